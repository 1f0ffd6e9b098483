"""Other tools' JSON files: values with their place, so that a fault names file and key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.files import read_document, read_text

POINTER = "/path"
#: Beyond any byte count, rate or time of a file that can be read.
_LARGEST = 1e30


@dataclass(frozen=True)
class Entry:
    """A value of a file: ``file`` and the keys that lead to it."""

    value: Any
    file: str
    keys: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """``file: key.key``."""
        return self.file + (f": {'.'.join(self.keys)}" if self.keys else "")

    def fault(self, message: str, alternatives: tuple[str, ...] = ()) -> SpecError:
        """A :class:`SpecError` at this place."""
        return SpecError(Fault(POINTER, f"{self.place} {message}", alternatives))

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def __getitem__(self, key: str) -> Entry:
        fields = self._fields()
        if key not in fields:
            raise SpecError(Fault(POINTER, f"{Entry(None, self.file, (*self.keys, key)).place} is missing"))
        return Entry(fields[key], self.file, (*self.keys, key))

    def fields(self) -> Iterator[tuple[str, Entry]]:
        """The fields of an object, in the order of the file."""
        for key in self._fields():
            yield str(key), Entry(self.value[key], self.file, (*self.keys, str(key)))

    def items(self) -> list[Entry]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            raise self.fault(f"must be a list, is {_kind(self.value)}")
        return [Entry(value, self.file, (*self.keys, str(index))) for index, value in enumerate(self.value)]

    def numbers(self, least: int = 0) -> list[float]:
        """A list of at least ``least`` numbers, none below 0."""
        out = [item.number() for item in self.items()]
        if len(out) < least:
            raise self.fault(f"must have at least {least} entries, has {len(out)}")
        return out

    def number(self, least: float = 0.0, *, above: bool = False) -> float:
        """A finite number of at least ``least`` (``above``: more than that)."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(f"must be a number, is {_kind(value)}")
        if not -_LARGEST <= value <= _LARGEST:  # infinities, and whole numbers that no float holds
            raise self.fault("must be a number of a sensible size")
        if value < least or (above and value == least):
            raise self.fault(f"must be {'above' if above else 'at least'} {least:g}, is {value:g}")
        return float(value)

    def any_number(self) -> float:
        """A number of either sign."""
        return self.number(-_LARGEST)

    def positive(self) -> float:
        """A finite number above 0."""
        return self.number(0.0, above=True)

    def count(self) -> int:
        """A whole number of at least 1."""
        value = self.number(1.0)
        if value != int(value):
            raise self.fault(f"must be a whole number, is {value:g}")
        return int(value)

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.fault(f"must be text, is {_kind(self.value)}")
        return self.value

    def key_count(self) -> int:
        """The last key as a whole number of at least 1."""
        key = self.keys[-1]
        if not key.isdecimal() or len(key) > 9 or int(key) < 1:
            raise self.fault("must have a key that is a whole number of at least 1")
        return int(key)

    def _fields(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.fault(f"must be an object, is {_kind(self.value)}")
        return self.value


def load(path: Path, root: Path | None = None) -> Entry:
    """The document in a JSON file; :class:`SpecError` with its name where it cannot be read."""
    name = _name(path, root)
    try:
        return Entry(read_document(path), name)
    except SpecError as error:
        raise SpecError(Fault(POINTER, f"{name} {f.message}".strip(), f.alternatives) for f in error.faults) from None


def lines(path: Path, root: Path | None = None) -> list[str]:
    """The lines of a text file that are not empty, without the ends."""
    try:
        return [line.strip() for line in read_text(path).splitlines() if line.strip()]
    except SpecError as error:
        raise SpecError(Fault(POINTER, f"{_name(path, root)} {f.message}") for f in error.faults) from None


def require_folder(path: Path, what: str) -> None:
    """:class:`SpecError` where ``path`` is no folder."""
    try:
        exists, folder = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:
        raise SpecError(Fault(POINTER, f"{str(path)[:200]!r} cannot be read: {error}")) from None
    if not folder:
        raise SpecError(Fault(POINTER, f"{path} {'is a file' if exists else 'does not exist'}; give {what}"))


def nothing_found(path: Path, expected: str) -> SpecError:
    """The fault of a folder that has none of the expected files."""
    return SpecError(Fault(POINTER, f"{path} holds none of the expected files: {expected}"))


def _name(path: Path, root: Path | None) -> str:
    return str(path.relative_to(root)) if root is not None and path.is_relative_to(root) else str(path)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return repr(value)[:40]
    return {"str": f"text {str(value)[:40]!r}", "list": "a list", "dict": "an object"}.get(
        type(value).__name__, type(value).__name__
    )
