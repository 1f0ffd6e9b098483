"""What a run's row says of precision, recomputation, sharding and workload; its stack's defaults where it is silent."""

from __future__ import annotations

import re

from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.feed_forward import DenseFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Hsdp, HsdpSharding, Sharding
from meshwright.specs.target import RecomputeMode
from meshwright.specs.workload import PARAMS_DTYPE, Workload

from .rows import Run, UnsupportedError
from .stacks import MEGATRON_STACKS, Stack

PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")
MODULES = ("moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "core_attn")


def precision_of(run: Run, stack: Stack, cluster: ClusterSpec, notes: list[str]) -> str:
    """GEMM precision; 32-bit training runs on tf32 units where the GPU has them (the frameworks' images turn it on)."""
    text = run.precision
    if not text:
        notes.append(f"precision {stack.precision}: default of {run.framework or 'no known framework'}")
        text = stack.precision
    gpu = cluster.gpu_of(cluster.pools[0])
    if text == "fp32" and gpu.supports("tf32"):
        notes.append("fp32 runs on tf32 units")
        return "tf32"
    found = next((name for name in PRECISIONS if text.startswith(name)), None)
    if found is None:
        raise UnsupportedError(f"precision {text!r} is unknown")
    if not gpu.supports(found):
        raise UnsupportedError(f"{gpu.name} has no {found} units")
    return found


def recompute_of(run: Run, stack: Stack, model: ModelSpec, chunks: int, notes: list[str]) -> RecomputeMode:
    """The ``recompute`` column; blank takes the stack's default."""
    text = run.recompute
    if not text:
        notes.append(f"recompute {stack.recompute}: not stated")
        text = stack.recompute
    if text.startswith("full"):
        partial = re.search(r"(\d+) of \d+ layers", text)
        if partial:
            each = max(round(int(partial[1]) / chunks), 1)
            return RecomputeMode(granularity="full", method="block", num_layers=each)
        return RecomputeMode(granularity="full", method="uniform", num_layers=1)
    if text == "selective-layer":  # torchtitan: every second layer
        layers = max(round(model.num_layers / 2 / chunks), 1)
        return RecomputeMode(granularity="full", method="block", num_layers=layers)
    if text == "selective-op" or (text == "selective" and stack.name == "torchtitan"):
        # torchtitan keeps every second product and attention (its default policy); the rest is computed again.
        return RecomputeMode(granularity="selective", modules=("layernorm", "alternate_ops"))
    if text == "selective":
        return RecomputeMode(granularity="selective", modules=("core_attn",))
    named = re.split(r"[+,]", text.partition(":")[2])
    modules = tuple(module for module in MODULES if module in named)
    return RecomputeMode.parse({"granularity": "selective", "modules": modules}) if modules else RecomputeMode()


def sharding_of(run: Run, stack: Stack, replicas: int, pp: int, notes: list[str]) -> Sharding:
    """Sharding level; hybrid sharding takes its group from ``fsdp_group``, else a node."""
    text = run.sharding
    if text == "fsdp" and pp > 1 and stack.name == "torchtitan":
        # Under pipeline parallelism it keeps parameters whole after the forward pass and reduces gradients once a step.
        notes.append("parameters are gathered once a step: torchtitan's default under pipeline parallelism")
        return "zero1"
    if text == "hsdp":
        group = run.flags.get("fsdp_group", "")
        if stack.name in MEGATRON_STACKS and not group:
            notes.append("sharded over all replicas: Megatron divides the optimizer over the outer group too")
            return "fsdp"
        shard = int(group) if group.isdigit() else run.gpus_per_node or 8
        if replicas % shard == 0 and replicas > shard:
            return Hsdp(hsdp=HsdpSharding(replicate=replicas // shard, shard=shard))
        return "fsdp"
    if text in ("none", "zero1", "zero2", "zero3", "fsdp"):
        return text  # type: ignore[return-value]
    if replicas > 1:
        notes.append(f"sharding {stack.sharding}: default of {run.framework or 'no known framework'}")
    return stack.sharding  # type: ignore[return-value]


def workload_of(
    run: Run, stack: Stack, model: ModelSpec, precision: str, sharding: Sharding, batch: int, mtp: bool
) -> Workload:
    reduced = run.flags.get("grad_reduce") or run.flags.get("grad_sync_dtype")
    gradient = "bf16" if reduced == "bf16" else "fp32" if reduced == "fp32" else stack.gradient_dtype
    if "fp32_allreduce" in run.flags or run.flags.get("mp_mode") == "DEFAULT":
        gradient = "fp32"
    params: str = PARAMS_DTYPE[precision]
    if precision in ("fp8", "mxfp8") and run.flag("fp8_param_gather", stack.low_precision_primary):
        params = "fp8"
    dtypes = (run.flags.get("opt_dtypes") or "").split("/")
    moments = "bf16" if len(dtypes) == 4 and dtypes[-1].startswith("bf") else "fp32"
    if "precision-aware optimizer" in run.text:
        moments = "bf16"
    # Megatron's full sharding adds gradients up in main gradients, whatever they are reduced in.
    fully = sharding == "fsdp" or isinstance(sharding, Hsdp)
    main_gradients = "fp32" if stack.name in MEGATRON_STACKS and fully and dtypes[0] == "fp32" else None
    if run.release.startswith("Bridge card") and not run.flags:
        main_gradients = "fp32"  # Megatron-Bridge's bf16_mixed; the performance recipes that differ state it
    return Workload.parse(
        {
            "task": run.task if run.task in ("sft", "lora") else "pretrain",
            "global_batch_size": batch,
            "seq_length": run.seq_length,
            "precision": precision,
            "params_dtype": params,
            "gradient_dtype": "fp32" if params == "fp32" else gradient,
            "main_gradient_dtype": main_gradients,
            "moments_dtype": moments,
            "dropout": dropout_of(stack, model),
            "mtp": mtp,
        }
    )


def dropout_of(stack: Stack, model: ModelSpec) -> bool:
    """Dropout 0.1 is Megatron's default, and models of GPT's kind (biases, no gate) are trained with it."""
    if stack.name not in MEGATRON_STACKS:
        return stack.dropout
    kind = model.kinds[0]
    biased = isinstance(kind.attention, SoftmaxAttention) and kind.attention.qkv_bias
    return biased and isinstance(kind.feed_forward, DenseFFN) and not kind.feed_forward.gated
