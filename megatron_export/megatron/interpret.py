"""Facts of an argument list: every quantity that Megatron derives from its arguments before training starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.rules import Facts, Violation, violations
from meshwright.specs.errors import SpecError

from .arguments import MegatronArguments, read_arguments
from .derived import ffn_hidden_size, moe_layers, num_layers, parse_layout, precision, virtual_stages
from .flags import NEWEST, version_number

#: What the launch scripts of the target export unless told otherwise (Hopper and before need it for TP and CP).
DEFAULT_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
DEFAULT_TE_VERSION = "2.12.0"
_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_REMOVED = ("batch_size", "warmup", "model_parallel_size", "checkpoint_activations")
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "seq_length",
    "vocab_size",
)
_REQUIRED = ("hidden_size", "num_attention_heads", "max_position_embeddings", "micro_batch_size")


def check_arguments(
    source: str | Sequence[str],
    world_size: int,
    env: Mapping[str, str] | None = None,
    te_version: str | None = DEFAULT_TE_VERSION,
    sm: float | None = 9.0,
    version: str = NEWEST,
) -> list[Violation]:
    """Every rule of a version that the arguments break; what its parser itself refuses is rule ``megatron.A0``."""
    try:
        facts = facts_from_arguments(read_arguments(source, version), world_size, env, te_version, sm)
    except SpecError as error:
        return [
            Violation("megatron.A0", f"{fault.pointer.lstrip('/')} {fault.message}".strip(), fault.alternatives)
            for fault in error.faults
        ]
    return violations(facts)


def facts_from_arguments(
    args: MegatronArguments,
    world_size: int,
    env: Mapping[str, str] | None = None,
    te_version: str | None = DEFAULT_TE_VERSION,
    sm: float | None = 9.0,
) -> Facts:
    """Facts of ``args`` launched on ``world_size`` ranks.

    ``env`` overrides what the script exports, which overrides :data:`DEFAULT_ENVIRONMENT`; an empty value means
    unset. ``te_version`` None means that TransformerEngine is not installed, ``sm`` None that the GPU is unknown.
    """
    sizes, not_positive = _positive(args)
    tp, pp, cp = (
        sizes[f"{name}_size"] for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    ep, etp = sizes["expert_model_parallel_size"], sizes["expert_tensor_parallel_size"]
    gtp = max((args["tensor_parallel_num_weight_shards"] or tp) // tp, 1)
    expert_gtp = max((args["expert_tensor_parallel_num_weight_shards"] or etp) // etp, 1)
    dp = max(world_size // (tp * pp * cp * gtp), 1)
    micro_batch = sizes["micro_batch_size"]
    global_batch = sizes["global_batch_size"] or micro_batch * dp * gtp
    if world_size < 1:
        not_positive += ("world size",)
    layers = num_layers(args)
    environment = {**DEFAULT_ENVIRONMENT, **args.environment, **(env or {})}
    return Facts(
        version=version_number(args.version),
        compute_capabilities=() if sm is None else (sm,),
        te_version=None if te_version is None else version_number(te_version),
        environment={name: value for name, value in environment.items() if value},
        precision=precision(args),
        world_size=max(world_size, 1),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=max(world_size // (etp * ep * pp * expert_gtp), 1),
        weight_shards=args["tensor_parallel_num_weight_shards"] or 0,
        expert_weight_shards=args["expert_tensor_parallel_num_weight_shards"] or 0,
        rank_order="tp-cp-ep-pp-dp" if args["use_tp_pp_dp_mapping"] else "tp-cp-ep-dp-pp",
        dist_opt_instances=sizes["num_distributed_optimizer_instances"],
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        num_microbatches=max(global_batch // (micro_batch * dp * gtp), 1),
        eval_micro_batch_size=args["eval_micro_batch_size"] or 0,
        eval_global_batch_size=args["eval_global_batch_size"] or 0,
        decrease_batch_size=args["decrease_batch_size_if_needed"],
        batch_schedule_with_global_batch=bool(args["step_batch_size_schedule"] and args["global_batch_size"]),
        missing=_missing(args),
        not_positive=not_positive,
        **_model(args, layers),
        **_pipeline(args, pp, layers),
        **_parallelism(args, tp),
        **_experts(args),
        **_data_parallelism(args),
        **_activations(args),
        **_training(args),
    )


def _positive(args: MegatronArguments) -> tuple[dict[str, int], tuple[str, ...]]:
    """Sizes that must be positive, clamped to 1 where they are not, and the names of those."""
    sizes = {
        "tensor_model_parallel_size": args["tensor_model_parallel_size"],
        "pipeline_model_parallel_size": args["pipeline_model_parallel_size"],
        "context_parallel_size": args["context_parallel_size"],
        "expert_model_parallel_size": args["expert_model_parallel_size"],
        "expert_tensor_parallel_size": args["expert_tensor_parallel_size"],
        "num_distributed_optimizer_instances": args["num_distributed_optimizer_instances"],
        "micro_batch_size": args["micro_batch_size"],
        "global_batch_size": args["global_batch_size"],
    }
    if sizes["expert_tensor_parallel_size"] is None:
        sizes["expert_tensor_parallel_size"] = sizes["tensor_model_parallel_size"]
    checked = {**sizes, **{name: args[name] for name in _SIZES}}
    wrong = tuple(f"--{name.replace('_', '-')}" for name, value in checked.items() if value is not None and value < 1)
    return {
        name: 0 if value is None and name == "global_batch_size" else max(value or 1, 1)
        for name, value in sizes.items()
    }, wrong


def _missing(args: MegatronArguments) -> tuple[str, ...]:
    names = [name for name in _REQUIRED if args[name] is None]
    if not num_layers(args):
        names.insert(0, "num_layers")
    if args["seq_length"] is None and args["encoder_seq_length"] is None:
        names.append("seq_length")
    return tuple(f"--{name.replace('_', '-')}" for name in names)


def _model(args: MegatronArguments, layers: int) -> dict[str, Any]:
    heads = args["num_attention_heads"] or 1
    moe = moe_layers(args)
    experts = args["num_experts"] or 0
    frequency = args["moe_layer_freq"]
    mixed = 0 in frequency if isinstance(frequency, list) else frequency > 1
    expert_width = args["moe_ffn_hidden_size"] or (ffn_hidden_size(args) if experts else None)
    if not experts and mixed and version_number(args.version) >= (0, 18):
        expert_width = None  # since then Megatron only warns: dense layers of a mixed model
    hybrid = args["hybrid_layer_pattern"] or ""
    delta = args["experimental_attention_variant"] == "gated_delta_net" or "G" in hybrid
    linear = (args["linear_num_key_heads"], args["linear_num_value_heads"])
    mamba_heads = args["mamba_num_heads"] or 2 * (args["hidden_size"] or 1) // max(args["mamba_head_dim"], 1)
    shared = args["moe_shared_expert_intermediate_size"] if experts else None
    return {
        "seq_length": args["seq_length"] or args["encoder_seq_length"] or 1,
        "max_position_embeddings": args["max_position_embeddings"] or 0,
        "num_layers": layers or 1,
        "hidden_size": args["hidden_size"] or 1,
        "heads": (heads,),
        "kv_heads": (args["num_query_groups"] if args["group_query_attention"] else heads,),
        "head_dim_given": args["kv_channels"] is not None,
        "ffn_hidden_sizes": (ffn_hidden_size(args),) if not all(moe) or not layers else (),
        "moe_ffn_hidden_sizes": (expert_width,) if expert_width and (any(moe) or not experts) else (),
        "shared_ffn_hidden_sizes": (shared,) if shared and any(moe) else (),
        "linear_heads": linear if delta else (),
        "linear_head_pairs": (linear,) if delta else (),
        "mamba_heads": (mamba_heads,) if "M" in hybrid else (),
        "mamba_groups": (args["mamba_num_groups"],) if "M" in hybrid else (),
        "experts": (experts,) if experts else (),
        "topk": args["moe_router_topk"],
        "moe_layer_pattern_length": len(frequency) if experts and isinstance(frequency, list) else None,
        "linear_bias": args["add_bias_linear"],
        "tied_embeddings": not args["untie_embeddings_and_output_weights"],
        "mla": args["multi_latent_attention"] or "+" in hybrid or "D" in hybrid,
        "group_query_attention": args["group_query_attention"],
        "gated_delta_net": delta,
        "sparse_attention": args["experimental_attention_variant"] == "dsa" or "D" in hybrid,
        "latent_moe": args["moe_latent_size"] is not None,
        "mtp_num_layers": args["mtp_num_layers"] or 0,
        "position_embedding": "rope" if args["use_rotary_position_embeddings"] else args["position_embedding_type"],
        "rope_fusion": args["apply_rope_fusion"] and args["position_embedding_type"] == "rope",
        "rope_type": args["rope_type"],
        "swiglu": args["swiglu"],
        "squared_relu": args["squared_relu"],
        "quick_geglu": args["quick_geglu"],
    }


def _pipeline(args: MegatronArguments, pp: int, layers: int) -> dict[str, Any]:
    layout, fault = parse_layout(args)
    hybrid = args["hybrid_layer_pattern"]
    bars = hybrid.split("/")[0].count("|") if hybrid else 0
    flags = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    has_layout = args["pipeline_model_parallel_layout"] is not None
    return {
        "vpp": virtual_stages(args, pp, layers),
        "split": "hybrid" if hybrid else "layout" if has_layout else "even",
        "vpp_flags": tuple(f"--{name.replace('_', '-')}" for name in flags if args[name] is not None),
        "layers_per_virtual_stage": args["num_layers_per_virtual_pipeline_stage"],
        "first_stage_layers": args["decoder_first_pipeline_num_layers"],
        "last_stage_layers": args["decoder_last_pipeline_num_layers"],
        "account_for_embedding": args["account_for_embedding_in_pipeline_split"],
        "account_for_loss": args["account_for_loss_in_pipeline_split"],
        "layout": layout,
        "layout_fault": fault,
        "hybrid_segments": bars + 1 if hybrid else None,
        "hybrid_has_bars": bars > 0,
        "overlap_p2p": args["overlap_p2p_comm"],
        "microbatch_group_size": args["microbatch_group_size_per_vp_stage"] or 0,
        "p2p_backend": args["pipeline_model_parallel_comm_backend"] or "",
        "defer_embedding_wgrad": args["defer_embedding_wgrad_compute"],
        "grad_accumulation_fusion": args["gradient_accumulation_fusion"],
    }


def _parallelism(args: MegatronArguments, tp: int) -> dict[str, Any]:
    return {
        "sequence_parallel": args["sequence_parallel"] and tp > 1,
        "tp_comm_overlap": args["tp_comm_overlap"],
        "transformer_impl": args["transformer_impl"],
        "cp_comm_type": tuple(args["cp_comm_type"]),
        "hierarchical_cp_sizes": tuple(args["hierarchical_context_parallel_sizes"] or ()),
        "hybrid_cp": args["hybrid_context_parallel"],
        "per_token_loss": args["calculate_per_token_loss"],
        "dataloader_type": args["dataloader_type"] or "single",
    }


def _experts(args: MegatronArguments) -> dict[str, Any]:
    balancing = args["moe_router_load_balancing_type"]
    balancing = tuple(balancing) if isinstance(balancing, list) else (balancing,)
    coefficients = args["moe_aux_loss_coeff"]
    capacity = args["moe_expert_capacity_factor"]
    return {
        "dispatcher": args["moe_token_dispatcher_type"],
        "flex_backend": args["moe_flex_dispatcher_backend"],
        "deepep": args["moe_enable_deepep"],
        "capacity_factor": capacity if capacity is None or capacity >= 0 else None,
        "pad_to_capacity": args["moe_pad_expert_input_to_capacity"],
        "rank_capacity_factor": args["moe_expert_rank_capacity_factor"],
        "load_balancing": balancing,
        "aux_loss_coefficients": len(coefficients) if isinstance(coefficients, list) else 1,
        "score_function": args["moe_router_score_function"],
        "pre_softmax": args["moe_router_pre_softmax"],
        "expert_score_bias": args["moe_router_enable_expert_bias"],
        "router_groups": args["moe_router_num_groups"] or 0,
        "router_group_topk": args["moe_router_group_topk"] or 0,
        "shared_experts": args["moe_shared_expert_intermediate_size"] is not None,
        "shared_expert_overlap": args["moe_shared_expert_overlap"],
        "moe_a2a_overlap": args["overlap_moe_expert_parallel_comm"],
        "delay_wgrad": args["delay_wgrad_compute"],
        "dispatch_backward_overlap": args["overlap_dispatch_backward_with_experts_wgrad"],
        "grouped_gemm": args["moe_grouped_gemm"],
        "permute_fusion": args["moe_permute_fusion"],
        "pad_for_quantization": args["moe_router_padding_for_quantization"] or args["moe_router_padding_for_fp8"],
    }


def _data_parallelism(args: MegatronArguments) -> dict[str, Any]:
    buckets = [name for name in ("ddp_bucket_size", "ddp_num_buckets") if args[name] is not None]
    return {
        "optimizer": args["optimizer"],
        "dist_opt": args["use_distributed_optimizer"] or args["use_megatron_fsdp"],
        "megatron_fsdp": args["use_megatron_fsdp"],
        "torch_fsdp2": args["use_torch_fsdp2"],
        "overlap_grad_reduce": args["overlap_grad_reduce"],
        "overlap_param_gather": args["overlap_param_gather"],
        "param_gather_with_step": args["overlap_param_gather_with_optimizer_step"],
        "average_in_collective": args["ddp_average_in_collective"],
        "ckpt_format": args["ckpt_format"],
        "gloo": args["use_gloo_process_groups"],
        "bucket_flags": tuple(f"--{name.replace('_', '-')}" for name in buckets),
        "precision_aware": args["use_precision_aware_optimizer"],
        "optimizer_cpu_offload": args["optimizer_cpu_offload"],
        "state_dtypes": tuple(f"{name} {args[name]}" for name in _DTYPES if args[name] != "fp32"),
        "single_grouped_weight": args["moe_single_grouped_weight"] or args["moe_single_grouped_bias"],
        "bf16": args["bf16"],
        "fp16": args["fp16"],
        "fp8": args["fp8"] is not None,
        "fp8_recipe": args["fp8_recipe"],
        "fp8_param_gather": args["fp8_param_gather"],
        "fp4": args["fp4"] is not None,
        "fp4_param_gather": args["fp4_param_gather"],
        "reuse_grad_buffer": args["reuse_grad_buf_for_mxfp8_param_ag"],
    }


def _activations(args: MegatronArguments) -> dict[str, Any]:
    granularity = "selective" if args["recompute_activations"] else args["recompute_granularity"]
    modules = args["recompute_modules"] or ["core_attn"]
    if args["moe_layer_recompute"]:
        modules = [*modules, "moe"]
    return {
        "recompute_full": granularity == "full",
        "recompute_selective": granularity == "selective" or args["moe_layer_recompute"],
        "recompute_method": args["recompute_method"],
        "recompute_method_given": args["recompute_method"] is not None,
        "recompute_layers_given": args["recompute_num_layers"] is not None,
        "recompute_modules": dict.fromkeys(modules, True),
        "distribute_saved_activations": args["distribute_saved_activations"],
        "cpu_offload_layers": args["cpu_offloading_num_layers"],
        "fine_grained_offload": args["fine_grained_activation_offloading"],
        "offload_modules": tuple(args["offload_modules"]),
        "cuda_graph": _cuda_graph(args),
        "cuda_graph_modules": tuple(name for name in _graph_scope(args) if name != "full_iteration"),
        "graph_padding": args["moe_pad_experts_for_cuda_graph_inference"],
        "attention_dropout": args["attention_dropout"],
        "hidden_dropout": args["hidden_dropout"],
        "nan_check": args["check_for_nan_in_loss_and_grad"] and not args["fp16"],
    }


def _cuda_graph(args: MegatronArguments) -> str:
    if args["enable_cuda_graph"]:
        return "local"
    implementation = "transformer_engine" if args["external_cuda_graph"] else str(args["cuda_graph_impl"])
    return "full_iteration" if "full_iteration" in _graph_scope(args) else implementation


def _graph_scope(args: MegatronArguments) -> list[str]:
    """What CUDA graphs capture; until 0.17 the whole iteration was one of the scopes."""
    if version_number(args.version) >= (0, 18):
        return list(args["cuda_graph_scope_deprecated"] or args["cuda_graph_modules"])
    return [name for name in args["cuda_graph_scope"] if name != "full"]


def _training(args: MegatronArguments) -> dict[str, Any]:
    paths = ("train_data_path", "valid_data_path", "test_data_path")
    sources = (args["mock_data"], bool(args["data_path"]), any(args[name] is not None for name in paths))
    iterations = args["train_samples"] is not None or args["lr_decay_samples"] is not None or args["lr_warmup_samples"]
    samples = args["lr_decay_iters"] is not None or args["lr_warmup_iters"]
    lr, interval = args["lr"], args["save_interval"]
    return {
        "removed_flags": tuple(f"--{name.replace('_', '-')}" for name in _REMOVED if args[name]),
        "data_sources": sum(map(bool, sources)),
        "train_iters_and_samples": bool((args["train_iters"] and iterations) or (args["train_samples"] and samples)),
        "save_without_interval": args["save"] is not None and not (interval and interval > 0),
        "min_lr_above_lr": lr is not None and args["min_lr"] > lr,
        "te_cross_entropy_fusion": args["cross_entropy_loss_fusion"] and args["cross_entropy_fusion_impl"] == "te",
    }
