"""The search over several pools: which of them run which stages, how many, in what order, with which layers.

Everything waits in one queue under a lower bound of its step time and is looked at more closely in rising order: a
skeleton, the skeleton with the layers that it must recompute, one of its layouts under the bound of the partition. What
is left when the bound reaches the best step time cannot win. Interleaved layouts are tried in the order in which they
promise to be quick; their bound stands for all their splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import comb

import numpy as np

from meshwright.cost_models.protocol import CellCosts, StageCosts
from meshwright.specs.batch import BoolArray, CandidateBatch, CellKeys, FloatArray, IntArray

from ..engine.arrangements import Arrangement
from ..engine.finalists import Finalist, all_cuts, improved
from ..engine.pricing import PricedBatch
from ..engine.space import VIRTUAL_STAGES
from ..engine.splits import fewest_recomputed_virtual
from ..request import PlanRequest
from .open_layouts import Layout, OpenLayouts
from .partition import best_split, layouts, tight_bound_s
from .pricing import PricedSkeletons
from .queue import Task, Waiting
from .space import Skeletons, allowed_counts, skeletons
from .virtual import Interleaving, chunk_cuts

#: Layouts priced event by event at most: plain ones, interleaved ones, and further ones for the plans beside the best.
PLAIN_TRIES, VIRTUAL_TRIES, OTHER_TRIES = 96, 96, 24
#: Of the interleaved ones so many are tried at once while skeletons are still looked at, and so many in all by then.
TRIES_AT_ONCE, EARLY_TRIES = 2, 48
#: Skeletons partitioned at most when the request names no limit, and more for the plans beside the best.
DEFAULT_WORK_LIMIT = {"skeleton": 400, "virtual": 400}
OTHER_WORK = 12
#: A partition looks at layouts up to this much above the skeleton's bound first, then further; all at last.
REACH = (1.05, 1.25, 2.0, np.inf)
#: Layouts of a skeleton and V that are worth a try.
LIKELY_KEPT = 8
#: Skeletons of a space that is looked through until the plans beside the best are settled as well.
SMALL_SPACE = 500
#: Plain layouts with at most this many splits are settled by pricing them all.
LISTED_SPLITS = 300
#: Quickest plans whose split is improved block by block.
IMPROVED = 4
#: What a move must promise to gain, as a share of the step: more than rounding.
LEAST_GAIN = 1e-12


@dataclass
class MixedResult:
    """What was found, each plan the one candidate of its batch; ``bound_s``: no plan of the space is faster."""

    plans: list[Finalist] = field(default_factory=list)
    bound_s: float = 0.0
    complete: bool = True
    candidates: int = 0
    partitioned: int = 0
    left: int = 0
    unfit: int = 0


class _Kept:
    """A cost source that remembers the cells of single keys, which the layouts of a skeleton share."""

    def __init__(self, costs: StageCosts):
        self._costs = costs
        self._cells: dict[bytes, CellCosts] = {}
        self.blocks = costs.blocks
        self.tail, self.boundary_s, self.shared_embedding_s = costs.tail, costs.boundary_s, costs.shared_embedding_s

    def cells(self, keys: CellKeys) -> CellCosts:
        code = b"".join(np.ascontiguousarray(column).tobytes() for column in vars(keys).values())
        if code not in self._cells:
            self._cells[code] = self._costs.cells(keys)
        return self._cells[code]


class MixedSearch:
    """One request's search over several pools, with legality given by ``legal`` (a mask of candidates)."""

    def __init__(
        self,
        request: PlanRequest,
        costs: StageCosts,
        eligible: tuple[int, ...],
        legal: Callable[[CandidateBatch], BoolArray],
        late: Callable[[], bool] = lambda: False,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ):
        self.request, self.costs, self.eligible, self.legal = request, _Kept(costs), eligible, legal
        self.late, self.progress = late, progress
        pinned, cap = request.fixed("pp"), request.cap("pp")
        layers = request.model.num_layers
        self.fewest, self.largest = pinned or 1, min(pinned or cap or layers, layers)
        self.virtual = self._virtual_stages()
        self.result = MixedResult()
        self.groups: list[PricedSkeletons] = []
        self.queue: list[tuple[float, int, Task]] = []
        self.tries: list[tuple[float, int, float, Interleaving, int, tuple[int, ...], tuple[int, ...], int]] = []
        self.by_key: dict[tuple[int, ...], float] = {}
        self.open_s = np.inf  # the least bound of plain layouts that were tried and not settled
        self.open = OpenLayouts()  # interleaved ones, which are never settled
        self.serial, self.tried, self.small = 0, 0, False

    def _virtual_stages(self) -> tuple[int, ...]:
        pinned, cap = self.request.fixed("vpp"), self.request.cap("vpp")
        stages = VIRTUAL_STAGES if "interleaved" in self.request.target.schedules else (1,)
        return tuple(v for v in stages if (pinned is None or v == pinned) and (cap is None or v <= cap))

    @property
    def best_s(self) -> float:
        return min(self.by_key.values(), default=np.inf)

    @property
    def last_s(self) -> float:
        """The step time of the last of the best sets of degrees that the request wants to see."""
        places = sorted(self.by_key.values())
        return places[self.request.top - 1] if len(places) >= self.request.top else np.inf

    @property
    def to_beat_s(self) -> float:
        """What an interleaved layout must stay below to be worth a look."""
        return self.last_s if self.small else self.best_s

    def run(self) -> MixedResult:
        """Search the space: plain pipelines first, then interleaved ones against the best of those."""
        self._price()
        result = self.result
        left = min(self._explore("skeleton"), self._explore("virtual"))
        self._try_virtual()
        self._improve()
        result.left = len(self.queue) + sum(len(waiting) - waiting.position for waiting in self.waiting.values())
        limit_s = min(left, self.open_s, self.best_s)
        result.bound_s = self.open.bound_s(limit_s, self._laid_out, self.late)
        if self.late():
            result.complete = False
        return result

    def _explore(self, kind: str) -> float:
        """Go on with the skeletons of a kind until none of them can win a place; the least bound of what is left."""
        result, limit = self.result, self.request.work_limit or DEFAULT_WORK_LIMIT[kind]
        waiting = self.waiting[kind]
        self.queue = []
        plain, others, work, extra = 0, 0, 0, 0
        while not self.late():
            if waiting.bound_s <= (self.queue[0][0] if self.queue else np.inf):
                bound, task = waiting.bound_s, None
            else:
                bound, task = self.queue[0][0], self.queue[0][2]
            done = bound >= self.best_s
            if bound >= self.last_s or not np.isfinite(bound):
                break
            if done and not self.small and (others >= OTHER_TRIES or extra >= OTHER_WORK or kind == "virtual"):
                break
            if not done and work >= limit:
                result.complete = False
                break
            if task is None:
                owner, skeleton = waiting.take()
                getattr(self, f"_{kind}")(bound, Task(kind, owner, skeleton))
                continue
            if task.kind == "layout":
                if not done and plain >= PLAIN_TRIES:
                    break
                plain, others = (plain, others + 1) if done else (plain + 1, others)
            elif task.kind in ("partition", "interleave"):
                work, extra = work + 1, extra + done
                result.partitioned += 1
                self.progress("partition" if kind == "skeleton" else "interleave", work, limit)
            heappop(self.queue)
            getattr(self, f"_{task.kind}")(bound, task)
        return min(waiting.bound_s, min((bound for bound, _, _ in self.queue), default=np.inf))

    def _push(self, bound: float, task: Task) -> None:
        self.serial += 1
        heappush(self.queue, (float(bound), self.serial, task))

    def _price(self) -> None:
        bounds: dict[str, list[tuple[FloatArray, int]]] = {"skeleton": [], "virtual": []}
        for several in (False, True):
            if (several and self.largest == 1) or (not several and self.fewest > 1):
                continue
            for part in skeletons(self.request, self.eligible, several):
                self.progress("price", len(self.groups), len(self.groups) + 1)
                if self.late():
                    self.open_s = 0.0  # skeletons that were not looked at may be anything
                    break
                self.result.candidates += len(part.batch)
                mask = self.legal(part.batch)
                if not mask.any():
                    continue
                part = Skeletons(part.stage_ranks, part.batch.take(mask), part.most[mask], part.step)
                group = PricedSkeletons(
                    self.costs,
                    part,
                    self.request.target,
                    self.request.memory_headroom,
                    self.largest,
                    len(self.request.cluster.pools),
                )
                if 1 in self.virtual:
                    bounds["skeleton"].append((group.least_step_s(), len(self.groups)))
                if several and self.virtual[-1:] > (1,):
                    bounds["virtual"].append((group.least_interleaved_s(), len(self.groups)))
                self.groups.append(group)
        self.waiting = {kind: Waiting(found) for kind, found in bounds.items()}
        self.small = sum(len(waiting) for waiting in self.waiting.values()) <= SMALL_SPACE

    def _skeleton(self, bound: float, task: Task) -> None:
        """Find the layers that a plain skeleton must recompute."""
        group = self.groups[task.owner]
        leading = group.fewest_recomputed(task.skeleton)
        if leading is None:
            self.result.unfit += 1
            return
        load = group.least_loaded_s(task.skeleton, leading, bound, self.last_s)
        self._push(load, replace(task, kind="partition", leading=leading))

    def _partition(self, bound: float, task: Task) -> None:
        """All layouts of a skeleton up to some way above its bound, or up to the time to beat."""
        group = self.groups[task.owner]
        tables = task.tables or group.tables(task.skeleton, task.leading)
        to_beat = self.last_s if self.best_s <= bound else self.best_s
        limit = min(to_beat, REACH[task.reach] * bound)
        most = tuple(int(count) for count in group.most[task.skeleton])
        several = group.max_stages > 1
        fewest, largest = (max(2, self.fewest), self.largest) if several else (1, 1)
        allowed = allowed_counts(most, group.skeletons.step, fewest, largest)
        items = []
        for part in layouts(tables, most, limit, allowed, group.skeletons.step):
            for counts, value in zip(part.counts.tolist(), part.value_s.tolist(), strict=True):
                if value < limit:
                    items.append((value, part.order, tuple(counts)))
        items = sorted(item for item in items if item[0] >= (bound if task.reach else 0.0))
        if items:
            self._push(items[0][0], replace(task, kind="layout", items=tuple(items), tables=tables))
        if limit < to_beat:
            self._push(limit, replace(task, reach=task.reach + 1, tables=tables))
        elif group.is_block[task.skeleton] and task.leading < group.longest(task.skeleton, limit):
            more = task.leading + 1
            load = group.least_loaded_s(task.skeleton, more, bound, self.last_s)
            self._push(load, Task("partition", task.owner, task.skeleton, more))

    def _layout(self, bound: float, task: Task) -> None:
        """Tighten the bound of the layout that comes next, and price its best split."""
        value, order, counts = task.items[task.position]
        if task.position + 1 < len(task.items):
            self._push(task.items[task.position + 1][0], replace(task, position=task.position + 1))
        tables = task.tables or self.groups[task.owner].tables(task.skeleton, task.leading)
        stages = tuple(g for g, count in zip(order, counts, strict=True) for _ in range(count))
        priced = self._candidate(task.owner, task.skeleton, order, counts, 1)
        if comb(int(priced.counted.sum()) - 1, len(stages) - 1) <= LISTED_SPLITS:
            self._list(priced, task.leading, value)
            return
        cuts, reached = best_split(tables, stages)
        if not np.isfinite(reached):
            return
        found = self._found(priced, cuts, task.leading, value)
        if found is not None and value < self.best_s * 1.02:
            found = _improved(found)
            self._enter(found)
        if value < self.best_s:
            tight = max(value, tight_bound_s(tables, stages, self.best_s))
            if tight < self.best_s:
                self._push(tight, Task("settled", task.owner, task.skeleton))

    def _list(self, priced: PricedBatch, leading: int, bound: float) -> None:
        """Price every split of a plain layout that has few."""
        every = all_cuts(priced.counted, priced.arrangement.pp)
        index = np.zeros(len(every), dtype=np.int64)
        every = every[priced.fits(index, every, np.full(len(every), leading))]
        if len(every):
            steps = priced.step_s(0, every, leading)
            best = int(steps.argmin())
            self._enter(Finalist(priced, 0, every[best], float(steps[best]), bound, leading))

    def _settled(self, bound: float, task: Task) -> None:
        """A layout that was tried but not proven: its bound stays."""
        self.open_s = min(self.open_s, bound)

    def _virtual(self, bound: float, task: Task) -> None:
        """Find the layers that an interleaved skeleton must recompute."""
        group = self.groups[task.owner]
        leading = group.fewest_recomputed(task.skeleton)
        if leading is None:
            self.result.unfit += 1
            return
        load = group.least_loaded_s(task.skeleton, min(leading, 1), bound, self.last_s)
        self._push(load, replace(task, kind="interleave", leading=leading))

    def _interleave(self, bound: float, task: Task) -> None:
        """Bounds of all layouts of an interleaved skeleton; the promising ones wait to be tried."""
        group = self.groups[task.owner]
        most = tuple(int(count) for count in group.most[task.skeleton])
        allowed = allowed_counts(most, group.skeletons.step, max(2, self.fewest), self.largest)
        after: FloatArray | None = None
        several = np.array([virtual for virtual in self.virtual if virtual > 1], dtype=np.int64)
        for place, virtual in enumerate(several.tolist()):
            work = Interleaving(group, task.skeleton, virtual)
            to_beat = self.to_beat_s
            found = work.counts(allowed, to_beat)
            if len(found.least_s) and np.isfinite(to_beat):
                if after is None:
                    after = group.after_s(task.skeleton, several, to_beat / work.m)
                found = found.followed_by(after[place])
            possible = found.least_s < to_beat
            if not possible.any():
                continue
            self.open.add(task.owner, task.skeleton, virtual, found, to_beat)
            for row in np.argsort(found.likely_s, kind="stable")[:LIKELY_KEPT]:
                if np.isfinite(found.likely_s[row]) and possible[row]:
                    self.serial += 1
                    heappush(
                        self.tries,
                        (
                            float(found.likely_s[row]),
                            self.serial,
                            float(found.least_s[row]),
                            work,
                            task.owner,
                            tuple(g for g in found.order[row].tolist() if found.counts[row, g]),
                            tuple(k for k in found.counts[row, found.order[row]].tolist() if k),
                            int(found.leading[row]),
                        ),
                    )
        self._try_virtual(min(self.tried + TRIES_AT_ONCE, EARLY_TRIES))

    def _try_virtual(self, most: int = VIRTUAL_TRIES) -> None:
        """Price interleaved layouts in the order in which they promise to be quick, until ``most`` have been tried."""
        while self.tries and self.tried < most and not self.late():
            likely, _, least, work, owner, order, counts, leading = self.tries[0]
            if likely >= 1.02 * self.to_beat_s:
                break
            heappop(self.tries)
            if least >= self.to_beat_s:
                continue
            self.tried += 1
            cuts = chunk_cuts(work, tuple(g for g, k in zip(order, counts, strict=True) for _ in range(k)), leading)
            if cuts is None:
                continue
            priced = self._candidate(owner, work.skeleton, order, counts, work.virtual)
            if not self.legal(priced.batch).all():
                continue
            one = np.array([0])
            more = fewest_recomputed_virtual(priced, one, cuts[None]) if priced.is_block[0] else np.array([0])
            self._found(priced, cuts, int(more[0]), least)

    def _laid_out(self, layout: Layout) -> PricedBatch:
        return self._candidate(layout.owner, layout.skeleton, layout.order, layout.counts, layout.virtual)

    def _candidate(
        self, owner: int, skeleton: int, order: tuple[int, ...], counts: tuple[int, ...], virtual: int
    ) -> PricedBatch:
        group = self.groups[owner]
        one = group.batch.take(np.array([skeleton]))
        one = replace(one, pp=np.array([sum(counts)]), vpp=np.array([virtual]))
        place = Arrangement(group.skeletons.stage_ranks, order, counts)
        return PricedBatch(self.costs, one, place, self.request.target, self.request.memory_headroom)

    def _found(self, priced: PricedBatch, cuts: IntArray, leading: int, bound: float) -> Finalist | None:
        one = np.array([0])
        if not priced.fits(one, cuts[None], np.array([leading]))[0]:
            return None
        step_s = float(priced.step_s(0, cuts[None], leading)[0])
        plan = Finalist(priced, 0, cuts, step_s, bound, leading)
        self._enter(plan)
        return plan

    def _enter(self, plan: Finalist) -> None:
        self.result.plans.append(plan)
        self.by_key[plan.key] = min(self.by_key.get(plan.key, np.inf), plan.step_time_s)

    def _improve(self) -> None:
        """Move single blocks of the quickest plans while that shortens their step."""
        self.result.plans.sort(key=lambda plan: (plan.step_time_s, plan.key, plan.leading, plan.cuts.tolist()))
        for plan in self.result.plans[:IMPROVED]:
            if not self.late():
                self._enter(_improved(plan))
        self.result.plans.sort(key=lambda plan: (plan.step_time_s, plan.key, plan.leading, plan.cuts.tolist()))


def _improved(plan: Finalist) -> Finalist:
    """The plan improved by all moves that are near."""
    return improved(plan, 4 * len(plan.cuts), LEAST_GAIN)
