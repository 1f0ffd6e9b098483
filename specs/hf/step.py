"""Step-3.7: sliding and full attention with a gate on every head, experts beside a shared one."""

from __future__ import annotations

from ..attention import SoftmaxAttention
from ..model import MTP, LayerKind
from .decoder import FULL, SLIDING, Decoder, attention_types, basics, check_groups, dense, windows
from .experts import experts, routing
from .fields import MAX_LAYERS, Fields
from .registry import family


@family("step3p5")
def step_text(fields: Fields) -> Decoder:
    """The text model of Step-3.7 (``Step3p7TextConfig``); lists may carry entries for the MTP layers at the end."""
    sizes = basics(fields)
    num_heads, kv_heads = fields.size("num_attention_heads"), fields.size("num_key_value_heads", "num_attention_groups")
    head_dim = fields.size("head_dim")
    mtp_layers = fields.stated("num_nextn_predict_layers", "num_mtp_layers", maximum=1000)
    sliding_heads = fields.optional("num_sliding_attention_heads")
    if sliding_heads is None:
        sliding_heads = fields.child("attention_other_setting").stated("num_attention_heads", minimum=1) or num_heads
    check_groups(fields, num_heads, kv_heads, "num_key_value_heads")
    check_groups(fields, sliding_heads, kv_heads, "num_sliding_attention_heads")
    types = _without_mtp(fields, "layer_types", sizes.num_layers, mtp_layers)
    kinds = attention_types(types, sizes.num_layers, lambda index: FULL, rule="full_attention in every layer")
    per_layer = windows(fields, kinds, fields.optional("sliding_window"))
    sparse = _sparse(_without_mtp(fields, "mlp_layer_types", sizes.num_layers, mtp_layers), sizes.num_layers)
    # Step3p7TextConfig also declares num_local_experts, but its model builds n_routed_experts.
    route = routing(fields, num_experts_names=("n_routed_experts", "moe_num_experts"))
    width = fields.size("moe_intermediate_size")
    shared = fields.size("share_expert_dim", "share_expert_dims")
    mlp_bias = fields.flag("mlp_bias")
    ffn = dense(fields, bias=mlp_bias)
    bias = fields.flag("attention_bias")
    fields.settle()
    moe = experts(route, width, score_bias=True, shared_width=shared, shared_bias=mlp_bias)

    def attention(kind: str, window: int | None) -> SoftmaxAttention:
        return SoftmaxAttention(
            num_heads=sliding_heads if kind == SLIDING else num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            head_gate=True,
        )

    layers = tuple(
        LayerKind(attention=attention(kind, window), feed_forward=moe if is_sparse else ffn)
        for kind, window, is_sparse in zip(kinds, per_layer, sparse, strict=True)
    )
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=layers,
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
        mtp=MTP(num_layers=mtp_layers, layer=layers[-1]) if mtp_layers else None,
    )


def _without_mtp(fields: Fields, name: str, num_layers: int, mtp_layers: int) -> Fields:
    """The same fields with the MTP layers' entries cut off the end of a list."""
    value = fields.data.get(name)
    if mtp_layers and isinstance(value, list) and len(value) == num_layers + mtp_layers:
        data = {**fields.data, name: value[:num_layers]}
        return Fields(data, fields.report, fields.pointer, fields.model_type, fields.nested)
    return fields


def _sparse(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    types = fields.words("mlp_layer_types", num_layers, ("dense", "sparse"))
    if types is not None:
        return tuple(kind == "sparse" for kind in types)
    enum = fields.data.get("moe_layers_enum")
    if isinstance(enum, str):
        parts = [part.strip() for part in enum.split(",") if part.strip()]
        if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
            fields.fault("moe_layers_enum", "must be layer numbers with commas between")
            parts = []
        return tuple(str(index) in parts for index in range(num_layers))
    listed = fields.integers("moe_layers_enum", maximum=MAX_LAYERS)
    if listed is not None:
        return tuple(index in listed for index in range(num_layers))
    fields.derived("mlp_layer_types", "dense in layers 0 to 2, then sparse", "as Step3p7TextConfig does when absent")
    return tuple(index >= 3 for index in range(num_layers))
