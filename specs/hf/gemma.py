"""Gemma 1 to 4 (text models)."""

from __future__ import annotations

from ..feed_forward import MoEFFN
from ..model import LayerKind
from .decoder import (
    FULL,
    SLIDING,
    Decoder,
    Heads,
    attention_types,
    basics,
    check_groups,
    dense,
    heads,
    softmax,
    windows,
)
from .experts import experts, routing
from .fields import MAX_LAYERS, Fields
from .llama_like import plain
from .registry import family

_ACTIVATION = ("hidden_activation", "hidden_act")


@family("gemma", "gemma2", "gemma3_text")
def gemma(fields: Fields) -> Decoder:
    """Gemma 1, 2 and 3: tied embeddings; four norms a layer and sliding layers from Gemma 2 on."""
    sizes = basics(fields, activation=_ACTIVATION)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    ffn = dense(fields)
    per_layer: tuple[int | None, ...] = (None,) * sizes.num_layers
    if fields.model_type != "gemma":
        period = 2 if fields.model_type == "gemma2" else _pattern(fields)
        types = attention_types(
            fields,
            sizes.num_layers,
            lambda index: SLIDING if (index + 1) % period else FULL,
            rule=f"full_attention in every {period}th layer, else sliding_attention",
        )
        per_layer = windows(fields, types, fields.optional("sliding_window"))
    fields.settle()
    return plain(
        sizes,
        tuple(
            LayerKind(
                attention=softmax(
                    head,
                    window,
                    qkv_bias=bias,
                    out_bias=bias,
                    qk_norm="head" if fields.model_type == "gemma3_text" else "none",
                ),
                feed_forward=ffn,
                norms=2 if fields.model_type == "gemma" else 4,
            )
            for window in per_layer
        ),
    )


def _pattern(fields: Fields) -> int:
    return fields.stated("sliding_window_pattern", minimum=1, maximum=MAX_LAYERS) or 6


@family("gemma4_text")
def gemma4(fields: Fields) -> Decoder:
    """Gemma 4: larger heads in full-attention layers, where keys can be values; experts beside a dense network."""
    sizes = basics(fields, activation=_ACTIVATION)
    local = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    key_is_value = fields.flag("attention_k_eq_v")
    types = attention_types(
        fields,
        sizes.num_layers,
        lambda index: SLIDING if (index + 1) % 6 else FULL,
        rule="full_attention in every 6th layer, else sliding_attention",
    )
    types = (*types[:-1], FULL)  # Gemma4TextConfig forces the last layer
    wide = _global_heads(fields, local, types.index(FULL), key_is_value)
    per_layer = windows(fields, types, fields.optional("sliding_window"))
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if fields.setting(name, minimum=0):
            fields.fault(
                name, "must be 0: layers that share keys and values and per-layer embeddings are not supported"
            )
    ffn = dense(fields)
    moe: MoEFFN | None = None
    if fields.flag("enable_moe_block"):
        route, width = routing(fields), fields.size("moe_intermediate_size")
        # The dense network runs beside the experts on every token, as a shared expert does.
        moe = experts(route, width, shared_width=ffn.intermediate_size)
    fields.settle()
    full = softmax(wide, qkv_bias=bias, out_bias=bias, qk_norm="head").model_copy(update={"key_is_value": key_is_value})
    # Experts add a norm before and after them and one after the dense network, and scales in the router.
    router_scales = sizes.hidden_size + moe.num_experts if moe else 0
    return plain(
        sizes,
        tuple(
            LayerKind(
                attention=full
                if kind == FULL
                else softmax(local, window, qkv_bias=bias, out_bias=bias, qk_norm="head"),
                feed_forward=moe or ffn,
                norms=7 if moe else 4,
                extra_parameters=router_scales,
            )
            for kind, window in zip(types, per_layer, strict=True)
        ),
    )


def _global_heads(fields: Fields, local: Heads, layer: int, key_is_value: bool) -> Heads:
    """Heads of the full-attention layers: by ``per_layer_config`` of the first one, else by the ``global`` fields."""
    stated = fields.layer(layer)
    head_dim = stated.stated("head_dim", minimum=1) or fields.stated("global_head_dim", minimum=1)
    if not head_dim:
        head_dim = 512
        fields.derived("global_head_dim", head_dim, "as Gemma4TextConfig does when it is absent")
    kv_heads = stated.stated("num_key_value_heads", minimum=1)
    if not kv_heads and key_is_value:
        kv_heads = fields.stated("num_global_key_value_heads", minimum=1)
    wide = Heads(local.num_heads, kv_heads or local.num_kv_heads, head_dim)
    check_groups(fields, wide.num_heads, wide.num_kv_heads, "num_global_key_value_heads")
    return wide
