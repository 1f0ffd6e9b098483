"""One plan that the user names: by its degrees, or as a whole."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwright.cost_models.rank_order import DATA_INSIDE
from meshwright.specs.batch import CandidateBatch
from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.placement import placement_faults
from meshwright.specs.plan import Plan
from meshwright.specs.target import RecomputeMode

from . import rules
from .answer.assemble import Skeleton, build_plan, sharding_level
from .answer.document import finish, inputs_of, provenance
from .answer.explain import GIB, describe
from .corrections import cost_model, estimate_of
from .engine.arrangements import Arrangement, arrangements, refused_pools
from .engine.finalists import SearchResult
from .engine.pricing import PricedBatch
from .engine.space import block_mode
from .engine.splits import split_plain, split_virtual
from .errors import IllegalPlan
from .request import PlanRequest


def estimate_degrees(request: PlanRequest, degrees: Mapping[str, Any]) -> PlanDocument:
    """Price the plan with the given degrees, its layers split best (or evenly enough when nothing fits).

    ``degrees`` may hold tp, pp, cp, ep, etp, vpp, micro_batch_size (default 1; etp defaults to tp), recompute (a label
    of the target), sharding and rank_order. All GPUs are used. Raises :class:`IllegalPlan` where the target refuses it
    and :class:`SpecError` where the numbers cannot be a plan at all.
    """
    started = time.process_time()
    skeleton, pp = _skeleton(request, degrees)
    arrangement = _arrangement(request, pp)
    modes = request.target.recompute
    leading = 0
    if skeleton.recompute in modes:
        mode = modes.index(skeleton.recompute)
    else:
        block = block_mode(request.target)
        if block is None or skeleton.recompute.method != "block" or skeleton.recompute.num_layers is None:
            valid = tuple(item.label for item in modes)
            raise SpecError(
                Fault("/recompute", f"{skeleton.recompute.label} is no mode of {request.target.name}", valid)
            )
        mode, leading = block, skeleton.recompute.num_layers
    row = {
        "tp": skeleton.tp,
        "pp": pp,
        "cp": skeleton.cp,
        "ep": skeleton.ep,
        "etp": skeleton.etp,
        "dp": skeleton.dp,
        "vpp": skeleton.vpp,
        "micro_batch_size": skeleton.micro_batch_size,
        "num_microbatches": skeleton.num_microbatches,
        "recompute": mode,
        "sharding": request.target.sharding.index(str(skeleton.sharding)),
    }
    batch = CandidateBatch(**{name: np.array([value], dtype=np.int64) for name, value in row.items()})
    costs = cost_model(request).ordered(skeleton.rank_order)
    priced = PricedBatch(costs, batch, arrangement, request.target, request.memory_headroom)
    one, ahead = np.array([0]), np.array([leading])
    if skeleton.vpp > 1:
        cuts = split_virtual(priced, one)[0]
    else:
        found, bound = split_plain(priced, one, leading=ahead)
        if not np.isfinite(bound[0]):
            found, _ = split_plain(priced, one, leading=ahead, ignore_memory=True)
        cuts = found[0]
    plan = build_plan(request.model, request.cluster, request.target, costs.blocks, arrangement, skeleton, cuts)
    return _document(request, plan, started)


def document_for_plan(request: PlanRequest, plan: Plan) -> PlanDocument:
    """Price a whole plan. Raises :class:`IllegalPlan` where the target refuses it, :class:`SpecError` where it does
    not lie on the request's cluster."""
    faults = placement_faults(plan, request.cluster, "/plan")
    if faults:
        raise SpecError(faults)
    return _document(request, plan, time.process_time())


def _document(request: PlanRequest, plan: Plan, started: float) -> PlanDocument:
    used = sorted({group.gpu for stage in plan.stages for group in stage.groups} & request.cluster.gpus.keys())
    gpus = [request.cluster.gpus[name] for name in used]
    broken = rules.violations(rules.facts_of_plan(plan, request.model, request.workload, request.target, gpus))
    if broken:
        raise IllegalPlan(broken)
    figures = estimate_of(request, plan)
    reason = None
    if not figures.fits:
        fill = [stage.reserved_bytes / stage.limit_bytes for stage in figures.stages]
        worst = int(np.argmax(fill))
        stage = figures.stages[worst]
        term, size = max(stage.breakdown_bytes.items(), key=lambda item: item[1])
        reason = (
            f"does not fit: stage {worst} needs {stage.reserved_bytes / GIB:.1f} GiB of "
            f"{stage.limit_bytes * (1 - request.memory_headroom) / GIB:.1f} GiB; the largest term is {term} "
            f"with {size / GIB:.1f} GiB"
        )
    document = PlanDocument(
        status="feasible" if figures.fits else "infeasible",
        reason=reason,
        inputs=inputs_of(request),
        plan=plan,
        estimate=figures,
        explanation=(Explanation(kind="choice", message=describe(plan), data={}),),
        provenance=provenance(request),
    )
    return finish(document, request, SearchResult(candidates=1), started)


