"""Request -> plan document."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.cost_models.uneven import uneven_pools
from meshwright.specs.document import Alternative, Bound, Explanation, PlanDocument
from meshwright.specs.plan import Plan

from .answer.document import finish, inputs_of, plan_of, provenance
from .answer.explain import describe, explain, seconds
from .answer.leaves import on_leaves
from .answer.no_fit import infeasible, smallest_fitting, undecided
from .corrections import estimate_of
from .engine.explore import Progress, Search
from .engine.finalists import Finalist, SearchResult
from .engine.pinned import without_forbidden
from .engine.widen import searched
from .errors import DeadlineExceeded
from .mixed.space import space_words
from .request import PlanRequest

#: A plan within this share of the proven bound is optimal: nearer than that, two times differ by rounding alone.
OPTIMAL_GAP = 1e-9


def plan(
    request: PlanRequest, progress: Progress | None = None, keep: Callable[[SearchResult], None] | None = None
) -> PlanDocument:
    """The best plan of the declared space, or why there is none. ``keep`` is handed all that was found.

    Raises :class:`DeadlineExceeded` when time was up before any plan was found.
    """
    started = time.process_time()
    request = without_forbidden(request)
    deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
    if request.objective == "gpus":
        found = smallest_fitting(request, deadline)
        if found is not None and found.num_gpus < request.cluster.num_gpus:
            request = request.model_copy(update={"cluster": found, "objective": "time"})
    search = searched(request, progress)
    result = search.result
    placed = on_leaves(request, search, progress) if uneven_pools(request.cluster) and result.best else None
    if placed:
        search, result = placed.search, placed.search.result
    if keep is not None:
        keep(result)
    best = result.best
    if best is None:
        if result.deadline_hit:
            raise DeadlineExceeded(
                f"no plan was found within {request.deadline_s} s; {result.candidates} candidates seen"
            )
        if not result.complete:
            return finish(undecided(request), request, result, started)
        return finish(infeasible(request, result, deadline), request, result, started)
    if placed:
        best, figures = placed.best, placed.estimate
        chosen, lowest_s = placed.plan_at(best), placed.bound_s
    else:
        chosen, lowest_s = plan_of(request, search, best), result.bound_s
        figures = estimate_of(request, chosen)
    bound_s = min(lowest_s, figures.step_time_s)  # the same sum in another order may differ by rounding
    gap = 1.0 - bound_s / figures.step_time_s
    if gap <= OPTIMAL_GAP:
        bound_s, gap = figures.step_time_s, 0.0
    alternatives = other_plans(request, search, result, best, placed.plan_at if placed else None)
    document = PlanDocument(
        status="optimal" if result.complete and gap == 0.0 else "feasible",
        complete=result.complete,
        reason=None if result.complete else "the search was cut short; the gap covers what was not tried",
        inputs=inputs_of(request),
        plan=chosen,
        estimate=figures,
        bound=Bound(step_time_s=bound_s, gap=gap, space=(*space_words(request), *search.wider)),
        alternatives=tuple(alternatives),
        explanation=(
            Explanation(kind="choice", message=describe(chosen), data={}),
            *explain(result, best, chosen, figures, request.cluster),
            *(placed.explanation if placed else ()),
            *_next_best(alternatives),
        ),
        provenance=provenance(request),
    )
    return finish(document, request, result, started)


def other_plans(
    request: PlanRequest,
    search: Search,
    result: SearchResult,
    best: Finalist,
    plan_at: Callable[[Finalist], Plan] | None = None,
) -> list[Alternative]:
    """The best plans whose degrees or pools differ from each other and from the best, fastest first; ``plan_at`` gives
    those of finalists that have one already."""
    out: list[Alternative] = []
    seen = {best.key}
    for finalist in sorted(result.finalists, key=lambda item: item.order):
        if finalist.key in seen or len(out) + 1 >= request.top:
            continue
        seen.add(finalist.key)
        slower = finalist.step_time_s / best.step_time_s - 1
        other = plan_at(finalist) if plan_at else plan_of(request, search, finalist)
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
