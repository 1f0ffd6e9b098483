"""Which expert-parallel rank holds which experts, so that the fullest rank has the least to do.

Loads are tokens by expert. A rank takes the sum of its experts' loads over its speed; the answer is judged by the
slowest rank over the ideal (all loads over all speeds). Start: longest processing time first (Graham 1969, SIAM J.
Appl. Math. 17:416), with a place count a rank. Then swaps of two experts while the slowest rank gains, then, where the
answer is not near its lower bound, an integer programme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

#: A placement this near its lower bound is left as it is: measured loads are known no better.
NEAR = 2e-3
#: Largest integer programme (experts times ranks), and the deterministic time that one gets.
MAX_CELLS, SOLVER_TIME = 4096, 1.0
#: Resolution of loads and speeds in the integer programme.
LOAD_UNITS, SPEED_UNITS = 1_000_000, 1_000
#: Swaps at most, for each expert.
SWAPS_PER_EXPERT = 4


@dataclass(frozen=True)
class Placement:
    """Experts of every rank, and the slowest rank's time over the ideal. ``method``: ``contiguous``, ``greedy``,
    ``ilp`` or ``replicated``."""

    ranks: tuple[tuple[int, ...], ...]
    max_over_mean: float
    method: str


def max_over_mean(loads: FloatArray, ranks: Sequence[Sequence[int]], speeds: FloatArray | None = None) -> float:
    """Time of the slowest rank over the ideal, total load over total speed."""
    speed = np.ones(len(ranks)) if speeds is None else speeds
    times = np.array([loads[list(own)].sum() for own in ranks]) / speed
    return float(times.max() * speed.sum() / loads.sum())


def contiguous(loads: FloatArray, ranks: int, speeds: FloatArray | None = None) -> Placement:
    """Neighbouring experts together, as frameworks place them. ``ranks`` must divide the number of experts."""
    owned = tuple(tuple(part.tolist()) for part in np.arange(len(loads)).reshape(ranks, -1))
    return Placement(owned, max_over_mean(loads, owned, speeds), "contiguous")


def lower_bound(loads: FloatArray, ranks: int, speeds: FloatArray | None = None, equal: bool = True) -> float:
    """What :func:`max_over_mean` cannot fall below: 1, or the hottest expert with the coldest company on the quickest
    rank."""
    speed = np.ones(ranks) if speeds is None else speeds
    ordered = np.sort(loads)
    company = ordered[: len(loads) // ranks - 1].sum() if equal else 0.0
    return max(1.0, float((ordered[-1] + company) / speed.max() * speed.sum() / loads.sum()))


def placed(
    loads: FloatArray, ranks: int, speeds: FloatArray | None = None, equal: bool = True, solver: bool = True
) -> Placement:
    """Experts placed on ``ranks`` ranks of ``speeds`` (default all 1).

    ``equal``: every rank holds the same number (``ranks`` must divide it); else any number. The result is the same
    every time. It never is worse than :func:`contiguous`.
    """
    speed = np.ones(ranks) if speeds is None else np.asarray(speeds, dtype=float)
    owner = _swapped(loads, _greedy(loads, speed, len(loads) // ranks if equal else None), speed, equal)
    method, found = "greedy", _of(loads, owner, speed)
    bound = lower_bound(loads, ranks, speed, equal)
    if solver and found > bound * (1 + NEAR) and len(loads) * ranks <= MAX_CELLS:
        solved = _solved(loads, owner, speed, equal)
        if _of(loads, solved, speed) < found * (1 - 1e-9):
            owner, method = solved, "ilp"
    answer = _placement(loads, owner, speed, method)
    if equal:
        plain = contiguous(loads, ranks, speed)
        return plain if plain.max_over_mean <= answer.max_over_mean else answer
    return answer


def replicated(loads: FloatArray, ranks: int, slots: int, speeds: FloatArray | None = None) -> Placement:
    """Experts on ``slots`` places a rank; spare places hold copies of the experts with most load a copy.

    Copies of an expert share its load equally and lie on different ranks. Raises ValueError where the places do not
    hold every expert.
    """
    if slots * ranks < len(loads):
        raise ValueError(f"{slots} places on {ranks} ranks do not hold {len(loads)} experts")
    speed = np.ones(ranks) if speeds is None else np.asarray(speeds, dtype=float)
    copies = np.ones(len(loads), dtype=np.int64)
    for _ in range(slots * ranks - len(loads)):
        share = np.where(copies < ranks, loads / copies, -1.0)
        copies[int(share.argmax())] += 1
    share = loads / copies
    held: list[list[int]] = [[] for _ in range(ranks)]
    times = np.zeros(ranks)
    for expert in np.repeat(np.arange(len(loads)), copies)[
        np.argsort(-np.repeat(share, copies), kind="stable")
    ].tolist():
        open_ranks = [r for r in range(ranks) if len(held[r]) < slots]
        apart = [r for r in open_ranks if expert not in held[r]] or open_ranks
        best = min(apart, key=lambda r: (times[r] + share[expert] / speed[r], r))
        held[best].append(expert)
        times[best] += share[expert] / speed[best]
    ratio = float(times.max() * speed.sum() / loads.sum())
    return Placement(tuple(tuple(sorted(own)) for own in held), ratio, "replicated")


def _greedy(loads: FloatArray, speed: FloatArray, places: int | None) -> IntArray:
    """Rank of every expert: hottest first, each to the rank that ends first with it and has a place left."""
    times, count = np.zeros(len(speed)), np.zeros(len(speed), dtype=np.int64)
    owner = np.zeros(len(loads), dtype=np.int64)
    for expert in np.argsort(-loads, kind="stable").tolist():
        ends = times + loads[expert] / speed
        if places is not None:
            ends[count >= places] = np.inf
        rank = int(ends.argmin())
        owner[expert], times[rank] = rank, ends[rank]
        count[rank] += 1
    return owner


def _swapped(loads: FloatArray, owner: IntArray, speed: FloatArray, equal: bool) -> IntArray:
    """The placement after swaps (and, with free counts, moves) of experts while the slowest rank gets quicker."""
    owner = owner.copy()
    held = np.bincount(owner, weights=loads, minlength=len(speed))
    for _ in range(SWAPS_PER_EXPERT * len(loads)):
        times = held / speed
        slow = int(times.argmax())
        mine, theirs = np.nonzero(owner == slow)[0], np.nonzero(owner != slow)[0]
        back, other = loads[theirs], owner[theirs]
        if not equal:
            others = np.setdiff1d(np.arange(len(speed)), [slow])
            back, other = np.append(back, np.zeros(len(others))), np.append(other, others)
        if not len(other):
            break
        given = loads[mine][:, None] - back[None, :]
        worse = np.maximum((held[slow] - given) / speed[slow], (held[other] + given) / speed[other])
        best = int(worse.argmin())
        a, b = divmod(best, len(other))
        if worse.flat[best] >= times[slow] * (1 - 1e-12):
            break
        held[slow] -= given[a, b]
        held[other[b]] += given[a, b]
        owner[mine[a]] = other[b]
        if b < len(theirs):
            owner[theirs[b]] = slow
    return owner


def _solved(loads: FloatArray, start: IntArray, speed: FloatArray, equal: bool) -> IntArray:
    """The placement of an integer programme that starts from ``start``; the start where no better is found in time."""
    from ortools.sat.python import cp_model

    experts, ranks = len(loads), len(speed)
    weight = np.rint(loads / loads.sum() * LOAD_UNITS).astype(int).tolist()
    pace = np.maximum(1, np.rint(speed / speed.max() * SPEED_UNITS)).astype(int).tolist()
    model = cp_model.CpModel()
    on = [[model.new_bool_var("") for _ in range(ranks)] for _ in range(experts)]
    slowest = model.new_int_var(0, LOAD_UNITS * SPEED_UNITS, "")
    for expert in range(experts):
        model.add_exactly_one(on[expert])
        for rank in range(ranks):
            model.add_hint(on[expert][rank], int(start[expert] == rank))
    for rank in range(ranks):
        if equal:
            model.add(sum(on[expert][rank] for expert in range(experts)) == experts // ranks)
        done = sum(SPEED_UNITS * weight[expert] * on[expert][rank] for expert in range(experts))
        model.add(done <= pace[rank] * slowest)
    if len(set(pace)) == 1:  # ranks are alike, so the hottest expert may lie on the one it is on
        hottest = int(loads.argmax())
        model.add(on[hottest][int(start[hottest])] == 1)
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = SOLVER_TIME
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    return np.array([next(r for r in range(ranks) if solver.boolean_value(row[r])) for row in on], dtype=np.int64)


def _of(loads: FloatArray, owner: IntArray, speed: FloatArray) -> float:
    held = np.bincount(owner, weights=loads, minlength=len(speed))
    return float((held / speed).max() * speed.sum() / loads.sum())


def _placement(loads: FloatArray, owner: IntArray, speed: FloatArray, method: str) -> Placement:
    owned = tuple(tuple(np.nonzero(owner == rank)[0].tolist()) for rank in range(len(speed)))
    return Placement(owned, _of(loads, owner, speed), method)
