"""Request -> plan document with everything that was asked beside the plan: goal, cost, batches, what-ifs, placement."""

from __future__ import annotations

import time
from collections import Counter

from meshwright.specs.document import PlanDocument
from meshwright.specs.goals import Goal

from .answer.current import with_current
from .answer.document import finish
from .answer.reasons import with_reasons
from .answer.remedies import with_remedies
from .engine.explore import Progress
from .engine.finalists import SearchResult
from .experts.goal import with_expert_load, with_placement
from .objectives.batches import with_sweep
from .objectives.changes import changed
from .objectives.cheapest import cheapest, smallest_meeting, with_goal
from .objectives.costs import with_cost
from .objectives.pareto import pareto
from .objectives.what_if import with_what_ifs
from .request import PlanRequest
from .variants import best_variant


def answer(request: PlanRequest, progress: Progress | None = None) -> PlanDocument:
    """The plan document of a request. Raises what :func:`meshwright.planner.search.plan` raises."""
    started = time.process_time()
    deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
    for k, change in enumerate(request.what_if):  # told before the search rather than after it
        changed(request, change, f"/what_if/{k}")
    asked = with_expert_load(request)
    goal: Goal | None = None
    inner, complete = asked, True
    if request.objective == "cost":
        part, goal, complete = cheapest(asked, progress)
        inner = asked if part is None else asked.model_copy(update={"cluster": part})
    elif request.objective == "gpus" and request.target_step_time_s is not None:
        part, goal, complete = smallest_meeting(asked, progress)
        inner = asked if part is None else asked.model_copy(update={"cluster": part})
    if request.objective in ("cost", "batch") or goal is not None:
        inner = inner.model_copy(update={"objective": "time", "deadline_s": _left(deadline)})
    results: list[SearchResult] = []
    inner, document = best_variant(inner, progress, results.append)
    if document.plan is not None and results:
        document = document.model_copy(update={"pareto": pareto(inner, results[-1])})
    document = with_reasons(inner, with_placement(inner, document), deadline)
    if results:
        document = with_remedies(inner, document, results[-1], deadline)
    if goal is not None:
        document = _judged(asked, document, goal, complete)
    document = with_cost(asked, document)
    if request.objective == "batch":
        document = with_sweep(asked, document, deadline)
    document = with_current(asked, document)
    if request.what_if:
        document = with_what_ifs(request, document, deadline)
    if document.run is None:
        return document
    totals = SearchResult(candidates=document.run.candidates, pruned=Counter(document.run.pruned))
    return finish(document, request, totals, started)


def _left(deadline: float | None) -> float | None:
    """Seconds to the deadline; a little where it has passed, for the plan that is already known to exist."""
    return None if deadline is None else max(deadline - time.monotonic(), 1.0)


def _judged(request: PlanRequest, document: PlanDocument, goal: Goal, complete: bool) -> PlanDocument:
    """The document with its goal; infeasible where no part of the cluster meets the target."""
    limit = request.target_step_time_s
    figures = document.estimate
    if figures is not None and limit is not None and figures.step_time_s > limit:
        reason = f"no size of the cluster reaches {limit:g} s a step; the best plan takes {figures.step_time_s:.4g} s"
        return document.model_copy(
            update={"status": "infeasible", "reason": reason, "complete": complete, "goal": goal, "bound": None}
        )
    if document.plan is None:
        return document.model_copy(update={"goal": goal})
    document = with_goal(request, document, goal)
    if complete:
        return document
    reason = "the deadline came before every part of the cluster was looked at"
    return document.model_copy(update={"status": "feasible", "complete": False, "reason": reason})
