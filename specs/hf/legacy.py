"""Models with names of their own for the usual sizes: GPT-2, GPT-J, GPT-NeoX, Falcon, ChatGLM, DBRX."""

from __future__ import annotations

from ..attention import SoftmaxAttention
from ..feed_forward import DenseFFN
from ..model import LayerKind
from .decoder import Decoder, Heads, check_groups, softmax, split_heads
from .experts import Routing, experts
from .fields import MAX_LAYERS, Fields
from .registry import family


@family("gpt2", "gptj")
def gpt2(fields: Fields) -> Decoder:
    """GPT-2 (learned positions, biases everywhere) and GPT-J (rotary, one norm, biases in the network and head)."""
    is_gpt2 = fields.model_type == "gpt2"
    hidden = fields.size("n_embd", "hidden_size")
    num_layers = fields.size("n_layer", "num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.size("n_head", "num_attention_heads")
    vocab = fields.size("vocab_size")
    positions = fields.setting("n_positions", "n_ctx", "max_position_embeddings")
    inner = fields.optional("n_inner", "intermediate_size")
    tied = fields.flag("tie_word_embeddings")
    if inner is None:
        inner = 4 * hidden
        fields.derived("n_inner", inner, "4 * n_embd, as it is not stated")
    head = Heads(num_heads, num_heads, split_heads(fields, hidden, num_heads, "n_head"))
    fields.settle()
    layer = LayerKind(
        attention=softmax(head, qkv_bias=is_gpt2, out_bias=is_gpt2),
        feed_forward=DenseFFN(intermediate_size=inner, gated=False, bias=True),
        norms=2 if is_gpt2 else 1,
        norm_bias=True,
    )
    return Decoder(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(layer,) * num_layers,
        tied_embeddings=tied,
        max_position_embeddings=positions,
        learned_positions=positions if is_gpt2 else 0,
        final_norm_bias=True,
        head_bias=not is_gpt2,
        rotary=not is_gpt2,
        norm="LayerNorm",
        activation=fields.text("activation_function", absent="gelu_new"),
    )


@family("gpt_neox")
def gpt_neox(fields: Fields) -> Decoder:
    """GPT-NeoX and Pythia: layer norms and biases, attention and network in parallel."""
    hidden = fields.size("hidden_size")
    num_layers = fields.size("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.size("num_attention_heads")
    vocab, width = fields.size("vocab_size"), fields.size("intermediate_size")
    bias, tied = fields.flag("attention_bias"), fields.flag("tie_word_embeddings")
    positions = fields.optional("max_position_embeddings")
    head = Heads(num_heads, num_heads, split_heads(fields, hidden, num_heads))
    fields.settle()
    layer = LayerKind(
        attention=softmax(head, qkv_bias=bias, out_bias=bias),
        feed_forward=DenseFFN(intermediate_size=width, gated=False, bias=True),
        norm_bias=True,
    )
    return Decoder(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(layer,) * num_layers,
        tied_embeddings=tied,
        max_position_embeddings=positions,
        final_norm_bias=True,
        norm="LayerNorm",
        activation=fields.text("hidden_act", absent="gelu"),
    )


@family("falcon", "RefinedWeb", "RefinedWebModel")
def falcon(fields: Fields) -> Decoder:
    """Falcon, also by its first names: multi-query by a flag, grouped queries in the new architecture."""
    fields = Fields(fields.data, fields.report, fields.pointer, "falcon", fields.nested)
    hidden = fields.size("hidden_size", "n_embed")
    num_layers = fields.size("num_hidden_layers", "n_layer", maximum=MAX_LAYERS)
    num_heads = fields.size("num_attention_heads", "n_head")
    vocab = fields.size("vocab_size")
    tied, bias = fields.flag("tie_word_embeddings"), fields.flag("bias")
    stated_kv = fields.optional("num_kv_heads", "n_head_kv")
    is_new = fields.flag("new_decoder_architecture") or fields.has("n_head_kv")
    multi_query, parallel = fields.flag("multi_query"), fields.flag("parallel_attn")
    norms_in_parallel = fields.optional("num_ln_in_parallel_attn")
    width = fields.optional("ffn_hidden_size") or 4 * hidden
    alibi = fields.flag("alibi")
    positions = fields.optional("max_position_embeddings")
    kv_heads = (stated_kv or num_heads) if is_new else 1 if multi_query else num_heads
    head = Heads(num_heads, kv_heads, split_heads(fields, hidden, num_heads))
    check_groups(fields, num_heads, kv_heads, "num_kv_heads")
    fields.settle()
    if not fields.has("ffn_hidden_size"):
        fields.derived("ffn_hidden_size", width, "4 * hidden_size, as it is not stated")
    two_norms = not parallel or (is_new and norms_in_parallel in (None, 2))
    layer = LayerKind(
        attention=softmax(head, qkv_bias=bias, out_bias=bias),
        feed_forward=DenseFFN(intermediate_size=width, gated=False, bias=bias),
        norms=2 if two_norms else 1,
        norm_bias=True,
    )
    return Decoder(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(layer,) * num_layers,
        tied_embeddings=tied,
        max_position_embeddings=positions,
        final_norm_bias=True,
        rotary=not alibi,
        norm="LayerNorm",
        activation=fields.text("activation", absent="gelu"),
    )


@family("chatglm")
def chatglm(fields: Fields) -> Decoder:
    """ChatGLM2, ChatGLM3 and GLM-4 by their own code (it has no class in transformers)."""
    hidden = fields.size("hidden_size")
    num_layers = fields.size("num_layers", "num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.size("num_attention_heads")
    head_dim = fields.size("kv_channels")
    vocab = fields.size("padded_vocab_size", "vocab_size")
    width = fields.size("ffn_hidden_size")
    bias, qkv_bias = fields.flag("add_bias_linear", absent=False), fields.flag("add_qkv_bias", absent=False)
    kv_heads = num_heads
    if fields.flag("multi_query_attention", absent=False):
        kv_heads = fields.size("multi_query_group_num")
    tied = fields.flag("tie_word_embeddings", absent=False)
    positions = fields.stated("seq_length") or None
    is_rms = fields.flag("rmsnorm", absent=True)
    check_groups(fields, num_heads, kv_heads, "multi_query_group_num")
    fields.settle()
    attention = SoftmaxAttention(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias or qkv_bias,
        out_bias=bias,
    )
    layer = LayerKind(
        attention=attention, feed_forward=DenseFFN(intermediate_size=width, bias=bias), norm_bias=not is_rms
    )
    return Decoder(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(layer,) * num_layers,
        tied_embeddings=tied,
        max_position_embeddings=positions,
        final_norm_bias=not is_rms,
        norm="RMSNorm" if is_rms else "LayerNorm",
    )


@family("dbrx")
def dbrx(fields: Fields) -> Decoder:
    """DBRX: attention and experts in objects of their own, layer norms without bias."""
    hidden = fields.size("d_model", "hidden_size")
    num_layers = fields.size("n_layers", "num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.size("n_heads", "num_attention_heads")
    vocab = fields.size("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    positions = fields.optional("max_seq_len")
    attn = fields.child("attn_config", "dbrx/attn_config", nested=True, required=True)
    ffn = fields.child("ffn_config", "dbrx/ffn_config", nested=True, required=True)
    kv_heads = attn.size("kv_n_heads")
    route = Routing(ffn.size("moe_num_experts"), ffn.size("moe_top_k"))
    width = ffn.size("ffn_hidden_size")
    if route.top_k > route.num_experts and not fields.report.faults:
        ffn.fault("moe_top_k", f"{route.top_k} experts a token, but there are {route.num_experts}")
    head = Heads(num_heads, kv_heads, split_heads(fields, hidden, num_heads, "n_heads"))
    check_groups(attn, num_heads, kv_heads, "kv_n_heads")
    fields.settle()
    layer = LayerKind(attention=softmax(head), feed_forward=experts(route, width))
    return Decoder(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=(layer,) * num_layers,
        tied_embeddings=tied,
        max_position_embeddings=positions,
        norm="LayerNorm",
    )
