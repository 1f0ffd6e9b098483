"""Facts of candidates and of whole plans, as the exporter of this project would launch them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost_models.graphs import scope_of_search
from meshwright.cost_models.memory import held
from meshwright.cost_models.overlap import default_overlap
from meshwright.specs.attention import LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.batch import CandidateBatch, IntArray
from meshwright.specs.cluster import GpuType
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Hsdp, Options, Plan, Stage, expand_blocks, parse_range
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.workload import Workload

from .expressible import inexpressible
from .facts import Facts
from .layout import Layout
from .logic import Truth
from .torchtitan_models import PYTHON_CONFIG, held_by, pipelines
from .torchtitan_models import inexpressible as inexpressible_in_torchtitan

#: What fine-grained offload needs in the environment (Transformer Engine 2.10 and later); exports set it.
OFFLOAD_ENVIRONMENT = {"NVTE_CPU_OFFLOAD_V1": "1"}
#: Precisions that run on bf16 parameters with quantized matrix products.
FP8_RECIPES = {"fp8": "tensorwise", "mxfp8": "mxfp8"}
#: Sharding levels that Megatron-FSDP runs, by its strategy name; zero1 is the distributed optimizer.
FSDP_STRATEGIES = {"zero2": "optim_grads", "zero3": "optim_grads_params", "fsdp": "optim_grads_params"}


def uses_fsdp(sharding: object) -> bool:
    """Whether a sharding level runs on Megatron-FSDP."""
    return isinstance(sharding, Hsdp) or sharding in FSDP_STRATEGIES


def uses_distributed_optimizer(sharding: object) -> bool:
    """Whether a sharding level needs the distributed optimizer (Megatron-FSDP switches it on)."""
    return sharding == "zero1" or uses_fsdp(sharding)


def version_of(target: Target) -> tuple[int, ...]:
    """A target's version as numbers; ``main`` comes after every release."""
    numbers = re.findall(r"\d+", target.version)
    return tuple(map(int, numbers)) if numbers else (1_000_000,)


def state_dtypes(workload: Workload) -> tuple[str, ...]:
    """Optimizer-state dtypes that only the precision-aware optimizer stores."""
    names = {"main parameters": workload.main_params_dtype, "moments": workload.moments_dtype}
    return tuple(f"{name} {dtype}" for name, dtype in names.items() if dtype != "fp32")


