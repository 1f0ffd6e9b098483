"""Metis: devices, (dp, tp) and layers of every stage; layers count the embedding and the head."""

from __future__ import annotations

import json
from typing import Any

from meshwright.specs.document import PlanDocument

from ..terms import Refusals, layers_with_ends, plan_in


def export_metis(document: PlanDocument) -> dict[str, str]:
    """``plan_metis.json``; :class:`~meshwright.specs.errors.SpecError` for what the format cannot say."""
    return {"plan_metis.json": json.dumps(metis_plan(document)) + "\n"}


def metis_plan(document: PlanDocument) -> dict[str, Any]:
    """The plan as plain JSON values."""
    plan = plan_in(document)
    refusals = Refusals("metis")
    refusals.data_tensor_pipeline_only(plan)
    refusals.plain_pipeline(plan)
    refusals.no_recompute(plan)
    refusals.no_sharding(plan)
    refusals.decoder_only(plan)
    refusals.raise_if_any()
    held = [len(layers_with_ends(stage, document.inputs.model.num_layers)) for stage in plan.stages]
    return {
        "device_groups": [stage.degrees.dp * stage.degrees.tp for stage in plan.stages],
        "strategies": [[stage.degrees.dp, stage.degrees.tp] for stage in plan.stages],
        "layer_partition": [sum(held[:index]) for index in range(len(held) + 1)],
    }
