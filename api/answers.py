"""Questions to answers: the calls that the command line and the REST service share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.cost_models.calibration import Calibration
from meshwright.planner.request import PlanRequest
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan

from . import exit_codes
from .bodies import Degrees, EstimateBody
from .requests import document_request, plan_request

#: Words of ``explanation.kind`` which say that the target's rules leave nothing, whatever the memory.
ILLEGAL_KINDS = frozenset({"illegal"})


def answer(request: PlanRequest, progress: Callable[[str, int, int], None] | None = None) -> PlanDocument:
    """The plan document of a request. Raises what :func:`meshwright.planner.goals.answer` raises."""
    from meshwright.planner import goals

    return goals.answer(request, progress)


def estimate_data(data: Any, *, files: bool = False) -> PlanDocument:
    """Price the plan that a body of the kind :class:`EstimateBody` gives by degrees or in full.

    Raises :class:`SpecError` for bad input and :class:`~meshwright.planner.errors.IllegalPlan` for a plan that the
    target refuses.
    """
    from meshwright.planner.experts.goal import with_expert_load, with_placement
    from meshwright.planner.single import document_for_plan, estimate_degrees

    request, body = plan_request(data, EstimateBody, files=files)
    request = with_expert_load(request)
    if body.degrees is not None and body.plan is not None:
        raise SpecError(Fault("/plan", "and degrees both give a plan; leave one out"))
    if body.plan is not None:
        return with_placement(request, document_for_plan(request, Plan.parse(body.plan, "/plan")))
    degrees = body.degrees.given() if body.degrees is not None else {}
    try:
        return with_placement(request, estimate_degrees(request, degrees))
    except SpecError as error:
        raise SpecError(_in_degrees(fault) for fault in error.faults) from None


def _in_degrees(fault: Fault) -> Fault:
    """A fault of a degree, placed where a body gives it."""
    inside = fault.pointer.removeprefix("/") in Degrees.model_fields
    return Fault("/degrees" + fault.pointer, fault.message, fault.alternatives) if inside else fault


def estimate_document(
    document: PlanDocument, memory_headroom: float = 0.0, calibration: Calibration | None = None
) -> PlanDocument:
    """Price the plan of a plan document again; a calibration that it was made with is not kept.

    Raises :class:`NoPlan` for a document without a plan.
    """
    from meshwright.planner.single import document_for_plan

    plan = plan_of(document)
    return document_for_plan(document_request(document, memory_headroom=memory_headroom, calibration=calibration), plan)


class NoPlan(SpecError):  # noqa: N818  named for what it says
    """A plan is asked for that ``document`` does not hold."""

    def __init__(self, document: PlanDocument):
        self.document = document
        why = f"status {document.status}" + (f": {document.reason}" if document.reason else "")
        super().__init__(Fault("/document/plan", f"is null: the document holds no plan ({why})"))


def plan_of(document: PlanDocument) -> Plan:
    """The plan of a document that was handed in; :class:`NoPlan` where it holds none."""
    if document.plan is None:
        raise NoPlan(document)
    return document.plan


def exit_code_of(document: PlanDocument) -> int:
    """What a command that printed ``document`` exits with."""
    if document.status == "unknown":
        return exit_codes.DEADLINE
    if document.status == "infeasible":
        illegal = any(item.kind in ILLEGAL_KINDS for item in document.explanation)
        return exit_codes.ILLEGAL if illegal else exit_codes.DOES_NOT_FIT
    return exit_codes.DONE


def estimate_arguments(arguments: list[str], inputs: dict[str, Any], *, files: bool = False) -> PlanDocument:
    """Price the plan that Megatron arguments describe; ``inputs`` names the cluster and what they leave open."""
    from .checks import priced_arguments

    return priced_arguments(arguments, inputs, files=files)
