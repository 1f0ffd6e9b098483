"""Text models that exist only inside multimodal Llamas: Llama 3.2 Vision and Llama 4."""

from __future__ import annotations

from ..model import LayerKind
from .decoder import CHUNKED, FULL, Decoder, attention_types, basics, dense, heads, softmax, windows
from .experts import experts, routing
from .fields import MAX_LAYERS, Fields
from .llama_like import plain
from .registry import family

#: MllamaTextConfig's default for ``cross_attention_layers`` (transformers 5.24.0).
_CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
#: MllamaTextModel embeds this many tokens beyond ``vocab_size`` (the image token and reserve).
_EXTRA_TOKENS = 8


@family("mllama_text_model")
def mllama_text(fields: Fields) -> Decoder:
    """Llama 3.2 Vision: some layers attend to the image instead of the text."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    ffn = dense(fields)
    cross_layers = fields.integers("cross_attention_layers", maximum=MAX_LAYERS)
    if cross_layers is None:
        cross_layers = _CROSS_LAYERS
        fields.derived("cross_attention_layers", list(cross_layers), "as MllamaTextConfig does when it is absent")
    if not fields.report.faults and any(index >= sizes.num_layers for index in cross_layers):
        fields.fault("cross_attention_layers", f"names a layer beyond the last one, {sizes.num_layers - 1}")
    fields.settle()
    own = LayerKind(attention=softmax(head), feed_forward=ffn)
    cross = LayerKind(
        attention=softmax(head, qk_norm="head").model_copy(update={"cross": True}),
        feed_forward=ffn,
        extra_parameters=2,  # the gates of attention and network
    )
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=tuple(cross if index in cross_layers else own for index in range(sizes.num_layers)),
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        extra_parameters=_EXTRA_TOKENS * sizes.hidden_size,
        activation=sizes.activation,
    )


@family("llama4_text")
def llama4_text(fields: Fields) -> Decoder:
    """Llama 4: experts (width ``intermediate_size``) in every n-th layer beside a shared one, dense networks
    (``intermediate_size_mlp``) in the others, chunked attention but in every fourth layer."""
    sizes = basics(fields)
    head = heads(fields, sizes.hidden_size)
    bias = fields.flag("attention_bias")
    chunk = fields.optional("attention_chunk_size")
    every = fields.setting("no_rope_layer_interval")
    rope = fields.integers("no_rope_layers", maximum=1)
    if rope and len(rope) != sizes.num_layers and not fields.report.faults:
        fields.fault("no_rope_layers", f"has {len(rope)} entries, but the model has {sizes.num_layers} layers")
    local = rope or [int((index + 1) % every != 0) for index in range(sizes.num_layers)]
    types = attention_types(
        fields,
        sizes.num_layers,
        lambda index: CHUNKED if chunk and index < len(local) and local[index] else FULL,
        rule=f"chunked_attention but in every {every}th layer (no_rope_layer_interval)",
        allowed=(FULL, CHUNKED),
    )
    per_layer = windows(fields, types, chunk)
    if chunk and CHUNKED in types:
        fields.report.assume(f"chunked attention of {chunk} tokens is priced as a sliding window of that size")
    step = fields.setting("interleave_moe_layer_step")
    stated = fields.integers("moe_layers", maximum=MAX_LAYERS)
    sparse = frozenset(range(step - 1, sizes.num_layers, step) if stated is None else stated)
    route, width = routing(fields), fields.size("intermediate_size")
    dense_width = fields.size("intermediate_size_mlp") if len(sparse) < sizes.num_layers else width
    fields.settle()
    moe = experts(route, width, shared_width=width)
    ffn = dense(fields).model_copy(update={"intermediate_size": dense_width})
    return plain(
        sizes,
        tuple(
            LayerKind(
                attention=softmax(head, window, qkv_bias=bias, out_bias=bias),
                feed_forward=moe if index in sparse else ffn,
            )
            for index, window in enumerate(per_layer)
        ),
    )
