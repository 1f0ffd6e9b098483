"""Sailor's plan: ``pipeline_list`` with the layers, the degree and the machines of every replica of every stage."""

from __future__ import annotations

import json
from typing import Any

from meshwright.specs.document import PlanDocument

from ..terms import Refusals, layers_with_ends, plan_in, replica_pools

#: Its names of GPU types; others keep ours.
GPU_NAMES = {
    "A100-SXM-40GB": "A100-40",
    "V100-SXM2-16GB": "V100-16",
    "GH200-96GB": "GH-96",
    "RTX-2080": "RTX-2080",
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
}
#: The zone of pools whose name does not say one (``A100-40_us-central1-a`` does).
ZONE = "us-central1-a"


def export_sailor(document: PlanDocument) -> dict[str, str]:
    """``plan_sailor.json``; :class:`~meshwright.specs.errors.SpecError` for what the format cannot say."""
    return {"plan_sailor.json": json.dumps(sailor_plan(document)) + "\n"}


def sailor_plan(document: PlanDocument) -> dict[str, Any]:
    """The plan as plain JSON values. Layers count the embedding (0) and the head (the last)."""
    plan = plan_in(document)
    refusals = Refusals("sailor")
    refusals.data_tensor_pipeline_only(plan)
    refusals.plain_pipeline(plan)
    refusals.no_recompute(plan)
    refusals.no_sharding(plan)
    refusals.decoder_only(plan)
    refusals.unless(plan.dp is not None, "/dp", "differs between stages")
    refusals.unless(plan.micro_batch_size is not None, "/micro_batch_size", "differs between stages")
    refusals.raise_if_any()
    stages = [
        [[[[*_machine(pool, gpu, stage.degrees.tp)]], stage.degrees.tp] for pool, gpu in replica_pools(stage)]
        for stage in plan.stages
    ]
    pipeline = {
        "num_stages": plan.pp,
        "layers_per_stage": [layers_with_ends(stage, document.inputs.model.num_layers) for stage in plan.stages],
        "dp": [stage.degrees.dp for stage in plan.stages],
        "tmp_per_stage": stages,
    }
    return {"mbs": plan.micro_batch_size, "pipeline_list": [pipeline]}


def _machine(pool: str, gpu: str, gpus: int) -> tuple[str, int, str]:
    name = GPU_NAMES.get(gpu, gpu)
    zone = pool.removeprefix(f"{name}_")
    return name, gpus, zone if zone != pool else ZONE
