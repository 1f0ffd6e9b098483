"""Whether plans are put in the right order: what a planner needs more than exact seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bulk import Outcome
from .inputs import is_judged, is_moe
from .rows import measured_s

#: Measured times nearer than this are not told apart: runs of one plan differ by about as much, those of MoE more.
NEARER_DENSE, NEARER_MOE = 0.03, 0.06
#: Columns in which two runs must agree to be compared.
SAME = ("framework", "num_gpus", "precision", "seq_len", "global_batch", "release", "task", "cluster")
#: Columns of which at least one must differ: the plan.
PLAN = ("micro_batch", "tp", "pp", "cp", "vp", "ep", "etp", "dp", "sharding", "sequence_parallel", "recompute",
        "other_flags", "layers_per_stage", "partition_cut_points", "stage_devices")  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """Of ``pairs`` of runs of a source, ``right`` are predicted in the measured order and ``equal`` to take the same
    time, which is not right."""

    source: str
    pairs: int
    right: int
    equal: int

    @property
    def share(self) -> float:
        return self.right / self.pairs


def rankings(
    rows: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome], models: Mapping[str, Any]
) -> tuple[Ranking, ...]:
    """Rankings by source (``source_repo``, else ``framework``), most pairs first.

    Compared are judged rows of one ``group`` (else model and GPU) that agree in :data:`SAME`, differ in :data:`PLAN`,
    and whose measured times differ by more than 3% of the shorter (6% for MoE).
    """
    buckets: dict[tuple[str, ...], list[tuple[Mapping[str, str], float, float]]] = {}
    for row, outcome in zip(rows, outcomes, strict=True):
        measured = measured_s(row)
        if outcome.step_time_s is None or not measured or not is_judged(row):
            continue
        near = NEARER_MOE if is_moe(row, models) else NEARER_DENSE
        key = (source_of(row), str(near), *_group_of(row), *(_cell(row, name) for name in SAME))
        buckets.setdefault(key, []).append((row, measured, outcome.step_time_s))
    counts: dict[str, list[int]] = {}
    for key, members in buckets.items():
        found = _count(members, float(key[1]))
        if found[0]:
            counts[key[0]] = [a + b for a, b in zip(counts.get(key[0], [0, 0, 0]), found, strict=True)]
    ranked = [Ranking(source, *count) for source, count in counts.items()]
    return tuple(sorted(ranked, key=lambda item: (-item.pairs, item.source)))


def source_of(row: Mapping[str, str]) -> str:
    """Where a row was published."""
    return _cell(row, "source_repo") or _cell(row, "framework") or "(blank)"


def _cell(row: Mapping[str, str], name: str) -> str:
    return (row.get(name) or "").strip()


def _group_of(row: Mapping[str, str]) -> tuple[str, ...]:
    if _cell(row, "group"):
        return (_cell(row, "group"),)
    gpu = _cell(row, "gpu_type") or _cell(row, "gpu") or _cell(row, "gpu_types")
    return _cell(row, "model"), _cell(row, "model_overrides"), gpu


def _count(members: list[tuple[Mapping[str, str], float, float]], near: float) -> tuple[int, int, int]:
    """(pairs, of them in the right order, of them predicted equal) of one bucket; row by row, to need little memory."""
    measured = np.array([item[1] for item in members])
    predicted = np.array([item[2] for item in members])
    names = {plan: i for i, plan in enumerate(dict.fromkeys(_plan(item[0]) for item in members))}
    plan = np.array([names[_plan(item[0])] for item in members])
    pairs = right = equal = 0
    for i in range(len(members) - 1):
        rest = slice(i + 1, None)
        apart = np.maximum(measured[rest], measured[i]) / np.minimum(measured[rest], measured[i]) - 1.0
        told = (plan[rest] != plan[i]) & (apart > near)
        agree = np.sign(measured[rest] - measured[i]) == np.sign(predicted[rest] - predicted[i])
        pairs += int(told.sum())
        right += int((told & agree).sum())
        equal += int((told & (predicted[rest] == predicted[i])).sum())
    return pairs, right, equal


def _plan(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(_cell(row, name) for name in PLAN)
