"""Flags of a plan: degrees, pipeline split, recompute, sharding, overlap, numerics."""

from __future__ import annotations

from meshwright.planner.rules import (
    FP8_RECIPES,
    FSDP_STRATEGIES,
    Layout,
    checkpoint_format,
    context_sizes,
    layout_of_plan,
    state_dtypes,
    uses_fsdp,
)
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Hsdp, Plan
from meshwright.specs.workload import Workload

from .flags import is_known
from .model_flags import Flags

#: FP8 value format by recipe; MX blocks use E4M3 throughout (TransformerEngine's recipe defaults).
_FP8_FORMATS = {"tensorwise": "hybrid", "mxfp8": "e4m3"}


def parallel_flags(plan: Plan, model: ModelSpec, workload: Workload) -> Flags:
    """Every degree, written out, and how the layers are split."""
    degrees = plan.stages[0].degrees
    flags: Flags = [
        ("--tensor-model-parallel-size", str(degrees.tp)),
        ("--pipeline-model-parallel-size", str(plan.pp)),
        ("--context-parallel-size", str(degrees.cp)),
        ("--expert-model-parallel-size", str(degrees.ep)),
        ("--expert-tensor-parallel-size", str(degrees.etp)),
        *split_flags(plan, model, workload),
    ]
    if plan.options.sequence_parallel and degrees.tp > 1:
        flags.append(("--sequence-parallel",))
    if degrees.cp > 1:
        flags.append(("--cp-comm-type", plan.options.cp_comm_type or "p2p"))
        sizes = context_sizes(plan)
        if sizes:
            flags.append(("--hierarchical-context-parallel-sizes", *map(str, sizes)))
    if plan.rank_order == "tp-cp-ep-pp-dp":
        flags.append(("--use-tp-pp-dp-mapping",))
    if plan.vpp > 1:
        group = plan.options.vp_group_size
        if group and group != plan.pp:
            flags.append(("--microbatch-group-size-per-virtual-pipeline-stage", str(group)))
        if not plan.options.overlap_p2p:
            flags.append(("--no-overlap-p2p-communication",))
    return flags


def split_flags(plan: Plan, model: ModelSpec, workload: Workload) -> Flags:
    """The pipeline split: nothing where Megatron's even split is the plan's, a layout string otherwise."""
    layout, fault = layout_of_plan(plan)
    if layout is None:
        raise ValueError(fault)
    mtp = model.mtp.num_layers if model.mtp and workload.mtp else 0
    if layout == even_layout(model.num_layers, mtp, plan.pp, plan.vpp):
        return [("--num-virtual-stages-per-pipeline-rank", str(plan.vpp))] if plan.vpp > 1 else []
    return [("--pipeline-model-parallel-layout", layout.format())]