def facts_of_model(
    model: ModelSpec, workload: Workload, target: Target, gpus: Iterable[GpuType] = ()
) -> dict[str, Any]:
    """The facts that depend on neither degrees nor options, as keyword arguments of :class:`Facts`."""
    mtp = (model.mtp.layer,) if workload.mtp and model.mtp else ()
    kinds = [*(model.kinds[index] for index in sorted(set(model.pattern))), *mtp]
    mixers = [kind.attention for kind in kinds if kind.attention]
    softmax = [mixer for mixer in mixers if isinstance(mixer, SoftmaxAttention)]
    mla = [mixer for mixer in mixers if isinstance(mixer, MLAAttention)]
    linear = [mixer for mixer in mixers if isinstance(mixer, LinearAttention)]
    mamba = [mixer for mixer in mixers if isinstance(mixer, MambaMixer)]
    dense = [kind.feed_forward for kind in kinds if isinstance(kind.feed_forward, DenseFFN)]
    moe = [kind.feed_forward for kind in kinds if isinstance(kind.feed_forward, MoEFFN)]
    first = moe[0] if moe else None
    gpus, version = tuple(gpus), version_of(target)
    lacking = tuple(gpu.name for gpu in gpus if not gpu.supports(workload.precision))
    return {
        "rule_set": target.rules,
        "version": version,
        "kv_head_replication": target.kv_head_replication,
        "compute_capabilities": tuple(gpu.compute_capability for gpu in gpus if gpu.compute_capability),
        "environment_follows": True,
        "precision": workload.precision,
        "gpus_without_precision": lacking,
        "precision_alternatives": common_precisions(gpus) if lacking else (),
        **(_of_torchtitan(model, workload, target, version) if target.rules == "torchtitan" else {}),
        "inexpressible": inexpressible_in_torchtitan(model, workload, version)
        if target.rules == "torchtitan"
        else inexpressible(model, workload),
        "global_batch_size": workload.global_batch_size,
        "seq_length": workload.seq_length,
        "max_position_embeddings": model.learned_positions,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "heads": _distinct([*(m.num_heads for m in softmax), *(m.num_heads for m in mla)]),
        "kv_heads": _distinct(mixer.num_kv_heads for mixer in softmax),
        "ffn_hidden_sizes": _distinct(ffn.intermediate_size for ffn in dense),
        "moe_ffn_hidden_sizes": _distinct(ffn.expert_intermediate_size for ffn in moe),
        "shared_ffn_hidden_sizes": _distinct(f.shared_intermediate_size for f in moe if f.shared_intermediate_size),
        "shared_experts": any(ffn.shared_intermediate_size for ffn in moe),
        "linear_heads": _distinct(heads for m in linear for heads in (m.num_key_heads, m.num_value_heads)),
        "linear_head_pairs": _distinct((mixer.num_key_heads, mixer.num_value_heads) for mixer in linear),
        "mamba_heads": _distinct(mixer.num_heads for mixer in mamba),
        "mamba_groups": _distinct(mixer.num_groups for mixer in mamba),
        "experts": _distinct(ffn.num_experts for ffn in moe),
        "topk": first.top_k if first else 0,
        "linear_bias": has_linear_bias(model),
        "tied_embeddings": model.tied_embeddings,
        "mla": bool(mla),
        "gated_delta_net": any(mixer.rule == "gated_delta" for mixer in linear),
        "sparse_attention": any(mixer.top_k for mixer in mla),
        "latent_moe": any(ffn.latent_size for ffn in moe),
        "mtp_num_layers": model.mtp.num_layers if model.mtp and workload.mtp else 0,
        "position_embedding": position_embedding(model),
        "score_function": "sigmoid" if first and first.expert_score_bias else "softmax",
        "pre_softmax": bool(first and first.top_k == 1),
        "expert_score_bias": bool(first and first.expert_score_bias),
        "router_groups": first.num_expert_groups or 0 if first else 0,
        "router_group_topk": first.top_k_groups or 0 if first else 0,
        "capacity_factor": workload.moe_capacity_factor,
        "dispatcher": target.dispatcher,
        "grouped_gemm": bool(moe) and target.grouped_gemm,
        "split": "layout",
        "optimizer": workload.optimizer,
        "precision_aware": bool(state_dtypes(workload)),
        "state_dtypes": state_dtypes(workload),
        "bf16": workload.precision in ("bf16", "fp8", "mxfp8", "nvfp4"),
        "fp16": workload.precision == "fp16",
        "fp8": workload.precision in FP8_RECIPES,
        "fp8_recipe": FP8_RECIPES.get(workload.precision, "delayed"),
        "fp8_param_gather": workload.params_dtype == "fp8",
        "fp4": workload.precision == "nvfp4",
    }


def _of_torchtitan(model: ModelSpec, workload: Workload, target: Target, version: tuple[int, ...]) -> dict[str, Any]:
    """Facts that only torchtitan's rules read."""
    family = held_by(model, version).family
    return {
        "model_family": family,
        "pipelines": pipelines(family, version),
        "compiled": True,
        "attention_backend": "sdpa" if version < PYTHON_CONFIG else "flex",
        "loss_chunks": target.loss_chunks,
    }


def replicas_of(plan: Plan) -> int:
    """Groups of data-parallel ranks that each hold the whole model, sharded or not."""
    if plan.sharding == "none":
        return plan.stages[0].degrees.dp
    return plan.sharding.hsdp.replicate if isinstance(plan.sharding, Hsdp) else plan.options.dist_opt_instances


