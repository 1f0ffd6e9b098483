"""The search: enumerate, drop the illegal, price in bulk, split the promising, simulate the finalists, rank.

Best-first by a proven lower bound. A candidate is split only while its bound is below the best step time found, so what
is left at the end cannot win; a work limit or deadline leaves a gap that the answer states.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.protocol import StageCosts
from meshwright.specs.batch import CandidateBatch, FloatArray, IntArray

from . import rules
from .arrangements import arrangements, refused_pools
from .partition import StageTables, split_1f1b, split_chunks
from .pricing import PricedBatch
from .request import PlanRequest
from .space import candidates

Progress = Callable[[str, int, int], None]
#: Candidates split together: large enough to amortise numpy calls, small enough to profit from a falling best time.
SPLIT_BATCH = 32
#: Candidates split at most when the request names no limit.
DEFAULT_WORK_LIMIT = 4000


@dataclass(frozen=True)
class Finalist:
    """A candidate with its split and its step time, event by event."""

    batch: PricedBatch
    candidate: int
    cuts: IntArray
    step_time_s: float
    bound_s: float

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
        return (self.step_time_s, (*self.key, *(self.column(name) for name in names)))


@dataclass
class SearchResult:
    """What a search found and what it left out."""

    finalists: list[Finalist] = field(default_factory=list)
    best_bound_s: float = np.inf
    complete: bool = True
    candidates: int = 0
    pruned: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    refused_pools: dict[int, str] = field(default_factory=dict)
    priced: list[PricedBatch] = field(default_factory=list)
    split: int = 0
    deadline_hit: bool = False

    @property
    def best(self) -> Finalist | None:
        return min(self.finalists, key=lambda finalist: finalist.order, default=None)


class Search:
    """One request's search over a cost source."""

    def __init__(self, request: PlanRequest, costs: StageCosts | None = None, progress: Progress | None = None):
        self.request = request
        self.costs: StageCosts = costs or CostModel(request.model, request.cluster, request.workload, request.target)
        self.progress = progress or (lambda stage, done, total: None)
        self.started = time.monotonic()
        self.result = SearchResult(refused_pools=refused_pools(request.cluster, request.workload))

    def run(self, first_fit: bool = False) -> SearchResult:
        """Search the whole space; with ``first_fit`` stop at the first plan that fits."""
        self._price()
        self._explore(first_fit)
        return self.result

    def _eligible(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.request.cluster.pools)) if i not in self.result.refused_pools)

    def _max_stages(self) -> int:
        cap = self.request.cap("pp") or self.request.fixed("pp")
        return min(self.request.model.num_layers, cap or self.request.model.num_layers)

    def _price(self) -> None:
        found = list(arrangements(self.request.cluster, self._eligible(), self._max_stages()))
        for done, arrangement in enumerate(found):
            self.progress("price", done, len(found))
            batch = self._legal(candidates(self.request, arrangement, self.request.target.expert_tensor_parallel))
            if len(batch):
                keys, row = batch.cells()
                cells = self.costs.cells(keys)
                priced = PricedBatch(self.costs, cells, row, batch, arrangement, self.request.memory_headroom)
                self.result.priced.append(priced)

    def _legal(self, batch: CandidateBatch) -> CandidateBatch:
        self.result.candidates += len(batch)
        if not len(batch):
            return batch
        mask, rejected = rules.bulk_legal(batch, self.request.model, self.request.workload, self.request.target)
        self.result.rejected.update(rejected)
        self.result.pruned["illegal"] += int((~mask).sum())
        return batch.take(mask)

    def _explore(self, first_fit: bool) -> None:
        result = self.result
        bounds, fills, owners, members = self._promising()
        order = np.argsort(fills if first_fit else bounds, kind="stable")
        limit = self.request.work_limit or DEFAULT_WORK_LIMIT
        best = np.inf
        position = 0
        while position < len(order):
            if bounds[order[position]] >= best:
                break  # in rising order: no later candidate can win
            if result.split >= limit or self._late():
                result.complete = False
                break
            chunk = order[position : position + SPLIT_BATCH]
            position += len(chunk)
            chunk = chunk[bounds[chunk] < best]
            result.split += len(chunk)
            self.progress("split", min(position, len(order)), len(order))
            for finalist in self._split(owners[chunk], members[chunk], best):
                best = min(best, finalist.step_time_s)
                result.finalists.append(finalist)
                if first_fit:
                    return
        left = bounds[order[position:]]
        result.pruned["bound"] += len(left)
        unproven = float(left.min()) if len(left) else np.inf
        result.best_bound_s = min(result.best_bound_s, unproven, best)

    def _promising(self) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
        """Lower bounds and least fills of all candidates that may fit, with the batch and the row each belongs to."""
        rows: list[tuple[FloatArray, FloatArray, IntArray, IntArray]] = []
        for owner, priced in enumerate(self.result.priced):
            fill = priced.least_fill()
            index = np.nonzero(fill <= 1.0)[0]
            self.result.pruned["memory"] += len(fill) - len(index)
            rows.append((priced.least_step_s()[index], fill[index], np.full(len(index), owner), index))
        if not rows:
            nothing = np.empty(0, dtype=np.int64)
            return np.empty(0), np.empty(0), nothing, nothing
        bounds, fills, owners, members = (np.concatenate(column) for column in zip(*rows, strict=True))
        return bounds, fills, owners, members

    def _late(self) -> bool:
        deadline = self.request.deadline_s
        self.result.deadline_hit = deadline is not None and time.monotonic() - self.started > deadline
        return self.result.deadline_hit

    def _split(self, owners: IntArray, members: IntArray, best: float) -> Iterator[Finalist]:
        """Split candidates and simulate those whose bound is below the best step time, best bound first."""
        found: list[tuple[float, int, int, IntArray]] = []
        for owner in np.unique(owners):
            priced = self.result.priced[int(owner)]
            index = members[owners == owner]
            plain = index[priced.batch.vpp[index] == 1]
            if len(plain):
                cuts, bound = split_plain(priced, plain, best)
                self.result.pruned["memory"] += int(np.isinf(bound).sum())
                found += [
                    (float(b), int(owner), int(i), c)
                    for b, i, c in zip(bound, plain, cuts, strict=True)
                    if np.isfinite(b)
                ]
            for i in index[priced.batch.vpp[index] > 1]:
                cuts = split_virtual(priced, int(i))
                found.append((0.0, int(owner), int(i), cuts))
        for bound, owner, candidate, cuts in sorted(found, key=lambda item: item[:3]):
            priced = self.result.priced[owner]
            if bound >= best:
                self.result.best_bound_s = min(self.result.best_bound_s, bound)
                continue
            sums = priced.sums(candidate, cuts)
            if not sums.fits:
                self.result.pruned["memory"] += 1
                continue
            bound = max(bound, priced.bound_s(candidate, sums)) if priced.batch.vpp[candidate] > 1 else bound
            self.result.best_bound_s = min(self.result.best_bound_s, bound)
            if bound >= best:
                continue
            finalist = Finalist(priced, candidate, cuts, priced.step_s(candidate, sums), bound)
            best = min(best, finalist.step_time_s)
            yield finalist


