"""NVIDIA's own: Nemotron-H (Mamba-2, attention and networks are layers of their own) and NAS models."""

from __future__ import annotations

from collections.abc import Sequence

from ..attention import MambaMixer
from ..feed_forward import DenseFFN
from ..model import MTP, LayerKind
from .decoder import Decoder, Heads, basics, check_groups, heads, softmax, split_heads
from .experts import experts, routing
from .fields import MAX_LAYERS, Fields
from .registry import family

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SYNONYMS = {"linear_attention": "mamba", "full_attention": "attention"}


@family("nemotron_h")
def nemotron_h(fields: Fields) -> Decoder:
    """Nemotron-H and Nemotron 3: each layer is one mixer or one network, with one norm."""
    types = _layer_types(fields)
    hidden = fields.size("hidden_size")
    vocab = fields.size("vocab_size")
    tied = fields.flag("tie_word_embeddings")
    max_positions = fields.optional("max_position_embeddings")
    mtp_layers = fields.stated("num_nextn_predict_layers", maximum=1000)
    mtp_types = _mtp_types(fields) if mtp_layers else ()
    kinds = {kind: _layer(fields, kind, hidden) for kind in dict.fromkeys((*types, *mtp_types))}
    fields.settle()
    mtp = None
    if mtp_layers:
        parts = [kinds[kind] for kind in mtp_types]
        mixers = [part.attention for part in parts if part.attention]
        networks = [part.feed_forward for part in parts if part.feed_forward]
        if len(mixers) != 1 or len(networks) != 1:
            fields.fault("mtp_layers_block_type", "must have one mixer and one network")
            fields.settle()
        mtp = MTP(num_layers=mtp_layers, layer=LayerKind(attention=mixers[0], feed_forward=networks[0]))
    return Decoder(
        hidden_size=hidden,
        vocab_size=vocab,
        layers=tuple(kinds[kind] for kind in types),
        tied_embeddings=tied,
        max_position_embeddings=max_positions,
        rotary=False,
        activation=fields.text("mlp_hidden_act", absent="relu2"),
        mtp=mtp,
    )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    pattern = fields.text("hybrid_override_pattern")
    types = fields.items("layers_block_type")
    if types is None and not pattern:
        if fields.report.faults:  # such as a pattern of another type
            return ("mamba",)
        fields.fault("layers_block_type", "is required (also read as hybrid_override_pattern)")
        return ("mamba",)
    name, words = ("layers_block_type", types) if types is not None else ("hybrid_override_pattern", list(pattern))
    read = _words(fields, name, words, letters=types is None)
    stated = fields.stated("num_hidden_layers", minimum=1, maximum=MAX_LAYERS)
    if len(read) > MAX_LAYERS:
        fields.fault(name, f"has {len(read)} layers; at most {MAX_LAYERS} are read")
        return ("mamba",)
    if stated and stated != len(read) and not fields.report.faults:
        fields.fault("num_hidden_layers", f"is {stated}, but {name} has {len(read)} layers")
    if not stated and not fields.report.faults:
        fields.derived("num_hidden_layers", len(read), f"the length of {name}")
    return read


def _mtp_types(fields: Fields) -> tuple[str, ...]:
    pattern = fields.text("mtp_hybrid_override_pattern")
    types = fields.items("mtp_layers_block_type")
    if types is not None:
        return _words(fields, "mtp_layers_block_type", types, letters=False)
    if pattern:
        return _words(fields, "mtp_hybrid_override_pattern", list(pattern), letters=True)
    fields.derived("mtp_layers_block_type", "[attention, moe]", "as NemotronHConfig does when it is absent")
    return ("attention", "moe")


def _words(fields: Fields, name: str, values: Sequence[object], *, letters: bool) -> tuple[str, ...]:
    out = []
    table = _LETTERS if letters else {word: word for word in _LETTERS.values()} | _SYNONYMS
    for index, value in enumerate(values[: MAX_LAYERS + 1]):
        word = table.get(value) if isinstance(value, str) else None
        if word is None:
            where = name if letters else f"{name}/{index}"
            fields.fault(where, f"{str(value)[:40]!r} at position {index} is not a kind of layer", tuple(table))
        out.append(word or "mamba")
    if not out:
        fields.fault(name, "must not be empty")
        out.append("mamba")
    return tuple(out)


