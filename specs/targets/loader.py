"""Load targets from their data files, ``FRAMEWORK-VERSION.yaml`` beside this module."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from ..errors import Fault, SpecError
from ..files import parse_yaml
from ..target import Target

_FILE = re.compile(r"(?P<framework>[a-z]+)-(?P<version>[0-9.]+|main)\.yaml")
#: What a target must be verified by to be its framework's default, best first.
_TRUST = ("code", "schema", "source-read")


def load_target(name: str) -> Target:
    """The target called ``name`` (``megatron@0.19``), or its framework's default version (``megatron``).

    The default version is the newest of those verified best. Raises :class:`SpecError` that lists the known targets.
    """
    wanted = name.strip().lower()
    known = _files()
    if wanted in known:
        return _load(wanted)
    if "@" not in wanted:
        versions = [_load(target) for target in known if target.startswith(f"{wanted}@")]
        if versions:
            return min(versions, key=lambda target: (_TRUST.index(target.verified), _newest_first(target.version)))
    framework = wanted.partition("@")[0]
    near = tuple(target for target in known if target.startswith(f"{framework}@"))
    shown = repr(name if len(name) <= 60 else name[:57] + "...")
    raise SpecError(Fault("", f"unknown target {shown}", near or tuple(known)))


def list_targets() -> list[str]:
    """The names of all known targets, by framework and version."""
    return list(_files())


@cache
def _files() -> dict[str, str]:
    """Target name -> file name."""
    found = [match for item in files(__package__).iterdir() if (match := _FILE.fullmatch(item.name))]
    found.sort(key=lambda match: (match["framework"], [-part for part in _newest_first(match["version"])]))
    return {f"{match['framework']}@{match['version']}": match[0] for match in found}


@cache
def _load(name: str) -> Target:
    data = parse_yaml(files(__package__).joinpath(_files()[name]).read_text(encoding="utf-8"))
    target = Target.parse(data)
    if target.name != name or target.name != f"{target.framework}@{target.version}":
        raise AssertionError(f"target file {_files()[name]} describes {target.name}")
    return target


def _newest_first(version: str) -> tuple[int, ...]:
    """Sort key; a development branch is newer than every release."""
    if version == "main":
        return (-1_000_000,)
    return tuple(-int(part) for part in version.split(".") if part)
