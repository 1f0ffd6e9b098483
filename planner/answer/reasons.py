"""Reasons that need more than the search itself: what the next best plan loses by, and what each constraint costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from meshwright.specs.document import Alternative, Explanation, PlanDocument
from meshwright.specs.estimate import Estimate

from ..corrections import estimate_of
from ..objectives.pareto import choices_of
from ..request import PlanRequest
from ..variants import best_search
from .differences import DEGREES, differences, in_words
from .explain import seconds as in_seconds
from .explain import term_name

#: Constraints are lifted one by one where there are at most so many, and the search had at most so many candidates.
MOST_CONSTRAINTS, MOST_CANDIDATES = 4, 20_000
#: Candidates split at most to see what lifting a constraint would bring.
LIFTED_WORK = 400
#: Terms named, at most, and the share of a step from which one is worth naming.
MOST_TERMS, LEAST_SHARE = 3, 1e-3
#: Choices by which runners-up are told apart.
CHOICES = (*DEGREES, "recompute", "sharding", "layers", "gpus")


def with_reasons(request: PlanRequest, document: PlanDocument, deadline: float | None = None) -> PlanDocument:
    """The document with why the next best plan loses, and what each of the user's constraints costs."""
    document = _with_differences(document)
    if document.alternatives and document.estimate is not None:
        reason = _next_best(request, document, document.alternatives[0], document.estimate)
        kept = tuple(reason if each.kind == "next-best" else each for each in document.explanation)
        document = document.model_copy(update={"explanation": kept})
    costs = tuple(constraint_costs(request, document, deadline))
    return document.model_copy(update={"explanation": (*document.explanation, *costs)})


def _with_differences(document: PlanDocument) -> PlanDocument:
    """The document whose alternatives say in which choices they differ from the plan."""
    if document.plan is None:
        return document
    told = tuple(
        other.model_copy(
            update={
                "differences": tuple(d for d in differences(document.plan, other.plan) if d.name in CHOICES),
            }
        )
        for other in document.alternatives
    )
    return document.model_copy(update={"alternatives": told})


def moved_terms(ours: Estimate, other: Estimate) -> dict[str, float]:
    """Seconds that the other plan spends more in each term, largest change first."""
    names = sorted({*ours.breakdown_s, *other.breakdown_s})
    moved = {name: other.breakdown_s.get(name, 0.0) - ours.breakdown_s.get(name, 0.0) for name in names}
    return dict(sorted(moved.items(), key=lambda item: -abs(item[1])))


def _next_best(request: PlanRequest, document: PlanDocument, other: Alternative, ours: Estimate) -> Explanation:
    asked = request.model_copy(update={"cluster": document.inputs.cluster, "workload": document.inputs.workload})
    moved = moved_terms(ours, estimate_of(asked, other.plan))
    least = LEAST_SHARE * ours.step_time_s
    more = [f"{in_seconds(value)} more {term_name(name)}" for name, value in moved.items() if value > least]
    less = [f"{in_seconds(-value)} less {term_name(name)}" for name, value in moved.items() if value < -least]
    message = f"the next best plan with other degrees is {other.reason}: {in_words(other.differences)}"
    if more:
        message += f"; it has {', '.join(more[:MOST_TERMS])}"
        message += f" against {', '.join(less[:MOST_TERMS])}" if less else ""
    data: dict[str, Any] = {"slower_by": other.slower_by, "terms_s": moved}
    return Explanation(kind="next-best", message=message, data=data)


def constraint_costs(request: PlanRequest, document: PlanDocument, deadline: float | None) -> Iterator[Explanation]:
    """What each of the user's constraints costs: the best plan found with it lifted, the others kept.

    Nothing where there are too many constraints or candidates. A deadline ends it with a word.
    """
    lifted = list(without_each(request))
    candidates = document.run.candidates if document.run else 0
    if document.plan is None and document.status != "infeasible":
        return
    if not lifted or len(lifted) > MOST_CONSTRAINTS or candidates > MOST_CANDIDATES:
        return
    for name, free in lifted:
        if deadline is not None and time.monotonic() > deadline:
            message = "what the other constraints cost was not found in time"
            yield Explanation(kind="constraint", message=message, data={"constraint": name, "costs": None})
            return
        changed = {
            "cluster": document.inputs.cluster,
            "objective": "time",
            "deadline_s": None,
            "work_limit": LIFTED_WORK,
        }
        asked = free.model_copy(update=changed)
        chosen, result, _, _ = best_search(asked)
        best = result.best
        if best is None:
            continue
        plan = ", ".join(f"{key} {value}" for key, value in choices_of(chosen, best).items())
        if document.estimate is None or not document.estimate.fits:
            message = f"without {name} there is a plan that fits: {in_seconds(best.step_time_s)} a step with {plan}"
            yield Explanation(kind="constraint", message=message, data={"constraint": name, "costs": None})
            continue
        costs = max(0.0, 1 - best.step_time_s / document.estimate.step_time_s)
        if costs < LEAST_SHARE:
            message = f"{name} costs nothing"
        else:
            message = f"{name} costs {costs:.1%} of the step: without it {in_seconds(best.step_time_s)} with {plan}"
        yield Explanation(kind="constraint", message=message, data={"constraint": name, "costs": costs})


def without_each(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """The request without one of its constraints, and that one as the command line spells it."""
    for field in ("fix", "max"):
        given: dict[str, Any] = getattr(request, field)
        for name, value in given.items():
            rest = {other: each for other, each in given.items() if other != name}
            yield f"--{field} {name}={value}", request.model_copy(update={field: rest})
    for name in request.forbid:
        rest_of = tuple(other for other in request.forbid if other != name)
        yield f"--forbid {name}", request.model_copy(update={"forbid": rest_of})
