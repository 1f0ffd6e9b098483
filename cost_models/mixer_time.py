"""Seconds of token mixers: softmax and latent attention, linear-attention and state-space scans."""

from __future__ import annotations

import numpy as np

from meshwright.specs.attention import Attention, LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.batch import FloatArray

from .collectives import collective_s
from .context import SCAN_EXCHANGE_CALLS, context_exchange_s
from .core_attention import of_kernel
from .eager import ROPE
from .layer_time import LayerTimer
from .operators import attention_s, scan_s, seen_keys
from .pieces import CALLS, Pieces
from .unfused import unfused_attention_s

#: FLOP of a chunked scan per head and token, over key size * value size (state update, read-out, decay).
SCAN_FLOPS = 6.0


def mixer_pieces(timer: LayerTimer, mixer: Attention | None, trained: bool) -> Pieces:
    """The token mixer of a layer with its projections and collectives, to book more in; kinds of layers share it."""
    if mixer is None:
        return timer.pieces()
    return timer.at.remember((timer, mixer, trained), lambda: _mixer_pieces(timer, mixer, trained)).copy()


def _mixer_pieces(timer: LayerTimer, mixer: Attention, trained: bool) -> Pieces:
    at, out = timer.at, timer.pieces()
    weights = mixer.weights(at.model.hidden_size)
    up_names = ("q_up", "kv_up", "q") if isinstance(mixer, MLAAttention) else ()
    timer.linears(out, "mla_up_proj", tuple(w for w in weights if w.name in up_names), trained)
    timer.linears(out, "attention_linear", tuple(w for w in weights if w.name not in up_names), trained)
    compute = out.forward["gemm"]
    if isinstance(mixer, SoftmaxAttention):
        _softmax(timer, out, mixer)
    elif isinstance(mixer, MLAAttention):
        _latent(timer, out, mixer)
    else:
        _scan(timer, out, mixer)
    width = None
    if isinstance(mixer, MLAAttention):
        # The down-projections run on a rank's own tokens, so the up-projections gather the latents
        # (Megatron multi_latent_attention.py); without a query latent the hidden state is gathered for it.
        width = (mixer.q_lora_rank or at.model.hidden_size) + mixer.kv_lora_rank + mixer.qk_rope_head_dim
    timer.tensor_parallel(out, "attention_comm", compute, width)
    return out


def _core(
    timer: LayerTimer,
    out: Pieces,
    heads: FloatArray,
    qk_dim: int,
    v_dim: int,
    keys: float,
    kv_bytes_per_token: FloatArray,
) -> None:
    """Core attention and the exchange of context parallelism."""
    at = timer.at
    length = at.workload.seq_length
    if at.target.fused_attention:
        kv_heads = kv_bytes_per_token / (timer.wide * (qk_dim + v_dim))
        forward, backward = attention_s(timer.on, at.sequences, length, keys, heads, qk_dim, v_dim, at.cp, kv_heads)
        forward, backward = of_kernel(at.target.attention_kernel, timer.on.gpu, forward, backward)
    else:
        forward, backward = unfused_attention_s(timer.on, at.sequences, length, heads, qk_dim, v_dim)
    calls = CALLS["attention" if at.target.fused_attention else "unfused"]
    out.add("attention", "core_attn", forward, backward, calls)
    queries, outputs = (timer.wide * heads * size * at.tokens for size in (qk_dim, v_dim))
    block = kv_bytes_per_token * at.tokens
    exchange = context_exchange_s(at, timer.overlap, timer.levels, (forward, backward), block, queries, outputs)
    out.add("cp_comm", "core_attn", *exchange)


def _softmax(timer: LayerTimer, out: Pieces, mixer: SoftmaxAttention) -> None:
    at = timer.at
    heads, kv_heads = np.ceil(mixer.num_heads / at.tp), np.ceil(mixer.num_kv_heads / at.tp)
    moved = timer.wide * (heads + kv_heads) * mixer.head_dim * at.tokens
    if at.model.rotary:
        eager = not at.target.fused_elementwise
        ways = (ROPE.forward / timer.wide, ROPE.backward / timer.wide) if eager else (2.0, 2.0)
        timer.stream(out, "attention_linear", "rope", ways[0] * moved, ways[1] * moved)
    if mixer.qk_norm != "none":
        timer.stream(out, "attention_linear", "norm", 2 * moved, 3 * moved)
    if mixer.output_gate:
        gate = timer.wide * heads * mixer.head_dim * at.tokens
        timer.stream(out, "attention_linear", "activation", 3 * gate, 5 * gate)
    keys = float(at.workload.seq_length) if mixer.cross else seen_keys(at.workload.seq_length, mixer.window)
    _core(timer, out, heads, mixer.head_dim, mixer.head_dim, keys, 2 * timer.wide * kv_heads * mixer.head_dim)


