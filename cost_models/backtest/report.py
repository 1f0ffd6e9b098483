"""Error of priced runs by group: time, interval coverage, memory, fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bulk import Outcome
from .inputs import is_judged, is_moe
from .rows import measured_s, number
from .stacks import stack_of

#: Columns that every table has besides its own: the model's kind and the software stack.
DERIVED = ("experts", "stack")
DEFAULT_BY = ("framework", "experts")
#: What ``peak_kind`` is compared with; another allocator's or a device's figure is like neither.
ALLOCATED, RESERVED = "allocated", "reserved"
#: How an empty cell is called where a table is grouped by its column.
EMPTY = "(blank)"


@dataclass(frozen=True)
class Group:
    """Errors of the rows that share ``key``.

    ``rows`` counts all, ``ok`` those that were priced and have a measured time; the figures are over these. Errors are
    predicted over measured less one: ``mean``, ``median`` and ``p90`` of their size, ``bias`` the signed median.
    ``coverage`` is the share of measured times inside the interval. ``allocated_error`` and ``reserved_error`` are
    median sizes over ``allocated_rows`` and ``reserved_rows`` rows with such a peak. ``fits`` is the share that is said
    to fit: all of them ran. A figure without rows is None.
    """

    key: tuple[str, ...]
    rows: int
    ok: int
    mean: float | None
    median: float | None
    p90: float | None
    bias: float | None
    coverage: float | None
    allocated_rows: int
    allocated_error: float | None
    reserved_rows: int
    reserved_error: float | None
    fits: float | None


@dataclass(frozen=True)
class Report:
    """Groups of judged rows and their ``total``, and apart from them the ``others`` (other tasks, poor quality)."""

    by: tuple[str, ...]
    groups: tuple[Group, ...]
    total: Group
    others: tuple[Group, ...]
    unsupported: Mapping[str, int]


def report_of(
    rows: Sequence[Mapping[str, str]],
    outcomes: Sequence[Outcome],
    models: Mapping[str, Any],
    by: Sequence[str] = DEFAULT_BY,
) -> Report:
    """The report of priced rows; ``by`` names columns, whose combinations are the groups, or :data:`DERIVED`."""
    pairs = list(zip(rows, outcomes, strict=True))
    judged = [pair for pair in pairs if is_judged(pair[0])]
    others = [pair for pair in pairs if not is_judged(pair[0])]
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.status != "ok":
            reasons[outcome.reason] = reasons.get(outcome.reason, 0) + 1
    return Report(
        by=tuple(by),
        groups=_groups(judged, models, by),
        total=_group(("all",), judged),
        others=_groups(others, models, ("task", "quality")),
        unsupported=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    )


def cell_of(row: Mapping[str, str], column: str, models: Mapping[str, Any]) -> str:
    """What a row is grouped under in a column."""
    if column in row or column not in DERIVED:
        return (row.get(column) or "").strip() or EMPTY
    if column == "experts":
        return "moe" if is_moe(row, models) else "dense"
    return stack_of(row.get("framework") or "").name


_Pairs = Sequence[tuple[Mapping[str, str], Outcome]]


def _groups(pairs: _Pairs, models: Mapping[str, Any], by: Sequence[str]) -> tuple[Group, ...]:
    """One group for each combination of cells, the largest first."""
    found: dict[tuple[str, ...], list[tuple[Mapping[str, str], Outcome]]] = {}
    for pair in pairs:
        found.setdefault(tuple(cell_of(pair[0], column, models) for column in by), []).append(pair)
    groups = [_group(key, members) for key, members in found.items()]
    return tuple(sorted(groups, key=lambda group: (-group.rows, group.key)))


def _group(key: tuple[str, ...], pairs: _Pairs) -> Group:
    errors, inside, fits = [], [], []
    memory: dict[str, list[float]] = {ALLOCATED: [], RESERVED: []}
    for row, outcome in pairs:
        measured = measured_s(row)
        if outcome.step_time_s is None or not measured:
            continue
        errors.append(outcome.step_time_s / measured - 1.0)
        inside.append((outcome.interval_lo_s or 0.0) <= measured <= (outcome.interval_hi_s or 0.0))
        fits.append(bool(outcome.fits))
        for kind, ours, theirs in _peaks(row, outcome):
            memory[kind].append(ours / theirs - 1.0)
    signed = np.array(errors)
    size = np.abs(signed)
    some = len(errors) > 0
    return Group(
        key=key,
        rows=len(pairs),
        ok=len(errors),
        mean=float(size.mean()) if some else None,
        median=float(np.median(size)) if some else None,
        p90=float(np.quantile(size, 0.9)) if some else None,
        bias=float(np.median(signed)) if some else None,
        coverage=float(np.mean(inside)) if some else None,
        allocated_rows=len(memory[ALLOCATED]),
        allocated_error=_median_size(memory[ALLOCATED]),
        reserved_rows=len(memory[RESERVED]),
        reserved_error=_median_size(memory[RESERVED]),
        fits=float(np.mean(fits)) if some else None,
    )


def _median_size(errors: list[float]) -> float | None:
    return float(np.median(np.abs(errors))) if errors else None


def _peaks(row: Mapping[str, str], outcome: Outcome) -> list[tuple[str, float, float]]:
    """(kind, predicted, measured) bytes of what can be compared like with like."""
    peak, kind = number(row.get("peak_bytes")), (row.get("peak_kind") or "").strip()
    out = []
    if peak and kind == ALLOCATED and outcome.peak_allocated_bytes:
        out.append((ALLOCATED, float(outcome.peak_allocated_bytes), peak))
    reserved = number(row.get("peak_reserved_bytes")) or (peak if kind == RESERVED else None)
    if reserved and outcome.peak_reserved_bytes:
        out.append((RESERVED, float(outcome.peak_reserved_bytes), reserved))
    return out
