"""Settings of a plan by Bridge key: degrees, split, batch, memory, overlap, numerics, and the model."""

from __future__ import annotations

from typing import Any

from meshwright.planner.rules import (
    FSDP_STRATEGIES,
    OFFLOAD_ENVIRONMENT,
    context_sizes,
    layout_of_plan,
    state_dtypes,
    uses_fsdp,
)
from meshwright.specs.attention import LinearAttention, MLAAttention
from meshwright.specs.document import PlanDocument
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Hsdp, Plan
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

from ..launch import plan_in
from ..megatron import read_arguments
from ..megatron.model_flags import expert_flags, model_flags
from ..megatron.plan_flags import even_layout
from .precisions import RECIPE_OF, RECIPES
from .translate import RENAMED

Settings = dict[str, Any]

_RENAMED = {dest: key for key, dest in RENAMED.items()}
#: Arguments of the model that Bridge says in other words, or in the tokenizer.
_REWORDED = (
    "swiglu",
    "quick_geglu",
    "squared_relu",
    "untie_embeddings_and_output_weights",
    "group_query_attention",
    "apply_layernorm_1p",
    "max_position_embeddings",
    "bias_gelu_fusion",
)


def bridge_settings(document: PlanDocument) -> dict[str, Settings]:
    """All settings of a document's plan by section. The plan must be legal."""
    plan = plan_in(document)
    model, workload, target = document.inputs.model, document.inputs.workload, document.inputs.target
    return {
        "Model": model_settings(model, workload, target),
        "Batch": {
            "train.micro_batch_size": plan.stages[0].micro_batch_size,
            "train.global_batch_size": workload.global_batch_size,
            "model.seq_length": workload.seq_length,
            "dataset.seq_length": workload.seq_length,
        },
        "Parallelism": parallel_settings(plan, model, workload),
        "Memory": memory_settings(plan),
        "Overlap and kernels": overlap_settings(plan, model),
        "Numerics": numeric_settings(workload),
    }


def model_settings(model: ModelSpec, workload: Workload, target: Target) -> Settings:
    """The architecture: Megatron's own names, as they are fields of the provider."""
    flags = [*model_flags(model, workload, target), *expert_flags(model, workload)]
    given = dict(read_arguments([part for flag in flags for part in flag]).given)
    moe_or_dense = [kind.feed_forward for kind in model.layers if kind.feed_forward]
    gated = bool(moe_or_dense and moe_or_dense[0].gated)
    out: Settings = {
        _RENAMED.get(dest, f"model.{dest}"): value for dest, value in given.items() if dest not in _REWORDED
    }
    out["model.gated_linear_unit"] = gated
    out["model.activation_func"] = (
        "quick_gelu"
        if given.get("quick_geglu")
        else "silu"
        if gated
        else "squared_relu"
        if given.get("squared_relu")
        else "gelu"
    )
    out["model.bias_activation_fusion"] = gated or not given.get("squared_relu")
    out["model.share_embeddings_and_output_weights"] = model.tied_embeddings
    if model.norm == "LayerNorm1P":
        out["model.layernorm_zero_centered_gamma"] = True
    out["model.should_pad_vocab"] = True
    out.pop("model.dropout", None)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in out.items()}


def provider_of(model: ModelSpec) -> str:
    """Which class of Bridge holds the model."""
    latent = any(isinstance(kind.attention, MLAAttention) for kind in model.kinds)
    return "MLAModelProvider" if latent else "GPTModelProvider"


def layer_spec_of(model: ModelSpec) -> str:
    """The function that names the layers' classes: one block spec where layers differ, one layer spec where not."""
    linear = any(isinstance(kind.attention, LinearAttention) for kind in model.kinds)
    if linear or any(isinstance(kind.attention, MLAAttention) and kind.attention.top_k for kind in model.kinds):
        return "experimental"
    moe = any(isinstance(kind.feed_forward, MoEFFN) for kind in model.kinds)
    return "block" if moe else "default"


def parallel_settings(plan: Plan, model: ModelSpec, workload: Workload) -> Settings:
    """Every degree, written out, and how the layers are split."""
    degrees, options = plan.stages[0].degrees, plan.options
    out: Settings = {
        "model.tensor_model_parallel_size": degrees.tp,
        "model.pipeline_model_parallel_size": plan.pp,
        "model.virtual_pipeline_model_parallel_size": plan.vpp if plan.vpp > 1 else None,
        "model.pipeline_model_parallel_layout": None,
        "model.context_parallel_size": degrees.cp,
        "model.expert_model_parallel_size": degrees.ep,
        "model.expert_tensor_parallel_size": degrees.etp,
        "model.sequence_parallel": options.sequence_parallel and degrees.tp > 1,
        "dist.use_tp_pp_dp_mapping": plan.rank_order == "tp-cp-ep-pp-dp",
    }
    layout, fault = layout_of_plan(plan)
    if layout is None:
        raise ValueError(fault)
    mtp = model.mtp.num_layers if model.mtp and workload.mtp else 0
    if layout != even_layout(model.num_layers, mtp, plan.pp, plan.vpp):
        out["model.pipeline_model_parallel_layout"] = layout.format()
    if degrees.cp > 1:
        out["model.cp_comm_type"] = options.cp_comm_type or "p2p"
        sizes = context_sizes(plan)
        if sizes:
            out["model.hierarchical_context_parallel_sizes"] = list(sizes)
    if plan.vpp > 1 and options.vp_group_size and options.vp_group_size != plan.pp:
        out["model.microbatch_group_size_per_vp_stage"] = options.vp_group_size
    return out