def _layer(fields: Fields, kind: str, hidden: int) -> LayerKind:
    """One layer of Nemotron-H."""
    if kind == "attention":
        # NemotronHAttention has no biases, whatever attention_bias says.
        return LayerKind(attention=softmax(heads(fields, hidden)), norms=1)
    if kind == "mamba":
        mixer = MambaMixer(
            num_heads=fields.size("mamba_num_heads"),
            head_dim=fields.size("mamba_head_dim"),
            num_groups=fields.size("n_groups"),
            state_size=fields.size("ssm_state_size"),
            conv_kernel=fields.setting("conv_kernel"),
            conv_bias=fields.flag("use_conv_bias"),
            bias=fields.flag("use_bias"),
        )
        if mixer.num_heads % mixer.num_groups and not fields.report.faults:
            fields.fault("n_groups", f"{mixer.num_groups} groups do not divide {mixer.num_heads} mamba heads")
        return LayerKind(attention=mixer, norms=1)
    bias = fields.flag("mlp_bias")
    if kind == "mlp":
        network = DenseFFN(intermediate_size=fields.size("intermediate_size"), gated=False, bias=bias)
        return LayerKind(feed_forward=network, norms=1)
    shared = fields.optional("n_shared_experts", minimum=0)
    shared_width = fields.size("moe_shared_expert_intermediate_size") if shared else 0
    moe = experts(
        routing(fields, groups=True),
        fields.size("moe_intermediate_size"),
        gated=False,
        score_bias=True,
        shared_width=shared_width,
        shared_bias=bias,
        latent=fields.optional("moe_latent_size"),
    )
    latent_biases = hidden + moe.latent_size if bias and moe.latent_size else 0
    return LayerKind(feed_forward=moe, norms=1, extra_parameters=latent_biases)


@family("nemotron-nas")
def nemotron_nas(fields: Fields) -> Decoder:
    """Llama-Nemotron (DeciLM): ``block_configs`` gives each block its KV groups and width, or takes a part away."""
    sizes = basics(fields)
    num_heads = fields.size("num_attention_heads")
    head_dim = split_heads(fields, sizes.hidden_size, num_heads)
    attention_bias, mlp_bias = fields.flag("attention_bias", absent=False), fields.flag("mlp_bias", absent=False)
    blocks = fields.items("block_configs", sizes.num_layers)
    if not fields.has("block_configs"):
        fields.fault("block_configs", "is required: one object a layer")
    fields.settle()
    layers = []
    for index, value in enumerate(blocks or []):
        block = Fields({str(index): value}, fields.report, fields.path("block_configs")).child(
            str(index), required=True
        )
        if fields.report.faults:
            break
        layers.append(_block(block, num_heads, head_dim, sizes.hidden_size, attention_bias, mlp_bias))
    fields.settle()
    return Decoder(
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=tuple(layers),
        tied_embeddings=sizes.tied,
        max_position_embeddings=sizes.max_positions,
        activation=sizes.activation,
    )


def _block(
    block: Fields, num_heads: int, head_dim: int, hidden: int, attention_bias: bool, mlp_bias: bool
) -> LayerKind:
    part, network = block.child("attention", required=True), block.child("ffn", required=True)
    attention, ffn = None, None
    if block.report.faults:  # an entry that is no object has nothing to read
        return LayerKind()
    for each in (part, network):
        if each.flag("replace_with_linear", absent=False):
            each.fault("replace_with_linear", "must be false: linear stand-ins are not supported")
    if not part.flag("no_op", absent=False):
        group = part.size("n_heads_in_group")
        check_groups(part, num_heads, group, "n_heads_in_group")
        kv_heads = max(1, num_heads // group)
        window = part.optional("window_length")
        attention = softmax(
            Heads(num_heads, kv_heads, head_dim), window, qkv_bias=attention_bias, out_bias=attention_bias
        )
    if not network.flag("no_op", absent=False):
        ffn = DenseFFN(intermediate_size=_width(network.number("ffn_mult", maximum=1000.0), hidden), bias=mlp_bias)
    return LayerKind(attention=attention, feed_forward=ffn, norms=(attention is not None) + (ffn is not None))


def _width(multiplier: float, hidden: int) -> int:
    """Network width of a NAS block: 2/3 of ``multiplier * hidden``, up to a multiple of 256 (DeciLM's own code)."""
    width = int(2 * multiplier * hidden / 3)
    return max(256, -(-width // 256) * 256)
