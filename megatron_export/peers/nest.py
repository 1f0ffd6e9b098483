"""NEST's answer: layers and devices of every stage, one degree of each kind. The head belongs to its last layer."""

from __future__ import annotations

import json
from typing import Any

from meshwright.specs.document import PlanDocument

from ..terms import Refusals, blocks_of, plan_in


def export_nest(document: PlanDocument) -> dict[str, str]:
    """``plan_nest.json``; :class:`~meshwright.specs.errors.SpecError` for what the format cannot say."""
    return {"plan_nest.json": json.dumps(nest_plan(document)) + "\n"}


def nest_plan(document: PlanDocument) -> dict[str, Any]:
    """The plan as plain JSON values; ``finalTimePerBatch`` is our step time in seconds where there is an estimate."""
    plan = plan_in(document)
    refusals = Refusals("nest")
    refusals.plain_pipeline(plan)
    refusals.decoder_only(plan)
    for name in ("tp", "cp", "ep", "dp", "micro_batch_size"):
        refusals.unless(getattr(plan, name) is not None, f"/{name}", "differs between stages")
    gpus = {group.gpu for stage in plan.stages for group in stage.groups}
    refusals.unless(len(gpus) == 1, "/stages", f"run on {len(gpus)} GPU types")
    for index, stage in enumerate(plan.stages):
        degrees = stage.degrees
        nested = degrees.dp % degrees.ep == 0 and degrees.etp in (1, degrees.tp)
        refusals.unless(nested, f"/stages/{index}/degrees/ep", f"is {degrees.ep} over dp {degrees.dp}")
    refusals.raise_if_any()
    first = plan.stages[0].degrees
    width = first.tp * first.cp * first.ep
    return {
        "stages": [
            {
                "devicesForStage": width,
                "nodes": [-1 if kind == "embed" else layer for kind, layer in blocks_of(stage) if kind != "head"],
            }
            for stage in plan.stages
        ],
        "tensorParallelDegree": first.tp,
        "dataParallelDegree": first.dp // first.ep,
        "finalTimePerBatch": document.estimate.step_time_s if document.estimate else None,
    }