def even_layout(num_layers: int, mtp_num_layers: int, pp: int, vpp: int) -> Layout | None:
    """Megatron's split without a layout; None where it has none because layers do not divide."""
    if num_layers % (pp * vpp):
        return None
    chunks = ["t" * (num_layers // (pp * vpp)) for _ in range(pp * vpp)]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * mtp_num_layers + "L"
    return Layout(tuple(chunks))


def batch_flags(plan: Plan, workload: Workload) -> Flags:
    """Batch and sequence."""
    return [
        ("--micro-batch-size", str(plan.stages[0].micro_batch_size)),
        ("--global-batch-size", str(workload.global_batch_size)),
        ("--seq-length", str(workload.seq_length)),
    ]


def memory_flags(plan: Plan, workload: Workload) -> Flags:
    """Recompute, data-parallel sharding, and what lives in host memory."""
    flags: Flags = []
    mode = plan.stages[0].recompute
    if mode.granularity == "selective":
        flags += [("--recompute-granularity", "selective"), ("--recompute-modules", *mode.modules)]
    elif mode.granularity == "full":
        flags += [
            ("--recompute-granularity", "full"),
            ("--recompute-method", mode.method or "uniform"),
            ("--recompute-num-layers", str(mode.num_layers or 1)),
        ]
    sharding, options = plan.sharding, plan.options
    if sharding == "zero1":
        flags.append(("--use-distributed-optimizer",))
    elif uses_fsdp(sharding):
        strategy = "optim_grads_params" if isinstance(sharding, Hsdp) else FSDP_STRATEGIES[sharding]
        flags += [
            ("--use-distributed-optimizer",),
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", strategy),
            ("--ckpt-format", checkpoint_format(sharding)),
        ]
    if options.optimizer_offload_fraction:
        flags += [
            ("--optimizer-cpu-offload",),
            ("--optimizer-offload-fraction", f"{options.optimizer_offload_fraction:g}"),
        ]
        if options.optimizer_offload_overlap:
            flags.append(("--overlap-cpu-optimizer-d2h-h2d",))
        if not state_dtypes(workload):
            flags.append(("--use-precision-aware-optimizer",))
    if options.activation_offload_layers:
        flags.append(("--cpu-offloading-num-layers", str(options.activation_offload_layers)))
    if options.activation_offload_modules:
        flags += [
            ("--fine-grained-activation-offloading",),
            ("--offload-modules", *options.activation_offload_modules),
        ]
    instances = sharding.hsdp.replicate if isinstance(sharding, Hsdp) else options.dist_opt_instances
    if instances > 1:
        flags.append(("--num-distributed-optimizer-instances", str(instances)))
    return flags


def overlap_flags(plan: Plan, model: ModelSpec, version: str) -> Flags:
    """Communication overlap, fusions, expert dispatch."""
    options = plan.options
    flags: Flags = []
    for on, name in (
        (options.overlap_grad_reduce, "--overlap-grad-reduce"),
        (options.overlap_param_gather, "--overlap-param-gather"),
        (options.tp_comm_overlap, "--tp-comm-overlap"),
        (options.ep_comm_overlap, "--overlap-moe-expert-parallel-comm"),
        (options.delay_wgrad, "--delay-wgrad-compute"),
        (options.moe_shared_expert_overlap and model.is_moe, "--moe-shared-expert-overlap"),
        (options.fused_cross_entropy, "--cross-entropy-loss-fusion"),
        (options.grouped_gemm and model.is_moe, "--moe-grouped-gemm"),
    ):
        if on:
            flags.append((name,))
    if options.grad_bucket_params:
        flags.append(("--ddp-bucket-size", str(options.grad_bucket_params)))
    if model.is_moe:
        flags.append(("--moe-token-dispatcher-type", options.dispatcher or "alltoall"))
    if options.cuda_graph:
        flags.append(("--cuda-graph-impl", "local"))
        if options.cuda_graph_scope and "full_iteration" not in options.cuda_graph_scope:
            # Renamed in 0.18.
            name = "--cuda-graph-modules" if is_known("--cuda-graph-modules", version) else "--cuda-graph-scope"
            flags.append((name, *options.cuda_graph_scope))
    return flags


def numeric_flags(workload: Workload) -> Flags:
    """Precision, dtypes of gradients and optimizer states, optimizer."""
    flags: Flags = []
    half = {"fp16": "--fp16", "bf16": "--bf16", "fp8": "--bf16", "mxfp8": "--bf16", "nvfp4": "--bf16"}
    if workload.precision in half:
        flags.append((half[workload.precision],))
    if workload.precision in FP8_RECIPES:
        recipe = FP8_RECIPES[workload.precision]
        flags += [("--fp8-format", _FP8_FORMATS[recipe]), ("--fp8-recipe", recipe)]
        if workload.params_dtype == "fp8":
            flags.append(("--fp8-param-gather",))
    if workload.precision == "nvfp4":
        flags += [("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4")]
    if workload.gradient_dtype == "bf16":
        flags.append(("--grad-reduce-in-bf16",))
    elif workload.gradient_dtype == "fp32" and workload.precision == "fp16":
        flags.append(("--accumulate-allreduce-grads-in-fp32",))
    flags.append(("--optimizer", workload.optimizer))
    if state_dtypes(workload):
        flags += [
            ("--use-precision-aware-optimizer",),
            ("--main-params-dtype", workload.main_params_dtype),
            ("--exp-avg-dtype", workload.moments_dtype),
            ("--exp-avg-sq-dtype", workload.moments_dtype),
        ]
    return flags