def _latent(timer: LayerTimer, out: Pieces, mixer: MLAAttention) -> None:
    at = timer.at
    heads = np.ceil(mixer.num_heads / at.tp)
    latent = timer.wide * ((mixer.q_lora_rank or 0) + mixer.kv_lora_rank) * at.own_tokens
    timer.stream(out, "latent", "norm", 2 * latent, 3 * latent)
    # Rotary parts, and the concatenation of rotary and plain parts of queries and keys: read and write both.
    moved = 2 * timer.wide * 2 * heads * mixer.qk_head_dim * at.tokens
    timer.stream(out, "mla_up_proj", "rope", moved, moved)
    keys = seen_keys(at.workload.seq_length, None, mixer.indexer.top_k if mixer.indexer else None)
    if mixer.indexer:
        index = mixer.indexer
        every = seen_keys(at.workload.seq_length, None)
        scores, scores_back = attention_s(
            timer.on,
            at.sequences,
            at.workload.seq_length,
            every,
            np.full_like(heads, index.num_heads),
            index.head_dim,
            0,
            at.cp,
        )
        out.add("attention", "core_attn", scores, scores_back, CALLS["attention"])
    per_token = timer.wide * heads * (mixer.qk_head_dim + mixer.v_head_dim)
    _core(timer, out, heads, mixer.qk_head_dim, mixer.v_head_dim, keys, per_token)


def _scan(timer: LayerTimer, out: Pieces, mixer: LinearAttention | MambaMixer) -> None:
    """Convolution, chunked scan and gated norm; context parallelism exchanges heads for tokens and back."""
    at = timer.at
    if isinstance(mixer, LinearAttention):
        heads = np.ceil(mixer.num_value_heads / at.tp)
        size = mixer.key_head_dim * mixer.value_head_dim
        inner = heads * mixer.value_head_dim
        channels = inner + 2 * np.ceil(mixer.num_key_heads / at.tp) * mixer.key_head_dim
    else:
        heads = np.ceil(mixer.num_heads / at.tp)
        size = mixer.head_dim * mixer.state_size
        inner = heads * mixer.head_dim
        channels = inner + 2 * np.ceil(mixer.num_groups / at.tp) * mixer.state_size
    conv = timer.wide * channels * at.tokens
    # Mamba-2's fused backward pass runs the convolution again instead of keeping its result.
    again = 0 if isinstance(mixer, LinearAttention) else 2
    timer.stream(out, "attention_linear", "activation", 2 * conv, (3 + again) * conv, timer.on.fit.convolution)
    chains, kda = at.sequences * np.ceil(heads / at.cp), isinstance(mixer, LinearAttention) and mixer.rule == "kda"
    forward, backward = scan_s(timer.on, at.tokens, SCAN_FLOPS * heads * size, chains, at.workload.seq_length, kda)
    calls = CALLS["scan"]
    if isinstance(mixer, LinearAttention):
        calls = CALLS["delta_rule"]
        # Queries and keys are normalised, then repeated for every value head.
        once = timer.wide * (channels - inner) * at.tokens
        each = 2 * timer.wide * heads * mixer.key_head_dim * at.tokens
        timer.stream(out, "attention_linear", "norm", 2 * once, 3 * once)
        timer.stream(out, "attention_linear", "norm", once + each, once + each)
    out.add("attention", "core_attn", forward, backward, calls, corrected="scan")
    gated = timer.wide * inner * at.tokens
    timer.stream(out, "attention_linear", "norm", 3 * gated, 5 * gated)
    exchange = collective_s("all_to_all", timer.levels, conv, at.keys.cp, at.keys.tp)
    exchange = exchange + collective_s("all_to_all", timer.levels, gated, at.keys.cp, at.keys.tp)
    out.add("cp_comm", "core_attn", exchange, exchange, np.where(at.cp > 1, SCAN_EXCHANGE_CALLS, 0.0))
