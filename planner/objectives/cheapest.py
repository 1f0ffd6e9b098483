"""Objectives ``cost`` and ``gpus``: which part of the cluster to use."""

from __future__ import annotations

import time
from dataclasses import dataclass

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.goals import Considered, Goal

from ..answer.explain import seconds
from ..answer.no_fit import least_state_bytes
from ..engine.explore import Progress
from ..engine.finalists import Finalist, SearchResult
from ..errors import DeadlineExceeded
from ..request import PlanRequest
from ..variants import best_search
from .costs import cluster_price_per_s, plan_price_per_s, price_per_s
from .parts import growing, least_step_s, parts, space_of_parts

#: Every size is tried for a target up to this many, else doublings first and this many sizes between the last two.
SIZES_TRIED = 16


@dataclass(frozen=True)
class Found:
    """The best plan on a part of the cluster; ``result`` is None where its bound alone decided."""

    cluster: ClusterSpec
    considered: Considered
    result: SearchResult | None = None

    @property
    def step_s(self) -> float:
        return self.considered.step_time_s or float("inf")


class Parts:
    """Searches parts of one request's cluster, within its deadline."""

    def __init__(self, request: PlanRequest, progress: Progress | None = None):
        self.request = request
        self.progress = progress
        self.needed = least_state_bytes(request)
        self.deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        self.complete = True
        self.tried: list[Found] = []

    def search(self, part: ClusterSpec) -> Found:
        """The best plan on ``part``."""
        usable = sum(pool.num_gpus * part.gpu_of(pool).usable_memory_bytes for pool in part.pools)
        if usable < self.needed:
            return self._note(part, "infeasible", reason="weights and optimizer state alone do not fit")
        changed = {"cluster": part, "objective": "time", "deadline_s": remaining_s(self.deadline)}
        own = {name: price for name, price in self.request.price.items() if name in {p.gpu for p in part.pools}}
        request = self.request.model_copy(update=changed | {"price": own})
        _, result, bound_s, complete = best_search(request, self.progress)
        self.complete = self.complete and complete
        best = result.best
        if best is None:
            return self._note(part, "infeasible" if complete else "unknown", result, "no plan fits")
        return self._note(part, "feasible", result, bound_s=bound_s)

    def skip(self, part: ClusterSpec, bound_s: float, reason: str) -> Found:
        """Note a part that is not searched, since even ``bound_s`` a step does not do."""
        considered = Considered(
            cluster=part.name, num_gpus=part.num_gpus, status="pruned", bound_s=bound_s, reason=reason
        )
        self.tried.append(Found(part, considered))
        return self.tried[-1]

    def _note(
        self,
        part: ClusterSpec,
        status: str,
        result: SearchResult | None = None,
        reason: str | None = None,
        bound_s: float = 0.0,
    ) -> Found:
        best = result.best if result else None
        cost = None
        if best is not None and self.request.price:
            cost = best.step_time_s * _used_price_per_s(self.request, part, best)
        considered = Considered(
            cluster=part.name,
            num_gpus=part.num_gpus,
            status=status,
            step_time_s=best.step_time_s if best else None,
            bound_s=min(bound_s, best.step_time_s) if best else None,
            cost_per_step=cost,
            reason=None if best else reason,
        )
        self.tried.append(Found(part, considered, result))
        return self.tried[-1]

    @property
    def considered(self) -> tuple[Considered, ...]:
        return tuple(found.considered for found in self.tried)


