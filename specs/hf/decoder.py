"""What a family's builder returns, and the pieces that many families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..attention import SoftmaxAttention
from ..feed_forward import DenseFFN
from ..model import MTP, LayerKind, ModelSpec, VisionTower
from .fields import MAX_LAYERS, Fields

#: Words of ``layer_types``; chunked attention is local like sliding attention.
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


@dataclass(frozen=True)
class Decoder:
    """The language model of a configuration: :class:`ModelSpec` before it has a name. One kind a layer, in order."""

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerKind, ...]
    tied_embeddings: bool
    max_position_embeddings: int | None = None
    learned_positions: int = 0
    final_norm_bias: bool = False
    head_bias: bool = False
    extra_parameters: int = 0
    rotary: bool = True
    norm: str = "RMSNorm"
    activation: str = "silu"
    mtp: MTP | None = None
    vision: VisionTower | None = None

    def to_model(self, name: str, model_type: str, stored_dtype: str | None, assumptions: Sequence[str]) -> ModelSpec:
        """The finished document: equal layers become one kind."""
        index: dict[LayerKind, int] = {}
        pattern = tuple(index.setdefault(layer, len(index)) for layer in self.layers)
        return ModelSpec(
            name=name,
            family=model_type,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            kinds=tuple(index),
            pattern=pattern,
            tied_embeddings=self.tied_embeddings,
            max_position_embeddings=self.max_position_embeddings,
            learned_positions=self.learned_positions,
            final_norm_bias=self.final_norm_bias,
            head_bias=self.head_bias,
            extra_parameters=self.extra_parameters,
            rotary=self.rotary,
            norm=self.norm,
            activation=self.activation,
            mtp=self.mtp,
            vision=self.vision,
            stored_dtype=stored_dtype,
            assumptions=tuple(assumptions),
        )


@dataclass(frozen=True)
class Basics:
    """Sizes that nearly every decoder states."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    tied: bool
    max_positions: int | None
    activation: str


def basics(fields: Fields, *, activation: Sequence[str] = ("hidden_act", "hidden_activation")) -> Basics:
    """Read the sizes by their usual names."""
    return Basics(
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers", maximum=MAX_LAYERS),
        vocab_size=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        max_positions=fields.optional("max_position_embeddings"),
        activation=fields.text(*activation, absent="silu"),
    )


@dataclass(frozen=True)
class Heads:
    """Head counts and size of softmax attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def heads(fields: Fields, hidden_size: int) -> Heads:
    """Read head counts; absent KV heads mean one a query head, an absent head size hidden size / heads, as in
    Hugging Face's classes."""
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.optional("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = num_heads
        if not fields.report.faults:
            fields.derived("num_key_value_heads", num_heads, "num_attention_heads, as it is not stated")
    head_dim = fields.optional("head_dim")
    if head_dim is None:
        head_dim = split_heads(fields, hidden_size, num_heads)
    check_groups(fields, num_heads, num_kv_heads, "num_key_value_heads")
    return Heads(num_heads, num_kv_heads, head_dim)


def split_heads(fields: Fields, hidden_size: int, num_heads: int, name: str = "num_attention_heads") -> int:
    """Head size of ``hidden_size`` over ``num_heads``; a fault at ``name`` where that is not whole."""
    if hidden_size % num_heads and not fields.report.faults:
        fields.fault(name, f"{num_heads} heads do not divide the hidden size {hidden_size}, and no head_dim is stated")
    return max(1, hidden_size // num_heads)


def check_groups(fields: Fields, num_heads: int, num_kv_heads: int, name: str) -> None:
    """Record a fault where KV heads do not divide the heads."""
    if num_heads % num_kv_heads and not fields.report.faults:
        fields.fault(name, f"{num_kv_heads} key/value heads do not divide {num_heads} attention heads")


def softmax(
    heads: Heads,
    window: int | None = None,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["none", "head", "full"] = "none",
    output_gate: bool = False,
    sinks: bool = False,
) -> SoftmaxAttention:
    """Softmax attention of the given heads."""
    return SoftmaxAttention(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        window=window,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
        sinks=sinks,
    )


def dense(fields: Fields, *, bias: bool = False, gated: bool = True) -> DenseFFN:
    """The dense feed-forward network of width ``intermediate_size``."""
    return DenseFFN(intermediate_size=fields.size("intermediate_size"), gated=gated, bias=bias)


def attention_types(
    fields: Fields,
    num_layers: int,
    default: Callable[[int], str],
    rule: str = "",
    allowed: Sequence[str] = (FULL, SLIDING),
) -> tuple[str, ...]:
    """``layer_types`` where stated, else ``default`` of every layer index (named as an assumption with ``rule``)."""
    stated = fields.words("layer_types", num_layers, allowed)
    if stated is not None:
        return stated
    if rule and not fields.report.faults:
        fields.derived("layer_types", "by rule", rule)
    return tuple(default(index) for index in range(num_layers))


def windows(fields: Fields, types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of every layer; a local layer needs one."""
    local = [kind in (SLIDING, CHUNKED) for kind in types]
    if any(local) and window is None and not fields.report.faults:
        fields.fault("sliding_window", "is required: layer_types has sliding_attention layers")
    return tuple(window if is_local else None for is_local in local)


def useful_window(window: int | None, max_positions: int | None) -> int | None:
    """None for a window that no sequence of the model can outgrow."""
    return None if window is not None and max_positions is not None and window >= max_positions else window