def memory_settings(plan: Plan) -> Settings:
    """Recompute, data-parallel sharding, and what lives in host memory."""
    mode, sharding, options = plan.stages[0].recompute, plan.sharding, plan.options
    full, sharded = mode.granularity == "full", uses_fsdp(sharding)
    out: Settings = {
        "model.recompute_granularity": None if mode.granularity == "none" else mode.granularity,
        "model.recompute_modules": list(mode.modules) if mode.granularity == "selective" else None,
        "model.recompute_method": (mode.method or "uniform") if full else None,
        "model.recompute_num_layers": (mode.num_layers or 1) if full else None,
        "ddp.use_distributed_optimizer": sharded or sharding == "zero1",
        "optimizer.use_distributed_optimizer": sharded or sharding == "zero1",
        "ddp.use_megatron_fsdp": sharded,
        "ddp.data_parallel_sharding_strategy": "no_shard",
    }
    if sharded:
        out["ddp.data_parallel_sharding_strategy"] = (
            "optim_grads_params" if isinstance(sharding, Hsdp) else FSDP_STRATEGIES[str(sharding)]
        )
        out["checkpoint.ckpt_format"] = "fsdp_dtensor"
        out["ddp.average_in_collective"] = False
    instances = sharding.hsdp.replicate if isinstance(sharding, Hsdp) else options.dist_opt_instances
    if instances > 1:
        out["ddp.num_distributed_optimizer_instances"] = instances
    if options.optimizer_offload_fraction:
        out |= {
            "optimizer.optimizer_cpu_offload": True,
            "optimizer.optimizer_offload_fraction": options.optimizer_offload_fraction,
            "optimizer.overlap_cpu_optimizer_d2h_h2d": options.optimizer_offload_overlap,
            "optimizer.use_precision_aware_optimizer": True,
        }
    if options.activation_offload_layers:
        out |= {
            "model.cpu_offloading": True,
            "model.cpu_offloading_num_layers": options.activation_offload_layers,
        }
    if options.activation_offload_modules:
        out |= {
            "model.fine_grained_activation_offloading": True,
            "model.offload_modules": list(options.activation_offload_modules),
            # A new key of a mapping, which Hydra adds only where told to.
            **{f"++env_vars.{name}": value for name, value in OFFLOAD_ENVIRONMENT.items()},
        }
    return out


def overlap_settings(plan: Plan, model: ModelSpec) -> Settings:
    """Communication overlap, fusions, expert dispatch, CUDA graphs."""
    options = plan.options
    out: Settings = {
        "comm_overlap.tp_comm_overlap": options.tp_comm_overlap,
        "comm_overlap.overlap_moe_expert_parallel_comm": options.ep_comm_overlap,
        "comm_overlap.delay_wgrad_compute": options.delay_wgrad,
        "comm_overlap.overlap_grad_reduce": options.overlap_grad_reduce,
        "comm_overlap.overlap_param_gather": options.overlap_param_gather,
        "ddp.overlap_grad_reduce": options.overlap_grad_reduce,
        "ddp.overlap_param_gather": options.overlap_param_gather,
        "model.cross_entropy_loss_fusion": options.fused_cross_entropy,
    }
    if plan.vpp > 1:
        out["comm_overlap.overlap_p2p_comm"] = options.overlap_p2p
        out["comm_overlap.batch_p2p_comm"] = not options.overlap_p2p
    if options.grad_bucket_params:
        out |= {
            "ddp.bucket_size": options.grad_bucket_params,
            "comm_overlap.bucket_size": options.grad_bucket_params,
        }
    if model.is_moe:
        out |= {
            "model.moe_token_dispatcher_type": options.dispatcher or "alltoall",
            "model.moe_grouped_gemm": options.grouped_gemm,
            "model.moe_shared_expert_overlap": options.moe_shared_expert_overlap,
        }
    if options.cuda_graph:
        whole = not options.cuda_graph_scope or "full_iteration" in options.cuda_graph_scope
        out |= {
            "model.cuda_graph_impl": "full_iteration" if whole else "transformer_engine",
            "model.cuda_graph_modules": [] if whole else list(options.cuda_graph_scope),
            "model.use_te_rng_tracker": True,
            "rng.te_rng_tracker": True,
            "rerun_state_machine.check_for_nan_in_loss": False,
        }
    return out


def numeric_settings(workload: Workload) -> Settings:
    """Precision, as fields of the recipe that train.py starts from, and dtypes of gradients and optimizer states."""
    out: Settings = {}
    recipe = RECIPE_OF.get(workload.precision)
    if recipe:
        fields = dict(RECIPES[recipe])
        gathered = workload.params_dtype == "fp8"
        if "fp8_param_gather" in fields:
            fields["fp8_param_gather"] = gathered
        if "fp4_param_gather" in fields:
            fields["fp4_param_gather"] = False
        if "reuse_grad_buf_for_mxfp8_param_ag" in fields:
            fields["reuse_grad_buf_for_mxfp8_param_ag"] = gathered
        if workload.precision == "fp8":
            fields["first_last_layers_bf16"] = False
        fields["grad_reduce_in_fp32"] = workload.gradient_dtype == "fp32"
        out |= {f"mixed_precision.{name}": value for name, value in fields.items()}
    else:
        out["mixed_precision"] = None
    out["optimizer.optimizer"] = workload.optimizer
    if state_dtypes(workload):
        out |= {
            "optimizer.use_precision_aware_optimizer": True,
            "optimizer.main_params_dtype": _torch(workload.main_params_dtype),
            "optimizer.exp_avg_dtype": _torch(workload.moments_dtype),
            "optimizer.exp_avg_sq_dtype": _torch(workload.moments_dtype),
        }
    return out


def _torch(dtype: str) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}.get(dtype, dtype)
