"""JSON from strangers: every value is finite, in range, printable and not nested absurdly, or a fault says where."""

from __future__ import annotations

import json
import math
from typing import Any

from meshwright.specs.errors import Fault, SpecError

#: Deepest nesting of any document of ours is below 16; a bound keeps recursive code safe.
MAX_DEPTH = 64
#: Numbers beyond 64 bits are no quantity of a training run and overflow arrays.
MAX_INTEGER = 2**63 - 1
MAX_FAULTS = 50


class JSONSyntaxError(SpecError):
    """The text is not JSON."""


def parse_json(raw: bytes | str) -> Any:
    """The JSON value in ``raw``.

    Raises :class:`JSONSyntaxError` for text that is not JSON (with line and column), not UTF-8, or nested too deep to
    read; :class:`SpecError` with one fault per value for NaN, infinities, integers beyond 64 bits, lone surrogates,
    a key given twice, or nesting beyond :data:`MAX_DEPTH`.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JSONSyntaxError(Fault("", f"is not UTF-8 text (byte {error.start})")) from None
    if not text.strip():
        raise JSONSyntaxError(Fault("", "is empty; a JSON object is needed"))
    try:
        value = json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise JSONSyntaxError(Fault("", f"is not valid JSON: {error.msg} at {where}")) from None
    except RecursionError:
        raise JSONSyntaxError(Fault("", f"is nested deeper than {MAX_DEPTH} levels")) from None
    faults = _faults(value)
    if faults:
        raise SpecError(faults)
    return value


def _integer(digits: str) -> int | float:
    """An int; digits beyond any use become infinity, which :func:`_faults` refuses with its place."""
    return int(digits) if len(digits) <= 40 else math.inf


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise SpecError(Fault("", f"gives the field {twice[:60]!r} twice in one object"))
    return out


def _faults(root: Any) -> list[Fault]:
    """Values that are no plain finite data, walked without recursion."""
    faults: list[Fault] = []
    todo: list[tuple[str, Any, int]] = [("", root, 0)]
    while todo and len(faults) < MAX_FAULTS:
        pointer, value, depth = todo.pop()
        if depth > MAX_DEPTH:
            return [Fault("", f"is nested deeper than {MAX_DEPTH} levels")]
        if isinstance(value, dict):
            if any(not _is_text(key) for key in value):
                faults.append(Fault(pointer, "has a field name with a lone surrogate, which is not text"))
                continue
            todo += [(f"{pointer}/{escape(key)}", item, depth + 1) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            todo += [(f"{pointer}/{index}", item, depth + 1) for index, item in reversed(list(enumerate(value)))]
        elif isinstance(value, float) and not math.isfinite(value):
            faults.append(Fault(pointer, "must be a finite number within 64 bits (no NaN, no Infinity)"))
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
            faults.append(Fault(pointer, f"must be at most {MAX_INTEGER}, got a number of {len(str(value))} digits"))
        elif isinstance(value, str) and not _is_text(value):
            faults.append(Fault(pointer, "holds a lone surrogate, which is not text"))
    return faults


def escape(key: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
