"""FlashFlex: for every pipeline (replica) the tensor-parallel degree and the decoder layers of its stages."""

from __future__ import annotations

import json
from typing import Any

from meshwright.specs.document import PlanDocument

from ..terms import Refusals, decoder_layers, plan_in


def export_flashflex(document: PlanDocument) -> dict[str, str]:
    """``plan_flashflex.json``; :class:`~meshwright.specs.errors.SpecError` for what the format cannot say."""
    return {"plan_flashflex.json": json.dumps(flashflex_plan(document)) + "\n"}


def flashflex_plan(document: PlanDocument) -> dict[str, Any]:
    """``hetero_configs`` and ``layer_partitions`` of its trainer."""
    plan = plan_in(document)
    refusals = Refusals("flashflex")
    refusals.data_tensor_pipeline_only(plan)
    refusals.plain_pipeline(plan, ("1f1b", "gpipe"))
    refusals.no_recompute(plan)
    refusals.no_sharding(plan)
    refusals.decoder_only(plan)
    refusals.unless(plan.dp is not None, "/dp", "differs between stages")
    refusals.raise_if_any()
    widths = [stage.degrees.tp for stage in plan.stages]
    layers = [decoder_layers(stage) for stage in plan.stages]
    pipelines = plan.stages[0].degrees.dp
    return {"hetero_configs": [widths] * pipelines, "layer_partitions": [layers] * pipelines}
