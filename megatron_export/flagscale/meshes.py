"""FlagScale's heterogeneous training: a process mesh for every run of like stages, and the layers of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Plan, Stage

from ..terms import Refusals, decoder_layers, plan_in


def export_meshes(document: PlanDocument) -> dict[str, str]:
    """``hetero.yaml``; :class:`~meshwright.specs.errors.SpecError` for what the format cannot say."""
    import yaml

    text = yaml.safe_dump({"hetero": hetero_settings(document)}, default_flow_style=None, sort_keys=False, width=120)
    return {"hetero.yaml": text}


def hetero_settings(document: PlanDocument) -> dict[str, Any]:
    """The section ``hetero`` with GPU types by name.

    Meshes are (tp, cp, ep, dp, pp); FlagScale wants one cp for all, and the samples of a micro-step of the first mesh
    (dp x micro-batch) divisible by the dp of each.
    """
    plan = plan_in(document)
    refusals = Refusals("flagscale")
    refusals.plain_pipeline(plan)
    refusals.decoder_only(plan)
    refusals.unless(plan.cp is not None, "/cp", "differs between stages")
    for index, stage in enumerate(plan.stages):
        at, degrees = f"/stages/{index}", stage.degrees
        gpus = {group.gpu for group in stage.groups}
        refusals.unless(len(gpus) == 1, f"{at}/groups", f"mix {len(gpus)} GPU types")
        refusals.unless(degrees.etp in (1, degrees.tp), f"{at}/degrees/etp", f"is {degrees.etp} beside tp {degrees.tp}")
        first = plan.stages[0]
        fits = (first.degrees.dp * first.micro_batch_size) % degrees.dp == 0
        samples = first.degrees.dp * first.micro_batch_size
        refusals.unless(fits, f"{at}/degrees/dp", f"is {degrees.dp}, which does not divide the first stage's {samples}")
        uneven = len({group.micro_batches for group in stage.groups}) > 1
        refusals.unless(not uneven, f"{at}/groups", "have different numbers of micro-batches")
    refusals.raise_if_any()
    return settings_of_meshes(plan, [stage.groups[0].gpu for stage in plan.stages])


def settings_of_meshes(plan: Plan, types: Sequence[str]) -> dict[str, Any]:
    """The section ``hetero`` of a plan whose stages run on these device types."""
    meshes: list[list[Any]] = []
    for stage, device_type in zip(plan.stages, types, strict=True):
        key = _mesh(stage, device_type)
        if meshes and meshes[-1][0] == key:
            meshes[-1][1] += 1
        else:
            meshes.append([key, 1])
    return {
        "enable_hetero": True,
        "hetero_pipeline_layer_split": [decoder_layers(stage) for stage in plan.stages],
        "hetero_process_meshes": [value for (_, *degrees), count in meshes for value in (*degrees, count)],
        "hetero_device_types": [device_type for (device_type, *_), _ in meshes],
    }


def _mesh(stage: Stage, device_type: str) -> tuple[str, int, int, int, int]:
    degrees = stage.degrees
    return device_type, degrees.tp, degrees.cp, degrees.ep, degrees.dp
