"""Multi-head latent attention: DeepSeek V2 to V3.2, Kimi K2, GLM-5, GLM-4.7-Flash, MiniCPM3."""

from __future__ import annotations

from collections.abc import Sequence

from ..attention import Indexer, MLAAttention
from ..feed_forward import DenseFFN
from ..model import MTP, LayerKind
from .decoder import Basics, Decoder, Heads, basics, dense, softmax, split_heads
from .experts import experts, routing, sparse_after
from .fields import Fields
from .llama_like import plain
from .registry import family


def latent(fields: Fields, sizes: Basics, *, output_gate: bool = False) -> MLAAttention:
    """MLA by DeepSeek's names. ``head_dim`` and ``num_key_value_heads`` of such configurations mean nothing here."""
    num_heads = fields.size("num_attention_heads")
    q_rank = fields.optional("q_lora_rank")
    kv_rank = fields.size("kv_lora_rank")
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    value = fields.optional("v_head_dim")
    if value is None:
        value = split_heads(fields, sizes.hidden_size, num_heads)
        fields.derived("v_head_dim", value, "hidden_size / num_attention_heads, as it is not stated")
    bias = fields.flag("attention_bias")
    return MLAAttention(
        num_heads=num_heads,
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        bias=bias,
        output_gate=output_gate,
    )


def sparse_attention(fields: Fields, attention: MLAAttention, num_layers: int) -> tuple[MLAAttention, ...]:
    """The attention of every layer of a model with DeepSeek sparse attention: with an indexer of its own, or with
    the keys that the last indexer before it picked."""
    index = Indexer(
        num_heads=fields.size("index_n_heads"),
        head_dim=fields.size("index_head_dim"),
        top_k=fields.size("index_topk"),
    )
    own = attention.model_copy(update={"indexer": index})
    shared = attention.model_copy(update={"shared_top_k": index.top_k})
    types = fields.words("indexer_types", num_layers, ("full", "shared"))
    if types is None:
        # As GlmMoeDsaConfig does: an indexer in the first layers, then in every index_topk_freq-th.
        period = fields.stated("index_topk_freq", minimum=1) or 1
        offset = fields.stated("index_skip_topk_offset") or 2
        types = tuple("shared" if max(i - offset + 1, 0) % period else "full" for i in range(num_layers))
    return tuple(own if kind == "full" else shared for kind in types)


@family("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")
def deepseek(fields: Fields) -> Decoder:
    """DeepSeek and relatives: MLA (sparse in V3.2 and GLM-5), dense first layers, then routed and shared experts."""
    if "use_mla" in fields.data and not fields.flag("use_mla"):
        fields.settle()
        return multi_head_deepseek(fields)
    fields.settle()
    sizes = basics(fields)
    attention = latent(fields, sizes)
    mlp_bias = fields.flag("mlp_bias") if fields.model_type == "deepseek_v2" else False
    mtp_layers = fields.stated("num_nextn_predict_layers", maximum=1000)
    per_layer: Sequence[MLAAttention] = (attention,) * sizes.num_layers
    if fields.model_type in ("deepseek_v32", "glm_moe_dsa"):
        per_layer = sparse_attention(fields, attention, sizes.num_layers)
    return assemble(fields, sizes, per_layer, mlp_bias=mlp_bias, mtp_layers=mtp_layers)


def assemble(
    fields: Fields,
    sizes: Basics,
    per_layer: Sequence[MLAAttention],
    *,
    mlp_bias: bool = False,
    mtp_layers: int = 0,
) -> Decoder:
    """Join the attention of every layer with DeepSeek's feed-forward networks."""
    if fields.model_type == "glm4_moe_lite" and not fields.has("mlp_layer_types"):
        sparse = tuple(index >= 1 for index in range(sizes.num_layers))
    else:
        sparse = sparse_after(fields, sizes.num_layers)
    route = routing(fields, groups=True)
    width = fields.size("moe_intermediate_size")
    shared = fields.optional("n_shared_experts", minimum=0) or 0
    dense_ffn: DenseFFN | None = None if all(sparse) else dense(fields, bias=mlp_bias)
    balanced = fields.text("topk_method") == "noaux_tc"
    fields.settle()
    moe = experts(route, width, score_bias=balanced, shared_width=shared * width, shared_bias=mlp_bias)
    layers = tuple(
        LayerKind(attention=attention, feed_forward=moe if is_sparse else dense_ffn)
        for attention, is_sparse in zip(per_layer, sparse, strict=True)
    )
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
        mtp=MTP(num_layers=mtp_layers, layer=LayerKind(attention=per_layer[-1], feed_forward=moe))
        if mtp_layers
        else None,
    )


def multi_head_deepseek(fields: Fields) -> Decoder:
    """A DeepSeek model that states ``use_mla: false``: ordinary multi-head attention, as in DeepSeek-MoE."""
    sizes = basics(fields)
    num_heads = fields.size("num_attention_heads")
    head = Heads(num_heads, num_heads, split_heads(fields, sizes.hidden_size, num_heads))
    bias = fields.flag("attention_bias")
    sparse = sparse_after(fields, sizes.num_layers)
    route, width = routing(fields, groups=True), fields.size("moe_intermediate_size")
    shared = fields.optional("n_shared_experts", minimum=0) or 0
    dense_ffn = None if all(sparse) else dense(fields)
    fields.settle()
    attention = softmax(head, qkv_bias=bias, out_bias=bias)
    moe = experts(route, width, shared_width=shared * width)
    return plain(
        sizes,
        tuple(LayerKind(attention=attention, feed_forward=moe if is_sparse else dense_ffn) for is_sparse in sparse),
    )


@family("minicpm3")
def minicpm3(fields: Fields) -> Decoder:
    """MiniCPM3: MLA with dense networks."""
    sizes = basics(fields)
    attention = latent(fields, sizes)
    ffn = dense(fields, bias=fields.flag("mlp_bias"))
    fields.settle()
    return plain(sizes, (LayerKind(attention=attention, feed_forward=ffn),) * sizes.num_layers)
