"""Whether left-out predictions put the plans of one task in the measured order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from meshwright.cost_models.backtest.ranking import NEARER_DENSE, NEARER_MOE, PLAN, SAME

from .statistics import Row

#: Edges of how far apart two measured times are, the longer over the shorter less one; nearer ones are no pair.
EDGES = (NEARER_DENSE, NEARER_MOE, 0.12, 0.25, 0.5, 1.0, float("inf"))


@dataclass(frozen=True)
class Pair:
    """Two runs of one task with different plans; ``apart`` is the longer measured time over the shorter less one."""

    source_repo: str
    apart: float
    right: bool


def pairs_of(rows: Iterable[Row], runs: Mapping[str, Mapping[str, str]]) -> list[Pair]:
    """Pairs among ``rows`` (of one scheme) of one group that agree in all of ``ranking.SAME``, differ in
    ``ranking.PLAN`` and take measurably different times (3%, with experts 6%); ``runs`` are the published rows by id.
    An equal prediction is not right."""
    buckets: dict[tuple[str, ...], list[tuple[Row, tuple[str, ...]]]] = {}
    for row in rows:
        run = runs[row.id]
        key = (row.source_repo, row.group, *(run.get(name, "").strip() for name in SAME))
        buckets.setdefault(key, []).append((row, tuple(run.get(name, "").strip() for name in PLAN)))
    out = []
    for members in buckets.values():
        for (first, plan), (second, other) in combinations(members, 2):
            low, high = sorted((first, second), key=lambda row: row.measured_s)
            apart = high.measured_s / low.measured_s - 1
            if plan != other and apart > (NEARER_MOE if low.kind == "moe" else NEARER_DENSE):
                out.append(Pair(low.source_repo, apart, low.predicted_s < high.predicted_s))
    return out


def by_distance(pairs: Sequence[Pair]) -> list[tuple[str, int, float]]:
    """(range of ``apart``, pairs, share in the right order) for each range of :data:`EDGES` that has pairs."""
    out = []
    for low, high in pairwise(EDGES):
        inside = [pair.right for pair in pairs if low <= pair.apart < high]
        if inside:
            name = f"from {100 * low:.0f}%" if high == EDGES[-1] else f"{100 * low:.0f} to {100 * high:.0f}%"
            out.append((name, len(inside), sum(inside) / len(inside)))
    return out


def release_differences(rows: Iterable[Row], runs: Mapping[str, Mapping[str, str]]) -> dict[str, list[float]]:
    """By kind: how far apart (longer over shorter less one) runs with equal settings are in neighbouring releases of a
    framework, in the order of the releases' names."""
    buckets: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        run = runs[row.id]
        settings = (run.get(name, "").strip() for name in (*SAME, *PLAN) if name != "release")
        buckets.setdefault((row.group, *settings), []).append(row)
    out: dict[str, list[float]] = {}
    for members in buckets.values():
        by_release = {runs[row.id].get("release", ""): row for row in members}
        for first, second in pairwise(by_release[name] for name in sorted(by_release)):
            low, high = sorted((first.measured_s, second.measured_s))
            out.setdefault(first.kind, []).append(high / low - 1)
    return dict(sorted(out.items()))
