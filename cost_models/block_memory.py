"""Bytes and parameters of a block kind on a rank, from its weights and activations."""

from __future__ import annotations

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.target import RecomputeMode
from meshwright.specs.workload import BYTES

from . import memory
from .activations import kept_bytes, layer_activations
from .blocks import BlockKind
from .local import Local, activation_element_bytes, linear_input_bytes

#: Live bytes a logit: 16-bit logits and gradient in place; unfused 16 bit, fp32 copy, fp32 gradient.
FUSED_LOGIT_BYTES, UNFUSED_LOGIT_BYTES = 4.0, 10.0
#: Patches of an image for each token that the language model sees (2 x 2 merge), and tokens of an image where the
#: configuration does not say (336 px at 14 px patches, CLIP ViT-L).
PATCHES_PER_TOKEN, TOKENS_PER_IMAGE = 4, 576
FULLY_SHARDED = ("zero3", "fsdp")


def stored_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """Parameters on a rank that belong to the dense and to the expert data-parallel group, adapters included.

    The last stage has its own copy of a tied embedding, and of the one that MTP looks up in; not so where the whole
    model is one stage.
    """
    dense = at.numel(w for w in kind.weights if not w.expert)
    expert = at.numel(w for w in kind.weights if w.expert)
    embedding = at.numel(w for w in at.model.embedding_weights() if w.name == "embedding")
    if kind.role == "mtp":
        dense = dense + np.where(at.one_stage, 0.0, embedding)
    if kind.role == "head" and at.model.tied_embeddings:
        dense = dense - np.where(at.one_stage, embedding, 0.0)
    if kind.adapted:
        more = adapter_params(kind, at)
        dense, expert = dense + more[0], expert + more[1]
    return dense, expert


def adapter_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """(dense, expert) elements of the LoRA adapters of a block on a rank."""
    dense, expert = np.zeros_like(at.tp), np.zeros_like(at.tp)
    lora = at.workload.lora
    if lora is None or not kind.adapted:
        return dense, expert
    for linear in at.linears(kind.weights):
        parts = at.adapter(linear, lora)
        if parts and linear.expert:
            expert = expert + parts[0] + parts[1]
        elif parts:
            dense = dense + parts[0] + parts[1]
    return dense, expert


def trained_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """(dense, expert) parameters that get gradients and optimizer state."""
    return stored_params(kind, at) if kind.trained else adapter_params(kind, at)


def static_bytes(kind: BlockKind, at: Local, shardings: tuple[str, ...], transposed_copy: bool) -> FloatArray:
    """[C, (weights, gradients, optimizer)] bytes. ``transposed_copy``: low precision needs both layouts cached."""
    stored, trained = stored_params(kind, at), trained_params(kind, at)
    groups = at.dp * at.cp, at.edp
    out = np.zeros((len(at.tp), 3))
    for index in np.unique(at.keys.sharding):
        parts = [
            np.stack(memory.static_bytes(stored[i], trained[i], groups[i], shardings[index], at.workload), axis=1)
            for i in range(2)
        ]
        out = np.where((at.keys.sharding == index)[:, None], parts[0] + parts[1], out)
    low = [linear for linear in at.linears(kind.weights) if linear.low_precision]
    size = sum((at.numel(linear.weights) for linear in low), np.zeros_like(at.tp))
    out[:, 0] += memory.low_precision_copy_bytes(size, at.workload.precision, transposed_copy)
    return out


def gathered_bytes(kind: BlockKind, at: Local, shardings: tuple[str, ...]) -> FloatArray:
    """Full parameters and gradients of the units that are live under full sharding."""
    dense, expert = stored_params(kind, at)
    size = BYTES[at.workload.params_dtype] * memory.FSDP_LIVE_UNITS + BYTES[at.workload.gradient_dtype]
    sharded = np.isin(at.keys.sharding, [i for i, name in enumerate(shardings) if name in FULLY_SHARDED])
    return np.where(sharded, (dense + expert) * size, 0.0)


def logit_bytes(at: Local) -> FloatArray:
    """Live bytes of the logits and their loss on a rank."""
    each = FUSED_LOGIT_BYTES if at.target.fused_cross_entropy else UNFUSED_LOGIT_BYTES
    out: FloatArray = each * at.tokens * at.padded(at.model.vocab_size) / at.tp
    return out


def patches(at: Local) -> FloatArray:
    """Vision patches of a micro-batch: one image a sequence."""
    tokens = (at.model.vision.tokens_per_image if at.model.vision else None) or TOKENS_PER_IMAGE
    out: FloatArray = at.sequences * tokens * PATCHES_PER_TOKEN
    return out


def activation_bytes(kind: BlockKind, at: Local, modes: tuple[RecomputeMode, ...]) -> tuple[FloatArray, FloatArray]:
    """(kept for one in-flight micro-batch, transient) bytes of a block, without workspaces and gathered parameters."""
    hidden = activation_element_bytes(at.workload.precision) * at.model.hidden_size
    kept, transient = np.zeros_like(at.tp), np.zeros_like(at.tp)
    if kind.role == "embed":
        return 8.0 * at.tokens, hidden * (at.tokens + at.own_tokens)  # token ids; output before and after scatter
    if kind.role == "head":
        return 2 * hidden * at.own_tokens, logit_bytes(at) + hidden * at.tokens
    if kind.role == "vision" and at.model.vision:
        tower = at.model.vision
        inner = (2 if tower.gated else 1) + 1
        layer_bytes = 2.0 * (8 * tower.hidden_size + inner * tower.intermediate_size)
        return layer_bytes * tower.num_layers * patches(at), transient
    if kind.layer is None:
        return kept, transient
    saved = layer_activations(kind.layer, at)
    for index in np.unique(at.keys.recompute):
        some, work = kept_bytes(saved, modes[index], kind.layer, at)
        here = at.keys.recompute == index
        kept, transient = np.where(here, some, kept), np.where(here, work, transient)
    if kind.role == "mtp":
        # Normed hidden state and embedding, their concatenation, the projection, and a head of its own.
        kept = kept + 8 * hidden * at.own_tokens
        transient = np.maximum(transient, logit_bytes(at) + hidden * at.tokens)
    return kept, transient


def weight_stash_bytes(kind: BlockKind, at: Local) -> FloatArray:
    """What a micro-batch keeps for the weight gradients of a block once its input gradient is done: the input and the
    output gradient of every GEMM whose weights, or adapters, are trained.

    Counted per GEMM; for a dense layer in bf16 that is all but the softmax statistics of what it kept before
    (arXiv 2401.10241, table 1: 32 of 34 bytes). Sequence parallelism keeps a rank's own share of what is gathered.
    """
    out = np.zeros_like(at.tp)
    wide, low = activation_element_bytes(at.workload.precision), linear_input_bytes(at.workload.precision)
    ffn = kind.layer.feed_forward if kind.layer else None
    pairs = at.expert_tokens(ffn.top_k) if isinstance(ffn, MoEFFN) else out
    weights = kind.weights + (at.model.head_weights() if kind.role == "mtp" else ())
    for linear in at.linears(weights):
        lora = at.workload.lora if kind.adapted else None
        if not kind.trained and (lora is None or not at.adapter(linear, lora)):
            continue
        if linear.expert:
            rows_in = rows_out = pairs
        else:
            rows_in = at.tokens if linear.split == "row" else at.own_tokens
            rows_out = at.tokens if linear.split == "column" else at.own_tokens
        size = low if linear.low_precision else wide
        out = out + size * (rows_in * linear.inputs + rows_out * linear.outputs)
    return out
