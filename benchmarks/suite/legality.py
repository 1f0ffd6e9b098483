"""Whether a plan is legal, by another way than the search's: the arguments that it is exported to, read again."""

from __future__ import annotations

from meshwright.api.checks import run_check
from meshwright.megatron_export.megatron import environment_of, megatron_arguments
from meshwright.planner.corrections import estimate_of
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import facts_of_plan, violations
from meshwright.specs.document import PlanDocument
from meshwright.specs.placement import placement_faults
from meshwright.specs.plan import Plan


def faults_of_answer(request: PlanRequest, document: PlanDocument) -> list[str]:
    """What is wrong with the plan and the alternatives of a document; empty where nothing is."""
    plans = [] if document.plan is None else [document.plan]
    plans += [each.plan for each in document.alternatives]
    return [f"plan {k}: {fault}" for k, plan in enumerate(plans) for fault in faults_of_plan(request, document, plan)]


def faults_of_plan(request: PlanRequest, document: PlanDocument, plan: Plan) -> list[str]:
    """Rules that a plan breaks, as a document and as arguments under ``meshwright check``; whether it lies on the
    cluster; whether it fits."""
    cluster = request.cluster
    gpus = [cluster.gpus[name] for name in sorted({group.gpu for stage in plan.stages for group in stage.groups})]
    facts = facts_of_plan(plan, request.model, request.workload, request.target, gpus)
    out = [f"{each.rule}: {each.message}" for each in violations(facts)]
    out += [str(fault) for fault in placement_faults(plan, cluster, "/plan")]
    if out:
        return out
    flags = [flag for part in megatron_arguments(document.model_copy(update={"plan": plan})).values() for flag in part]
    degrees = plan.stages[0].degrees
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    found = run_check(
        {
            "arguments": [str(word) for flag in flags for word in flag],
            "world_size": degrees.tp * degrees.cp * degrees.dp * len(plan.stages),
            "env": {name: value or "" for name, value in environment_of(plan, cluster).items()},
            **({"sm": min(capabilities)} if capabilities else {}),
        }
    )
    out += [f"check: {each['rule']}: {each['message']}" for each in found["violations"]]
    return out if estimate_of(request, plan).fits else [*out, "does not fit"]
