"""The search: enumerate, drop the illegal, price in bulk, split the promising, simulate the finalists, rank.

Best-first by a proven lower bound. A candidate is split only while its bound is below the best step time found, so what
is left at the end cannot win; a work limit or deadline leaves a gap that the answer states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost_models.protocol import StageCosts
from meshwright.specs.batch import BoolArray, CandidateBatch, FloatArray, IntArray, row_codes
from meshwright.specs.cluster import GpuType
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

from .. import rules
from ..corrections import cost_model
from ..request import PlanRequest
from .arrangements import Arrangement, arrangements, refused_pools
from .bounds import SplitBounds, Test
from .finalists import Finalist, Podium, SearchResult, count_splits, every_split, fitting, improved, refined, simulated
from .open_bound import OpenBound
from .pricing import PricedBatch, in_block_mode, with_recompute
from .space import candidates
from .splits import split_plain, split_virtual

Progress = Callable[[str, int, int], None]
#: Candidates split together in search of the first that fits.
FIRST_FIT_BATCH = 64
#: Share by which the limit rises under which plans are looked for; doubled while there is none.
LIMIT_GROWTH = 0.02
#: Plans of other degrees than the best are looked for up to this share above its step time.
RUNNER_UP = 0.03
#: Up to this many times its step time some are looked for at least, and up to this many candidates all of them.
FAR_RUNNER_UP, SMALL_SPACE = 1.3, 400
#: Candidates tried for each set of degrees when only runners-up are missing.
RUNNERS_UP_TRIED = 4
#: Quickest finalists whose interleaved split is improved.
IMPROVED = 3
#: Other splits simulated at most to settle the candidates that could still win.
SIMULATION_LIMIT = 256
#: Splits of an interleaved candidate up to which all are looked at.
FEW_SPLITS = 200
#: Candidates split at most when the request names no limit.
DEFAULT_WORK_LIMIT = 4000


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


def first_of_keys(chunk: IntArray, pending: _Pending, most: int) -> IntArray:
    """Of the candidates ``chunk`` the ``most`` with the lowest bounds for each set of degrees."""
    order = chunk[np.lexsort((pending.bound_s[chunk], pending.key[chunk]))]
    key = pending.key[order]
    place = np.arange(len(key)) - np.searchsorted(key, key)
    return np.sort(order[place < most])


class Search:
    """One request's search over a cost source."""

    def __init__(self, request: PlanRequest, costs: StageCosts | None = None, progress: Progress | None = None):
        self.request = request
        self.costs: StageCosts = costs or cost_model(request)
        self.progress = progress or (lambda stage, done, total: None)
        self.started = time.monotonic()
        self.limit_s = np.inf
        self.chosen: Mapping[str, Any] = {}
        self.admits: Callable[[CandidateBatch], BoolArray] | None = None
        self.wider: tuple[str, ...] = ()
        self.result = SearchResult(refused_pools=refused_pools(request.cluster, request.workload))
        self.bounds: dict[int, SplitBounds] = {}
        self.open: list[tuple[SplitBounds, Test]] = []

    def run(self, first_fit: bool = False) -> SearchResult:
        """Search the whole space; with ``first_fit`` only what needs least memory, up to the first that fits.

        Several pools are searched by :mod:`.over_pools`; the first that fits uses them whole.
        """
        eligible = self._eligible()
        if len(eligible) > 1 and not first_fit:
            from ..mixed.over_pools import search_over_pools

            search_over_pools(self, eligible)
            return self.result
        self.price_whole_pools(lean=first_fit)
        self._explore(first_fit)
        return self.result

    def run_on(self, limit_s: float, first_fit: bool = False) -> SearchResult:
        """Search only what was added, for plans quicker than ``limit_s``."""
        self.limit_s = limit_s
        self._explore(first_fit)
        return self.result

    def add(self, arrangement: Arrangement, batch: CandidateBatch) -> None:
        """Price the legal ones of some candidates; ``chosen`` are facts of their options for the rules."""
        batch = self._legal(batch)
        if len(batch):
            priced = PricedBatch(self.costs, batch, arrangement, self.request.target, self.request.memory_headroom)
            self.result.priced.append(priced)

    def _eligible(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.request.cluster.pools)) if i not in self.result.refused_pools)

    def _max_stages(self) -> int:
        cap = self.request.cap("pp") or self.request.fixed("pp")
        return min(self.request.model.num_layers, cap or self.request.model.num_layers)

    def price_whole_pools(self, lean: bool = False) -> None:
        """Price the candidates that use pools whole; ``lean`` as in :func:`.candidates`."""
        found = list(arrangements(self.request.cluster, self._eligible(), self._max_stages()))
        for done, arrangement in enumerate(found):
            self.progress("price", done, len(found))
            if self.late():
                self.result.untried_bound_s = 0.0  # arrangements that were not looked at may hold anything
                return
            self.add(arrangement, candidates(self.request, arrangement, lean))

    def legal(self, batch: CandidateBatch) -> BoolArray:
        """Mask of the legal candidates; what rules refuse is counted."""
        mask, rejected = rules.bulk_legal(*self._judged(batch), self.chosen)
        if self.admits is not None:
            mask = mask & self.admits(batch)
        self.result.rejected.update(rejected)
        self.result.pruned["illegal"] += int((~mask).sum())
        return np.asarray(mask)

    def _legal(self, batch: CandidateBatch) -> CandidateBatch:
        self.result.candidates += len(batch)
        if not len(batch):
            return batch
        mask = self.legal(batch)
        if not mask.any():  # nothing of this arrangement is legal: keep an example of why
            example = rules.one_refusal(*self._judged(batch))
            if example is not None:
                self.result.refusals.setdefault(example.rule, example.message)
        return batch.take(mask)

    def _judged(self, batch: CandidateBatch) -> tuple[CandidateBatch, ModelSpec, Workload, Target, list[GpuType]]:
        """What the rules judge: candidates under the target's own recompute modes, and what they are for."""
        request = self.request
        modes = [mode.granularity for mode in request.target.recompute]
        named = with_recompute(batch, in_block_mode(batch, request.target), modes, "full")
        gpus = [request.cluster.gpu_of(request.cluster.pools[i]) for i in self._eligible()]
        return named, request.model, request.workload, request.target, gpus

    def _explore(self, first_fit: bool) -> None:
        pending = self._promising()
        podium = Podium(self.request.top, pending.key, self.limit_s)
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
                if found or self.late():
                    return

    def _find(self, pending: _Pending, podium: Podium) -> BoolArray:
        """Good plans: near-even splits of the candidates that may stay below a limit, which rises until a plan is
        below it. Returns which candidates were tried [N]."""
        tried = np.zeros(len(pending.bound_s), dtype=np.bool_)
        limit_s, growth = float(pending.bound_s.min(initial=np.inf)), LIMIT_GROWTH
        while not tried.all() and limit_s < np.inf:
            limit_s = limit_s * (1 + growth) if growth < 1 else np.inf
            growth *= 1 if self.result.finalists else 2
            chunk = np.flatnonzero(~tried & (pending.bound_s < np.minimum(podium.to_beat_s(pending.key), limit_s)))
            if self.result.best and self.result.best.step_time_s <= limit_s:  # only runners-up are missing
                chunk = first_of_keys(chunk[~podium.has(pending.key[chunk])], pending, RUNNERS_UP_TRIED)
            found: list[_Found] = []
            for priced, mine in self._by_owner(pending, chunk):
                passed = self._bounds(priced).first(
                    pending.member[mine], np.full(len(mine), min(limit_s, self.limit_s))
                )
                mine = mine[passed][: max(0, self._limit - int(tried.sum()))]
                tried[mine] = True
                index = pending.member[mine]
                found += _with_keys(self._even(priced, index), index, pending.key[mine])
            self._simulate(found, podium)
            self.progress("find", int(tried.sum()), len(tried))
            best = self.result.best
            done_s = np.inf if best is None else best.step_time_s * (1 if np.isfinite(podium.last_s) else FAR_RUNNER_UP)
            if self.late() or int(tried.sum()) >= self._limit or min(done_s, self.limit_s) <= limit_s:
                break
        self.result.complete = int(tried.sum()) < self._limit
        return tried

    def _prove(self, pending: _Pending, podium: Podium, tried: BoolArray) -> None:
        """All candidates that may still be better than the best, or a close runner-up."""
        best = self.result.best
        small = len(tried) <= SMALL_SPACE
        reach_s = np.inf if best is None or small else best.step_time_s * (1 + RUNNER_UP)
        limit_s = np.minimum(podium.to_beat_s(pending.key), reach_s)
        chunk = np.flatnonzero((pending.bound_s < limit_s) & (tried | self.result.complete))
        found: list[_Found] = []
        for done, (priced, mine) in enumerate(self._by_owner(pending, chunk)):
            self.progress("prove", done, len(self.result.priced))
            if self.late():
                return
            index, plain = pending.member[mine], priced.batch.vpp[pending.member[mine]] == 1
            split = self._plain(priced, index[plain], limit_s[mine[plain]])
            split += self._virtual(priced, index[~plain], limit_s[mine[~plain]], index[tried[mine]])
            found += _with_keys(split, index, pending.key[mine])
            tried[mine] = True
        self._simulate(found, podium)
        self._settle()
        self._try_every_split()
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
            if self.late():
                return
            finalist = simulated(finalist)
            podium.enter(key, finalist.step_time_s)
            self.result.finalists.append(finalist)

    def _improve(self, podium: Podium) -> None:
        """Improve the splits of the quickest interleaved plans layer by layer."""
        result = self.result
        for position in sorted(range(len(result.finalists)), key=lambda i: result.finalists[i].order)[:IMPROVED]:
            if result.finalists[position].column("vpp") > 1 and not self.late():
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
            if best is None or finalist.bound_s >= best.step_time_s or left <= 0 or self.late():
                break
            if finalist.settled:
                result.finalists[position], used = refined(finalist, best.step_time_s, left, self.late)
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

    def late(self) -> bool:
        """Whether the deadline has passed."""
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

    def _virtual(self, priced: PricedBatch, index: IntArray, limit_s: FloatArray, tried: IntArray) -> list[Finalist]:
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
            out += fitting(priced, same, split_virtual(priced, same))
        return out

    def _bounds(self, priced: PricedBatch) -> SplitBounds:
        if id(priced) not in self.bounds:
            self.bounds[id(priced)] = SplitBounds(priced)
        return self.bounds[id(priced)]

    def _try_every_split(self) -> None:
        """Settle interleaved candidates that have few splits."""
        result = self.result
        for k, (bounds, pairs) in enumerate(self.open):
            priced = bounds.priced
            chunks = priced.arrangement.pp * priced.batch.vpp[pairs.index]
            few = np.array([0 < count_splits(priced.counted, q) <= FEW_SPLITS for q in chunks.tolist()], dtype=np.bool_)
            best_s = result.best.step_time_s if result.best else np.inf
            some = bounds.within(pairs.take(np.flatnonzero(few)), best_s)
            self.open[k] = (bounds, pairs.take(np.flatnonzero(~few)))
            for candidate, leading in zip(some.index.tolist(), some.leading.tolist(), strict=True):
                cuts = np.zeros(priced.arrangement.pp * int(priced.batch.vpp[candidate]) + 1, dtype=np.int64)
                best_s = result.best.step_time_s if result.best else np.inf
                found = every_split(Finalist(priced, candidate, cuts, np.inf, np.inf, leading), best_s)
                if np.isfinite(found.step_time_s):
                    result.finalists.append(found)

    def _bound_open(self) -> None:
        """Lower bound of the interleaved candidates over all their splits."""
        best_s = min([self.limit_s, *(each.step_time_s for each in self.result.finalists)])
        if not np.isfinite(best_s):
            if any(len(pairs.index) for _, pairs in self.open):
                self.result.untried_bound_s = 0.0
            return
        self.result.untried_bound_s = min(self.result.untried_bound_s, OpenBound(self.open, best_s).bound_s())
