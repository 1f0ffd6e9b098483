"""A run as what the cost model prices: workload, target and plan, with every assumption named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from pydantic import ValidationError

from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import SpecError
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import (
    Chunk,
    Degrees,
    GraphScope,
    Group,
    Hsdp,
    HsdpSharding,
    Options,
    Plan,
    Sharding,
    Stage,
    collapse_blocks,
    format_range,
)
from meshwright.specs.target import OffloadModule, RecomputeMode, Target
from meshwright.specs.workload import PARAMS_DTYPE, Workload

from .architectures import model_of
from .hardware import cluster_of
from .layouts import chunks_of
from .rows import Run, UnsupportedError
from .stacks import BASE_TARGET, Stack, release_of, stack_of

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "tf32": "tf32", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
#: Stacks on Megatron-LM with Transformer Engine.
MEGATRON_STACKS = ("megatron-lm", "megatron-bridge", "nemo")
#: Stacks on PyTorch's own full sharding and autograd: gradients are tensors that come and go.
TORCH_STACKS = ("torchtitan", "automodel", "llm-foundry", "transformers")
MODULES = ("moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "core_attn")


@dataclass(frozen=True)
class Case:
    """A run ready to be priced. ``scale`` turns the step of the priced batch into that of the stated one."""

    run: Run
    stack: Stack
    release: str
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    target: Target
    plan: Plan
    scale: float
    assumptions: tuple[str, ...]


def case_of(run: Run, models: dict[str, dict[str, object]]) -> Case:
    """The case of a run; :class:`UnsupportedError` says why there is none."""
    notes: list[str] = []
    if run.model not in models:
        raise UnsupportedError(f"model {run.model!r} is not in the models file")
    overrides = dict(run.overrides)
    if overrides.get("num_layers") is not None and str(overrides["num_layers"]) == run.flags.get("mtp_num_layers"):
        notes.append("num_layers of the overrides is the number of MTP layers, misread")
        del overrides["num_layers"]
    model = model_of(run.model, {**models[run.model], **overrides}, notes)
    stack = stack_of(run.framework)
    cluster = cluster_of(run)
    try:
        return _case(run, stack, model, cluster, notes)
    except (SpecError, ValidationError) as error:
        raise UnsupportedError(f"plan cannot be expressed: {str(error)[:200]}") from error


def _case(run: Run, stack: Stack, model: ModelSpec, cluster: ClusterSpec, notes: list[str]) -> Case:
    precision = precision_of(run, stack, cluster, notes)
    tp, cp, pp = (_given(run, name, notes) for name in ("tp", "cp", "pp"))
    world = run.num_gpus
    if world % (tp * pp * cp):
        if world % (tp * pp) == 0 and run.dp == world // (tp * pp):
            cp = 1
        else:
            raise UnsupportedError(f"tp {tp} x cp {cp} x pp {pp} does not divide {world} GPUs")
    dp, ranks = world // (tp * pp * cp), world // pp
    ep, etp = expert_degrees(run, model, ranks, tp, notes)
    mbs, m, scale = micro_batches(run, dp, pp, notes)
    vpp = virtual_stages(run, model, pp, m, notes)
    recompute = recompute_of(run, stack, model, pp * vpp, notes)
    sharding = sharding_of(run, stack, dp * cp, pp, notes)
    mtp = bool(model.mtp) and run.flags.get("mtp") != "0"
    workload = workload_of(run, stack, model, precision, sharding, mbs * dp * m, mtp)
    options = options_of(run, stack, tp, notes)
    target = target_of(run, stack, options)
    degrees = Degrees(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=ranks // (etp * ep))
    blocks = chunks_of(run, model, pp, vpp, model.mtp.num_layers if mtp and model.mtp else 0, notes)
    pool = cluster.pools[0]
    stages = tuple(
        Stage(
            chunks=tuple(Chunk(order=v * pp + p, blocks=collapse_blocks(blocks[v * pp + p])) for v in range(vpp)),
            degrees=degrees,
            micro_batch_size=mbs,
            recompute=recompute,
            sharding=sharding,
            groups=(
                Group(
                    pool=pool.name,
                    gpu=pool.gpu,
                    ranks=(format_range(p * ranks, (p + 1) * ranks - 1),),
                    micro_batches=m,
                ),
            ),
        )
        for p in range(pp)
    )
    plan = Plan(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, dp=dp, edp=degrees.edp, vpp=vpp, micro_batch_size=mbs,
        num_microbatches=m, schedule="interleaved" if vpp > 1 else "1f1b", sharding=sharding, recompute=recompute,
        stages=stages, options=options,
    )  # fmt: skip
    return Case(
        run, stack, release_of(run.framework, run.release), model, cluster, workload, target, plan, scale, tuple(notes)
    )


def _given(run: Run, name: str, notes: list[str]) -> int:
    value = getattr(run, name)
    if value is None:
        if name in ("tp", "pp"):
            notes.append(f"{name} = 1: not stated")
        return 1
    return int(value)


def precision_of(run: Run, stack: Stack, cluster: ClusterSpec, notes: list[str]) -> str:
    """GEMM precision; 32-bit training runs on tf32 units where the GPU has them (the frameworks' images turn it on)."""
    text = run.precision
    if not text:
        notes.append(f"precision {stack.precision}: default of {run.framework}")
        text = stack.precision
    gpu = cluster.gpu_of(cluster.pools[0])
    if text == "fp32" and gpu.supports("tf32"):
        notes.append("fp32 runs on tf32 units")
        return "tf32"
    found = next((value for name, value in PRECISIONS.items() if text.startswith(name)), None)
    if found is None and text.startswith("fp8"):
        found = "fp8"
    if found is None:
        raise UnsupportedError(f"precision {text!r} is unknown")
    if not gpu.supports(found):
        raise UnsupportedError(f"{gpu.name} has no {found} units")
    return found


def expert_degrees(run: Run, model: ModelSpec, ranks: int, tp: int, notes: list[str]) -> tuple[int, int]:
    """(ep, etp). ETP follows TP unless stated or unless the expert grid then exceeds the stage (Megatron)."""
    if not model.is_moe:
        return 1, tp
    ep = run.ep or 1
    if run.ep is None:
        notes.append("ep = 1: not stated")
    experts = max(kind.feed_forward.num_experts for kind in model.kinds if isinstance(kind.feed_forward, MoEFFN))
    if ep > experts:
        notes.append(f"ep = {experts}: the stated {ep} shards each expert over {ep // experts} ranks")
        ep = experts
    etp = run.etp
    if etp is None:
        etp = tp if ep == 1 else 1
        if tp > 1:
            notes.append(f"etp = {etp}: not stated")
    if ranks % (etp * ep) and ranks % ep == 0:
        notes.append(f"etp = 1: the stated expert grid {ep} x {etp} does not divide the {ranks} ranks of a stage")
        etp = 1
    if ranks % (etp * ep):
        raise UnsupportedError(f"expert grid {ep} x {etp} does not divide the {ranks} ranks of a stage")
    return ep, etp


def micro_batches(run: Run, dp: int, pp: int, notes: list[str]) -> tuple[int, int, float]:
    """(micro-batch size, their number, stated over priced batch)."""
    batch = run.global_batch_size
    mbs = run.micro_batch_size
    if mbs is None:
        each = next((int(run.flags[n]) for n in ("grad_accum", "microbatches") if run.flags.get(n, "").isdigit()), None)
        if run.flags.get("local_batch", "").isdigit() and pp > 1:
            # torchtitan of 2024 cuts the local batch into as many micro-batches as there are stages.
            mbs = max(int(run.flags["local_batch"]) // pp, 1)
            notes.append(f"micro-batch size {mbs}: local batch over stages")
        elif each and batch % (each * dp) == 0:
            mbs = batch // (each * dp)
        else:
            mbs = max(batch // dp, 1) if pp == 1 and batch // dp <= 8 else 1
            notes.append(f"micro-batch size {mbs}: not stated")
    m = max(round(batch / (mbs * dp)), 1)
    scale = batch / (m * mbs * dp)
    if abs(scale - 1) > 1e-9:
        notes.append(f"{m} micro-batches of {mbs} on {dp} replicas make {m * mbs * dp} of {batch} samples")
    return mbs, m, scale


def virtual_stages(run: Run, model: ModelSpec, pp: int, m: int, notes: list[str]) -> int:
    """Chunks a stage; 1 where interleaving cannot run."""
    vpp = run.vpp or 1
    schedule = run.flags.get("schedule", "").lower()
    if run.vpp is None and "interleaved" in schedule and pp > 1:
        vpp = 2
        notes.append("2 virtual stages: interleaved, number not stated")
    if vpp > 1 and (pp == 1 or m < pp or m % pp):
        notes.append(f"priced without its {vpp} virtual stages: {m} micro-batches do not go in groups of {pp}")
        return 1
    if vpp * pp > model.num_layers + 2:
        raise UnsupportedError(f"{vpp * pp} chunks for {model.num_layers} layers")
    return vpp


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
        return RecomputeMode(granularity="selective", modules=("layernorm", "mlp", "alternate_ops"))
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
        notes.append(f"sharding {stack.sharding}: default of {run.framework}")
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


def options_of(run: Run, stack: Stack, tp: int, notes: list[str]) -> Options:
    blank = not run.flags
    overlap = stack.overlap and "no comm overlap" not in run.text
    tp_overlap = run.flag("tp_comm_overlap", stack.tp_overlap and tp > 1) or "asynctp" in run.text
    if blank and stack.overlap:
        notes.append("communication overlap as the framework's default: flags not stated")
    dispatcher = run.flags.get("moe_dispatcher", "")
    flex = "flex" in dispatcher or "deepep" in run.text or "hybridep" in run.text
    graph = run.flags.get("cuda_graph") or run.flags.get("cuda_graphs") or "none"
    if "cudagraph" in run.text:
        graph = "true"
    sequence_parallel = stack.sequence_parallel if run.sequence_parallel is None else run.sequence_parallel
    return Options.parse(
        {
            "sequence_parallel": tp > 1 and sequence_parallel,
            "overlap_grad_reduce": run.flag("overlap_grad_reduce", overlap),
            "overlap_param_gather": run.flag("overlap_param_gather", overlap),
            "tp_comm_overlap": tp > 1 and tp_overlap,
            "overlap_p2p": run.flag("overlap_p2p", True),
            "ep_comm_overlap": run.flag("ep_comm_overlap", False),
            "delay_wgrad": run.flag("delay_wgrad", False),
            "moe_shared_expert_overlap": run.flag("shared_expert_overlap", False),
            "dispatcher": "flex" if flex else stack.dispatcher,
            "cuda_graph": graph not in ("none", "false", ""),
            "cuda_graph_scope": graph_scope(graph),
            "fused_cross_entropy": stack.fused_loss or fused_loss(run),
            "grouped_gemm": stack.grouped,
            # torchtitan's chunked loss takes eight pieces by default.
            "loss_chunks": loss_chunks(run),
            "reshard_after_forward": run.flag("reshard_after_forward", True),
            "activation_offload_layers": offloaded_layers(run),
            "activation_offload_modules": tuple(
                name for name in get_args(OffloadModule) if name in re.split(r"[+,]", run.flags.get("act_offload", ""))
            ),
        }
    )


def loss_chunks(run: Run) -> int | None:
    """Pieces of a chunked loss."""
    stated = run.flags.get("loss_chunks", "")
    if stated.isdigit():
        return int(stated)
    return 8 if "chunkedceloss" in run.text or "chunk loss" in run.text else None


def offloaded_layers(run: Run) -> int:
    """Layers whose activations go to host memory."""
    match = re.search(r"(?:act_cpu_offload_layers|cpu_offloading_num_layers)\W+(\d+)", run.text)
    return int(match[1]) if match else 0


def graph_scope(text: str) -> tuple[str, ...]:
    """Scopes of ``transformer_engine:attn+moe_router``; none stated means whole layers."""
    known = get_args(GraphScope)
    return tuple(scope for scope in known if scope in re.split(r"[:+/]", text))


def target_of(run: Run, stack: Stack, options: Options) -> Target:
    """The base target with the stack's own capabilities."""
    return BASE_TARGET.model_copy(
        update={
            "name": stack.name,
            "framework": stack.name,
            "version": release_of(run.framework, run.release),
            "sequence_parallel": options.sequence_parallel or (run.tp or 1) == 1,
            "fused_attention": fused_attention(run, stack),
            "deepspeed_pipeline": "deepspeed" in stack.name,
            "logit_bytes": logit_bytes(run, stack),
            "fused_activation": stack.name not in TORCH_STACKS or compiled(run, "model"),
            "gradient_placeholders": stack.name in MEGATRON_STACKS
            and not run.flag("no_gradient_accumulation_fusion", False),
            "gradient_buffer": stack.name not in TORCH_STACKS,
            "low_precision_inputs": stack.name != "torchtitan",
            "gathered_inputs_kept": stack.name == "torchtitan" and (run.tp or 1) > 1,
        }
    )


def logit_bytes(run: Run, stack: Stack) -> float | None:
    """Live bytes a logit; torchtitan compiles the loss with the model since 2025."""
    year = max(re.findall(r"\b20[12]\d\b", run.release), default="")
    in_kernel = stack.name == "torchtitan" and year >= "2025" and compiled(run, "loss")
    return 4.0 if fused_loss(run) or in_kernel else stack.logit_bytes


def compiled(run: Run, part: str) -> bool:
    """Whether torch.compile covers ``part`` (``model`` or ``loss``); without a stated part it covers both."""
    return "torch.compile" in run.text or part in run.flags.get("compile", "")


def fused_loss(run: Run) -> bool:
    """Whether the row says that cross-entropy is fused."""
    return bool(re.search(r"\bce fusion|cross_entropy_\w*fusion=true", run.text))


def fused_attention(run: Run, stack: Stack) -> bool:
    """Whether attention runs as one kernel: not in stacks of 2022 and before (flash attention is from mid-2022)."""
    if run.flags.get("attention_backend") == "unfused":
        return False
    years = [int(year) for year in re.findall(r"\b(20[12]\d)\b", run.release + " " + run.row.get("source_path", ""))]
    return stack.flash and not (years and max(years) <= 2022)
