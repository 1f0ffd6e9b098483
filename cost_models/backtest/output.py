"""OUT.csv: one line a row, written as rows are done, so that a run cut short keeps what it has."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TextIO

from .bulk import Outcome

COLUMNS = tuple(field.name for field in fields(Outcome))


def write_outcomes(file: TextIO, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Pass outcomes on after writing each as a line of CSV below a header. Blank cells are figures that there are not;
    assumptions are joined by ``"; "``."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for outcome in outcomes:
        writer.writerow([_text(name, getattr(outcome, name)) for name in COLUMNS])
        yield outcome


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "; ".join(str(item).replace(";", ",") for item in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if name == "ms" and isinstance(value, float):
        return f"{value:.3f}"
    return repr(value) if isinstance(value, float) else str(value)
