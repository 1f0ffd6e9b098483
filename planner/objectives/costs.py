"""Money: what the GPUs of a plan cost."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.goals import Cost
from meshwright.specs.plan import Plan, parse_range

from ..request import PlanRequest

SECONDS_PER_HOUR, SECONDS_PER_DAY = 3600.0, 86400.0


def price_per_s(price: Mapping[str, float], gpu: str) -> float:
    """Money a second of one GPU of a type."""
    return price[gpu] / SECONDS_PER_HOUR


def cluster_price_per_s(price: Mapping[str, float], cluster: ClusterSpec) -> float:
    """Money a second of all GPUs of a cluster."""
    return sum(pool.num_gpus * price_per_s(price, pool.gpu) for pool in cluster.pools)


def plan_price_per_s(price: Mapping[str, float], plan: Plan) -> float:
    """Money a second of the GPUs that a plan uses."""
    return sum(
        len(parse_range(ranks)) * price_per_s(price, group.gpu)
        for stage in plan.stages
        for group in stage.groups
        for ranks in group.ranks
    )


def with_cost(request: PlanRequest, document: PlanDocument) -> PlanDocument:
    """The document with the cost of its plan; itself without a plan or prices."""
    plan, figures = document.plan, document.estimate
    if not request.price or plan is None or figures is None:
        return document
    per_step = figures.step_time_s * plan_price_per_s(request.price, plan)
    per_token = per_step / request.workload.tokens_per_step
    steps = None if request.tokens is None else request.tokens / request.workload.tokens_per_step
    cost = Cost(
        price_per_gpu_hour=dict(sorted(request.price.items())),
        per_step=per_step,
        per_million_tokens=per_token * 1e6,
        tokens=request.tokens,
        total=None if request.tokens is None else per_token * request.tokens,
        days=None if steps is None else steps * figures.step_time_s / SECONDS_PER_DAY,
    )
    words = f"the GPUs used cost {per_step:,.4g} a step and {cost.per_million_tokens:,.4g} a million tokens"
    if cost.total is not None and cost.days is not None:
        words += f"; {request.tokens:,.4g} tokens cost {cost.total:,.0f} and take {cost.days:,.1f} days"
    reason = Explanation(kind="cost", message=words, data={"per_step": per_step, "total": cost.total})
    return document.model_copy(update={"cost": cost, "explanation": (*document.explanation, reason)})
