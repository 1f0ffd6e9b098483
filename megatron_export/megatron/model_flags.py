"""Flags that describe the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from meshwright.specs.attention import LinearAttention, MLAAttention, SoftmaxAttention
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

Flags = list[tuple[str, ...]]

#: GPT-OSS clamps its gated activation at 7 and adds 1 to the linear half (modeling_gpt_oss.py: limit 7.0, ``up + 1``).
GPT_OSS_CLAMP, GPT_OSS_OFFSET = "7.0", "1.0"
#: Megatron warns that routing over this many experts without fp32 logits is unstable (transformer_config.py:2812).
FP32_ROUTING_FROM_EXPERTS = 32


def model_flags(model: ModelSpec, workload: Workload, target: Target) -> Flags:
    """Architecture flags. The model must be expressible (rule ``megatron.M1``)."""
    return [
        ("--num-layers", str(model.num_layers)),
        ("--hidden-size", str(model.hidden_size)),
        *_attention(model),
        *_feed_forward(model),
        *_whole(model, workload, target),
    ]


def expert_flags(model: ModelSpec, workload: Workload) -> Flags:
    """Mixture-of-experts flags that belong to the model, not to its parallelism."""
    moe = model.moe
    if moe is None:
        return []
    flags: Flags = [
        ("--num-experts", str(moe.num_experts)),
        ("--moe-ffn-hidden-size", str(moe.expert_intermediate_size)),
        ("--moe-router-topk", str(moe.top_k)),
    ]
    pattern = [int(isinstance(kind.feed_forward, MoEFFN)) for kind in model.layers]
    if not all(pattern):
        flags.append(("--moe-layer-freq", pattern_text(pattern)))
    if moe.shared_intermediate_size:
        flags.append(("--moe-shared-expert-intermediate-size", str(moe.shared_intermediate_size)))
    if moe.shared_gate:
        flags.append(("--moe-shared-expert-gate",))
    if moe.expert_score_bias:
        flags += [("--moe-router-score-function", "sigmoid"), ("--moe-router-enable-expert-bias",)]
    elif moe.top_k == 1:
        flags.append(("--moe-router-pre-softmax",))
    if moe.top_k_groups and moe.num_expert_groups:
        flags.append(("--moe-router-num-groups", str(moe.num_expert_groups)))
        flags.append(("--moe-router-group-topk", str(moe.top_k_groups)))
    if moe.num_experts >= FP32_ROUTING_FROM_EXPERTS:
        flags.append(("--moe-router-dtype", "fp32"))
    if moe.latent_size:
        flags.append(("--moe-latent-size", str(moe.latent_size)))
    if workload.moe_capacity_factor is not None:
        flags.append(("--moe-expert-capacity-factor", repr(workload.moe_capacity_factor)))
    return flags


def pattern_text(pattern: Sequence[int]) -> str:
    """A per-layer pattern as Megatron's list expression: ``[0]*3+[1]*58``."""
    runs = [(value, len(list(same))) for value, same in groupby(pattern)]
    if len(runs) > 4:
        return "[" + ",".join(map(str, pattern)) + "]"
    return "+".join(f"[{value}]*{count}" for value, count in runs)


def _attention(model: ModelSpec) -> Flags:
    mixers = [kind.attention for kind in model.layers]
    mla = next((mixer for mixer in mixers if isinstance(mixer, MLAAttention)), None)
    softmax = next((mixer for mixer in mixers if isinstance(mixer, SoftmaxAttention)), None)
    linear = next((mixer for mixer in mixers if isinstance(mixer, LinearAttention)), None)
    flags: Flags = []
    if mla:
        flags += _latent(mla)
    if softmax:
        flags += _softmax(model, softmax)
    if linear:
        flags += [
            ("--experimental-attention-variant", "gated_delta_net"),
            ("--linear-attention-freq", pattern_text([int(isinstance(mixer, LinearAttention)) for mixer in mixers])),
            ("--linear-conv-kernel-dim", str(linear.conv_kernel)),
            ("--linear-key-head-dim", str(linear.key_head_dim)),
            ("--linear-value-head-dim", str(linear.value_head_dim)),
            ("--linear-num-key-heads", str(linear.num_key_heads)),
            ("--linear-num-value-heads", str(linear.num_value_heads)),
        ]
        if not softmax and not mla:
            # Megatron asks for softmax heads even where no layer has them.
            flags.append(("--num-attention-heads", str(linear.num_value_heads)))
    return flags


