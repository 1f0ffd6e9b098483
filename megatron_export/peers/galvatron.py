"""Galvatron's strategy file: comma strings with one entry a layer, and how embedding and head run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Stage

from ..terms import Refusals, decoder_layers, plan_in


@dataclass(frozen=True)
class LayerChoice:
    """How one layer runs: ``width`` ranks tensor-parallel or (``ulysses``) sequence-parallel, ZeRO-3 or the default."""

    width: int
    ulysses: bool
    zero3: bool
    recompute: bool


def strategy_json(
    stages: Sequence[Sequence[LayerChoice]],
    rest: LayerChoice,
    chunks: int,
    global_batch: int,
    world_size: int,
    default: str = "zero2",
) -> dict[str, Any]:
    """The strategy of layers by stage and of the rest as plain JSON values."""
    layers = [layer for stage in stages for layer in stage]

    def row(values: Sequence[int]) -> str:
        return ",".join(map(str, values))

    return {
        "pp_deg": len(stages),
        "tp_sizes_enc": row([layer.width for layer in layers]),
        "tp_consecutive_flags": row([1] * len(layers)),
        "dp_types_enc": row([int(layer.zero3) for layer in layers]),
        "use_sp": row([int(layer.ulysses) for layer in layers]),
        "checkpoint": row([int(layer.recompute) for layer in layers]),
        "global_bsz": global_batch,
        "chunks": chunks,
        "pp_division": row([len(stage) for stage in stages]),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": default,
        "vtp": rest.width,
        "vsp": int(rest.ulysses),
        "embed_sdp": int(rest.zero3),
        "world_size": world_size,
    }


def export_galvatron(document: PlanDocument) -> dict[str, str]:
    """``galvatron_strategy.json``; :class:`~meshwright.specs.errors.SpecError` for what the format cannot say."""
    plan = plan_in(document)
    refusals = Refusals("galvatron")
    refusals.data_tensor_pipeline_only(plan)
    refusals.plain_pipeline(plan, ("1f1b", "gpipe"))
    refusals.decoder_only(plan)
    refusals.unless(plan.micro_batch_size is not None, "/micro_batch_size", "differs between stages")
    ranks = {stage.degrees.tp * stage.degrees.dp for stage in plan.stages}
    refusals.unless(len(ranks) == 1, "/stages", "have different numbers of ranks")
    gpus = {group.gpu for stage in plan.stages for group in stage.groups}
    refusals.unless(len(gpus) == 1, "/stages", f"run on {len(gpus)} GPU types")
    for index, stage in enumerate(plan.stages):
        at, tp = f"/stages/{index}", stage.degrees.tp
        refusals.unless(tp & (tp - 1) == 0, f"{at}/degrees/tp", f"is {tp}, no power of two")
        mode = stage.recompute
        by_layer = mode.granularity != "selective" and (mode.method != "uniform" or mode.num_layers in (None, 1))
        refusals.unless(by_layer, f"{at}/recompute", f"is {mode.label}")
        plain = isinstance(stage.sharding, str) and stage.sharding != "zero1"
        label = stage.sharding if isinstance(stage.sharding, str) else "hsdp"
        refusals.unless(plain, f"{at}/sharding", f"is {label} (--fix sharding=none plans without)")
    pure = {s.sharding in ("zero3", "fsdp") for s in plan.stages} == {False}
    names = {s.sharding for s in plan.stages if isinstance(s.sharding, str) and s.sharding not in ("zero3", "fsdp")}
    refusals.unless(len(names) <= 1, "/sharding", "mixes unsharded and zero2 stages")
    refusals.raise_if_any()
    default = "ddp" if pure and names == {"none"} else "zero2"
    stages = [_choices(stage) for stage in plan.stages]
    first = stages[0][0]
    rest = LayerChoice(first.width, False, first.zero3, False)
    data = strategy_json(
        stages,
        rest,
        plan.num_microbatches,
        document.inputs.workload.global_batch_size,
        plan.num_ranks,
        default,
    )
    if plan.schedule == "gpipe":
        data["pipeline_type"] = "gpipe"
    return {"galvatron_strategy.json": json.dumps(data, indent=1) + "\n"}


def _choices(stage: Stage) -> list[LayerChoice]:
    """The layers of a stage; the first ones are recomputed where only some are."""
    layers = decoder_layers(stage)
    mode = stage.recompute
    again = 0 if mode.granularity == "none" else layers
    if mode.method == "block":
        again = min(mode.num_layers or layers, layers)
    zero3 = stage.sharding in ("zero3", "fsdp")
    return [LayerChoice(stage.degrees.tp, False, zero3, index < again) for index in range(layers)]
