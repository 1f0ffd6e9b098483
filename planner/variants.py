"""Searches with the options that a request allows beyond the target's: one search for each set of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import get_args

from meshwright.specs.document import Bound, PlanDocument
from meshwright.specs.target import Switch

from .corrections import estimate_of
from .engine.explore import Progress
from .engine.finalists import SearchResult
from .engine.widen import searched
from .errors import DeadlineExceeded
from .pins import pinned_options, switched, with_switches
from .request import PlanRequest
from .search import OPTIMAL_GAP, plan

#: Switches that mean something only with experts, and those that only hide what else would be waited for.
OF_EXPERTS = ("ep_comm_overlap", "delay_wgrad", "flex_dispatcher")
NEVER_WORSE = ("tp_comm_overlap", "delay_wgrad")


def variants(request: PlanRequest) -> list[PlanRequest]:
    """The request with each set of allowed switches that may be best in some plan, most switches first.

    Some switches only ever hide communication, so that a set without them is never better.
    """
    request = request.model_copy(update={"target": with_switches(request.target, request.fix)})
    pinned = pinned_options(request.fix)
    open_ = set(request.allow) - set(request.target.switches) - pinned.keys()
    open_ -= {"flex_dispatcher"} if "dispatcher" in pinned else set()
    allowed = [switch for switch in get_args(Switch) if switch in open_]
    if not request.model.is_moe:
        allowed = [switch for switch in allowed if switch not in OF_EXPERTS]
    sets: list[tuple[Switch, ...]] = [request.target.switches]
    for switch in allowed:
        grown = [(*each, switch) for each in sets]
        sets = grown if switch in NEVER_WORSE else [*grown, *sets]
    return [request.model_copy(update={"target": switched(request.target, each)}) for each in sets]


def best_search(
    request: PlanRequest, progress: Progress | None = None
) -> tuple[PlanRequest, SearchResult, float, bool]:
    """The variant with the fastest finalist, what its search found, the bound over all variants, and whether all were
    searched in full. They share the deadline: a variant that it leaves no time for keeps the bound open."""
    deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
    found: list[tuple[PlanRequest, SearchResult]] = []
    for variant in variants(request):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            found.append((variant, SearchResult(untried_bound_s=0.0, complete=False, deadline_hit=True)))
            continue
        found.append((variant, searched(variant.model_copy(update={"deadline_s": left}), progress).result))
    with_plan = [each for each in found if each[1].best is not None]
    chosen, result = min(with_plan, key=lambda each: _finalist_s(each[1])) if with_plan else found[-1]
    complete = all(each.complete for _, each in found)
    return chosen, result, min(each.bound_s for _, each in found), complete


def _finalist_s(result: SearchResult) -> float:
    return result.best.step_time_s if result.best is not None else float("inf")


def best_variant(
    request: PlanRequest,
    progress: Progress | None = None,
    keep: Callable[[SearchResult], None] | None = None,
    every: list[PlanRequest] | None = None,
) -> tuple[PlanRequest, PlanDocument]:
    """The variant whose plan is fastest, with its document; the bound holds over all variants.

    ``keep`` is handed what its search found; ``every`` are the variants, by default all. Raises what
    :func:`meshwright.planner.search.plan` raises.
    """
    every = variants(request) if every is None else every
    if len(every) == 1:
        return every[0], _fitting(every[0], plan(every[0], progress, keep))
    deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
    found: list[tuple[PlanRequest, PlanDocument, list[SearchResult]]] = []
    late: DeadlineExceeded | None = None
    for variant in every:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            late = late or DeadlineExceeded("the deadline came before every set of allowed options was searched")
            continue
        results: list[SearchResult] = []
        try:
            document = plan(variant.model_copy(update={"deadline_s": left}), progress, results.append)
        except DeadlineExceeded as error:
            late = error
            continue
        found.append((variant, _fitting(variant, document), results))
    if not found:
        raise late or DeadlineExceeded("the deadline came before any plan was found")
    planned = [each for each in found if each[1].estimate is not None and each[1].estimate.fits]
    if not planned:
        for result in found[-1][2]:
            if keep is not None:
                keep(result)
        return found[-1][0], found[-1][1]
    chosen, document, results = min(planned, key=_step_s)
    if keep is not None:
        for result in results:
            keep(result)
    return chosen, _over_all(request, document, [each[1] for each in found], late is None)


def _fitting(request: PlanRequest, document: PlanDocument) -> PlanDocument:
    """The document, or its fastest runner-up where the plan does not fit after all.

    A search does not count the micro-batch that overlapped expert exchange keeps alive.
    """
    if document.estimate is None or document.estimate.fits:
        return document
    for k, other in enumerate(document.alternatives):
        figures = estimate_of(request, other.plan)
        if figures.fits:
            update = {"plan": other.plan, "estimate": figures, "alternatives": document.alternatives[k + 1 :]}
            return document.model_copy(update=update)
    return document


def _step_s(each: tuple[PlanRequest, PlanDocument, list[SearchResult]]) -> float:
    figures = each[1].estimate
    return figures.step_time_s if figures is not None else float("inf")


def _over_all(request: PlanRequest, best: PlanDocument, every: list[PlanDocument], in_time: bool) -> PlanDocument:
    """The best document with the bound, completeness and effort of all variants."""
    assert best.bound is not None  # noqa: S101  a plan has one
    assert best.estimate is not None  # noqa: S101
    bound_s = min(each.bound.step_time_s for each in every if each.bound is not None) if in_time else 0.0
    gap = 1.0 - min(bound_s, best.estimate.step_time_s) / best.estimate.step_time_s
    complete = in_time and all(each.complete for each in every)
    gap = 0.0 if gap <= OPTIMAL_GAP else gap
    space = (*best.bound.space, f"options: {', '.join(sorted(request.allow))} on or off")
    run = best.run
    if run is not None:
        runs = [each.run for each in every if each.run is not None]
        pruned: Counter[str] = Counter()
        for each in runs:
            pruned.update(each.pruned)
        run = run.model_copy(update={"candidates": sum(each.candidates for each in runs), "pruned": dict(pruned)})
    return best.model_copy(
        update={
            "bound": Bound(step_time_s=best.estimate.step_time_s * (1.0 - gap), gap=gap, space=space),
            "status": "optimal" if complete and gap == 0.0 else "feasible",
            "complete": complete,
            "reason": best.reason if in_time else "the deadline came before every set of allowed options was searched",
            "run": run,
        }
    )
