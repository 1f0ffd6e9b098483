"""A request's expert load: the load of expert ranks at every degree, and the placement for the plan that was found."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.expert_load import ExpertLoad
from meshwright.specs.goals import ExpertPlacement

from ..answer.explain import seconds
from ..corrections import estimate_of
from ..engine.space import divisors
from ..request import PlanRequest
from .placement import Placement, contiguous, lower_bound, placed, replicated

#: Other ways to place experts are told of where they leave less than this share of the load.
GAIN = 0.99
#: Histograms of more layers than this are placed without the integer programme, one call of which takes up to seconds.
SOLVED_LAYERS = 4


def with_expert_load(request: PlanRequest) -> PlanRequest:
    """The request with the load factor of every expert-parallel degree, experts placed; itself without a load.

    A degree's factor is the mean over MoE layers, since a step adds them up.
    """
    load = request.expert_load
    if load is None:
        return request
    equal = not request.target.uneven_experts
    factors = {ep: _mean(placements(load, ep, equal)) for ep in divisors(load.num_experts)}
    workload = request.workload.model_copy(update={"moe_load_factor_by_ep": factors})
    return request.model_copy(update={"workload": workload})


@lru_cache(maxsize=256)
def placements(load: ExpertLoad, ep: int, equal: bool = True) -> tuple[Placement, ...]:
    """The placement of every layer of a load on ``ep`` ranks; ``equal``: as many experts on each."""
    solver = len(load.layers) <= SOLVED_LAYERS
    return tuple(placed(np.array(layer), ep, equal=equal, solver=solver) for layer in load.layers)


def _mean(found: tuple[Placement, ...]) -> float:
    return max(1.0, float(np.mean([each.max_over_mean for each in found])))


def with_placement(request: PlanRequest, document: PlanDocument) -> PlanDocument:
    """The document with the expert placement of its plan, and what the plan would take without it."""
    load, plan, figures = request.expert_load, document.plan, document.estimate
    if load is None or plan is None or figures is None or plan.ep is None:
        return document
    ep, layers = plan.ep, [np.array(layer) for layer in load.layers]
    equal = not request.target.uneven_experts
    found = placements(load, ep, equal)
    before = max(1.0, float(np.mean([contiguous(layer, ep).max_over_mean for layer in layers])))
    uneven = max(1.0, float(np.mean([placed(layer, ep, equal=False, solver=False).max_over_mean for layer in layers])))
    slots = load.num_experts // ep + 1
    copied = max(1.0, float(np.mean([replicated(layer, ep, slots).max_over_mean for layer in layers])))
    workload = document.inputs.workload
    plain = workload.model_copy(update={"moe_load_factor_by_ep": workload.moe_load_factor_by_ep | {ep: before}})
    cluster = document.inputs.cluster
    without_s = estimate_of(request.model_copy(update={"workload": plain, "cluster": cluster}), plan).step_time_s
    placement = ExpertPlacement(
        source=load.source,
        ep=ep,
        experts_per_rank=max(len(own) for each in found for own in each.ranks),
        max_over_mean=_mean(found),
        lower_bound=float(np.mean([lower_bound(layer, ep, equal=equal) for layer in layers])),
        worst_layer_max_over_mean=max(1.0, *(each.max_over_mean for each in found), 1.0),
        contiguous_max_over_mean=before,
        uneven_max_over_mean=min(uneven, _mean(found)),
        replicated_max_over_mean=min(copied, _mean(found)),
        step_time_s=figures.step_time_s,
        contiguous_step_time_s=without_s,
        layers=tuple(each.ranks for each in found),
    )
    return document.model_copy(
        update={"expert_placement": placement, "explanation": (*document.explanation, _reason(placement))}
    )


def _reason(placement: ExpertPlacement) -> Explanation:
    if placement.ep == 1:
        message = "every GPU of a stage holds all experts, so an uneven load does not matter"
    else:
        saved = placement.contiguous_step_time_s / placement.step_time_s - 1
        message = (
            f"experts are placed so that the fullest of {placement.ep} expert ranks has {placement.max_over_mean:.3f} "
            f"times the mean load; in their own order it would have {placement.contiguous_max_over_mean:.3f} times, "
            f"and the step would take {seconds(placement.contiguous_step_time_s)}, {saved:.1%} longer"
        )
        others = {
            "any number of experts a rank": placement.uneven_max_over_mean,
            "one copy of a hot expert more on each rank": placement.replicated_max_over_mean,
        }
        better = [
            f"{value:.3f} times with {how}" for how, value in others.items() if value < GAIN * placement.max_over_mean
        ]
        if better:
            message += f"; where the framework took it, {' and '.join(better)}"
    data = {
        "max_over_mean": placement.max_over_mean,
        "contiguous_max_over_mean": placement.contiguous_max_over_mean,
        "uneven_max_over_mean": placement.uneven_max_over_mean,
    }
    return Explanation(kind="expert-placement", message=message, data=data)