def remaining_s(deadline: float | None) -> float | None:
    """Seconds to ``deadline``; :class:`DeadlineExceeded` where none are left."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the deadline came before every part of the cluster was looked at")
    return left


def _used_price_per_s(request: PlanRequest, part: ClusterSpec, best: Finalist) -> float:
    arrangement = best.batch.arrangement
    return sum(
        stages * arrangement.stage_ranks * price_per_s(request.price, part.pools[pool].gpu)
        for pool, stages in zip(arrangement.pools, arrangement.stages, strict=True)
    )


def cheapest(request: PlanRequest, progress: Progress | None = None) -> tuple[ClusterSpec | None, Goal | None, bool]:
    """The part of the cluster with the cheapest step, the goal reached so far, and whether all parts were looked at.

    Parts whose FLOPs at full peak already cost more than the best found are pruned.
    """
    search = Parts(request, progress)
    found = parts(request.cluster)
    floor = {part.name: least_step_s(request, part) * cluster_price_per_s(request.price, part) for part in found}
    best: Found | None = None
    limit = request.target_step_time_s or float("inf")
    try:
        for part in sorted(found, key=lambda part: (floor[part.name], part.num_gpus, part.name)):
            step_s = least_step_s(request, part)
            if step_s > limit:
                search.skip(part, step_s, "its peak alone is too slow for the target")
            elif (
                best is not None
                and best.considered.cost_per_step is not None
                and (floor[part.name] >= best.considered.cost_per_step)
            ):
                search.skip(part, step_s, "its GPUs at full peak already cost more than the best found")
            else:
                tried = search.search(part)
                if tried.step_s <= limit and _cost(tried) < (_cost(best) if best else float("inf")):
                    best = tried
    except DeadlineExceeded:
        search.complete = False
    if best is None:
        return None, _no_goal(request, search, "cost"), search.complete
    value = _cost(best)
    bound = min([value, *(_least_cost(request, tried) for tried in search.tried)])
    if not search.complete:
        bound = min(bound, *floor.values())
    goal = Goal(
        objective="cost",
        unit="price a step",
        value=value,
        bound=bound,
        gap=1 - bound / value if value else 0.0,
        target_step_time_s=request.target_step_time_s,
        considered=search.considered,
    )
    return best.cluster, goal, search.complete


def _cost(found: Found) -> float:
    cost = found.considered.cost_per_step
    return float("inf") if cost is None else cost


def _least_cost(request: PlanRequest, tried: Found) -> float:
    """No plan that uses a whole part is cheaper; what uses less of it is another part."""
    bound_s = tried.considered.bound_s
    if bound_s is None:
        return float("inf")
    return bound_s * cluster_price_per_s(request.price, tried.cluster)


def smallest_meeting(request: PlanRequest, progress: Progress | None = None) -> tuple[ClusterSpec | None, Goal, bool]:
    """The smallest size of the cluster, pools in proportion, whose best plan meets the target; None if none does."""
    limit = request.target_step_time_s
    assert limit is not None  # noqa: S101  the caller has checked
    search = Parts(request, progress)
    every = list(growing(request.cluster))
    open_ = [part for part in every if least_step_s(request, part) <= limit]
    for part in every[: len(every) - len(open_)][-1:]:
        search.skip(part, least_step_s(request, part), "its peak alone is too slow for the target")
    best: Found | None = None
    try:
        best = _first(search, open_, limit)
    except DeadlineExceeded:
        search.complete = False
    if best is None:
        return None, _no_goal(request, search, "gpus"), search.complete
    goal = Goal(
        objective="gpus",
        unit="GPUs",
        value=best.cluster.num_gpus,
        target_step_time_s=limit,
        considered=search.considered,
    )
    return best.cluster, goal, search.complete


def _first(search: Parts, sizes: list[ClusterSpec], limit: float) -> Found | None:
    """The first of ``sizes`` that meets ``limit``; of many, the first of those looked at."""
    if len(sizes) <= SIZES_TRIED:
        return next((found for found in map(search.search, sizes) if found.step_s <= limit), None)
    low, position = -1, 0
    while True:
        found = search.search(sizes[position])
        if found.step_s <= limit:
            break
        if position == len(sizes) - 1:
            return None
        low, position = position, min(2 * position + 1, len(sizes) - 1)
    between = range(low + 1, position)
    stride = max(1, -(-len(between) // SIZES_TRIED))
    for k in between[stride - 1 :: stride] if stride > 1 else between:
        smaller = search.search(sizes[k])
        if smaller.step_s <= limit:
            return smaller
    return found


def _no_goal(request: PlanRequest, search: Parts, objective: str) -> Goal:
    return Goal(
        objective="cost" if objective == "cost" else "gpus",
        unit="price a step" if objective == "cost" else "GPUs",
        value=0.0,
        target_step_time_s=request.target_step_time_s,
        considered=search.considered,
    )


def with_goal(request: PlanRequest, document: PlanDocument, goal: Goal) -> PlanDocument:
    """The document of the chosen part with the goal and the reason for the choice."""
    others = [each for each in goal.considered if each.step_time_s is not None and each.cluster != _name(document)]
    if goal.objective == "cost" and document.plan is not None and document.estimate is not None:
        value = document.estimate.step_time_s * plan_price_per_s(request.price, document.plan)
        bound = min(goal.bound or 0.0, value)
        goal = goal.model_copy(update={"value": value, "bound": bound, "gap": 1 - bound / value if value else 0.0})
        message = (
            f"{_name(document)} gives the cheapest step, {value:,.4g}; no part of the cluster can be more than "
            f"{goal.gap or 0.0:.1%} cheaper"
        )
        priced = [each for each in others if each.cost_per_step is not None]
        if priced:
            next_best = min(priced, key=lambda each: each.cost_per_step or 0.0)
            more = (next_best.cost_per_step or 0.0) / value - 1 if value else 0.0
            message += (
                f"; next is {next_best.cluster}, {more:.1%} dearer at {seconds(next_best.step_time_s or 0.0)} a step"
            )
    else:
        message = f"{_name(document)} is the smallest size tried whose step takes at most {goal.target_step_time_s:g} s"
        smaller = [each for each in others if each.num_gpus < document.inputs.cluster.num_gpus]
        if smaller:
            last = max(smaller, key=lambda each: each.num_gpus)
            message += f"; {last.cluster} needs {seconds(last.step_time_s or 0.0)}"
    reason = Explanation(kind="goal", message=message, data={"value": goal.value, "gap": goal.gap})
    bound_of = document.bound
    if bound_of is not None and goal.objective == "cost":
        bound_of = bound_of.model_copy(update={"space": (*bound_of.space, space_of_parts(request.cluster))})
    return document.model_copy(update={"goal": goal, "bound": bound_of, "explanation": (*document.explanation, reason)})


def _name(document: PlanDocument) -> str:
    return document.inputs.cluster.name
