"""What Megatron derives from its arguments on its own: layers, widths, virtual stages, the layout, the precision."""

from __future__ import annotations

from meshwright.planner.rules import Layout, LayoutError
from meshwright.specs.errors import Fault, SpecError

from .arguments import MegatronArguments

#: No model comes near; more would only fill memory with layer patterns.
MAX_LAYERS = 100_000


def num_layers(args: MegatronArguments) -> int:
    """Decoder layers; the hybrid pattern counts before ``--num-layers`` (0 if neither is given).

    :class:`SpecError` beyond :data:`MAX_LAYERS`.
    """
    pattern = args["hybrid_layer_pattern"]
    if pattern:
        return sum(symbol != "|" for symbol in pattern.split("/")[0])
    layers = int(args["num_layers"] or args["encoder_num_layers"] or 0)
    if layers > MAX_LAYERS:
        raise SpecError(Fault("/--num-layers", f"must be at most {MAX_LAYERS}, got {layers}"))
    return max(layers, 0)


def moe_layers(args: MegatronArguments) -> list[bool]:
    """Whether each decoder layer is a mixture of experts."""
    layers = num_layers(args)
    if not args["num_experts"]:
        return [False] * layers
    frequency = args["moe_layer_freq"]
    if isinstance(frequency, list):
        return [bool(entry) for entry in frequency]
    return [index % max(frequency, 1) == 0 for index in range(layers)]


def ffn_hidden_size(args: MegatronArguments) -> int:
    """Width of dense layers; the default keeps SwiGLU at the size of two matrices, in multiples of 64."""
    if args["ffn_hidden_size"]:
        return int(args["ffn_hidden_size"])
    hidden = int(args["hidden_size"] or 0)
    return int((4 * hidden * 2 / 3) / 64) * 64 if args["swiglu"] else 4 * hidden


def virtual_stages(args: MegatronArguments, pp: int, layers: int) -> int:
    """Virtual stages of a rank (1 = none), from whichever flag states them."""
    stages = 1
    if args["pipeline_model_parallel_layout"]:
        layout, _ = parse_layout(args)
        stages = len(layout.chunks) // pp if layout else 1
    elif args["hybrid_layer_pattern"]:
        stages = (args["hybrid_layer_pattern"].split("/")[0].count("|") + 1) // pp
    elif args["num_virtual_stages_per_pipeline_rank"]:
        stages = args["num_virtual_stages_per_pipeline_rank"]
    elif args["num_layers_per_virtual_pipeline_stage"]:
        extra = args["account_for_embedding_in_pipeline_split"] + args["account_for_loss_in_pipeline_split"]
        stages = (layers + extra) // pp // args["num_layers_per_virtual_pipeline_stage"]
    return max(stages, 1)


def parse_layout(args: MegatronArguments) -> tuple[Layout | None, str]:
    """The pipeline layout, or None and what is wrong with it ("" if there is none)."""
    text = args["pipeline_model_parallel_layout"]
    if text is None:
        return None, ""
    try:
        return Layout.parse(text), ""
    except LayoutError as error:
        return None, str(error)


def precision(args: MegatronArguments) -> str:
    """The workload's word for the numerics."""
    if args["fp4"]:
        return "nvfp4"
    if args["fp8"]:
        return "mxfp8" if args["fp8_recipe"] == "mxfp8" else "fp8"
    return "bf16" if args["bf16"] else "fp16" if args["fp16"] else "fp32"
