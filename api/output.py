"""What goes to standard output and standard error, and how faults are told."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.planner.errors import ViolationLike
    from meshwright.specs.errors import Fault


def emit(text: str) -> None:
    """Print ``text`` to standard output. A reader that has gone away is no error of ours."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence_stdout()


def silence_stdout() -> None:
    """Throw away what is still to be written: it would raise again when the interpreter closes standard output."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_json(data: Any) -> str:
    """The text of a document: readable, ASCII only, no NaN."""
    return json.dumps(data, indent=1, allow_nan=False)


def deliver(data: Any, *, as_json: bool, output: str | None) -> None:
    """Write a document to the file of ``-o`` and print it where ``--json`` asks for it."""
    text = to_json(data)
    if output is not None:
        from .files import write_file

        write_file(output, text + "\n")
    if as_json:
        emit(text)


def message(text: str) -> None:
    """One line to standard error, free of control characters; nothing where that cannot be written."""
    if sys.stderr is None:  # closed by the caller; print would turn to standard output
        return
    with contextlib.suppress(OSError):
        print("".join(c if c.isprintable() else "?" for c in text), file=sys.stderr, flush=True)


def fault_dicts(faults: Iterable[Fault]) -> list[dict[str, Any]]:
    """Faults as JSON values."""
    return [{"pointer": f.pointer, "message": f.message, "alternatives": list(f.alternatives)} for f in faults]


def violation_dicts(violations: Iterable[ViolationLike]) -> list[dict[str, Any]]:
    """Rule violations as JSON values."""
    return [
        {"rule": v.rule, "message": v.message, "alternatives": list(getattr(v, "alternatives", ()))} for v in violations
    ]


def fault_line(fault: Fault) -> str:
    """``error: FIELD: message (valid: ...)`` with the field as the command line calls it."""
    from .options import field_name

    field = field_name(fault.pointer)
    text = f"{field}: {fault.message}" if field else fault.message
    return f"error: {text}" + (f" (valid: {', '.join(fault.alternatives)})" if fault.alternatives else "")


def report_faults(faults: Sequence[Fault], *, as_json: bool) -> None:
    """One line a fault on standard error; with ``--json`` also ``{"errors": [...]}`` on standard output."""
    for fault in faults:
        message(fault_line(fault))
    if as_json:
        emit(to_json({"errors": fault_dicts(faults)}))


def report_violations(violations: Sequence[ViolationLike], *, as_json: bool) -> None:
    """One line a broken rule on standard error; with ``--json`` also errors and violations on standard output."""
    rows = violation_dicts(violations)
    for row in rows:
        valid = f" (valid: {', '.join(map(str, row['alternatives']))})" if row["alternatives"] else ""
        message(f"error: {row['rule']}: {row['message']}{valid}")
    if as_json:
        errors = [{"pointer": "", "message": f"{row['rule']}: {row['message']}", "alternatives": []} for row in rows]
        emit(to_json({"errors": errors, "violations": rows}))
