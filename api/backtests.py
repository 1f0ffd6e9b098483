"""What backtest and calibrate share: their inputs, their progress, their tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.cost_models.backtest.ranking import Ranking
from meshwright.cost_models.backtest.report import Group, Report
from meshwright.cost_models.calibration import Calibration
from meshwright.specs.errors import Fault, SpecError

from .render import _console, _table

#: Groups and reasons that a table on a screen shows; all are in the JSON document.
MOST_GROUPS, MOST_REASONS = 40, 8


def processes_of(text: str | None) -> int:
    """Processes to use: as many as are asked for, else as many as the machine lends us."""
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 256:
        raise SpecError(Fault("/jobs", f"must be a whole number from 1 to 256, got {text[:40]!r}"))
    return int(text)


def require_other_file(path: str, inputs: dict[str, str], pointer: str) -> None:
    """:class:`SpecError` where writing ``path`` would replace one of the files that are read."""
    for name, read in inputs.items():
        if Path(path).exists() and Path(read).exists() and Path(path).samefile(read):
            raise SpecError(Fault(pointer, f"is the same file as {name}; it would be replaced"))


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Tells (stage, done, total) on standard error; None off a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield tell


def report_data(report: Report, ranking: tuple[Ranking, ...] | None) -> dict[str, Any]:
    """A report as one JSON document."""
    out: dict[str, Any] = {
        "by": list(report.by),
        "total": _group_data(report.total, ()),
        "groups": [_group_data(group, report.by) for group in report.groups],
        "others": [_group_data(group, ("task", "quality")) for group in report.others],
        "unsupported": dict(report.unsupported),
    }
    if ranking is not None:
        out["ranking"] = [asdict(item) | {"share": item.share} for item in ranking]
    return out


def _group_data(group: Group, by: tuple[str, ...]) -> dict[str, Any]:
    data = asdict(group)
    data["key"] = dict(zip(by, group.key, strict=True)) if by else {}
    return data


def print_report(report: Report, ranking: tuple[Ranking, ...] | None) -> None:
    """The report for people."""
    console = _console()
    console.print(_groups("Error of the step time", report.by, [*report.groups[:MOST_GROUPS], report.total]))
    if len(report.groups) > MOST_GROUPS:
        console.print(f"... and {len(report.groups) - MOST_GROUPS} more groups; --json lists all")
    if report.others:
        console.print()
        console.print(_groups("Not judged", ("task", "quality"), list(report.others[:MOST_GROUPS])))
    if ranking is not None:
        console.print()
        table = _table("source", ">pairs", ">right order", ">predicted equal", title="Plans in the right order")
        for item in ranking:
            table.add_row(item.source, f"{item.pairs:,}", f"{item.share:.1%}", f"{item.equal / item.pairs:.1%}")
        console.print(table if ranking else "No two runs of one source differ in their plan alone.")
    if report.unsupported:
        console.print()
        console.print("Not priced:")
        for reason, count in list(report.unsupported.items())[:MOST_REASONS]:
            console.print(f"  {count:>5}  {reason}", soft_wrap=True)
        if len(report.unsupported) > MOST_REASONS:
            console.print(f"  ... and {len(report.unsupported) - MOST_REASONS} more reasons")


def _groups(title: str, by: tuple[str, ...], groups: list[Group]) -> Any:
    figures = (">n", ">ok", ">mean", ">median", ">p90", ">bias", ">inside", ">alloc. error", ">res. error", ">fits")
    table = _table(*by, *figures, title=title)
    for group in groups:
        key = (*group.key, *[""] * (len(by) - len(group.key)))
        memory = [
            f"{_share(error)} ({count})" if count else "-"
            for error, count in (
                (group.allocated_error, group.allocated_rows),
                (group.reserved_error, group.reserved_rows),
            )
        ]
        table.add_row(
            *key,
            f"{group.rows:,}",
            f"{group.ok:,}",
            *(_share(value) for value in (group.mean, group.median, group.p90)),
            "-" if group.bias is None else f"{group.bias:+.1%}",
            _share(group.coverage),
            *memory,
            _share(group.fits),
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def print_calibration(calibration: Calibration, skipped: dict[str, int]) -> None:
    """The entries of a calibration for people."""
    console = _console()
    source = calibration.source
    console.print(f"calibration {calibration.id[7:19]} from {source.used:,} of {source.rows:,} runs")
    table = _table("stack", "release", "GPU", "precision", "model", ">runs", ">compute", ">links", ">spread", ">worst")
    for entry in calibration.entries[:MOST_GROUPS]:
        match, factors = entry.match, entry.multipliers
        table.add_row(
            match.stack,
            "any" if match.release is None else match.release or EMPTY_RELEASE,
            match.gpu,
            match.precision,
            match.model or ("any moe" if match.moe else "any dense"),
            f"{entry.runs:,}",
            f"{factors.get('gemm', 1.0):.3f}",
            f"{factors.get('dp_comm', 1.0):.3f}",
            f"{entry.residual_spread:.1%}",
            f"{entry.largest_residual:.1%}",
        )
    console.print(table)
    if len(calibration.entries) > MOST_GROUPS:
        console.print(f"... and {len(calibration.entries) - MOST_GROUPS} more entries; the file holds all")
    for reason, count in sorted(skipped.items(), key=lambda item: -item[1])[:MOST_REASONS]:
        console.print(f"left out {count}: {reason}", soft_wrap=True)


#: A release that the table of runs does not state.
EMPTY_RELEASE = "(blank)"
