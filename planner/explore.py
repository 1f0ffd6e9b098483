"""The search: enumerate, drop the illegal, price in bulk, split the promising, simulate the finalists, rank.

Best-first by a proven lower bound. A candidate is split only while its bound is below the best step time found, so what
is left at the end cannot win; a work limit or deadline leaves a gap that the answer states.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from meshwright.cost_models.protocol import StageCosts
from meshwright.cost_models.schedules.base import MAX_REPLAYED
from meshwright.specs.batch import BoolArray, CandidateBatch, FloatArray, IntArray, row_codes

from . import rules
from .arrangements import arrangements, refused_pools
from .bounds import SplitBounds, _Test
from .corrections import cost_model
from .partition import splits_by_bound
from .pricing import PricedBatch, in_block_mode, with_recompute
from .request import PlanRequest
from .space import candidates
from .splits import (
    fewest_recomputed_virtual,
    improved_virtual,
    split_plain,
    split_virtual,
    stage_tables,
)

Progress = Callable[[str, int, int], None]
#: Candidates split together in search of the first that fits.
FIRST_FIT_BATCH = 64
#: Share by which the limit rises under which plans are looked for; doubled while there is none.
LIMIT_GROWTH = 0.02
#: Plans of other degrees than the best are looked for up to this share above its step time.
RUNNER_UP = 0.03
#: Quickest finalists whose interleaved split is improved at the end, and the chunk passes replayed for each at most.
IMPROVED, IMPROVEMENT_PASSES = 3, 400_000
#: Splits of a candidate simulated at once.
SIMULATED_TOGETHER = 16
#: Other splits simulated at most to settle the candidates that could still win.
SIMULATION_LIMIT = 256
#: Halvings of the interval in which the bound of the interleaved candidates lies.
BOUND_STEPS = 10
#: Candidates split at most when the request names no limit.
DEFAULT_WORK_LIMIT = 4000


@dataclass(frozen=True)
class Finalist:
    """A candidate with its split and its step time, event by event; ``leading`` layers of a chunk are recomputed.

    ``bound_s`` holds for this split, or, where ``settled``, for every split with as many layers recomputed; it then
    counts ``tail_s`` after the passes.
    """

    batch: PricedBatch
    candidate: int
    cuts: IntArray
    step_time_s: float
    bound_s: float
    leading: int = 0
    settled: bool = False
    tail_s: float = 0.0

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
        return min([self.untried_bound_s, *(min(f.bound_s, f.step_time_s) for f in self.finalists if f.settled)])

    @property
    def best(self) -> Finalist | None:
        return min(self.finalists, key=lambda finalist: finalist.order, default=None)


#: A finalist and the number of its degrees and pools.
_Found = tuple[Finalist, int]


def _with_keys(found: list[Finalist], index: IntArray, key: IntArray) -> list[_Found]:
    key_of = dict(zip(index.tolist(), key.tolist(), strict=True))
    return [(finalist, key_of[finalist.candidate]) for finalist in found]


@dataclass(frozen=True)
class _Pending:
    """Candidates that may fit, in columns of equal length.

    Lower bound of the step time, least fill, index of their batch, row in it, and a number for their degrees and pools.
    """

    bound_s: FloatArray
    fill: FloatArray
    owner: IntArray
    member: IntArray
    key: IntArray


class Podium:
    """The best step time of every set of degrees, and of the ``places`` best sets the last.

    A candidate is worth a look while its bound is below both: then it may be the best of its degrees and among the best
    of all, so that the plans named beside the best are the true next ones.
    """

    def __init__(self, places: int, keys: IntArray):
        self._places = places
        self._best_s = np.full(int(keys.max(initial=-1)) + 1, np.inf)
        self.last_s = np.inf

    def enter(self, key: int, step_time_s: float) -> None:
        """A plan of degrees ``key`` takes ``step_time_s``."""
        if step_time_s < self._best_s[key]:
            self._best_s[key] = step_time_s
            if len(self._best_s) >= self._places:
                self.last_s = float(np.partition(self._best_s, self._places - 1)[self._places - 1])

    def to_beat_s(self, key: IntArray | int) -> FloatArray:
        """What a candidate of degrees ``key`` must stay below."""
        out: FloatArray = np.minimum(self._best_s[key], self.last_s)
        return out


class Search:
    """One request's search over a cost source."""

    def __init__(self, request: PlanRequest, costs: StageCosts | None = None, progress: Progress | None = None):
        self.request = request
        self.costs: StageCosts = costs or cost_model(request)
        self.progress = progress or (lambda stage, done, total: None)
        self.started = time.monotonic()
        self.result = SearchResult(refused_pools=refused_pools(request.cluster, request.workload))
        self.bounds: dict[int, SplitBounds] = {}
        self.open: list[tuple[SplitBounds, _Test]] = []

    def run(self, first_fit: bool = False) -> SearchResult:
        """Search the whole space; with ``first_fit`` only what needs least memory, up to the first that fits."""
        self._price(lean=first_fit)
        self._explore(first_fit)
        return self.result

    def _eligible(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.request.cluster.pools)) if i not in self.result.refused_pools)

    def _max_stages(self) -> int:
        cap = self.request.cap("pp") or self.request.fixed("pp")
        return min(self.request.model.num_layers, cap or self.request.model.num_layers)

    def _price(self, lean: bool = False) -> None:
        found = list(arrangements(self.request.cluster, self._eligible(), self._max_stages()))
        for done, arrangement in enumerate(found):
            self.progress("price", done, len(found))
            if self._late():
                self.result.untried_bound_s = 0.0  # arrangements that were not looked at may hold anything
                return
            batch = self._legal(candidates(self.request, arrangement, lean))
            if len(batch):
                priced = PricedBatch(self.costs, batch, arrangement, self.request.target, self.request.memory_headroom)
                self.result.priced.append(priced)

    def _legal(self, batch: CandidateBatch) -> CandidateBatch:
        self.result.candidates += len(batch)
        if not len(batch):
            return batch
        modes = [mode.granularity for mode in self.request.target.recompute]
        named = with_recompute(batch, in_block_mode(batch, self.request.target), modes, "full")
        gpus = [self.request.cluster.gpu_of(self.request.cluster.pools[i]) for i in self._eligible()]
        mask, rejected = rules.bulk_legal(named, self.request.model, self.request.workload, self.request.target, gpus)
        self.result.rejected.update(rejected)
        if not mask.any():  # nothing of this arrangement is legal: keep an example of why
            example = rules.one_refusal(named, self.request.model, self.request.workload, self.request.target, gpus)
            if example is not None:
                self.result.refusals.setdefault(example.rule, example.message)
        self.result.pruned["illegal"] += int((~mask).sum())
        return batch.take(mask)

    def _explore(self, first_fit: bool) -> None:
        pending = self._promising()
        podium = Podium(self.request.top, pending.key)
        if first_fit:
            self._first_fit(pending, podium)
            return
        tried = self._find(pending, podium)
        self._improve(podium)
        self._prove(pending, podium, tried)
        result = self.result
        left = pending.bound_s[~tried] if not result.complete else np.empty(0)
        result.untried_bound_s = min(result.untried_bound_s, float(left.min(initial=np.inf)))
        result.pruned["bound"] += int((~tried).sum())
        best_s = result.best.step_time_s if result.best else np.inf
        # What is left may still hold a runner-up; it leaves the answer open only if it may hold a better plan.
        result.complete = not result.deadline_hit and (result.complete or result.untried_bound_s >= best_s)

    def _first_fit(self, pending: _Pending, podium: Podium) -> None:
        """The first candidate that fits, emptiest first."""
        order = np.argsort(pending.fill, kind="stable")[: self._limit]
        for start in range(0, len(order), FIRST_FIT_BATCH):
            for priced, mine in self._by_owner(pending, order[start : start + FIRST_FIT_BATCH]):
                index = pending.member[mine]
                found = self._even(priced, index)
                self._simulate(_with_keys(found[:1], index, pending.key[mine]), podium)
                if found or self._late():
                    return

    def _find(self, pending: _Pending, podium: Podium) -> BoolArray:
        """Good plans: near-even splits of the candidates that may stay below a limit, which rises until a plan is
        below it. Returns which candidates were tried [N]."""
        tried = np.zeros(len(pending.bound_s), dtype=np.bool_)
        limit_s, growth = float(pending.bound_s.min(initial=np.inf)), LIMIT_GROWTH
        while not tried.all():
            limit_s *= 1 + growth
            growth *= 1 if self.result.finalists else 2
            chunk = np.flatnonzero(~tried & (pending.bound_s < np.minimum(podium.to_beat_s(pending.key), limit_s)))
            if not len(chunk) and limit_s > podium.last_s:
                break
            found: list[_Found] = []
            for priced, mine in self._by_owner(pending, chunk):
                passed = self._bounds(priced).first(pending.member[mine], np.full(len(mine), limit_s))
                mine = mine[passed][: max(0, self._limit - int(tried.sum()))]
                tried[mine] = True
                index = pending.member[mine]
                found += _with_keys(self._even(priced, index), index, pending.key[mine])
            self._simulate(found, podium)
            self.progress("find", int(tried.sum()), len(tried))
            best = self.result.best
            if self._late() or int(tried.sum()) >= self._limit or (best and best.step_time_s <= limit_s):
                break
        self.result.complete = int(tried.sum()) < self._limit
        return tried

    def _prove(self, pending: _Pending, podium: Podium, tried: BoolArray) -> None:
        """All candidates that may still be better than the best, or a close runner-up."""
        best = self.result.best
        reach_s = np.inf if best is None else best.step_time_s * (1 + RUNNER_UP)
        limit_s = np.minimum(podium.to_beat_s(pending.key), reach_s)
        chunk = np.flatnonzero(pending.bound_s < limit_s)
        found: list[_Found] = []
        for done, (priced, mine) in enumerate(self._by_owner(pending, chunk)):
            self.progress("prove", done, len(self.result.priced))
            if self._late():
                return
            index, plain = pending.member[mine], priced.batch.vpp[pending.member[mine]] == 1
            split = self._plain(priced, index[plain], limit_s[mine[plain]])
            split += self._virtual(priced, index[~plain], limit_s[mine[~plain]], index[tried[mine]])
            found += _with_keys(split, index, pending.key[mine])
            tried[mine] = True
        self._simulate(found, podium)
        self._settle()
        self._bound_open()

    @property
    def _limit(self) -> int:
        return self.request.work_limit or DEFAULT_WORK_LIMIT

    def _by_owner(self, pending: _Pending, chunk: IntArray) -> Iterator[tuple[PricedBatch, IntArray]]:
        for owner in np.unique(pending.owner[chunk]).tolist():
            yield self.result.priced[owner], chunk[pending.owner[chunk] == owner]

    def _simulate(self, found: list[_Found], podium: Podium) -> None:
        """Simulate those that may win a place, best bound first."""
        for finalist, key in sorted(found, key=lambda item: (item[0].bound_s, item[0].order)):
            if finalist.bound_s >= podium.to_beat_s(key):
                continue
            if self._late():
                return
            finalist = simulated(finalist)
            podium.enter(key, finalist.step_time_s)
            self.result.finalists.append(finalist)

    def _improve(self, podium: Podium) -> None:
        """Improve the splits of the quickest interleaved plans layer by layer."""
        result = self.result
        for position in sorted(range(len(result.finalists)), key=lambda i: result.finalists[i].order)[:IMPROVED]:
            if result.finalists[position].column("vpp") > 1 and not self._late():
                result.finalists[position] = improved(result.finalists[position])

    def _settle(self) -> None:
        """Look at other splits of the plain candidates that could still win, lowest bound first.

        The dynamic programme minimises the bound, the events may like another split better. Splits come in rising order
        of bound, so a candidate is settled when the next bound is not below the best step time.
        """
        result = self.result
        left = SIMULATION_LIMIT
        for position in sorted(range(len(result.finalists)), key=lambda i: (result.finalists[i].bound_s, i)):
            finalist, best = result.finalists[position], result.best
            if best is None or finalist.bound_s >= best.step_time_s or left <= 0 or self._late():
                break
            if finalist.settled:
                result.finalists[position], used = refined(finalist, best.step_time_s, left, self._late)
                left -= used
                self.progress("refine", SIMULATION_LIMIT - left, SIMULATION_LIMIT)

    def _promising(self) -> _Pending:
        """All candidates that may fit."""
        rows: list[tuple[FloatArray | IntArray, ...]] = []
        keys = 0
        for owner, priced in enumerate(self.result.priced):
            fill = priced.least_fill()
            index = np.nonzero(fill <= 1.0)[0]
            self.result.pruned["memory"] += len(fill) - len(index)
            batch = priced.batch
            degrees = row_codes((batch.tp, batch.cp, batch.ep, batch.etp))
            _, key = np.unique(degrees[index], return_inverse=True)
            rows.append(
                (priced.least_step_s()[index], fill[index], np.full(len(index), owner), index, keys + key.reshape(-1))
            )
            keys += int(key.max(initial=-1)) + 1
        if not rows:
            nothing = np.empty(0, dtype=np.int64)
            return _Pending(np.empty(0), np.empty(0), nothing, nothing, nothing)
        return _Pending(*(np.concatenate(column) for column in zip(*rows, strict=True)))

    def _late(self) -> bool:
        deadline = self.request.deadline_s
        if deadline is not None and time.monotonic() - self.started > deadline:
            self.result.deadline_hit, self.result.complete = True, False
        return self.result.deadline_hit

    def _plain(self, priced: PricedBatch, index: IntArray, limit_s: FloatArray) -> list[Finalist]:
        """1F1B candidates with the split of best bound, for every number of recomputed layers that may be worth it."""
        if not len(index):
            return []
        pairs = self._bounds(priced).pairs(index, limit_s)
        if not len(pairs.index):
            return []
        cuts, bound = split_plain(priced, pairs.index, float(limit_s.max()), pairs.leading)
        tail_s = pairs.first_reduce_s + pairs.after_s
        bound = bound + tail_s
        return [
            Finalist(
                priced, int(pairs.index[k]), cuts[k], np.inf, float(bound[k]), int(pairs.leading[k]), True, tail_s[k]
            )
            for k in np.flatnonzero(np.isfinite(bound))
        ]

    def _virtual(
        self, priced: PricedBatch, index: IntArray, limit_s: FloatArray, tried: IntArray
    ) -> list[Finalist]:
        """Interleaved candidates that may win and were not ``tried`` yet, split near-evenly where that fits."""
        if not len(index):
            return []
        pairs = self._bounds(priced).pairs(index, limit_s)
        self.open.append((self._bounds(priced), pairs))
        return self._even(priced, np.setdiff1d(pairs.index, tried))

    def _even(self, priced: PricedBatch, index: IntArray) -> list[Finalist]:
        """Candidates with chunks of near-equal time and the fewest layers recomputed that then fit."""
        out: list[Finalist] = []
        for virtual in np.unique(priced.batch.vpp[index]):
            same = index[priced.batch.vpp[index] == virtual]
            self.result.split += len(same)
            cuts = split_virtual(priced, same)
            leading = np.zeros(len(same), dtype=np.int64)
            block = priced.is_block[same]
            if block.any():
                leading[block] = fewest_recomputed_virtual(priced, same[block], cuts[block])
            sums = priced.sums(same, cuts, leading)
            bound = priced.bound_s(same, sums)
            out += [
                Finalist(priced, int(same[k]), cuts[k], np.inf, float(bound[k]), int(leading[k]))
                for k in np.flatnonzero(sums.fits)
            ]
        return out

    def _bounds(self, priced: PricedBatch) -> SplitBounds:
        return self.bounds.setdefault(id(priced), SplitBounds(priced))

    def _bound_open(self) -> None:
        """Lower bound of the interleaved candidates over all their splits, by bisection between it and the best."""
        best = self.result.best
        if best is None:
            if any(len(pairs.index) for _, pairs in self.open):
                self.result.untried_bound_s = 0.0
            return
        low, high, left = 0.5 * best.step_time_s, best.step_time_s, self.open
        for step in range(BOUND_STEPS):
            middle = high if step == 0 else (low + high) / 2
            passed = [(bounds, bounds.within(pairs, middle)) for bounds, pairs in left]
            passed = [(bounds, pairs) for bounds, pairs in passed if len(pairs.index)]
            if passed:
                left, high, low = passed, middle, low
            elif step == 0:
                return  # none may be quicker than the best
            else:
                low = middle
        self.result.untried_bound_s = min(self.result.untried_bound_s, low)


def simulated(finalist: Finalist) -> Finalist:
    """The finalist with its step time."""
    step_s = float(finalist.batch.step_s(finalist.candidate, finalist.cuts[None], finalist.leading)[0])
    return replace(finalist, step_time_s=step_s)


def improved(finalist: Finalist) -> Finalist:
    """An interleaved finalist with its split improved, where that shortens its step."""
    priced, candidate, leading = finalist.batch, finalist.candidate, finalist.leading
    passes = 2 * (len(finalist.cuts) - 1) * min(finalist.column("num_microbatches"), MAX_REPLAYED)
    cuts, step_s = improved_virtual(
        priced, candidate, finalist.cuts, leading, finalist.step_time_s, IMPROVEMENT_PASSES // passes
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
