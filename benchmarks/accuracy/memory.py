"""Predicted against published memory: the table that ``--memory`` makes, and what the page says of it."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory_accuracy import Verdicts, priced_runs, verdicts
from meshwright.cost_models.backtest.inputs import read_models
from meshwright.cost_models.backtest.rows import read_rows

from .statistics import framework_of

COLUMNS = ("what", "framework", "task", "measured", "predicted", "id")
#: Kinds of rows beside ``allocated``, ``reserved`` and ``other`` peaks: whether a run fits. 1 is yes.
STATED, GUESSED, OUT, NEIGHBOUR = "ran, plan stated", "ran, plan guessed", "out of memory", "neighbour that ran"


@dataclass(frozen=True)
class MemoryRow:
    """A peak in bytes with ``what`` it is, or (1 or 0) whether a run fitted and is said to fit."""

    what: str
    framework: str
    task: str
    measured: float
    predicted: float
    id: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def right(self) -> bool:
        return self.measured == self.predicted


def measure(runs: Path, models: Path, failed: Path) -> list[MemoryRow]:
    """Prices all runs that have a peak or ran, and the configurations that ran out of memory (half a minute)."""
    known = read_models(models)
    peaks, stated, guessed = priced_runs(runs, known)
    out = [
        MemoryRow(peak.kind, framework_of(peak.framework), peak.task, peak.measured, round(peak.predicted), peak.id)
        for peak in peaks
    ]

    def add(what: str, priced: Verdicts, fitted: bool) -> None:
        for _, run in priced:
            if run.estimate is not None:
                framework = framework_of(run.row["framework"])
                said = float(run.estimate.fits)
                out.append(MemoryRow(what, framework, run.row.get("task", ""), float(fitted), said, run.row["id"]))

    add(STATED, stated, True)
    add(GUESSED, guessed, True)
    add(OUT, verdicts(failed, known, "oom"), False)
    add(NEIGHBOUR, verdicts(failed, known, "fits"), True)
    return out


def write(path: Path, rows: Sequence[MemoryRow]) -> None:
    """Packed without a time stamp, so that equal rows make an equal file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((r.what, r.framework, r.task, f"{r.measured:.0f}", f"{r.predicted:.0f}", r.id) for r in rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read(path: Path) -> list[MemoryRow]:
    return [
        MemoryRow(r["what"], r["framework"], r["task"], float(r["measured"]), float(r["predicted"]), r["id"])
        for r in read_rows(path)
    ]
