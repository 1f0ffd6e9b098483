"""``ModelSpec`` from an architecture in Megatron's names, as run tables state it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.specs.attention import Attention, LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.errors import SpecError
from meshwright.specs.feed_forward import DenseFFN, FeedForward, MoEFFN
from meshwright.specs.model import MTP, LayerKind, ModelSpec

from .rows import UnsupportedError

#: GPT-2's vocabulary padded as Megatron does: what tables of GPT runs leave unsaid.
DEFAULT_VOCABULARY = 51200
#: Kernel of the short convolutions of Mamba-2 and Gated DeltaNet (the published models' configurations).
CONV_KERNEL = 4
#: (groups, groups a token may choose) of routers that tables leave unsaid, by experts, choices and hidden size:
#: ``n_group`` and ``topk_group`` in the config.json of DeepSeek-V3 and DeepSeek-V2.
ROUTING_GROUPS = {(256, 8, 7168): (8, 4), (160, 6, 5120): (8, 3)}


def model_of(name: str, data: Mapping[str, Any], notes: list[str]) -> ModelSpec:
    """The model; what is assumed is appended to ``notes``. :class:`UnsupportedError` where it cannot be expressed."""
    try:
        return _model(name, data, notes)
    except KeyError as error:
        raise UnsupportedError(f"model {name} does not state {error.args[0]}") from error
    except (SpecError, ValidationError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(f"model {name} cannot be expressed: {str(error)[:200]}") from error


def _model(name: str, data: Mapping[str, Any], notes: list[str]) -> ModelSpec:
    layers = int(data["num_layers"])
    if data.get("hybrid_pattern"):
        kinds, mtp_kind = _hybrid(data, layers)
    else:
        kinds, mtp_kind = _uniform(data, layers, notes), None
    distinct: list[LayerKind] = []
    pattern = []
    for kind in kinds:
        if kind not in distinct:
            distinct.append(kind)
        pattern.append(distinct.index(kind))
    if data.get("enable_hyper_connections"):
        notes.append("hyper-connections are priced as plain residual connections")
    vocabulary = data.get("vocab_size")
    if not isinstance(vocabulary, int):
        vocabulary = DEFAULT_VOCABULARY
        notes.append(f"vocabulary of {DEFAULT_VOCABULARY} (GPT-2's, padded)")
    depth = int(data.get("mtp_num_layers") or 0)
    learned = data.get("position_embedding_type") == "learned_absolute" or "learned" in str(data.get("pos_embedding"))
    return ModelSpec(
        name=name,
        family="megatron",
        hidden_size=data["hidden_size"],
        vocab_size=vocabulary,
        kinds=tuple(distinct),
        pattern=tuple(pattern),
        tied_embeddings=bool(data.get("tied_embeddings")),
        rotary=not learned and data.get("position_embedding_type") not in ("none", "learned_absolute"),
        mtp=MTP(num_layers=depth, layer=mtp_kind or kinds[-1]) if depth else None,
    )


def _softmax(data: Mapping[str, Any], window: int | None = None) -> SoftmaxAttention:
    heads = int(data["num_attention_heads"])
    return SoftmaxAttention(
        num_heads=heads,
        num_kv_heads=int(data.get("num_query_groups") or heads),
        head_dim=int(data.get("kv_channels") or data["hidden_size"] // heads),
        window=window,
        qkv_bias=bool(data.get("add_qkv_bias") or data.get("add_bias_linear") or data.get("bias")),
        qk_norm="head" if data.get("qk_layernorm") else "none",
        output_gate=bool(data.get("attention_output_gate")),
    )


def _feed_forward(data: Mapping[str, Any], sparse: bool) -> FeedForward:
    gated = bool(data.get("gated_linear_unit"))
    if not sparse:
        return DenseFFN(intermediate_size=int(data["ffn_hidden_size"]), gated=gated)
    experts, top_k = int(data["num_experts"]), int(data["topk"])
    groups, chosen = ROUTING_GROUPS.get((experts, top_k, int(data["hidden_size"])), (None, None))
    return MoEFFN(
        num_experts=experts,
        top_k=top_k,
        num_expert_groups=groups,
        top_k_groups=chosen,
        expert_intermediate_size=int(data["moe_ffn_hidden_size"]),
        gated=gated,
        shared_intermediate_size=int(data.get("shared_expert_intermediate_size") or 0),
        latent_size=data.get("moe_latent_size"),
    )


def _uniform(data: Mapping[str, Any], layers: int, notes: list[str]) -> list[LayerKind]:
    sparse = list(data.get("moe_layers") or [1 if data.get("num_experts") else 0] * layers)
    sparse += [sparse[-1]] * (layers - len(sparse))
    mixers = _mixers(data, layers, notes)
    return [
        LayerKind(attention=mixer, feed_forward=_feed_forward(data, bool(moe)))
        for mixer, moe in zip(mixers, sparse, strict=False)
    ]


def _mixers(data: Mapping[str, Any], layers: int, notes: list[str]) -> list[Attention]:
    if data.get("mla"):
        mla = MLAAttention(
            num_heads=data["num_attention_heads"],
            q_lora_rank=data.get("q_lora_rank") or None,
            kv_lora_rank=data["kv_lora_rank"],
            qk_nope_head_dim=data["qk_head_dim"],
            qk_rope_head_dim=data["qk_pos_emb_head_dim"],
            v_head_dim=data["v_head_dim"],
        )
        return [mla] * layers
    if data.get("csa_compress_ratios"):
        return _compressed(data, layers, notes)
    if data.get("linear_num_key_heads"):
        linear = LinearAttention(
            num_key_heads=data["linear_num_key_heads"],
            key_head_dim=data["linear_key_head_dim"],
            num_value_heads=data["linear_num_value_heads"],
            value_head_dim=data["linear_value_head_dim"],
            conv_kernel=data.get("linear_conv_kernel_dim") or CONV_KERNEL,
        )
        every = int(data.get("linear_attention_freq") or 4)
        return [_softmax(data) if i % every == every - 1 else linear for i in range(layers)]
    full = _softmax(data)
    window = _window(data, notes)
    if not window:
        return [full] * layers
    every = data.get("window_attn_skip_freq") or 2
    if not isinstance(every, int):
        every = 2
    sliding = _softmax(data, window)
    return [full if i % every == every - 1 else sliding for i in range(layers)]


def _window(data: Mapping[str, Any], notes: list[str]) -> int | None:
    value = data.get("window_size")
    if isinstance(value, list | tuple):
        value = value[0]
    if value is None and "sliding-window(128)" in str(data.get("attention")):
        value = 128
    if value is None and data.get("attention_chunk_size"):
        notes.append("chunked attention is priced as full attention up to the chunk's length")
    return int(value) if value and int(value) > 0 else None


def _compressed(data: Mapping[str, Any], layers: int, notes: list[str]) -> list[Attention]:
    """Attention over compressed keys: priced as a window of what a query sees, local keys and compressed ones."""
    notes.append("compressed sparse attention is priced as sliding attention over as many keys")
    ratios = data["csa_compress_ratios"]
    if isinstance(ratios, str):
        ratios = _list_expression(ratios)
    local, chosen = int(data.get("csa_window_size") or 128), int(data.get("dsa_indexer_topk") or 512)
    return [_softmax(data, local + (chosen if ratio else 0)) for ratio in [*ratios, *[0] * layers][:layers]]


def _list_expression(text: str) -> list[int]:
    """``[0,0,4]+[128,4]*20+[0]`` as a list; only lists, sums and whole multiples are read."""

    def value(node: ast.expr) -> list[int]:
        if isinstance(node, ast.List):
            return [int(ast.literal_eval(item)) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            times = int(ast.literal_eval(node.right))
            if times > 1000:
                raise UnsupportedError("a list repeats more than 1000 times")
            return value(node.left) * times
        raise UnsupportedError(f"cannot read the list {text!r}")

    return value(ast.parse(text, mode="eval").body)


def _hybrid(data: Mapping[str, Any], layers: int) -> tuple[list[LayerKind], LayerKind | None]:
    """Layers of a pattern: ``M`` Mamba-2, ``*`` attention, ``-`` dense, ``E`` experts; after ``/`` comes MTP."""
    mamba = MambaMixer(
        num_heads=data["mamba_num_heads"],
        head_dim=data["mamba_head_dim"],
        num_groups=data["mamba_num_groups"],
        state_size=data["mamba_state_dim"],
        conv_kernel=CONV_KERNEL,
    )

    def kind(letter: str) -> LayerKind:
        if letter == "M":
            return LayerKind(attention=mamba, norms=1)
        if letter == "*":
            return LayerKind(attention=_softmax(data), norms=1)
        if letter in "-E":
            return LayerKind(feed_forward=_feed_forward(data, letter == "E"), norms=1)
        raise UnsupportedError(f"layer {letter!r} of a hybrid pattern is unknown")

    main = str(data["hybrid_pattern"]).split("/")[0].replace("|", "")
    if layers < len(main):
        main = main[:layers]
    mtp = LayerKind(attention=_softmax(data), feed_forward=_feed_forward(data, bool(data.get("num_experts"))))
    return [kind(letter) for letter in main], mtp if data.get("mtp_num_layers") else None