def _softmax(model: ModelSpec, mixer: SoftmaxAttention) -> Flags:
    flags: Flags = [("--num-attention-heads", str(mixer.num_heads)), ("--kv-channels", str(mixer.head_dim))]
    if mixer.num_kv_heads != mixer.num_heads:
        flags += [("--group-query-attention",), ("--num-query-groups", str(mixer.num_kv_heads))]
    if mixer.qk_norm == "head":
        flags.append(("--qk-layernorm",))
    if mixer.output_gate:
        flags.append(("--attention-output-gate",))
    if mixer.sinks:
        flags.append(("--softmax-type", "learnable"))
    if mixer.qkv_bias and not mixer.out_bias:
        flags.append(("--add-qkv-bias",))
    windows = [kind.attention.window if isinstance(kind.attention, SoftmaxAttention) else None for kind in model.layers]
    window = next((size for size in windows if size), None)
    if window:
        # Megatron counts tokens to the left without the token itself.
        flags.append(("--window-size", f"{window - 1},0"))
        if not all(windows):
            flags.append(("--window-attn-skip-freq", pattern_text([int(bool(size)) for size in windows])))
    return flags


def _latent(mixer: MLAAttention) -> Flags:
    flags: Flags = [
        ("--multi-latent-attention",),
        ("--num-attention-heads", str(mixer.num_heads)),
        # Unused by latent attention, but its default would have to divide the hidden size.
        ("--kv-channels", str(mixer.v_head_dim)),
        ("--kv-lora-rank", str(mixer.kv_lora_rank)),
        ("--qk-head-dim", str(mixer.qk_nope_head_dim)),
        ("--qk-pos-emb-head-dim", str(mixer.qk_rope_head_dim)),
        ("--v-head-dim", str(mixer.v_head_dim)),
        ("--qk-layernorm",),
        # RoPE fusion of latent attention works only with YaRN, whose factors a ModelSpec does not hold.
        ("--rope-type", "rope"),
        ("--no-rope-fusion",),
    ]
    if mixer.q_lora_rank:
        flags.append(("--q-lora-rank", str(mixer.q_lora_rank)))
    if mixer.indexer:
        flags += [
            ("--experimental-attention-variant", "dsa"),
            ("--dsa-indexer-n-heads", str(mixer.indexer.num_heads)),
            ("--dsa-indexer-head-dim", str(mixer.indexer.head_dim)),
            ("--dsa-indexer-topk", str(mixer.indexer.top_k)),
        ]
    return flags


def _feed_forward(model: ModelSpec) -> Flags:
    ffns = [kind.feed_forward for kind in model.layers if kind.feed_forward]
    dense = next((ffn for ffn in ffns if isinstance(ffn, DenseFFN)), None)
    first = ffns[0]
    width = dense.intermediate_size if dense else first.expert_intermediate_size  # type: ignore[union-attr]
    flags: Flags = [("--ffn-hidden-size", str(width))]
    if model.family == "gpt_oss":
        flags += [
            ("--quick-geglu",),
            ("--glu-linear-offset", GPT_OSS_OFFSET),
            ("--activation-func-clamp-value", GPT_OSS_CLAMP),
        ]
    elif first.gated:
        flags.append(("--swiglu",) if model.activation == "silu" else ("--quick-geglu",))
    elif model.activation in ("relu2", "squared_relu"):
        flags.append(("--squared-relu",))
        if first.bias:
            flags.append(("--no-bias-gelu-fusion",))
    if not first.bias:
        flags.append(("--disable-bias-linear",))
    return flags


def _whole(model: ModelSpec, workload: Workload, target: Target) -> Flags:
    flags: Flags = [("--normalization", "RMSNorm" if model.norm == "RMSNorm" else "LayerNorm")]
    if model.norm == "LayerNorm1P":
        flags.append(("--apply-layernorm-1p",))
    if model.learned_positions:
        flags.append(("--position-embedding-type", "learned_absolute"))
        positions = model.learned_positions
    else:
        flags.append(("--position-embedding-type", "rope" if model.rotary else "none"))
        positions = max(model.max_position_embeddings or 0, workload.seq_length)
    flags.append(("--max-position-embeddings", str(positions)))
    # Megatron's defaults are 0.1; the models here train without dropout, and dropout would cost memory and time.
    flags += [("--attention-dropout", "0.0"), ("--hidden-dropout", "0.0")]
    if not model.tied_embeddings:
        flags.append(("--untie-embeddings-and-output-weights",))
    flags.append(("--vocab-size", str(model.vocab_size)))
    flags.append(("--make-vocab-size-divisible-by", str(target.vocab_divisor)))
    if workload.mtp and model.mtp:
        flags.append(("--mtp-num-layers", str(model.mtp.num_layers)))
    return flags
