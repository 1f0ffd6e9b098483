"""Plans that a search has split and simulated: ranking them, and trying other splits of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from math import comb
from typing import Any

import numpy as np

from meshwright.cost_models.schedules.base import MAX_REPLAYED
from meshwright.specs.batch import BoolArray, FloatArray, IntArray

from .partition import splits_by_bound
from .pricing import PricedBatch
from .splits import LEAST_GAIN, MOVES_TRIED, fewest_recomputed_virtual, improved_cuts, stage_tables

#: Chunk passes replayed at most to improve the split of one finalist.
IMPROVEMENT_PASSES = 400_000
#: Splits of a candidate simulated at once.
SIMULATED_TOGETHER = 16


@dataclass(frozen=True)
class Finalist:
    """A candidate with its split and its step time, event by event; ``leading`` layers of a chunk are recomputed.

    ``bound_s`` holds for this split, or, where ``settled``, for every split with as many layers recomputed; it then
    counts ``tail_s`` after the passes. ``options`` of its plan come beside those that all plans of its search have.
    """

    batch: PricedBatch
    candidate: int
    cuts: IntArray
    step_time_s: float
    bound_s: float
    leading: int = 0
    settled: bool = False
    tail_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def column(self, name: str) -> int:
        """A column of the candidate's skeleton."""
        return int(getattr(self.batch.batch, name)[self.candidate])

    @property
    def key(self) -> tuple[int, ...]:
        """The degrees that make a plan different from another."""
        names = ("tp", "pp", "cp", "ep", "etp", "dp")
        return (*(self.column(name) for name in names), *self.batch.arrangement.pools)

    @property
    def order(self) -> tuple[float, tuple[int, ...]]:
        """Ranking key: step time, then everything else so that ties break the same way every time."""
        names = ("vpp", "micro_batch_size", "recompute", "sharding")
        return (self.step_time_s, (*self.key, *(self.column(name) for name in names), self.leading))


