"""Hybrids of linear and softmax attention: Qwen3-Next, Qwen3.5, Kimi Linear and Kimi K3."""

from __future__ import annotations

from ..attention import LinearAttention, MLAAttention
from ..feed_forward import FeedForward
from ..model import MTP, LayerKind
from .decoder import FULL, LINEAR, Basics, Decoder, attention_types, basics, dense, heads, softmax
from .deepseek import latent
from .experts import experts, routing, sparse_after, sparse_by_step
from .fields import MAX_LAYERS, Fields
from .registry import family


@family("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
def qwen_hybrid(fields: Fields) -> Decoder:
    """Qwen3-Next and Qwen3.5: Gated DeltaNet in three of four layers, gated softmax attention in the fourth."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    period = fields.stated("full_attention_interval", minimum=1, maximum=MAX_LAYERS) or 4
    types = attention_types(
        fields,
        sizes.num_layers,
        lambda index: LINEAR if (index + 1) % period else FULL,
        rule=f"full_attention in every {period}th layer, else linear_attention",
        allowed=(FULL, LINEAR),
    )
    linear = LinearAttention(
        num_key_heads=fields.setting("linear_num_key_heads"),
        key_head_dim=fields.setting("linear_key_head_dim"),
        num_value_heads=fields.setting("linear_num_value_heads"),
        value_head_dim=fields.setting("linear_value_head_dim"),
        conv_kernel=fields.setting("linear_conv_kernel_dim"),
    )
    networks = _qwen_networks(fields, sizes)
    mtp_layers = fields.stated("mtp_num_hidden_layers", "num_nextn_predict_layers", maximum=1000)
    fields.settle()
    full = softmax(head, qkv_bias=bias, out_bias=bias, qk_norm="head", output_gate=True)
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=tuple(
            LayerKind(attention=full if kind == FULL else linear, feed_forward=network)
            for kind, network in zip(types, networks, strict=True)
        ),
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
        mtp=MTP(num_layers=mtp_layers, layer=LayerKind(attention=full, feed_forward=networks[-1]))
        if mtp_layers
        else None,
    )


def _qwen_networks(fields: Fields, sizes: Basics) -> tuple[FeedForward, ...]:
    if fields.model_type == "qwen3_5_text":
        return (dense(fields),) * sizes.num_layers
    sparse = sparse_by_step(fields, sizes.num_layers)
    route, width = routing(fields), fields.size("moe_intermediate_size")
    shared = fields.size("shared_expert_intermediate_size")
    moe = experts(route, width, shared_width=shared, shared_gate=True)
    if all(sparse):
        return (moe,) * sizes.num_layers
    dense_ffn = dense(fields)
    return tuple(moe if is_sparse else dense_ffn for is_sparse in sparse)


@family("kimi_linear")
def kimi_linear(fields: Fields) -> Decoder:
    """Kimi Linear and the text model of Kimi K3: Kimi Delta Attention and MLA, experts at a latent width in K3."""
    sizes = basics(fields)
    mla = latent(fields, sizes, output_gate=fields.flag("mla_use_output_gate", absent=False))
    part = fields.child("linear_attn_config")
    is_full = _full_layers(fields, part, sizes.num_layers)
    kda = _delta_attention(fields, part)
    sparse = sparse_after(fields, sizes.num_layers) if fields.has("first_k_dense_replace", "mlp_layer_types") else None
    if sparse is None:
        sparse = tuple(index > 0 for index in range(sizes.num_layers))
        fields.derived("first_k_dense_replace", 1, "as KimiLinearConfig does when it is absent")
    route, width = routing(fields, groups=True), fields.size("moe_intermediate_size")
    shared = fields.setting("num_shared_experts", "n_shared_experts", minimum=0)
    latent_width = fields.optional("routed_expert_hidden_size")
    latent_norm = latent_width is not None and fields.flag("latent_moe_use_norm", absent=False)
    if fields.has("attn_res_block_size"):
        fields.report.assume(
            f"{fields.path('attn_res_block_size').strip('/').replace('/', '.')}: the few parameters of attention "
            "residuals are not counted, as their layout is not published"
        )
    dense_ffn = None if all(sparse) else dense(fields)
    fields.settle()
    moe = experts(route, width, score_bias=True, shared_width=shared * width, latent=latent_width)

    def layer(full: bool, is_sparse: bool) -> LayerKind:
        attention: MLAAttention | LinearAttention = mla if full else kda
        if not is_sparse:
            return LayerKind(attention=attention, feed_forward=dense_ffn)
        norm = latent_width if latent_norm and latent_width else 0
        return LayerKind(attention=attention, feed_forward=moe, extra_parameters=norm)

    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=tuple(layer(full, is_sparse) for full, is_sparse in zip(is_full, sparse, strict=True)),
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        rotary=False,
        activation=sizes.activation,
    )


def _full_layers(fields: Fields, part: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers are MLA: ``linear_attn_config`` counts layers from 1 and must name each exactly once."""
    full, delta = part.integers("full_attn_layers", minimum=1), part.integers("kda_layers", minimum=1)
    if full is None or delta is None:
        types = attention_types(
            fields,
            num_layers,
            lambda index: FULL if index and index % 4 == 0 else LINEAR,
            rule="full_attention in every 4th layer, else linear_attention",
            allowed=(FULL, LINEAR),
        )
        return tuple(kind == FULL for kind in types)
    if sorted((*full, *delta)) != list(range(1, num_layers + 1)) and not fields.report.faults:
        part.fault("full_attn_layers", f"with kda_layers must name each of the layers 1 to {num_layers} once")
    return tuple(index + 1 in set(full) for index in range(num_layers))


def _delta_attention(fields: Fields, part: Fields) -> LinearAttention:
    stated = bool(part.data)
    num_heads = part.size("num_heads") if stated else fields.setting("linear_num_heads")
    head_dim = part.size("head_dim") if stated else fields.setting("linear_head_dim")
    kernel = part.size("short_conv_kernel_size") if stated else fields.setting("linear_conv_kernel_dim")
    full_gate = part.flag("use_full_rank_gate", absent=False)
    return LinearAttention(
        rule="kda",
        num_key_heads=num_heads,
        key_head_dim=head_dim,
        num_value_heads=num_heads,
        value_head_dim=head_dim,
        conv_kernel=kernel,
        gate_rank=None if full_gate else head_dim,
    )
