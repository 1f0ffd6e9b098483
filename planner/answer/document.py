"""Parts of a plan document: the plan of a finalist, inputs with digests, provenance, the run record."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version

from meshwright.cost_models.memory import held
from meshwright.specs.base import digest_of
from meshwright.specs.document import Inputs, PlanDocument, Run
from meshwright.specs.plan import Plan
from meshwright.specs.target import RecomputeMode

from ..engine.explore import Search
from ..engine.finalists import Finalist, SearchResult
from ..request import PlanRequest
from .assemble import Skeleton, build_plan, sharding_level


def plan_of(request: PlanRequest, search: Search, finalist: Finalist) -> Plan:
    """The plan document of a finalist."""
    sharding, more = held(sharding_of(request, finalist)), dict(getattr(finalist.batch.costs, "plan_options", {}))
    if finalist.column("cp") == 1:  # nothing to exchange
        more = {name: value for name, value in more.items() if name not in ("cp_comm_type", "cp_a2a_size")}
    skeleton = Skeleton(
        tp=finalist.column("tp"),
        cp=finalist.column("cp"),
        ep=finalist.column("ep"),
        etp=finalist.column("etp"),
        dp=finalist.column("dp"),
        vpp=finalist.column("vpp"),
        micro_batch_size=finalist.column("micro_batch_size"),
        num_microbatches=finalist.column("num_microbatches"),
        recompute=recompute_of(request, finalist),
        sharding=sharding_level(sharding.level),
        replicas=sharding.replicas,
        rank_order=getattr(finalist.batch.costs, "rank_order", request.target.rank_orders[0]),
    )
    return build_plan(
        request.model,
        request.cluster,
        request.target,
        search.costs.blocks,
        finalist.batch.arrangement,
        skeleton,
        finalist.cuts,
        {**more, **finalist.options},
    )


def sharding_of(request: PlanRequest, finalist: Finalist) -> str:
    """The sharding of a finalist by the name that its costs know: ``zero1``, ``hsdp:4``."""
    names: tuple[str, ...] = getattr(finalist.batch.costs, "shardings", request.target.sharding)
    return names[finalist.column("sharding")]


def recompute_of(request: PlanRequest, finalist: Finalist) -> RecomputeMode:
    """The recompute mode of a finalist; block mode with the layers that were found."""
    if finalist.leading:
        return RecomputeMode(granularity="full", method="block", num_layers=finalist.leading)
    modes, index = request.target.recompute, finalist.column("recompute")
    return modes[index] if index < len(modes) else RecomputeMode()


def inputs_of(request: PlanRequest) -> Inputs:
    """The request's inputs in full, with digests."""
    parts = {
        "model": request.model,
        "cluster": request.cluster,
        "workload": request.workload,
        "target": request.target,
    }
    return Inputs(
        model=request.model,
        cluster=request.cluster,
        workload=request.workload,
        target=request.target,
        digests={name: part.digest() for name, part in parts.items()},
    )


def provenance(request: PlanRequest) -> dict[str, str]:
    """What made the answer."""
    out = {"meshwright": version("meshwright"), "cost_model": "analytic"}
    return out | ({"calibration": request.calibration.id} if request.calibration else {})


def finish(document: PlanDocument, request: PlanRequest, result: SearchResult, started: float) -> PlanDocument:
    """The document with its run record; the id is the digest of everything else."""
    run = Run(
        cpu_s=time.process_time() - started,
        candidates=result.candidates,
        pruned=dict(sorted(result.pruned.items())),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        id=digest_of({"request": request.digest(), "document": document.model_dump(mode="json", exclude={"run"})})[
            7:23
        ],
    )
    return document.model_copy(update={"run": run})
