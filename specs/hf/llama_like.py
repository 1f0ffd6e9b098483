"""Dense decoders of one shape: softmax attention, a feed-forward network, a norm before each."""

from __future__ import annotations

from ..attention import SoftmaxAttention
from ..model import LayerKind
from .decoder import (
    FULL,
    SLIDING,
    Basics,
    Decoder,
    attention_types,
    basics,
    dense,
    heads,
    softmax,
    useful_window,
    windows,
)
from .fields import Fields
from .registry import family


def plain(sizes: Basics, layers: tuple[LayerKind, ...]) -> Decoder:
    """A decoder without anything special outside its layers."""
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
    )


@family("llama", "smollm3", "helium", "seed_oss", "granite", "arcee", "cwm", "internlm3", "ernie4_5")
def llama(fields: Fields) -> Decoder:
    """Llama and what follows its layout (LlamaConfig and relatives)."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    attention_bias = _flag(fields, "attention_bias", "use_bias", "qkv_bias")
    out_bias = _flag(fields, "attention_out_bias") if "attention_out_bias" in fields.defaults else attention_bias
    if fields.model_type == "helium":
        out_bias = False
    ffn = dense(fields, bias=_flag(fields, "mlp_bias", "use_bias", "bias"), gated=fields.model_type != "arcee")
    types = attention_types(fields, sizes.num_layers, lambda index: FULL)
    window = fields.optional("sliding_window") if SLIDING in types else None
    per_layer = windows(fields, types, window)
    fields.settle()
    kinds = {
        each: LayerKind(attention=softmax(head, each, qkv_bias=attention_bias, out_bias=out_bias), feed_forward=ffn)
        for each in set(per_layer)
    }
    return plain(sizes, tuple(kinds[each] for each in per_layer))


def _flag(fields: Fields, *names: str) -> bool:
    """The first of the flags that the class knows; false where it knows none."""
    for name in names:
        if name in fields.defaults or name in fields.data:
            return fields.flag(name)
    return False


@family("mistral", "phi3")
def mistral(fields: Fields) -> Decoder:
    """Mistral and Phi-3: a window, where stated, holds for all layers."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    window = useful_window(fields.optional("sliding_window"), sizes.max_positions)
    ffn = dense(fields)
    fields.settle()
    return plain(sizes, (LayerKind(attention=softmax(head, window), feed_forward=ffn),) * sizes.num_layers)


def qwen_windows(fields: Fields, num_layers: int, max_positions: int | None) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: with ``use_sliding_window`` the layers from ``max_window_layers`` on."""
    if not fields.flag("use_sliding_window", absent=False):
        if "layer_types" in fields.data:
            attention_types(fields, num_layers, lambda index: FULL)
        return (None,) * num_layers
    window = useful_window(fields.optional("sliding_window"), max_positions)
    first = fields.setting("max_window_layers", minimum=0)
    types = attention_types(
        fields,
        num_layers,
        lambda index: SLIDING if index >= first else FULL,
        rule=f"sliding_attention from layer {first} (max_window_layers) on",
    )
    return tuple(window if kind == SLIDING else None for kind in types)


@family("qwen2", "qwen2_5_vl_text", "qwen2_vl_text")
def qwen2(fields: Fields) -> Decoder:
    """Qwen2 and Qwen2.5: biases on query, key and value."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    per_layer = qwen_windows(fields, sizes.num_layers, sizes.max_positions)
    ffn = dense(fields)
    fields.settle()
    return plain(
        sizes,
        tuple(LayerKind(attention=softmax(head, window, qkv_bias=True), feed_forward=ffn) for window in per_layer),
    )


