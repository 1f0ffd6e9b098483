"""The search of a request under the options that it pins with ``fix``, and costs under other switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.rank_order import PIPELINE_INSIDE
from meshwright.specs.batch import BoolArray, CandidateBatch

from ..corrections import cost_model
from ..pins import pinned_options, with_switches
from ..request import PlanRequest
from ..rules import uses_fsdp
from .explore import Progress, Search
from .host_memory import OffloadedOptimizer


def without_forbidden(request: PlanRequest) -> PlanRequest:
    """The request with the switches of its target as it pins or forbids them, and with the rank order that it pins."""
    target, update = with_switches(request.target, request.fix, request.forbid), dict[str, Any]()
    order = str(request.fix.get("rank_order", target.rank_orders[0]))
    if ("rank_order" in request.fix or "rank_order" in request.forbid) and target.rank_orders != (order,):
        update["rank_orders"] = (order,)
    if order == PIPELINE_INSIDE:
        update |= {
            name: tuple(level for level in getattr(target, name) if not uses_fsdp(level))
            for name in ("sharding", "sharding_replicas")
        }
    target = target.model_copy(update=update)
    return request if target == request.target else request.model_copy(update={"target": target})


def pinned_search(request: PlanRequest, progress: Progress | None = None) -> Search:
    """The search of a request under the costs of the options that it pins, over the candidates that can have them."""
    pinned = pinned_options(request.fix)
    kind, inner = pinned.get("cp_comm_type"), pinned.get("cp_a2a_size", 1)
    copies, share = pinned.get("dist_opt_instances", 1), pinned.get("optimizer_offload_fraction", 0.0)
    cp = request.fixed("cp")
    if kind == "a2a+p2p" and (cp is None or cp % inner):
        kind = None  # a constraint that it needs was lifted to see what that costs
    if copies > 1:
        request = _pinned_sharding(request, f"zero1:{copies}")
    elif share:
        request = _pinned_sharding(request, "zero1")
    costs, chosen = cost_model(request), dict[str, Any]()
    if kind is not None:
        sizes = {"cp_a2a_size": inner} if kind == "a2a+p2p" else {}
        costs = costs_with(request, {"context": kind, "context_a2a_size": inner}, {"cp_comm_type": kind} | sizes)
        chosen = {"cp_comm_type": (kind,)}
        if kind == "a2a+p2p" and cp is not None:
            chosen["hierarchical_cp_sizes"] = (inner, cp // inner)
    search = Search(request, OffloadedOptimizer(costs, share) if share else costs, progress)
    search.chosen = chosen
    if copies > 1:
        search.admits = lambda batch: divides(batch, copies)
    if pinned.get("activation_offload_layers"):
        search.admits = lambda batch: np.asarray(batch.pp == 1)
    return search


def _pinned_sharding(request: PlanRequest, name: str) -> PlanRequest:
    target = request.target
    names, with_stages = (tuple(dict.fromkeys((*old, name))) for old in (target.sharding, target.sharding_with_stages))
    target = target.model_copy(update={"sharding": names, "sharding_with_stages": with_stages})
    return request.model_copy(update={"target": target, "fix": {**request.fix, "sharding": name}})


def divides(batch: CandidateBatch, copies: int) -> BoolArray:
    """[N] whether the replicas of weights and of experts divide into so many instances of more than one rank."""
    ranks = batch.dp * batch.cp
    return np.asarray((ranks % copies == 0) & (batch.edp % copies == 0) & (ranks > copies))


def costs_like(costs: CostModel, request: PlanRequest) -> CostModel:
    """The costs of another request under the switches of ``costs``."""
    found = cost_model(request)
    found.overlap, found.plan_options = costs.overlap, costs.plan_options
    return found


def costs_with(request: PlanRequest, overlap: Mapping[str, Any], options: Mapping[str, Any]) -> CostModel:
    """The costs of a request under other switches of communication, whose plans say ``options``."""
    found = cost_model(request)
    found.overlap = replace(found.overlap, **overlap)
    found.plan_options = options
    return found
