"""Read a JSON or YAML file of a user. Whatever is wrong with it becomes a :class:`SpecError`."""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import Fault, SpecError

#: No description of a cluster, model or workload comes near; a larger file is the wrong file.
MAX_BYTES = 5_000_000
MAX_DEPTH = 50
MAX_NODES = 200_000


def read_document(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON (``.json``, ``.json.gz``) or YAML (any other suffix) file.

    Raises :class:`SpecError` for a file that is missing, no regular file, unreadable, larger than ``MAX_BYTES``, not
    UTF-8, or not one well-formed document (see :func:`parse_json`, :func:`parse_yaml`).
    """
    text = read_text(path)
    return parse_json(text) if Path(os.fspath(path).lower().removesuffix(".gz")).suffix == ".json" else parse_yaml(text)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a regular UTF-8 file of at most ``MAX_BYTES`` bytes, also after unpacking (``.gz``)."""
    name = _name(path)
    try:
        about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            raise SpecError(Fault("", f"{name} is a directory; give a file in it"))
        if not stat.S_ISREG(about.st_mode):
            raise SpecError(Fault("", f"{name} is not a regular file"))
        if about.st_size > MAX_BYTES:
            raise SpecError(Fault("", f"{name} has {about.st_size} bytes; at most {MAX_BYTES} are read"))
        raw = read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        raise SpecError(Fault("", f"{name} does not exist")) from None
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(Fault("", f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(Fault("", f"{name} is not UTF-8 text (byte {error.start})")) from None


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a file, unpacked where its suffix is ``.gz``.

    Raises :class:`OSError` where it cannot be read, is no whole gzip file, or unpacks to more than ``limit`` bytes.
    """
    packed = Path(path).suffix.lower() == ".gz"
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            raw = file.read(limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(f"is no whole gzip file ({error})") from None
    if len(raw) > limit:
        raise OSError(f"holds more than {limit} bytes")
    return raw


def parse_json(text: str) -> Any:
    """The value of a JSON document; NaN, infinities, repeated keys and nesting beyond ``MAX_DEPTH`` are faults."""
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SpecError(Fault("", f"is not valid JSON: {error.msg} at {where}")) from None
    except RecursionError:
        raise SpecError(Fault("", f"is nested deeper than {MAX_DEPTH} levels")) from None
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(Fault("", f"is not valid JSON: {error}")) from None
    if _depth_exceeds(value, MAX_DEPTH):
        raise SpecError(Fault("", f"is nested deeper than {MAX_DEPTH} levels"))
    return value


def parse_yaml(text: str) -> Any:
    """The value of a YAML document of plain data.

    Aliases (and with them merge keys), tags, repeated keys, several documents and documents of more than ``MAX_NODES``
    values are faults: no input of ours needs them, and they make small files huge or ambiguous.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is much faster but not always built in

    class PlainLoader(loader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            twice = _first_repeated(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice is not None:
                message = f"the field {twice[:60]!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
            built: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return built

    try:
        _scan(yaml, text, loader)
        return yaml.load(text, Loader=PlainLoader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(Fault("", f"is not valid YAML: {error.problem}{where}")) from None
    except yaml.YAMLError as error:
        raise SpecError(Fault("", f"is not valid YAML: {str(error).splitlines()[0]}")) from None
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(Fault("", f"is not valid YAML: {str(error)[:200]}")) from None


def _scan(yaml: Any, text: str, loader: Any) -> None:
    """Refuse what :func:`parse_yaml` does not take, from the flat event stream, before anything is built."""
    depth = nodes = documents = 0
    for event in yaml.parse(text, Loader=loader):
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(Fault("", f"uses a YAML alias at {where}; write the value out"))
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise SpecError(Fault("", f"uses the YAML tag {tag[:60]!r} at {where}; only plain values are read"))
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or nodes > MAX_NODES or documents > 1:
            limits = f"{MAX_DEPTH} levels, {MAX_NODES} values and one document"
            raise SpecError(Fault("", f"is larger than this reads ({limits}), at {where}"))


def _no_constant(name: str) -> Any:
    raise SpecError(Fault("", f"holds {name}, which is not a number of JSON"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = _first_repeated(key for key, _ in pairs)
        raise SpecError(Fault("", f"gives the field {str(twice)[:60]!r} twice in one object"))
    return out


def _first_repeated(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _name(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return repr(text if len(text) <= 200 else text[:197] + "...")