@family("qwen3", "qwen3_vl_text")
def qwen3(fields: Fields) -> Decoder:
    """Qwen3: a norm on every query and key head."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    per_layer = qwen_windows(fields, sizes.num_layers, sizes.max_positions)
    ffn = dense(fields)
    fields.settle()
    return plain(
        sizes,
        tuple(
            LayerKind(attention=softmax(head, window, qkv_bias=bias, out_bias=bias, qk_norm="head"), feed_forward=ffn)
            for window in per_layer
        ),
    )


@family("qwen")
def qwen(fields: Fields) -> Decoder:
    """Qwen v1 (its own code): ``intermediate_size`` is twice the width, biases on query, key and value."""
    sizes = basics(fields)
    num_heads = fields.size("num_attention_heads")
    kv_channels = fields.size("kv_channels")
    width = fields.size("intermediate_size")
    no_bias = fields.flag("no_bias", absent=True)
    fields.settle()
    if width % 2:
        fields.fault("intermediate_size", f"must be even (it is twice the width of the network), got {width}")
        fields.settle()
    attention = SoftmaxAttention(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=kv_channels, qkv_bias=True, out_bias=not no_bias
    )
    fields.data = {**fields.data, "intermediate_size": width // 2}
    layer = LayerKind(attention=attention, feed_forward=dense(fields, bias=not no_bias))
    return plain(sizes, (layer,) * sizes.num_layers)


@family("olmo2", "olmo3")
def olmo2(fields: Fields) -> Decoder:
    """OLMo 2 and 3: norms after attention and network, and over all query and key channels."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    ffn = dense(fields)
    if fields.model_type == "olmo3":
        types = attention_types(
            fields,
            sizes.num_layers,
            lambda index: SLIDING if (index + 1) % 4 else FULL,
            rule="three sliding_attention layers, then one full_attention layer",
        )
        per_layer = windows(fields, types, fields.optional("sliding_window"))
    else:
        per_layer = (None,) * sizes.num_layers
    fields.settle()
    return plain(
        sizes,
        tuple(
            LayerKind(attention=softmax(head, window, qkv_bias=bias, out_bias=bias, qk_norm="full"), feed_forward=ffn)
            for window in per_layer
        ),
    )


@family("cohere", "cohere2")
def cohere(fields: Fields) -> Decoder:
    """Command-R: one norm feeds attention and network in parallel; Cohere 2 slides in three of four layers."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    qk_norm = fields.flag("use_qk_norm") if "use_qk_norm" in fields.defaults else False
    ffn = dense(fields)
    per_layer: tuple[int | None, ...] = (None,) * sizes.num_layers
    if fields.model_type == "cohere2":
        period = fields.stated("sliding_window_pattern") or 4
        types = attention_types(
            fields,
            sizes.num_layers,
            lambda index: SLIDING if (index + 1) % period else FULL,
            rule=f"every layer but each {period}th is sliding_attention",
        )
        per_layer = windows(fields, types, fields.optional("sliding_window"))
    fields.settle()
    return plain(
        sizes,
        tuple(
            LayerKind(
                attention=softmax(head, window, qkv_bias=bias, out_bias=bias, qk_norm="full" if qk_norm else "none"),
                feed_forward=ffn,
                norms=1,
            )
            for window in per_layer
        ),
    )


@family("glm", "glm4")
def glm(fields: Fields) -> Decoder:
    """GLM-4 in its Hugging Face form; ``glm4`` has two more norms a layer."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    ffn = dense(fields)
    fields.settle()
    norms = 4 if fields.model_type == "glm4" else 2
    layer = LayerKind(attention=softmax(head, qkv_bias=bias), feed_forward=ffn, norms=norms)
    return plain(sizes, (layer,) * sizes.num_layers)


@family("nemotron")
def nemotron(fields: Fields) -> Decoder:
    """Nemotron-4: squared-ReLU network without a gate, layer norms with bias."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    ffn = dense(fields, bias=fields.flag("mlp_bias"), gated=False)
    fields.settle()
    layer = LayerKind(attention=softmax(head, qkv_bias=bias, out_bias=bias), feed_forward=ffn, norm_bias=True)
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=(layer,) * sizes.num_layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        final_norm_bias=True,
        norm="LayerNorm",
        activation=sizes.activation,
    )


@family("starcoder2")
def starcoder2(fields: Fields) -> Decoder:
    """StarCoder 2: biases everywhere, layer norm, no gate."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("use_bias")
    window = useful_window(fields.optional("sliding_window"), sizes.max_positions)
    ffn = dense(fields, bias=bias, gated=False)
    fields.settle()
    layer = LayerKind(attention=softmax(head, window, qkv_bias=bias, out_bias=bias), feed_forward=ffn, norm_bias=True)
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=(layer,) * sizes.num_layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        final_norm_bias=True,
        norm="LayerNorm",
        activation=sizes.activation,
    )