def split_plain(
    priced: PricedBatch, index: IntArray, best_s: float = np.inf, ignore_memory: bool = False
) -> tuple[IntArray, FloatArray]:
    """Cuts [n, P+1] and bound of the step time [n] of 1F1B candidates, inf where no split fits.

    ``best_s`` is a step time already reached: stages that alone need longer are not tried.
    """
    busy = priced.busy_s(index)
    held = priced.held(index)[:, :, 0]
    static = priced.per_block(priced.cells.static_bytes, index)
    activations = priced.per_block(priced.cells.activation_bytes, index)
    count = priced.batch.num_microbatches[index]
    width = busy.shape[-1]
    if np.isfinite(best_s):
        # blocks that cost least come first in the sum, so no longer stage can stay below best_s
        cheapest = np.sort(busy.min(axis=1), axis=-1).cumsum(axis=-1) * count[:, None]
        width = max(1, int((cheapest <= best_s).sum(axis=-1).max()))
    split = split_1f1b(
        StageTables(
            busy_s=busy,
            bytes_=static[:, None, :] + held[:, :, None] * activations[:, None, :],
            transient_bytes=priced.per_block(priced.cells.transient_bytes, index),
            capacity_bytes=np.full((len(index), busy.shape[1]), np.inf)
            if ignore_memory
            else priced.capacity_bytes(index),
            send_s=priced.held_by_sends_s(index),
            micro_batches=count,
            counted=priced.counted,
        ),
        width,
    )
    return split.cuts, split.bound_s + priced.least_tail_s()[index]


def split_virtual(priced: PricedBatch, candidate: int) -> IntArray:
    """Chunk cuts [P*V + 1] of an interleaved candidate."""
    busy = priced.busy_s(np.array([candidate]))[0]
    return split_chunks(busy, priced.arrangement.pp, int(priced.batch.vpp[candidate]), priced.counted)
