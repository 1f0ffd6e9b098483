"""A user's own configuration as it was read: what is wrong with it, and the plan that it describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.planner.rules import Violation
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload


@dataclass(frozen=True)
class Given:
    """What a user says beside the configuration.

    ``world_size`` is 0 where it is not known. ``model``, the fields of ``workload`` and ``degrees`` (``tp``, ``pp``,
    ``micro_batch_size``, ``recompute``) are for formats that leave them to the training script.
    """

    target: Target
    world_size: int = 0
    model: ModelSpec | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    #: Transformer Engine's version and the compute capability, where they are not the defaults.
    known: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Described:
    """A plan with the model and the workload that it is for; ``target`` where it is not the one that was asked for
    (Accelerate starts DeepSpeed)."""

    plan: Plan
    model: ModelSpec
    workload: Workload
    target: Target | None = None


@dataclass(frozen=True)
class Reading:
    """The verdict on a configuration.

    ``notes`` say what was assumed and what has no effect. ``missing`` are the inputs without which its plan cannot be
    told; ``describe`` tells it for a cluster, and raises :class:`SpecError` where it cannot be a plan.
    """

    violations: tuple[Violation, ...]
    describe: Callable[[ClusterSpec], Described]
    notes: tuple[str, ...] = ()
    missing: tuple[Fault, ...] = ()