@dataclass
class SearchResult:
    """What a search found and what it left out."""

    finalists: list[Finalist] = field(default_factory=list)
    untried_bound_s: float = np.inf
    complete: bool = True
    candidates: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    refused_pools: dict[int, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    priced: list[PricedBatch] = field(default_factory=list)
    split: int = 0
    deadline_hit: bool = False

    @property
    def bound_s(self) -> float:
        """No plan of the space is faster than this."""
        best_s = [f.step_time_s for f in self.finalists]
        return min([self.untried_bound_s, *best_s, *(f.bound_s for f in self.finalists if f.settled)])

    @property
    def best(self) -> Finalist | None:
        return min(self.finalists, key=lambda finalist: finalist.order, default=None)


class Podium:
    """The best step time of every set of degrees, and of the ``places`` best sets the last.

    A candidate is worth a look while its bound is below both: then it may be the best of its degrees and among the best
    of all, so that the plans named beside the best are the true next ones.
    """

    def __init__(self, places: int, keys: IntArray, limit_s: float = np.inf):
        self._places = places
        self._best_s = np.full(int(keys.max(initial=-1)) + 1, limit_s)
        self.last_s = limit_s

    def enter(self, key: int, step_time_s: float) -> None:
        """A plan of degrees ``key`` takes ``step_time_s``."""
        if step_time_s < self._best_s[key]:
            self._best_s[key] = step_time_s
            if len(self._best_s) >= self._places:
                self.last_s = float(np.partition(self._best_s, self._places - 1)[self._places - 1])

    def has(self, key: IntArray) -> BoolArray:
        """Whether there is a plan of degrees ``key``."""
        return np.asarray(np.isfinite(self._best_s[key]))

    def to_beat_s(self, key: IntArray | int) -> FloatArray:
        """What a candidate of degrees ``key`` must stay below."""
        out: FloatArray = np.minimum(self._best_s[key], self.last_s)
        return out


def fitting(priced: PricedBatch, index: IntArray, cuts: IntArray) -> list[Finalist]:
    """Candidates under their ``cuts`` [n, chunks + 1], with the fewest layers recomputed that then fit; none that do
    not."""
    leading = np.zeros(len(index), dtype=np.int64)
    block = priced.is_block[index]
    if block.any():
        leading[block] = fewest_recomputed_virtual(priced, index[block], cuts[block])
    sums = priced.sums(index, cuts, leading)
    bound = priced.bound_s(index, sums)
    return [
        Finalist(priced, int(index[k]), cuts[k], np.inf, float(bound[k]), int(leading[k]))
        for k in np.flatnonzero(sums.fits)
    ]


def simulated(finalist: Finalist) -> Finalist:
    """The finalist with its step time."""
    step_s = float(finalist.batch.step_s(finalist.candidate, finalist.cuts[None], finalist.leading)[0])
    return replace(finalist, step_time_s=step_s)


def improved(finalist: Finalist, moves: int = MOVES_TRIED, least_gain: float = LEAST_GAIN) -> Finalist:
    """A finalist with its split improved, where that shortens its step; arguments as of :func:`.improved_cuts`."""
    priced, candidate, leading = finalist.batch, finalist.candidate, finalist.leading
    passes = 2 * (len(finalist.cuts) - 1) * min(finalist.column("num_microbatches"), MAX_REPLAYED)
    tries = IMPROVEMENT_PASSES // passes
    cuts, step_s = improved_cuts(
        priced, candidate, finalist.cuts, leading, finalist.step_time_s, tries, moves, least_gain
    )
    return replace(finalist, cuts=cuts, step_time_s=step_s)


def refined(finalist: Finalist, best_s: float, limit: int, late: Callable[[], bool]) -> tuple[Finalist, int]:
    """The finalist with its best split and the bound that is then proven, and how many splits were simulated."""
    priced, candidate, tail_s = finalist.batch, finalist.candidate, finalist.tail_s
    tables = stage_tables(priced, np.array([candidate]), np.array([finalist.leading], dtype=np.int64))
    splits = splits_by_bound(tables, best_s - tail_s)
    used, bound, given_up = 0, finalist.bound_s, False
    while used < limit and bound < min(best_s, finalist.step_time_s) and not given_up and not late():
        batch = list(islice(splits, min(SIMULATED_TOGETHER, limit - used)))
        bound = batch[-1][0] + tail_s if batch else best_s  # every split not yet seen has at least this bound
        cuts = [cuts for _, cuts in batch if cuts is not None]
        given_up = len(cuts) < len(batch)
        used += len(cuts)
        if cuts:
            steps = priced.step_s(candidate, np.stack(cuts), finalist.leading)
            quickest = int(steps.argmin())
            if steps[quickest] < finalist.step_time_s:
                finalist = replace(finalist, cuts=cuts[quickest], step_time_s=float(steps[quickest]))
    return replace(finalist, bound_s=min(bound, finalist.step_time_s)), used


def every_split(finalist: Finalist, best_s: float) -> Finalist:
    """The finalist with the best of all its splits, which are few, if one is below ``best_s``; settled in any case."""
    priced, candidate, leading = finalist.batch, finalist.candidate, finalist.leading
    cuts = all_cuts(priced.counted, len(finalist.cuts) - 1)
    index, first = np.full(len(cuts), candidate), np.full(len(cuts), leading)
    sums = priced.sums(index, cuts, first)
    bounds = np.where(sums.fits, priced.bound_s(index, sums), np.inf)
    order = np.argsort(bounds, kind="stable")
    for start in range(0, len(order), SIMULATED_TOGETHER):
        rows = order[start : start + SIMULATED_TOGETHER]
        rows = rows[bounds[rows] < min(best_s, finalist.step_time_s)]
        if not len(rows):
            break
        steps = priced.step_s(candidate, cuts[rows], leading)
        quickest = int(steps.argmin())
        if steps[quickest] < finalist.step_time_s:
            finalist = replace(finalist, cuts=cuts[rows[quickest]], step_time_s=float(steps[quickest]))
    return replace(finalist, bound_s=min(best_s, finalist.step_time_s), settled=True)


def count_splits(counted: FloatArray, chunks: int) -> int:
    """Splits into ``chunks`` chunks with a counted block each, where no other block lies between counted ones."""
    decoders = np.flatnonzero(counted)
    between = decoders[-1] - decoders[0] + 1 > len(decoders)
    return 0 if between else comb(len(decoders) - 1, chunks - 1)


def all_cuts(counted: FloatArray, chunks: int) -> IntArray:
    """[n, chunks + 1] those splits."""
    decoders = np.flatnonzero(counted)
    inner = list(combinations(decoders[1:].tolist(), chunks - 1))
    out = np.zeros((len(inner), chunks + 1), dtype=np.int64)
    out[:, 1:-1], out[:, -1] = inner, len(counted)
    return out
