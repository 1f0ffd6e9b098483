"""Framework arguments: legal or not, and what the plan that they describe costs."""

from __future__ import annotations

from typing import Any

from meshwright.megatron_export import (
    MegatronArguments,
    facts_from_arguments,
    model_from_arguments,
    plan_from_arguments,
    read_arguments,
    workload_from_arguments,
)
from meshwright.planner import rules
from meshwright.planner.errors import IllegalPlan
from meshwright.planner.request import PlanRequest
from meshwright.planner.single import document_for_plan
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError

from .bodies import DEFAULT_TARGET, CheckBody, HeadroomBody
from .output import violation_dicts
from .requests import Faults, read_cluster, read_model, read_target


def run_check(data: Any, *, files: bool = False) -> dict[str, Any]:
    """``{"legal", "fits", "violations", "estimate"}`` of a body of the kind :class:`CheckBody`.

    ``fits`` and ``estimate`` are null without a cluster and for illegal arguments. Raises :class:`SpecError`.
    """
    faults = Faults()
    body = faults.of("", lambda: CheckBody.read(data))
    given = data if isinstance(data, dict) else {}
    target = given.get("target", DEFAULT_TARGET)
    if isinstance(target, str):
        faults.of("/target", lambda: read_target(target))
    cluster: ClusterSpec | None = None
    if given.get("cluster") is not None:
        cluster = faults.of("/cluster", lambda: read_cluster(given["cluster"], files=files))
    arguments = faults.of("/arguments", lambda: read_arguments(body.arguments)) if body is not None else None
    faults.raise_if_any()
    assert body is not None and arguments is not None  # noqa: S101 - raise_if_any has raised otherwise
    world_size = _world_size(body.world_size, cluster)
    facts = facts_from_arguments(arguments, world_size, body.env, body.te_version, body.sm)
    broken = rules.violations(facts)
    document = None
    if not broken and cluster is not None:
        document = _priced(arguments, cluster, world_size, target, body.memory_headroom, None)
    estimate = document.estimate if document is not None else None
    return {
        "legal": not broken,
        "fits": estimate.fits if estimate is not None else None,
        "violations": violation_dicts(broken),
        "estimate": estimate.to_json() if estimate is not None else None,
    }
