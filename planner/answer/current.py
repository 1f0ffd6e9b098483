"""How far a plan in use is from the best one, and what each difference between them is worth."""

from __future__ import annotations

from typing import Any

from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.errors import SpecError
from meshwright.specs.goals import CurrentPlan, Difference
from meshwright.specs.plan import Plan

from ..corrections import estimate_of
from ..errors import IllegalPlan
from ..request import PlanRequest
from ..single import document_for_plan, estimate_degrees
from .differences import DEGREES, differences, why
from .explain import describe, seconds
from .reasons import moved_terms

#: Choices that :func:`estimate_degrees` takes; data parallelism and the schedule follow from them.
CHANGEABLE = (*(name for name in DEGREES if name != "dp"), "recompute", "sharding")
FOLLOWS = {
    "dp": "follows from the other degrees",
    "schedule": "follows from vpp",
    "gpus": "follows from the pools and pp",
    "options.sequence_parallel": "follows from tp",
    "options.vp_group_size": "follows from vpp",
    "options.cp_comm_type": "follows from cp",
}


def with_current(request: PlanRequest, document: PlanDocument) -> PlanDocument:
    """The document with the request's current plan priced and compared.

    Raises :class:`SpecError` where it does not lie on the cluster and :class:`IllegalPlan` where the target refuses it.
    """
    current = request.current
    if current is None:
        return document
    asked = request.model_copy(update={"objective": "time", "price": {}, "tokens": None})
    figures = document_for_plan(asked, current).estimate
    assert figures is not None  # noqa: S101  a priced plan has one
    ratio, found = 1.0, tuple[Difference, ...]()
    moved: dict[str, float] = {}
    if document.plan is not None and document.estimate is not None:
        ratio = figures.step_time_s / document.estimate.step_time_s
        found = tuple(
            _worth(asked, current, document.plan, each, figures.step_time_s)
            for each in differences(current, document.plan)
        )
        moved = moved_terms(document.estimate, figures)
    compared = CurrentPlan(
        summary=describe(current),
        step_time_s=figures.step_time_s,
        ratio=ratio,
        fits=figures.fits,
        plan=current,
        differences=found,
        terms_s=moved,
        why=why(found, moved, figures.step_time_s) if ratio > 1 and found else None,
    )
    reason = _reason(compared)
    return document.model_copy(update={"current": compared, "explanation": (*document.explanation, reason)})


def _worth(request: PlanRequest, current: Plan, best: Plan, difference: Difference, before_s: float) -> Difference:
    """The difference with what changing it alone in the current plan saves; negative where that makes it slower."""
    name = difference.name
    leader = FOLLOWS.get(name, "").removeprefix("follows from ")
    if name in FOLLOWS and (leader not in DEGREES or getattr(current, leader) != getattr(best, leader)):
        return difference.model_copy(update={"reason": FOLLOWS[name]})
    try:
        if name.startswith("options."):
            option = name.removeprefix("options.")
            options = current.options.model_copy(update={option: getattr(best.options, option)})
            tried = document_for_plan(request, current.model_copy(update={"options": options}))
        elif name == "layers":
            tried = _split_again(request, current, {})
        else:
            tried = _split_again(request, current, {name: difference.theirs})
    except IllegalPlan as error:
        return difference.model_copy(update={"reason": f"alone it is illegal: {error}"})
    except SpecError as error:
        return difference.model_copy(update={"reason": f"alone it is no plan: {error}"})
    figures = tried.estimate
    assert figures is not None  # noqa: S101
    if not figures.fits:
        return difference.model_copy(update={"reason": "alone it does not fit"})
    return difference.model_copy(update={"worth_s": before_s - figures.step_time_s})


def _split_again(request: PlanRequest, current: Plan, changes: dict[str, Any]) -> PlanDocument:
    """The current plan with other degrees, its layers split anew, its options kept as far as they apply."""
    degrees = {name: getattr(current, name) for name in CHANGEABLE if name not in ("recompute", "sharding")}
    degrees |= {"recompute": current.recompute.label, "sharding": current.sharding, "rank_order": current.rank_order}
    if "ep" not in changes and "tp" in changes and current.etp == current.tp and current.ep == 1:
        degrees["etp"] = changes["tp"]
    if not isinstance(current.sharding, str):
        raise SpecError(())
    found = estimate_degrees(request, degrees | changes)
    assert found.plan is not None  # noqa: S101
    kept = current.options.model_copy(
        update={
            name: getattr(found.plan.options, name)
            for name in ("sequence_parallel", "vp_group_size", "overlap_p2p", "cp_comm_type", "cp_a2a_size")
            if changes
        }
    )
    plan = found.plan.model_copy(update={"options": kept})
    return found.model_copy(update={"plan": plan, "estimate": estimate_of(request, plan)})


def _reason(compared: CurrentPlan) -> Explanation:
    if not compared.fits:
        message = f"the current plan ({compared.summary}) does not fit"
    elif compared.ratio < 1:
        message = (
            f"the current plan ({compared.summary}) takes {seconds(compared.step_time_s)}, "
            f"{1 - compared.ratio:.1%} less than the best plan of the search space"
        )
    else:
        message = (
            f"the current plan ({compared.summary}) takes {seconds(compared.step_time_s)}, {compared.ratio:.2f} times "
            "the best one"
        ) + (f"; against it the best has {compared.why}" if compared.why else "")
    worth = sorted((each for each in compared.differences if each.worth_s), key=lambda each: -(each.worth_s or 0.0))
    if worth:
        words = (
            f"{each.name} {each.ours} -> {each.theirs} {seconds(abs(each.worth_s or 0.0))} "
            f"{'faster' if (each.worth_s or 0.0) > 0 else 'slower'}"
            for each in worth[:5]
        )
        message += "; changed alone: " + ", ".join(words)
    data = {
        "ratio": compared.ratio,
        "terms_s": compared.terms_s,
        "worth_s": {each.name: each.worth_s for each in worth},
    }
    return Explanation(kind="current", message=message, data=data)
