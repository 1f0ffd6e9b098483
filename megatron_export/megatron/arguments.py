"""Read Megatron arguments: every flag of the parser is known, every other one is a fault."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.specs.errors import Fault, SpecError

from .flags import NEWEST, Flag, defaults, load_flags
from .source import Source, read_source

_NEGATIVE = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True)
class MegatronArguments:
    """Parsed arguments. ``args["tensor_model_parallel_size"]`` is a value by destination, defaults included.

    ``given`` holds the destinations that the arguments name; ``environment`` what a script exports.
    """

    given: Mapping[str, Any]
    version: str = NEWEST
    environment: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, dest: str) -> Any:
        """Value of a destination; KeyError for one that no parser has.

        A version without the flag behaves as if it were not given.
        """
        return self.given[dest] if dest in self.given else defaults(self.version)[dest]

    def __contains__(self, dest: str) -> bool:
        return dest in self.given


def read_arguments(source: str | Sequence[str], version: str = NEWEST) -> MegatronArguments:
    """Parse an argument line, a bash script, YAML, or a list of arguments as Megatron's parser would.

    Raises :class:`SpecError` with one fault per unknown flag (with near matches), missing or wrong value. Like the
    parser, a flag cannot be abbreviated, and the last of repeated flags counts.
    """
    found = read_source(source) if isinstance(source, str) else Source(list(source))
    table, faults, given = load_flags(version), [], {}
    tokens = found.tokens
    position = 0
    while position < len(tokens):
        name, equals, attached = tokens[position].partition("=")
        position += 1
        flag = table.get(name)
        if flag is None:
            if name.startswith("--"):
                near = tuple(difflib.get_close_matches(name, table, n=3, cutoff=0.75))
                elsewhere = name in load_flags(NEWEST)
                what = f"is not an argument of Megatron {version}" if elsewhere else "is not a Megatron argument"
                faults.append(Fault(f"/{name}", what, near))
                while position < len(tokens) and _is_value(tokens[position]):
                    position += 1
            else:
                faults.append(Fault("", f"{tokens[position - 1]!r} belongs to no flag"))
            continue
        values = [attached] if equals else []
        if not equals and flag.kind != "switch":
            while position < len(tokens) and _is_value(tokens[position]) and len(values) < _most(flag):
                values.append(tokens[position])
                position += 1
        try:
            given[flag.dest] = _value(flag, values)
        except ValueError as error:
            faults.append(Fault(f"/{name}", str(error), tuple(map(str, flag.choices))))
    if faults:
        raise SpecError(faults)
    return MegatronArguments(given, version, found.environment)


def _is_value(text: str) -> bool:
    return not text.startswith("-") or text == "-" or " " in text or bool(_NEGATIVE.match(text))


def _most(flag: Flag) -> int:
    if isinstance(flag.nargs, int):
        return flag.nargs
    return {None: 1, "?": 1}.get(flag.nargs, 1_000_000)


def _value(flag: Flag, values: list[str]) -> Any:
    if flag.kind == "switch":
        if values:
            raise ValueError(f"takes no value, got {values[0]!r}")
        return flag.constant
    if isinstance(flag.nargs, int) and len(values) != flag.nargs:
        raise ValueError(f"needs {flag.nargs} values, got {len(values)}")
    if flag.nargs in (None, "+") and not values:
        raise ValueError("needs a value")
    converted = [flag.convert(text) for text in values]
    if flag.nargs in (None, "?"):
        return converted[0] if converted else None
    return converted
