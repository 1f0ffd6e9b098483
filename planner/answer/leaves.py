"""Plans on unequal leaves: the search's finalists with their nodes in the quickest order, and what that gains."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from meshwright.cost_models.uneven import in_one, placeable
from meshwright.specs.document import Explanation
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Plan

from ..corrections import estimate_of
from ..engine.explore import Progress, Search
from ..engine.finalists import Finalist
from ..engine.node_order import node_order, with_order
from ..engine.widen import searched
from ..request import PlanRequest
from .document import plan_of
from .explain import seconds

#: Finalists of each search whose nodes are ordered.
ORDERED = 6
#: What the order adds to the space, for ``bound.space``.
SPACE = "any order of a pool's nodes over its leaves, for the bound as if all were in one"


@dataclass(frozen=True)
class OnLeaves:
    """What was chosen: ``search`` holds the ordered finalists alone, with their plans in ``plans``."""

    search: Search
    bound_s: float
    best: Finalist
    estimate: Estimate
    plans: list[tuple[Finalist, Plan]]
    explanation: tuple[Explanation, ...]

    def plan_at(self, finalist: Finalist) -> Plan:
        """The plan of one of the finalists."""
        return next(plan for other, plan in self.plans if other is finalist)


def on_leaves(request: PlanRequest, worst: Search, progress: Progress | None) -> OnLeaves:
    """The best plan with its nodes in order, from the finalists of ``worst``, which took leaves at their worst, and of
    a search that takes all nodes as if in one leaf, which gives the bound."""
    left = None if request.deadline_s is None else max(worst.started + request.deadline_s - time.monotonic(), 1e-3)
    near = searched(request.model_copy(update={"cluster": in_one(request.cluster), "deadline_s": left}), progress)
    found: list[tuple[Finalist, Search, Plan, Estimate, Explanation | None]] = []
    best_s = float("inf")
    for search in (near, worst):
        for finalist in sorted(search.result.finalists, key=lambda item: item.order)[:ORDERED]:
            plan = plan_of(request, search, finalist)
            if search is near and finalist.step_time_s >= best_s and len(found) >= request.top:
                continue
            if any(plan.stages == other.stages and plan.options == other.options for _, _, other, _, _ in found):
                continue
            plan, why = ordered(request, plan, best_s)
            figures = estimate_of(request, plan)
            best_s = min(best_s, figures.step_time_s)
            found.append((replace(finalist, step_time_s=figures.step_time_s), search, plan, figures, why))
    best, search, _, figures, why = min(found, key=lambda item: item[0].order)
    plans = [(finalist, plan) for finalist, _, plan, _, _ in found]
    bound_s = near.result.bound_s if near.result.best else 0.0
    result = replace(
        search.result,
        finalists=[finalist for finalist, _ in plans],
        complete=near.result.complete and worst.result.complete,
        candidates=near.result.candidates + worst.result.candidates,
        pruned=near.result.pruned + worst.result.pruned,
    )
    search.result = result
    search.wider = (*search.wider, SPACE)
    return OnLeaves(search, bound_s, best, figures, plans, (why,) if why else ())


def ordered(request: PlanRequest, plan: Plan, limit_s: float = float("inf")) -> tuple[Plan, Explanation | None]:
    """The plan with its nodes in the quickest order, and what that gains over the cluster's own order; orders that take
    ``limit_s`` or more are not sought."""
    if not placeable(plan, request.cluster):
        return plan, None
    pool = request.cluster.pool(plan.devices[0].pool)
    found = node_order(plan, pool, lambda spans: estimate_of(request, plan, spans).step_time_s, limit_s)
    if found.method == "declared":
        return plan, None
    plain_s = estimate_of(request, plan).step_time_s
    at = pool.uneven_level
    name = pool.levels[at].name if at is not None else ""
    message = (
        f"the nodes of {pool.name} are ordered for the unequal instances of {name}: in the order of the cluster a step "
        f"takes {seconds(plain_s)}, {plain_s / found.step_time_s - 1:.1%} longer"
    )
    data = {"pool": pool.name, "level": name, "method": found.method, "proven": found.proven, "plain_s": plain_s}
    return with_order(plan, pool, found.nodes), Explanation(kind="placement", message=message, data=data)
