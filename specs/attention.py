"""Token mixers of a layer: softmax attention (MHA, GQA, MQA, sliding), MLA, linear attention, Mamba-2."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from .base import Document
from .weights import Weight, vector


class SoftmaxAttention(Document):
    """Multi-head attention with ``num_kv_heads`` key/value heads and an optional sliding ``window`` (tokens).

    ``output_gate`` doubles the query projection by a gate of its width, ``head_gate`` adds one gate a head;
    ``key_is_value`` projects keys and values once; ``cross`` takes keys and values from the vision tower's tokens.
    """

    kind: Literal["softmax"] = "softmax"
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    output_gate: bool = False
    head_gate: bool = False
    sinks: bool = False
    key_is_value: bool = False
    cross: bool = False

    @property
    def variant(self) -> str:
        """``mha``, ``gqa`` or ``mqa``, with ``sliding-`` or ``cross-`` in front."""
        base = "mha" if self.num_kv_heads == self.num_heads else "mqa" if self.num_kv_heads == 1 else "gqa"
        return ("cross-" if self.cross else "sliding-" if self.window else "") + base

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Parameters of the mixer, without the layer's norms."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gate = 2 if self.output_gate else 1
        rows = [
            Weight("q", hidden_size, gate * query, "column", units=self.num_heads, fuse="qkv"),
            Weight("k", hidden_size, kv, "column", units=self.num_kv_heads, fuse="qkv"),
        ]
        if not self.key_is_value:
            rows.append(Weight("v", hidden_size, kv, "column", units=self.num_kv_heads, fuse="qkv"))
        if self.head_gate:
            rows.append(Weight("head_gate", hidden_size, self.num_heads, "column", units=self.num_heads))
        rows.append(Weight("o", query, hidden_size, "row", units=self.num_heads))
        if self.qkv_bias:
            rows.append(vector("qkv_bias", gate * query + (1 if self.key_is_value else 2) * kv, split="column"))
        if self.out_bias:
            rows.append(vector("o_bias", hidden_size))
        if self.qk_norm == "head":
            rows.append(vector("qk_norm", 2 * self.head_dim))
        elif self.qk_norm == "full":
            rows.append(vector("qk_norm", query + kv, split="column"))
        if self.sinks:
            rows.append(vector("sinks", self.num_heads, split="column"))
        return tuple(rows)


class Indexer(Document):
    """Sparse-attention indexer of DeepSeek sparse attention: picks ``top_k`` keys a query."""

    num_heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt


class MLAAttention(Document):
    """Multi-head latent attention (DeepSeek-V2): low-rank query (optional) and key/value compression.

    ``indexer`` makes it sparse; ``shared_top_k`` instead says that the layer attends to that many keys a query, those
    that the nearest indexer before it picked. ``output_gate`` is a gate of the value width, computed from the input.
    """

    kind: Literal["mla"] = "mla"
    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    bias: bool = False
    output_gate: bool = False
    indexer: Indexer | None = None
    shared_top_k: PositiveInt | None = None

    @property
    def variant(self) -> str:
        return "mla-sparse" if self.top_k else "mla"

    @property
    def top_k(self) -> int | None:
        """Keys that a query attends to where the layer is sparse, else None (all)."""
        return self.indexer.top_k if self.indexer else self.shared_top_k

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Parameters of the mixer incl. its latent norms, without the layer's norms."""
        heads, rank = self.num_heads, self.kv_lora_rank
        query = heads * self.qk_head_dim
        rows: list[Weight] = []
        if self.q_lora_rank:
            rows += [
                Weight("q_down", hidden_size, self.q_lora_rank),
                vector("q_norm", self.q_lora_rank),
                Weight("q_up", self.q_lora_rank, query, "column", units=heads),
            ]
        else:
            rows.append(Weight("q", hidden_size, query, "column", units=heads))
        rows += [
            Weight("kv_down", hidden_size, rank + self.qk_rope_head_dim),
            vector("kv_norm", rank),
            Weight("kv_up", rank, heads * (self.qk_nope_head_dim + self.v_head_dim), "column", units=heads),
            Weight("o", heads * self.v_head_dim, hidden_size, "row", units=heads),
        ]
        if self.output_gate:
            rows.append(Weight("gate", hidden_size, heads * self.v_head_dim, "column", units=heads))
        if self.bias:
            rows.append(vector("bias", (self.q_lora_rank or 0) + rank + self.qk_rope_head_dim + hidden_size))
        if self.indexer:
            index = self.indexer
            rows += [
                Weight("index_q", self.q_lora_rank or hidden_size, index.num_heads * index.head_dim),
                Weight("index_k", hidden_size, index.head_dim),
                Weight("index_weights", hidden_size, index.num_heads),
                vector("index_norm", 2 * index.head_dim),
            ]
        return tuple(rows)


