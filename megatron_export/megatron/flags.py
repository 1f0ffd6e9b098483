"""The flags of Megatron's parser, as data taken from the live parser."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

#: A pattern that expands to more entries than this is a mistake: no model has as many layers.
_MAX_PATTERN = 100_000


@dataclass(frozen=True)
class Flag:
    """One flag. ``kind`` is ``switch``, ``int``, ``float``, ``str``, ``bool``, ``tuple`` or ``pattern``.

    ``nargs`` is None (one value), a number, ``+``, ``*`` or ``?``; a switch stores ``constant``.
    """

    name: str
    dest: str
    kind: str
    default: Any
    nargs: int | str | None
    choices: tuple[Any, ...]
    constant: Any

    def convert(self, text: str) -> Any:
        """A value as the parser would read it; ValueError with what is expected otherwise."""
        value = _CONVERT[self.kind](text)
        if self.choices and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(map(str, self.choices))}, got {text!r}")
        return value


#: The release whose parser is stored in full, and older ones, stored as what differs from it.
NEWEST = "0.19"
INVENTORIES = (NEWEST, "0.18", "0.17", "0.16")


def inventory_of(version: str) -> str:
    """The inventory that stands for a version: its own, else that of the release before it, else the oldest."""
    wanted = version_number(version)
    return next((known for known in INVENTORIES if version_number(known) <= wanted), INVENTORIES[-1])


def version_number(version: str) -> tuple[int, ...]:
    """``(0, 19)`` of ``0.19``, for comparing."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@lru_cache
def load_flags(version: str = NEWEST) -> dict[str, Flag]:
    """Every option string of the parser with its flag, aliases and negations included."""
    return _flags(inventory_of(version))


@lru_cache
def defaults(version: str = NEWEST) -> dict[str, Any]:
    """Default of every destination; that of the newest parser for one that the version does not have."""
    newest, own = load_flags(NEWEST), load_flags(version)
    return {flag.dest: flag.default for table in (newest, own) for flag in table.values()}


def is_known(name: str, version: str) -> bool:
    """Whether the parser of a version has the flag."""
    return name in load_flags(version)


@lru_cache
def _flags(inventory: str) -> dict[str, Flag]:
    table: dict[str, Flag] = {}
    for name, row in _rows(inventory).items():
        flag = Flag(
            name=name,
            dest=row["dest"],
            kind=row["kind"],
            default=row["default"],
            nargs=row.get("nargs"),
            choices=tuple(row.get("choices", ())),
            constant=row.get("constant"),
        )
        for option in (name, *row.get("aliases", ())):
            table[option] = flag
        for option in row.get("negated", ()):
            table[option] = Flag(option, flag.dest, "switch", flag.default, None, (), False)
    return table


def _rows(inventory: str) -> dict[str, Any]:
    """Flags of a file; an older release's file holds what it lacks of its base, and what it has otherwise."""
    text = files("meshwright.megatron_export.megatron.data").joinpath(f"flags-{inventory}.json").read_text("utf-8")
    document = json.loads(text)
    flags: dict[str, Any] = document["flags"]
    if "base" not in document:
        return flags
    absent = set(document["absent"])
    return {name: row for name, row in (_rows(document["base"]) | flags).items() if name not in absent}


def _integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None
    if abs(value) >= 2**53:
        raise ValueError(f"is too large: {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def _pattern(text: str) -> int | list[int]:
    """A whole number, or a list expression of numbers such as ``([0]*3+[1]*58)``."""
    if "[" not in text:
        return _integer(text)
    if re.search(r"[^,\d\[\]()+*]", text) or len(text) > 10_000:
        raise ValueError(f"must be a list expression such as ([0]*3+[1]*58), got {text[:60]!r}")
    try:
        value = _fold(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"is not a list expression: {text[:60]!r}") from None
    if not isinstance(value, list):
        raise ValueError(f"must be a list, got {text[:60]!r}")
    return value


def _fold(node: ast.expr) -> int | list[int]:
    """Value of a list expression of +, *, lists and whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_fold(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _fold(node.left), _fold(node.right)
        if isinstance(node.op, ast.Add):
            return left + right  # type: ignore[operator]
        size = (len(left) if isinstance(left, list) else left) * (len(right) if isinstance(right, list) else right)
        if size > _MAX_PATTERN:
            raise TypeError("too long")
        return left * right  # type: ignore[operator]
    raise TypeError("neither a list nor a number")


def _tuple(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.strip("()").split(","))


_CONVERT: dict[str, Any] = {
    "int": _integer,
    "float": _number,
    "str": str,
    "bool": bool,
    "tuple": _tuple,
    "pattern": _pattern,
}