def _arrangement(request: PlanRequest, pp: int) -> Arrangement:
    """All pools that can run the precision, in the order of the cluster, each used whole."""
    refused = refused_pools(request.cluster, request.workload)
    eligible = tuple(index for index in range(len(request.cluster.pools)) if index not in refused)
    if not eligible:
        raise SpecError(Fault("/workload/precision", "; ".join(refused.values())))
    everything = sum(request.cluster.pools[index].num_gpus for index in eligible)
    for found in arrangements(request.cluster, eligible, pp, everything):
        if found.pp == pp and found.pools == eligible:
            return found
    raise SpecError(
        Fault(
            "/pp",
            f"{pp} stages of equal size cannot be cut from {everything} GPUs with every stage in one pool "
            f"({' + '.join(str(request.cluster.pools[i].num_gpus) for i in eligible)})",
        )
    )


def _skeleton(request: PlanRequest, degrees: Mapping[str, Any]) -> tuple[Skeleton, int]:
    refused = refused_pools(request.cluster, request.workload)
    world = sum(pool.num_gpus for index, pool in enumerate(request.cluster.pools) if index not in refused)
    if not world:
        raise SpecError(Fault("/workload/precision", "; ".join(refused.values())))
    value = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "vpp": 1, "micro_batch_size": 1, **_given(degrees)}
    etp = value.get("etp", value["tp"])
    model_ranks = value["tp"] * value["cp"] * value["pp"]
    faults: list[Fault] = []
    if world % model_ranks:
        faults.append(Fault("/tp", f"tp*cp*pp = {model_ranks} must divide the {world} GPUs"))
        raise SpecError(faults)
    dp = world // model_ranks
    if "dp" in value and value["dp"] != dp:
        faults.append(Fault("/dp", f"{world} GPUs over tp*cp*pp = {model_ranks} leave dp = {dp}, got {value['dp']}"))
    stage_ranks = world // value["pp"]
    if stage_ranks % (value["ep"] * etp):
        faults.append(Fault("/ep", f"ep*etp = {value['ep'] * etp} must divide the {stage_ranks} GPUs of a stage"))
    per_step = value["micro_batch_size"] * dp
    batch = request.workload.global_batch_size
    if batch % per_step:
        lower, upper = batch // per_step * per_step, (batch // per_step + 1) * per_step
        near = tuple(str(size) for size in (lower, upper) if size)
        message = f"must be a multiple of micro_batch_size*dp = {per_step}, got {batch}"
        faults.append(Fault("/workload/global_batch_size", message, near))
    chunks, layers = value["pp"] * value["vpp"], request.model.num_layers
    if chunks > layers:
        faults.append(Fault("/vpp", f"pp*vpp = {chunks} chunks need a decoder layer each, the model has {layers}"))
    if faults:
        raise SpecError(faults)
    sharding = str(degrees.get("sharding") or next((s for s in request.target.sharding if s != "none"), "none"))
    if sharding not in request.target.sharding:
        raise SpecError(
            Fault("/sharding", f"{sharding!r} is unknown to {request.target.name}", request.target.sharding)
        )
    order = str(degrees.get("rank_order") or request.target.rank_orders[0])
    if order not in request.target.rank_orders:
        message = f"{order!r} is unknown to {request.target.name}"
        raise SpecError(Fault("/rank_order", message, request.target.rank_orders))
    if order != DATA_INSIDE and len(request.cluster.pools) - len(refused) > 1:
        raise SpecError(Fault("/rank_order", f"over several pools plans have {DATA_INSIDE}", (DATA_INSIDE,)))
    skeleton = Skeleton(
        tp=value["tp"],
        cp=value["cp"],
        ep=value["ep"],
        etp=etp,
        dp=dp,
        vpp=value["vpp"],
        micro_batch_size=value["micro_batch_size"],
        num_microbatches=batch // per_step,
        recompute=_recompute(request, degrees.get("recompute")),
        sharding=sharding_level(sharding),
        rank_order=order,
    )
    return skeleton, value["pp"]


def _given(degrees: Mapping[str, Any]) -> dict[str, int]:
    names = ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch_size")
    given = {name: degrees[name] for name in names if degrees.get(name) is not None}
    faults = [
        Fault(f"/{name}", f"must be a whole number from 1, got {value!r}")
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9
    ]
    if faults:
        raise SpecError(faults)
    return given


def _recompute(request: PlanRequest, label: object) -> RecomputeMode:
    if label is None:
        return RecomputeMode()
    if isinstance(label, RecomputeMode):
        return label
    for mode in request.target.recompute:
        if mode.label == label:
            return mode
    block = re.fullmatch(r"full:block:(\d{1,6})", str(label))
    if block and int(block[1]):
        return RecomputeMode(granularity="full", method="block", num_layers=int(block[1]))
    valid = tuple(mode.label for mode in request.target.recompute)
    raise SpecError(Fault("/recompute", f"{label!r} is not a recompute mode of {request.target.name}", valid))
