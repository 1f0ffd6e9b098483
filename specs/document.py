"""The plan document: one answer to one request, as CLI, REST and files carry it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt

from .base import Document
from .cluster import ClusterSpec
from .errors import SpecError
from .estimate import Estimate
from .goals import BatchSweep, Cost, CurrentPlan, Difference, ExpertPlacement, Goal, ParetoPoint, WhatIf
from .model import ModelSpec
from .placement import placement_faults
from .plan import Plan
from .target import Target
from .workload import Workload


class Inputs(Document):
    """The request in full with the digest of each part."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    target: Target
    digests: dict[str, str] = Field(default_factory=dict)


class Bound(Document):
    """A proven lower bound of the step time over the space that ``space`` declares; ``gap`` = 1 - bound / plan."""

    step_time_s: float = Field(ge=0)
    gap: float = Field(ge=0, le=1)
    space: tuple[str, ...]


class Alternative(Document):
    """Another plan that fits, and why it lost. ``differences`` name the choices in which it differs from the plan."""

    plan: Plan
    step_time_s: float
    slower_by: float
    reason: str
    differences: tuple[Difference, ...] = ()


ReasonKind = Literal[
    "choice",
    "binding-time",
    "binding-memory",
    "layout",
    "left-out",
    "rules",
    "next-best",
    "placement",
    "expert-placement",
    "cost",
    "goal",
    "batch",
    "constraint",
    "what-if",
    "current",
    "no-fit",
    "illegal",
    "would-fit",
]


class Explanation(Document):
    """One reason, in words and as data."""

    kind: ReasonKind
    message: str
    data: dict[str, Any] = Field(default_factory=dict)


class Run(Document):
    """How the answer was made; outside the digest."""

    cpu_s: float
    candidates: NonNegativeInt
    pruned: dict[str, NonNegativeInt]
    date: str
    id: str | None = None


class PlanDocument(Document):
    """Request, best plan, its estimate, bound, alternatives and explanation."""

    schema_version: Literal[1] = 1
    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    reason: str | None = None
    complete: bool = True
    inputs: Inputs
    plan: Plan | None = None
    estimate: Estimate | None = None
    bound: Bound | None = None
    alternatives: tuple[Alternative, ...] = ()
    pareto: tuple[ParetoPoint, ...] = ()
    cost: Cost | None = None
    goal: Goal | None = None
    batch_sweep: BatchSweep | None = None
    what_if: tuple[WhatIf, ...] = ()
    current: CurrentPlan | None = None
    expert_placement: ExpertPlacement | None = None
    explanation: tuple[Explanation, ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)
    run: Run | None = None

    @classmethod
    def parse(cls, data: Any, pointer: str = "") -> Self:
        """Validate a document, and that its plan lies on its cluster; SpecError with a fault per wrong field."""
        document = super().parse(data, pointer)
        if document.plan is not None:
            faults = placement_faults(document.plan, document.inputs.cluster, f"{pointer}/plan")
            if faults:
                raise SpecError(faults)
        return document
