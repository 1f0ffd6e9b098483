"""The models that pricing is timed on."""

from __future__ import annotations

from meshwright.specs.attention import MLAAttention, SoftmaxAttention
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec


def deepseek_v3() -> ModelSpec:
    """The shape of DeepSeek-V3 without MTP."""
    attention = MLAAttention(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    moe = MoEFFN(
        num_experts=256, top_k=8, expert_intermediate_size=2048, shared_intermediate_size=2048, num_expert_groups=8,
        top_k_groups=4,
    )  # fmt: skip
    kinds = (
        LayerKind(attention=attention, feed_forward=DenseFFN(intermediate_size=18432)),
        LayerKind(attention=attention, feed_forward=moe),
    )
    return ModelSpec(
        name="deepseek-v3", family="deepseek_v3", hidden_size=7168, vocab_size=129280, kinds=kinds,
        pattern=(0,) * 3 + (1,) * 58,
    )  # fmt: skip


def llama(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelSpec:
    """A Llama 3.1 of the given size."""
    attention = SoftmaxAttention(num_heads=heads, num_kv_heads=8, head_dim=128)
    kind = LayerKind(attention=attention, feed_forward=DenseFFN(intermediate_size=ffn))
    return ModelSpec(
        name=name, family="llama", hidden_size=hidden, vocab_size=128256, kinds=(kind,), pattern=(0,) * layers
    )