def facts_of_batch(
    batch: CandidateBatch,
    model: ModelSpec,
    workload: Workload,
    target: Target,
    gpus: Iterable[GpuType] = (),
    chosen: Mapping[str, Any] | None = None,
) -> Facts:
    """Facts of every candidate: degrees as arrays; the layer split is open, so layout rules do not apply.

    ``chosen`` replaces facts, by name, that follow from options beyond those that a search always writes.
    """
    fixed = facts_of_model(model, workload, target, gpus)
    modes, sharded = target.recompute, [held(name) for name in target.sharding]
    levels = [kept.level for kept in sharded]
    distributed = _by_index(batch.sharding, [uses_distributed_optimizer(level) for level in levels])
    replicas = np.where(distributed, _by_index(batch.sharding, [kept.replicas for kept in sharded]), batch.dp)
    usual = default_overlap(model, target.switches, target.context_exchanges)
    facts = Facts(
        **fixed,
        world_size=batch.world_size,
        tp=batch.tp,
        pp=batch.pp,
        cp=batch.cp,
        ep=batch.ep,
        etp=batch.etp,
        dp=batch.dp,
        # A grid that does not divide breaks W2; the floor keeps the other rules defined.
        edp=np.maximum(batch.stage_ranks // (batch.etp * batch.ep), 1),
        vpp=batch.vpp,
        rank_order=target.rank_orders[0],
        micro_batch_size=batch.micro_batch_size,
        num_microbatches=batch.num_microbatches,
        sequence_parallel=(batch.tp > 1) & target.sequence_parallel,
        tp_comm_overlap=(batch.tp > 1) & target.sequence_parallel & ("tp_comm_overlap" in target.switches),
        moe_a2a_overlap=(batch.ep > 1) & ("ep_comm_overlap" in target.switches),
        delay_wgrad=(batch.ep > 1) & ({"ep_comm_overlap", "delay_wgrad"} <= set(target.switches)),
        cuda_graph="local" if "cuda_graph" in target.switches else "none",
        cuda_graph_modules=scope_of_search(model) if "cuda_graph" in target.switches else (),
        cp_comm_type=(usual.context,),
        shared_expert_overlap=usual.shared_expert,
        dp_replicate=replicas,
        # Replicas that do not divide break F4; the floor keeps the other rules defined.
        dp_shard=np.maximum(batch.dp // replicas, 1),
        expert_tensor_degree=np.where(batch.ep > 1, batch.etp, 1),
        reduces_once=_by_index(batch.sharding, [level == "zero1" for level in levels]),
        dist_opt_instances=_by_index(batch.sharding, [kept.replicas for kept in sharded]),
        dist_opt=distributed,
        megatron_fsdp=_by_index(batch.sharding, [uses_fsdp(level) for level in levels]),
        ckpt_format=_by_index(batch.sharding, [checkpoint_format(level) for level in levels]),
        overlap_grad_reduce=target.overlap_grad_reduce,
        overlap_param_gather=distributed & target.overlap_param_gather,
        **_recompute(modes, lambda values: _by_index(batch.recompute, values)),
    )
    return replace(facts, **chosen) if chosen else facts


def facts_of_plan(
    plan: Plan, model: ModelSpec, workload: Workload, target: Target, gpus: Iterable[GpuType] = ()
) -> Facts:
    """Facts of one plan, with the layout that its stage chunks spell."""
    first, options = plan.stages[0], plan.options
    degrees = first.degrees
    layout, fault = layout_of_plan(plan)
    fixed = facts_of_model(model, workload, target, gpus)
    return Facts(
        **{
            **fixed,
            "dispatcher": options.dispatcher or target.dispatcher,
            "grouped_gemm": options.grouped_gemm,
            **_offload(options),
        },
        world_size=plan.num_ranks,
        tp=degrees.tp,
        pp=plan.pp,
        cp=degrees.cp,
        ep=degrees.ep,
        etp=degrees.etp,
        dp=degrees.dp,
        edp=degrees.edp,
        vpp=plan.vpp,
        rank_order=plan.rank_order,
        uniform_stages=_uniform(plan),
        rank_fault=rank_fault(plan),
        dist_opt_instances=plan.sharding.hsdp.replicate
        if isinstance(plan.sharding, Hsdp)
        else options.dist_opt_instances,
        dp_replicate=replicas_of(plan),
        dp_shard=max(degrees.dp // replicas_of(plan), 1),
        expert_tensor_degree=degrees.etp if degrees.ep > 1 else 1,
        reduces_once=plan.sharding == "zero1",
        micro_batch_size=first.micro_batch_size,
        num_microbatches=plan.num_microbatches,
        microbatch_group_size=options.vp_group_size or 0,
        schedule=plan.schedule,
        schedules=target.schedules,
        layout=layout,
        layout_fault=fault,
        stage_pools=tuple(tuple(dict.fromkeys(group.pool for group in stage.groups)) for stage in plan.stages),
        overlap_p2p=options.overlap_p2p,
        sequence_parallel=options.sequence_parallel and degrees.tp > 1,
        tp_comm_overlap=options.tp_comm_overlap,
        cp_comm_type=((options.cp_comm_type if degrees.cp > 1 else None) or "p2p",),
        hierarchical_cp_sizes=context_sizes(plan),
        shared_expert_overlap=options.moe_shared_expert_overlap,
        moe_a2a_overlap=options.ep_comm_overlap,
        delay_wgrad=options.delay_wgrad,
        fp8_dispatch=options.fp8_dispatch,
        bucket_flags=("--ddp-bucket-size",) if options.grad_bucket_params else (),
        dist_opt=uses_distributed_optimizer(plan.sharding),
        megatron_fsdp=uses_fsdp(plan.sharding),
        ckpt_format=checkpoint_format(plan.sharding),
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        cuda_graph="local" if options.cuda_graph else "none",
        cuda_graph_modules=() if "full_iteration" in options.cuda_graph_scope else options.cuda_graph_scope,
        **_recompute((first.recompute,), lambda values: values[0]),
        recompute_method=first.recompute.method,
    )


def _offload(options: Options) -> dict[str, Any]:
    """What an export says of host memory: the optimizer there is a precision-aware one."""
    out: dict[str, Any] = {
        "cpu_offload_layers": options.activation_offload_layers,
        "fine_grained_offload": bool(options.activation_offload_modules),
        "offload_modules": options.activation_offload_modules,
        "optimizer_cpu_offload": options.optimizer_offload_fraction > 0,
    }
    if options.activation_offload_modules:
        out["environment"] = OFFLOAD_ENVIRONMENT
    return out | ({"precision_aware": True} if options.optimizer_offload_fraction else {})


def context_sizes(plan: Plan) -> tuple[int, ...]:
    """Sizes of the all-to-all and the ring of context parallelism by ``a2a+p2p``; () without it or without a size."""
    cp, inner = plan.stages[0].degrees.cp, plan.options.cp_a2a_size
    if cp == 1 or plan.options.cp_comm_type != "a2a+p2p" or inner is None:
        return ()
    return inner, cp // inner


def checkpoint_format(sharding: object) -> str:
    """Checkpoint format that the sharding level needs."""
    return "fsdp_dtensor" if uses_fsdp(sharding) else "torch_dist"


def has_linear_bias(model: ModelSpec) -> bool:
    """Whether linear maps carry biases (Megatron has one switch for all of them)."""
    return any(
        (isinstance(kind.feed_forward, DenseFFN | MoEFFN) and kind.feed_forward.bias)
        or (isinstance(kind.attention, SoftmaxAttention) and kind.attention.out_bias)
        for kind in model.kinds
    )


def position_embedding(model: ModelSpec) -> str:
    """Megatron's word for the model's position embedding."""
    return "learned_absolute" if model.learned_positions else "rope" if model.rotary else "none"


def common_precisions(gpus: Iterable[GpuType]) -> tuple[str, ...]:
    """Precisions that every GPU type has, e.g. ``("precision=fp16",)``."""
    names = [set(gpu.peak_flops) for gpu in gpus]
    return tuple(f"precision={name}" for name in sorted(set.intersection(*names))) if names else ()


def layout_of_plan(plan: Plan) -> tuple[Layout | None, str]:
    """The layout of the plan's chunks, or None and what is wrong with them."""
    chunks = sorted((chunk.order, p, v, chunk) for p, s in enumerate(plan.stages) for v, chunk in enumerate(s.chunks))
    if len(plan.stages) != plan.pp or any(len(stage.chunks) != plan.vpp for stage in plan.stages):
        return None, f"the plan must have PP {plan.pp} stages of {plan.vpp} chunks each"
    if any(order != virtual * plan.pp + stage for order, stage, virtual, _ in chunks):
        return None, "chunk v of stage p must come at place v x PP + p along the pipeline"
    blocks = [[block for block in expand_blocks(chunk.blocks) if block[0] != "vision"] for *_, chunk in chunks]
    seen: dict[str, int] = {}
    for kind, index in (block for chunk in blocks for block in chunk):
        if index != seen.get(kind, 0):
            return None, f"block {kind}:{index} is repeated or out of order; {kind}:{seen.get(kind, 0)} was due"
        seen[kind] = index + 1
    return Layout.from_blocks(blocks), ""


def rank_fault(plan: Plan) -> str:
    """What is wrong with who runs each stage; Megatron numbers the ranks of a stage in one run and shares evenly."""
    per_stage = plan.num_ranks // plan.pp
    first = plan.stages[0].degrees
    block = per_stage if plan.rank_order.endswith("pp") else min(first.tp * first.cp, per_stage)
    for index, stage in enumerate(plan.stages):
        ranks = [rank for group in stage.groups for text in group.ranks for rank in parse_range(text)]
        starts = range(index * block, plan.num_ranks, plan.pp * block)
        wanted = [start + rank for start in starts for rank in range(block)]
        if ranks != wanted and block < per_stage:
            return f"stage {index} must run on {block} ranks of every {plan.pp * block}, from rank {index * block} on"
        if ranks != wanted:
            return f"stage {index} must run on ranks {index * per_stage}-{(index + 1) * per_stage - 1}"
        if any(group.micro_batches != plan.num_microbatches for group in stage.groups):
            return f"stage {index} shares micro-batches unevenly between its groups"
    return ""


def _uniform(plan: Plan) -> bool:
    def key(stage: Stage) -> tuple[object, ...]:
        return stage.degrees, stage.micro_batch_size, stage.recompute, stage.sharding

    first = plan.stages[0]
    return all(key(stage) == key(first) for stage in plan.stages) and (
        plan.micro_batch_size in (None, first.micro_batch_size)
        and plan.recompute == first.recompute
        and plan.sharding == first.sharding
    )


def _recompute(modes: tuple[RecomputeMode, ...], pick: Callable[[list[Any]], Truth]) -> dict[str, Any]:
    modules = sorted({module for mode in modes for module in mode.modules})
    return {
        "recompute_full": pick([mode.granularity == "full" for mode in modes]),
        "recompute_selective": pick([mode.granularity == "selective" for mode in modes]),
        # The exporter writes uniform groups of one layer where a full mode names no method.
        "recompute_method_given": pick([mode.granularity == "full" for mode in modes]),
        "recompute_layers_given": pick([mode.granularity == "full" for mode in modes]),
        "recompute_modules": {name: pick([name in mode.modules for mode in modes]) for name in modules},
    }


def _by_index(index: IntArray, values: list[Any]) -> Any:
    return np.array(values)[index]


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(set(values)))
