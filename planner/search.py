"""Request -> plan document."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.specs.base import digest_of
from meshwright.specs.document import Alternative, Bound, Explanation, Inputs, PlanDocument, Run
from meshwright.specs.plan import Plan
from meshwright.specs.target import RecomputeMode

from .assemble import Skeleton, build_plan, sharding_level
from .errors import DeadlineExceeded
from .explain import describe, explain, seconds
from .explore import Finalist, Progress, Search, SearchResult
from .no_fit import infeasible, smallest_fitting
from .request import PlanRequest
from .space import SPACE

#: A plan within this share of the proven bound is optimal: nearer than that, two times differ by rounding alone.
OPTIMAL_GAP = 1e-9


def plan(request: PlanRequest, progress: Progress | None = None) -> PlanDocument:
    """The best plan of the declared space, or why there is none.

    Raises :class:`DeadlineExceeded` when time was up before any plan was found.
    """
    started = time.process_time()
    if request.objective == "gpus":
        found = smallest_fitting(request)
        if found is not None:
            request = request.model_copy(update={"cluster": found, "objective": "time"})
    search = Search(request, progress=progress)
    result = search.run()
    best = result.best
    if best is None:
        if result.deadline_hit:
            raise DeadlineExceeded(
                f"no plan was found within {request.deadline_s} s; {result.candidates} candidates seen"
            )
        return finish(infeasible(request, result), request, result, started)
    chosen = plan_of(request, search, best)
    figures = estimate(
        request.model, request.cluster, request.workload, request.target, chosen, request.memory_headroom
    )
    bound_s = min(result.bound_s, figures.step_time_s)  # the same sum in another order may differ by rounding
    gap = 1.0 - bound_s / figures.step_time_s
    alternatives = other_plans(request, search, result, best)
    document = PlanDocument(
        status="optimal" if result.complete and gap <= OPTIMAL_GAP else "feasible",
        complete=result.complete,
        reason=None if result.complete else "the search was cut short; the gap covers what was not tried",
        inputs=inputs_of(request),
        plan=chosen,
        estimate=figures,
        bound=Bound(step_time_s=bound_s, gap=gap, space=SPACE),
        alternatives=tuple(alternatives),
        explanation=(
            Explanation(kind="choice", message=describe(chosen), data={}),
            *explain(result, best, chosen, figures, request.cluster),
            *_next_best(alternatives),
        ),
        provenance=provenance(),
    )
    return finish(document, request, result, started)


def plan_of(request: PlanRequest, search: Search, finalist: Finalist) -> Plan:
    """The plan document of a finalist."""
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
        sharding=sharding_level(request.target.sharding[finalist.column("sharding")]),
    )
    return build_plan(
        request.model,
        request.cluster,
        request.target,
        search.costs.blocks,
        finalist.batch.arrangement,
        skeleton,
        finalist.cuts,
    )


def recompute_of(request: PlanRequest, finalist: Finalist) -> RecomputeMode:
    """The recompute mode of a finalist; block mode with the layers that were found."""
    if finalist.leading:
        return RecomputeMode(granularity="full", method="block", num_layers=finalist.leading)
    modes, index = request.target.recompute, finalist.column("recompute")
    return modes[index] if index < len(modes) else RecomputeMode()


def other_plans(request: PlanRequest, search: Search, result: SearchResult, best: Finalist) -> list[Alternative]:
    """The best plans whose degrees or pools differ from each other and from the best, fastest first."""
    out: list[Alternative] = []
    seen = {best.key}
    for finalist in sorted(result.finalists, key=lambda item: item.order):
        if finalist.key in seen or len(out) + 1 >= request.top:
            continue
        seen.add(finalist.key)
        slower = finalist.step_time_s / best.step_time_s - 1
        other = plan_of(request, search, finalist)
        out.append(
            Alternative(
                plan=other,
                step_time_s=finalist.step_time_s,
                slower_by=slower,
                reason=f"{describe(other)}: {seconds(finalist.step_time_s)} a step, {slower:.1%} slower",
            )
        )
    return out


def _next_best(alternatives: list[Alternative]) -> list[Explanation]:
    if not alternatives:
        return []
    return [
        Explanation(
            kind="next-best",
            message=f"the next best plan with other degrees is {alternatives[0].reason}",
            data={"slower_by": alternatives[0].slower_by},
        )
    ]


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


def provenance() -> dict[str, str]:
    """What made the answer."""
    return {"meshwright": version("meshwright"), "cost_model": "analytic"}


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


def cost_model(request: PlanRequest) -> CostModel:
    """The analytic cost model of a request."""
    return CostModel(request.model, request.cluster, request.workload, request.target)
