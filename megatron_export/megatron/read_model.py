"""Model and workload that an argument list describes."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from meshwright.specs.attention import (
    Attention,
    Indexer,
    LinearAttention,
    MLAAttention,
    SoftmaxAttention,
)
from meshwright.specs.base import faults_of
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import MTP, LayerKind, ModelSpec
from meshwright.specs.workload import Workload

from .arguments import MegatronArguments
from .derived import ffn_hidden_size, moe_layers, num_layers, precision
from .interpret import facts_from_arguments

_UNREAD = {
    "hybrid_layer_pattern": "hybrid layer patterns",
    "hybrid_override_pattern": "hybrid layer patterns",
    "heterogeneous_layers_config_path": "heterogeneous layer configurations",
    "yaml_cfg": "YAML configurations of Megatron's own",
    "use_checkpoint_args": "arguments kept in a checkpoint",
}


def model_from_arguments(args: MegatronArguments, name: str = "megatron-arguments") -> ModelSpec:
    """The architecture; :class:`SpecError` names what is missing, not read, or no size."""
    try:
        return _model(args, name)
    except ValidationError as error:
        raise SpecError(faults_of(error, "/model")) from None


def _model(args: MegatronArguments, name: str) -> ModelSpec:
    faults = [
        Fault(f"/--{dest.replace('_', '-')}", f"{words} are not read")
        for dest, words in _UNREAD.items()
        if args.given.get(dest)
    ]
    known = {dest: args[dest] for dest in ("hidden_size", "num_attention_heads")}
    known["vocab_size"] = args["vocab_size"] or args["padded_vocab_size"]
    faults += [
        Fault(f"/--{dest.replace('_', '-')}", "is required to know the model")
        for dest, value in known.items()
        if not value
    ]
    layers = num_layers(args)
    if not layers and "hybrid_layer_pattern" not in args:
        faults.append(Fault("/--num-layers", "is required to know the model"))
    if faults:
        raise SpecError(faults)
    moe = moe_layers(args)
    if len(moe) != layers:
        raise SpecError(Fault("/--moe-layer-freq", f"lists {len(moe)} layers, the model has {layers}"))
    mixers, ffns = _mixers(args, layers), [_feed_forward(args, is_moe) for is_moe in moe]
    layer_norm = args["normalization"] == "LayerNorm"
    rows = [
        LayerKind(attention=mixer, feed_forward=ffn, norms=2, norm_bias=layer_norm)
        for mixer, ffn in zip(mixers, ffns, strict=True)
    ]
    kinds = tuple(dict.fromkeys(rows))
    position = "rope" if args["use_rotary_position_embeddings"] else args["position_embedding_type"]
    depth = args["mtp_num_layers"]
    learned = position == "learned_absolute"
    return ModelSpec(
        name=name,
        family="gpt_oss" if args["quick_geglu"] else "megatron",
        hidden_size=args["hidden_size"],
        vocab_size=args["vocab_size"] or args["padded_vocab_size"],
        kinds=kinds,
        pattern=tuple(kinds.index(row) for row in rows),
        tied_embeddings=not args["untie_embeddings_and_output_weights"],
        max_position_embeddings=args["max_position_embeddings"],
        learned_positions=args["max_position_embeddings"] or 0 if learned else 0,
        final_norm_bias=layer_norm,
        rotary=position not in ("learned_absolute", "none", "relative"),
        norm="LayerNorm1P" if layer_norm and args["layernorm_zero_centered_gamma"] else args["normalization"],
        activation=_activation(args),
        mtp=MTP(num_layers=depth, layer=rows[-1]) if depth else None,
    )


def workload_from_arguments(args: MegatronArguments, world_size: int | None = None) -> Workload:
    """Batch, sequence and numerics. ``world_size`` gives the global batch where the arguments leave it out."""
    faults = [
        Fault(f"/--{dest.replace('_', '-')}", "is required")
        for dest in ("micro_batch_size", "seq_length")
        if not args[dest] and not (dest == "seq_length" and args["encoder_seq_length"])
    ]
    if not args["global_batch_size"] and world_size is None:
        faults.append(Fault("/--global-batch-size", "is required where the number of ranks is not known"))
    if args["optimizer"] not in ("adam", "sgd"):
        faults.append(Fault("/--optimizer", f"{args['optimizer']} is not priced", ("adam", "sgd")))
    if faults:
        raise SpecError(faults)
    kind = precision(args)
    batch = args["global_batch_size"] or facts_from_arguments(args, world_size or 1).global_batch_size
    half = "bf16" if args["bf16"] else "fp16" if args["fp16"] else "fp32"
    reduced = args["grad_reduce_in_bf16"] or args["main_grads_dtype"] == "bf16"
    gradients = "bf16" if reduced else "fp32"
    if half == "fp16" and not args["accumulate_allreduce_grads_in_fp32"]:
        gradients = "fp16"
    return Workload.parse(
        {
            "task": "sft" if args["sft"] else "pretrain",
            "global_batch_size": batch,
            "seq_length": args["seq_length"] or args["encoder_seq_length"],
            "precision": kind,
            "params_dtype": "fp8" if args["fp8_param_gather"] and args["fp8"] else half,
            "gradient_dtype": gradients,
            "main_params_dtype": args["main_params_dtype"],
            "moments_dtype": args["exp_avg_dtype"],
            "optimizer": args["optimizer"],
            "moe_capacity_factor": args["moe_expert_capacity_factor"],
            "mtp": bool(args["mtp_num_layers"]),
        },
        "/workload",
    )


def _mixers(args: MegatronArguments, layers: int) -> list[Attention]:
    variant = args["experimental_attention_variant"]
    full = _latent(args, variant == "dsa") if args["multi_latent_attention"] else _softmax(args, None)
    out: list[Attention] = [full] * layers
    if args["window_size"] and not args["multi_latent_attention"]:
        windowed = _softmax(args, args["window_size"][0] + 1)
        skip = args["window_attn_skip_freq"]
        for index in range(layers):
            if skip is None or (skip[index] if isinstance(skip, list) else (index + 1) % skip):
                out[index] = windowed
    if variant == "gated_delta_net":
        linear = LinearAttention(
            num_key_heads=args["linear_num_key_heads"],
            key_head_dim=args["linear_key_head_dim"],
            num_value_heads=args["linear_num_value_heads"],
            value_head_dim=args["linear_value_head_dim"],
            conv_kernel=args["linear_conv_kernel_dim"],
        )
        frequency = args["linear_attention_freq"]
        if frequency is None or (isinstance(frequency, list) and len(frequency) != layers):
            raise SpecError(Fault("/--linear-attention-freq", f"must be a number or list all {layers} layers"))
        for index in range(layers):
            if frequency[index] if isinstance(frequency, list) else (index + 1) % frequency:
                out[index] = linear
    return out


def _softmax(args: MegatronArguments, window: int | None) -> SoftmaxAttention:
    heads = args["num_attention_heads"]
    bias = args["add_bias_linear"]
    return SoftmaxAttention(
        num_heads=heads,
        num_kv_heads=args["num_query_groups"] if args["group_query_attention"] else heads,
        head_dim=args["kv_channels"] or max(args["hidden_size"] // heads, 1),
        window=window,
        qkv_bias=bias or args["add_qkv_bias"],
        out_bias=bias,
        qk_norm="head" if args["qk_layernorm"] else "none",
        output_gate=args["attention_output_gate"],
        sinks=args["softmax_type"] == "learnable",
    )


def _latent(args: MegatronArguments, sparse: bool) -> MLAAttention:
    index = None
    if sparse:
        index = Indexer.parse(
            {
                "num_heads": args["dsa_indexer_n_heads"],
                "head_dim": args["dsa_indexer_head_dim"],
                "top_k": args["dsa_indexer_topk"],
            },
            "/--dsa-indexer",
        )
    return MLAAttention(
        num_heads=args["num_attention_heads"],
        q_lora_rank=args["q_lora_rank"],
        kv_lora_rank=args["kv_lora_rank"],
        qk_nope_head_dim=args["qk_head_dim"],
        qk_rope_head_dim=args["qk_pos_emb_head_dim"],
        v_head_dim=args["v_head_dim"],
        indexer=index,
    )


def _feed_forward(args: MegatronArguments, is_moe: bool) -> Any:
    gated, bias = args["swiglu"] or args["quick_geglu"], args["add_bias_linear"]
    if not is_moe:
        return DenseFFN(intermediate_size=ffn_hidden_size(args), gated=gated, bias=bias)
    return MoEFFN(
        num_experts=args["num_experts"],
        top_k=args["moe_router_topk"],
        expert_intermediate_size=args["moe_ffn_hidden_size"] or ffn_hidden_size(args),
        gated=gated,
        bias=bias,
        router_bias=bias,
        expert_score_bias=args["moe_router_enable_expert_bias"],
        shared_intermediate_size=args["moe_shared_expert_intermediate_size"] or 0,
        shared_gate=args["moe_shared_expert_gate"],
        latent_size=args["moe_latent_size"],
        num_expert_groups=args["moe_router_num_groups"] if args["moe_router_group_topk"] else None,
        top_k_groups=args["moe_router_group_topk"],
    )


def _activation(args: MegatronArguments) -> str:
    if args["swiglu"] or args["quick_geglu"]:
        return "silu"
    return "relu2" if args["squared_relu"] else "gelu"