class LinearAttention(Document):
    """Linear attention with a recurrent state: Gated DeltaNet (``gated_delta``) or Kimi Delta Attention (``kda``).

    ``gate_rank`` is the rank of KDA's output gate (None: one full matrix); Gated DeltaNet's gate is always full.
    """

    kind: Literal["linear"] = "linear"
    rule: Literal["gated_delta", "kda"] = "gated_delta"
    num_key_heads: PositiveInt
    key_head_dim: PositiveInt
    num_value_heads: PositiveInt
    value_head_dim: PositiveInt
    conv_kernel: PositiveInt
    gate_rank: PositiveInt | None = None

    @property
    def variant(self) -> str:
        return "gated-delta-net" if self.rule == "gated_delta" else "kda"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Parameters of the mixer (layouts of Qwen3-Next and Kimi Linear), without the layer's norms."""
        key, value = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        heads = self.num_value_heads
        shared = (
            Weight("conv", self.conv_kernel, 2 * key + value, "column", units=self.num_key_heads, matmul=False),
            vector("a_log", heads, split="column"),
            vector("norm", self.value_head_dim),
            Weight("o", value, hidden_size, "row", units=heads),
        )
        if self.rule == "gated_delta":
            return (
                Weight("qkvz", hidden_size, 2 * key + 2 * value, "column", units=self.num_key_heads),
                Weight("ba", hidden_size, 2 * heads, "column", units=self.num_key_heads),
                vector("dt_bias", heads, split="column"),
                *shared,
            )
        rows = [
            Weight("qkv", hidden_size, 2 * key + value, "column", units=self.num_key_heads),
            Weight("beta", hidden_size, heads, "column", units=heads),
            # The decay is low-rank by the head size; its first factor is small and whole on every TP rank.
            Weight("decay_down", hidden_size, self.key_head_dim),
            Weight("decay_up", self.key_head_dim, key, "column", units=heads),
            vector("dt_bias", key, split="column"),
        ]
        if self.gate_rank:
            rows += [
                Weight("gate_down", hidden_size, self.gate_rank),
                Weight("gate_up", self.gate_rank, value, "column", units=heads),
            ]
        else:
            rows.append(Weight("gate", hidden_size, value, "column", units=heads))
        return (*rows, *shared)


class MambaMixer(Document):
    """Mamba-2 state-space mixer."""

    kind: Literal["mamba2"] = "mamba2"
    num_heads: PositiveInt
    head_dim: PositiveInt
    num_groups: PositiveInt
    state_size: PositiveInt
    conv_kernel: PositiveInt
    conv_bias: bool = True
    bias: bool = False

    @property
    def variant(self) -> str:
        return "mamba2"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Parameters of the mixer incl. its gated norm, without the layer's norms."""
        inner = self.num_heads * self.head_dim
        conv = inner + 2 * self.num_groups * self.state_size
        rows = [
            Weight("in", hidden_size, inner + conv + self.num_heads, "column", units=self.num_groups),
            Weight("conv", self.conv_kernel, conv, "column", units=self.num_groups, matmul=False),
            vector("dt_bias", self.num_heads, split="column"),
            vector("a_log", self.num_heads, split="column"),
            vector("d", self.num_heads, split="column"),
            vector("norm", inner, split="column"),
            Weight("o", inner, hidden_size, "row", units=self.num_heads),
        ]
        if self.conv_bias:
            rows.append(vector("conv_bias", conv, split="column"))
        if self.bias:
            rows.append(vector("bias", inner + conv + self.num_heads + hidden_size))
        return tuple(rows)


Attention = Annotated[SoftmaxAttention | MLAAttention | LinearAttention | MambaMixer, Field(discriminator="kind")]
