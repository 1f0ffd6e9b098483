"""Mixture-of-experts decoders with ordinary softmax attention."""

from __future__ import annotations

from ..feed_forward import DenseFFN
from ..model import MTP, LayerKind
from .decoder import (
    FULL,
    SLIDING,
    Decoder,
    attention_types,
    basics,
    dense,
    heads,
    softmax,
    useful_window,
    windows,
)
from .experts import experts, routing, sparse_after, sparse_by_step
from .fields import Fields
from .llama_like import plain, qwen_windows
from .registry import family


@family("mixtral")
def mixtral(fields: Fields) -> Decoder:
    """Mixtral: ``intermediate_size`` is the width of an expert."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    window = useful_window(fields.optional("sliding_window"), sizes.max_positions)
    route, width = routing(fields), fields.size("intermediate_size")
    fields.settle()
    layer = LayerKind(attention=softmax(head, window), feed_forward=experts(route, width))
    return plain(sizes, (layer,) * sizes.num_layers)


@family("olmoe")
def olmoe(fields: Fields) -> Decoder:
    """OLMoE: norms over all query and key channels."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    route, width = routing(fields), fields.size("intermediate_size")
    fields.settle()
    attention = softmax(head, qkv_bias=bias, out_bias=bias, qk_norm="full")
    return plain(sizes, (LayerKind(attention=attention, feed_forward=experts(route, width)),) * sizes.num_layers)


@family("phimoe")
def phimoe(fields: Fields) -> Decoder:
    """Phi-3.5-MoE: layer norms with bias, biases in attention and head."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    window = useful_window(fields.optional("sliding_window"), sizes.max_positions)
    route, width = routing(fields), fields.size("intermediate_size")
    head_bias = fields.flag("lm_head_bias")
    fields.settle()
    layer = LayerKind(
        attention=softmax(head, window, qkv_bias=bias, out_bias=bias),
        feed_forward=experts(route, width),
        norm_bias=True,
    )
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=(layer,) * sizes.num_layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        final_norm_bias=True,
        head_bias=head_bias,
        norm="LayerNorm",
        activation=sizes.activation,
    )


@family("qwen2_moe")
def qwen2_moe(fields: Fields) -> Decoder:
    """Qwen1.5-MoE and Qwen2-MoE: a gated shared expert, biases on query, key and value."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("qkv_bias")
    per_layer = qwen_windows(fields, sizes.num_layers, sizes.max_positions)
    sparse = sparse_by_step(fields, sizes.num_layers)
    route, width = routing(fields), fields.size("moe_intermediate_size")
    shared = fields.size("shared_expert_intermediate_size")
    dense_ffn = None if all(sparse) else dense(fields)
    fields.settle()
    moe = experts(route, width, shared_width=shared, shared_gate=True)
    return plain(
        sizes,
        tuple(
            LayerKind(attention=softmax(head, window, qkv_bias=bias), feed_forward=moe if is_sparse else dense_ffn)
            for window, is_sparse in zip(per_layer, sparse, strict=True)
        ),
    )


@family("qwen3_moe", "qwen3_vl_moe_text")
def qwen3_moe(fields: Fields) -> Decoder:
    """Qwen3-MoE: no shared expert, a norm on every query and key head."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    per_layer = qwen_windows(fields, sizes.num_layers, sizes.max_positions)
    sparse = sparse_by_step(fields, sizes.num_layers)
    route, width = routing(fields), fields.size("moe_intermediate_size")
    dense_ffn = None if all(sparse) else dense(fields)
    fields.settle()
    moe = experts(route, width)
    return plain(
        sizes,
        tuple(
            LayerKind(
                attention=softmax(head, window, qkv_bias=bias, out_bias=bias, qk_norm="head"),
                feed_forward=moe if is_sparse else dense_ffn,
            )
            for window, is_sparse in zip(per_layer, sparse, strict=True)
        ),
    )


@family("gpt_oss")
def gpt_oss(fields: Fields) -> Decoder:
    """gpt-oss: biases everywhere, attention sinks, every other layer slides."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    types = attention_types(
        fields,
        sizes.num_layers,
        lambda index: SLIDING if (index + 1) % 2 else FULL,
        rule="sliding_attention and full_attention in turn",
    )
    per_layer = windows(fields, types, fields.optional("sliding_window"))
    route, width = routing(fields), fields.size("intermediate_size")
    fields.settle()
    moe = experts(route, width, bias=True, router_bias=True)
    return plain(
        sizes,
        tuple(
            LayerKind(attention=softmax(head, window, qkv_bias=bias, out_bias=bias, sinks=True), feed_forward=moe)
            for window in per_layer
        ),
    )


@family("minimax_m2")
def minimax_m2(fields: Fields) -> Decoder:
    """MiniMax-M2: norms over all query and key channels, routing with a balancing bias, MTP modules."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    route, width = routing(fields), fields.size("intermediate_size")
    score_bias = fields.flag("use_routing_bias", absent=True)
    shared = fields.stated("shared_intermediate_size")
    mtp_layers = fields.stated("num_mtp_modules", maximum=1000) if fields.data.get("use_mtp") is not False else 0
    fields.settle()
    layer = LayerKind(
        attention=softmax(head, qk_norm="full"),
        feed_forward=experts(route, width, score_bias=score_bias, shared_width=shared),
    )
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=(layer,) * sizes.num_layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
        mtp=MTP(num_layers=mtp_layers, layer=layer) if mtp_layers else None,
    )


@family("glm4_moe", "dots1")
def glm4_moe(fields: Fields) -> Decoder:
    """GLM-4.5 and dots.llm1: dense first layers, then experts with shared ones, and an MTP layer."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    is_dots = fields.model_type == "dots1"
    qk_norm = True if is_dots else fields.flag("use_qk_norm")
    sparse = sparse_after(fields, sizes.num_layers)
    route, width = routing(fields, groups=True), fields.size("moe_intermediate_size")
    shared = fields.setting("n_shared_experts", minimum=0)
    mtp_layers = fields.stated("num_nextn_predict_layers", maximum=1000)
    dense_ffn: DenseFFN | None = None if all(sparse) else dense(fields)
    fields.settle()
    attention = softmax(head, qkv_bias=bias, out_bias=bias and is_dots, qk_norm="head" if qk_norm else "none")
    moe = experts(route, width, score_bias=True, shared_width=shared * width)
    sparse_layer = LayerKind(attention=attention, feed_forward=moe)
    dense_layer = LayerKind(attention=attention, feed_forward=dense_ffn)
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=tuple(sparse_layer if is_sparse else dense_layer for is_sparse in sparse),
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
        mtp=MTP(num_layers=mtp_layers, layer=sparse_layer) if mtp_layers else None,
    )
