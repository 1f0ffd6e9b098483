"""Activation bytes of a layer on a rank for one micro-batch, by the module that would recompute them.

Per token of a dense GQA SwiGLU layer in bf16 with flash attention: ``8h + 4ad + 4gd + 6f + 4a``, over tp * cp; within
0.05% of SimuMax's leaf walk, 0.5% of its measured B200 allocations. MLA, MoE and state-space layers likewise. Unfused
attention with dropout adds ``5as`` a token (softmax, mask, dropped softmax), dropout ``2h`` of masks: together with
GELU's ``4f = 16h`` the ``34sbh + 5as^2b`` of Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.specs.attention import LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.batch import FloatArray
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind
from meshwright.specs.target import RecomputeMode

from .local import Local, activation_element_bytes, linear_input_bytes

#: Tokens between the states of a chunked scan (Mamba-2 and FLA kernels). Both compute the states again in the backward
#: pass; FLA keeps the inverse of each chunk's triangular matrix, ``chunk`` numbers a token and head.
SCAN_CHUNK = {"mamba2": 256, "linear": 64}


@dataclass
class Saved:
    """Bytes kept for the backward pass by module, and the largest working set while the layer runs backward.

    ``alternate`` of them stay under module ``alternate_ops``, ``offloadable`` holds inputs by their offload module.
    """

    by_module: dict[str, FloatArray] = field(default_factory=dict)
    transient: FloatArray = field(default_factory=lambda: np.zeros(1))
    alternate: FloatArray = field(default_factory=lambda: np.zeros(1))
    offloadable: dict[str, FloatArray] = field(default_factory=dict)

    def keep(
        self,
        module: str,
        size: FloatArray,
        *,
        alternate: FloatArray | float = 0.0,
        offload: str = "",
    ) -> None:
        """Book ``size`` under ``module``; ``alternate`` of it is among what every second operator keeps."""
        self.by_module[module] = self.by_module[module] + size if module in self.by_module else size
        self.alternate = self.alternate + alternate
        if offload:
            self.offloadable[offload] = self.offloadable[offload] + size if offload in self.offloadable else size

    def work(self, size: FloatArray) -> None:
        self.transient = np.maximum(self.transient, size)

    def total(self, without: frozenset[str] = frozenset()) -> FloatArray:
        """All bytes but those of the modules ``without``."""
        kept = [size for module, size in self.by_module.items() if module not in without]
        out: FloatArray = np.sum(kept, axis=0) if kept else np.zeros_like(self.transient)
        return out


def layer_activations(layer: LayerKind, at: Local) -> Saved:
    """What one decoder layer keeps and works with."""
    saved = Saved(transient=at.none, alternate=at.none)
    own, hidden = at.own_tokens, at.model.hidden_size
    normed = at.tokens if at.target.gathered_inputs_kept else own
    wide = activation_element_bytes(at.workload.precision)
    low = linear_input_bytes(at.workload.precision) if at.target.low_precision_inputs else wide
    parts = [part for part in (layer.attention, layer.feed_forward) if part is not None]
    for _ in parts:
        saved.keep("residual", wide * hidden * own, alternate=wide * hidden * own)  # layer input; last product
        saved.keep("layernorm", low * hidden * normed)
        if at.workload.dropout:
            saved.keep("residual", hidden * own)  # one byte a mask element
    if layer.attention is not None:
        saved.offloadable["attn_norm"] = wide * hidden * own
        saved.offloadable["qkv_linear"] = low * hidden * own
    if layer.feed_forward is not None:
        saved.offloadable["mlp_norm"] = wide * hidden * own
    extra_norms = max(layer.norms - len(parts), 0)
    if extra_norms:
        saved.keep("residual", extra_norms * wide * hidden * own)
    if layer.attention is not None:
        _attention(layer, at, saved, wide, low)
    if isinstance(layer.feed_forward, DenseFFN):
        width = layer.feed_forward.intermediate_size / at.tp * at.tokens
        gates = 2 if layer.feed_forward.gated else 1
        saved.keep("mlp", gates * wide * width, alternate=wide * width)
        saved.keep("mlp", low * width + _before_gate(gates, at) * wide * width)
        saved.work(wide * ((1 + gates) * width + hidden * (at.tokens + own)))
    elif isinstance(layer.feed_forward, MoEFFN):
        _mixture(layer.feed_forward, at, saved, wide, low)
    return saved


def _attention(layer: LayerKind, at: Local, saved: Saved, wide: float, low: float) -> None:
    mixer, hidden = layer.attention, at.model.hidden_size
    tokens, own, tp = at.tokens, at.own_tokens, at.tp
    if isinstance(mixer, SoftmaxAttention):
        heads = np.ceil(mixer.num_heads / tp)
        kv_heads = np.ceil(mixer.num_kv_heads / tp)
        query, kv = heads * mixer.head_dim * tokens, kv_heads * mixer.head_dim * tokens
        saved.keep("qkv", wide * (query + 2 * kv), alternate=wide * (query + kv), offload="core_attn")
        if mixer.qk_norm != "none":
            saved.keep("qkv", wide * (query + kv))
        if mixer.output_gate:
            saved.keep("qkv", 2 * wide * query)
        saved.keep("attention_out", low * query, alternate=low * query, offload="attn_proj")
        scores = _core(at, saved, heads, wide)
        saved.work(wide * (2 * query + 2 * kv + hidden * (tokens + own)) + _ring_buffers(at, wide * 2 * kv) + scores)
    elif isinstance(mixer, MLAAttention):
        heads = np.ceil(mixer.num_heads / tp)
        rank = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        saved.keep("latent", wide * own * (2 * (mixer.q_lora_rank or 0) + rank + mixer.kv_lora_rank))
        qk, v = heads * mixer.qk_head_dim * tokens, heads * mixer.v_head_dim * tokens
        saved.keep("mla_up_proj", wide * (2 * qk + v), alternate=wide * (2 * qk + v), offload="core_attn")
        if mixer.output_gate:
            saved.keep("attention_out", 2 * wide * v)
        saved.keep("attention_out", low * v, alternate=low * v, offload="attn_proj")
        scores = _core(at, saved, heads, wide)
        saved.work(wide * (2 * qk + 2 * v + hidden * (tokens + own)) + _ring_buffers(at, wide * (qk + v)) + scores)
    elif isinstance(mixer, LinearAttention):
        key = np.ceil(mixer.num_key_heads / tp) * mixer.key_head_dim * tokens
        value = np.ceil(mixer.num_value_heads / tp) * mixer.value_head_dim * tokens
        # Projection out, its part before the convolution in another layout, convolution out; query and key repeated to
        # the value heads, before and after their norm; the scan's triangular inverses and its output; gated norm out.
        heads = np.ceil(mixer.num_value_heads / tp)
        repeated = 2 * heads * mixer.key_head_dim * tokens
        saved.keep("qkv", wide * (3 * (2 * key + value) + value))
        saved.keep("core_attn", wide * (2 * repeated + value + heads * SCAN_CHUNK["linear"] * tokens))
        saved.keep("attention_out", low * value)
        states = 4.0 * heads * mixer.key_head_dim * mixer.value_head_dim * tokens / SCAN_CHUNK["linear"]
        saved.work(wide * (2 * (2 * key + 2 * value) + hidden * (tokens + own)) + 2 * states)
    elif isinstance(mixer, MambaMixer):
        heads = np.ceil(mixer.num_heads / tp)
        inner = heads * mixer.head_dim * tokens
        conv = inner + 2 * np.ceil(mixer.num_groups / tp) * mixer.state_size * tokens
        # The fused scan keeps its input (gate, convolution input, step sizes) and output; the norm after it its own
        # input and what it hands to the output projection.
        saved.keep("qkv", wide * (conv + inner + heads * tokens))
        saved.keep("core_attn", wide * 2 * inner)
        saved.keep("attention_out", low * inner)
        states = 4.0 * heads * mixer.head_dim * mixer.state_size * tokens / SCAN_CHUNK["mamba2"]
        saved.work(wide * (2 * (conv + inner) + hidden * (tokens + own)) + 2 * states)


def _core(at: Local, saved: Saved, heads: FloatArray, wide: float) -> FloatArray:
    """Book what the attention kernel keeps; its own working set is returned.

    One fused kernel keeps the log-sum-exp of each row; separate kernels the softmax, and under dropout its mask (one
    byte) and the dropped softmax, and work with the gradient, in place (Megatron's fused softmax).
    """
    if at.target.fused_attention:
        saved.keep("core_attn", 4.0 * heads * at.tokens, alternate=4.0 * heads * at.tokens)
        return at.none
    scores = heads * at.tokens * at.workload.seq_length
    saved.keep("core_attn", (2 * wide + 1 if at.workload.dropout else wide) * scores)
    return wide * scores


def _ring_buffers(at: Local, kv_bytes: FloatArray) -> FloatArray:
    """Ring context parallelism holds two key/value blocks in flight beside its own."""
    return np.where(at.cp > 1, 2 * kv_bytes, 0.0)


def _before_gate(gates: int, at: Local) -> int:
    """Results of a gated activation function that separate kernels keep before they meet the gate."""
    return int(gates == 2 and not at.target.fused_activation)


def _mixture(moe: MoEFFN, at: Local, saved: Saved, wide: float, low: float) -> None:
    hidden, own = at.model.hidden_size, at.own_tokens
    width = moe.latent_size or hidden
    gates = 2 if moe.gated else 1
    pairs = at.expert_tokens(moe.top_k)
    inner = pairs * moe.expert_intermediate_size / at.etp
    saved.keep("moe", low * width * pairs, offload="expert_fc1")
    saved.keep("moe", gates * wide * inner)
    if at.target.dispatcher != "flex" or at.target.moe_comm_overlap:
        # The experts' output, for the gradient of the routing weights or as the input of an overlapped combine; the
        # flex dispatcher applies the weights inside the activation function instead.
        saved.keep("moe", wide * width * pairs)
    saved.keep("moe_act", low * inner + _before_gate(gates, at) * wide * inner, offload="moe_act")
    saved.offloadable["fused_group_mlp"] = low * width * pairs + gates * wide * inner
    saved.keep("moe", 4.0 * moe.num_experts * own)
    if moe.latent_size:
        saved.keep("moe", 2 * wide * width * own)
    working = wide * (pairs * width * 2 + (1 + gates) * inner)
    if moe.shared_intermediate_size:
        shared = moe.shared_intermediate_size / at.tp * at.tokens
        saved.keep("shared_experts", (gates * wide + low) * shared + wide * hidden * own, alternate=wide * shared)
        working = working + wide * (1 + gates) * shared
    saved.work(working + wide * hidden * (at.tokens + own))


def recomputed_modules(mode: RecomputeMode, layer: LayerKind) -> frozenset[str]:
    """Modules of :class:`Saved` that ``mode`` computes again; ``full`` keeps the layer's input alone."""
    if mode.granularity == "none":
        return frozenset()
    if mode.granularity == "full":
        return frozenset({"*"})
    out: set[str] = set(mode.modules)
    if "moe" in out:
        out |= {"moe_act", "shared_experts"}
    if not isinstance(layer.feed_forward, DenseFFN):
        out.discard("mlp")
    return frozenset(out)


def kept_bytes(saved: Saved, mode: RecomputeMode, layer: LayerKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """(kept for an in-flight micro-batch, transient) bytes of a layer under ``mode``.

    ``full`` keeps ``2h`` a token of the layer's own share, one for each group of ``num_layers`` under the uniform
    method, and rebuilds the group while it runs.
    """
    modules = recomputed_modules(mode, layer)
    if "alternate_ops" in modules:
        return saved.alternate, saved.transient + saved.total() - saved.alternate
    if "*" not in modules:
        again = sum((size for module, size in saved.by_module.items() if module in modules), at.none)
        return saved.total(modules), saved.transient + again
    group = float(mode.num_layers or 1) if mode.method == "uniform" else 1.0
    inputs = activation_element_bytes(at.workload.precision) * at.model.hidden_size * at.own_tokens
    return inputs / group, saved.transient + group * saved.total()
