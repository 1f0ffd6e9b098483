"""Bytes and parameters of a block kind on a rank, from its weights and activations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import BoolArray, FloatArray
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.target import RecomputeMode
from meshwright.specs.workload import BYTES

from . import memory
from .activations import Saved, kept_bytes, layer_activations
from .blocks import BlockKind
from .few import distinct
from .local import Local, activation_element_bytes, linear_input_bytes

#: Live bytes a logit: 16-bit logits and their gradient; unfused, as PyTorch composes it, the fp32 log-softmax, its
#: gradient and that of the logits (``nll_loss_backward`` fills a whole tensor).
FUSED_LOGIT_BYTES, UNFUSED_LOGIT_BYTES = 4.0, 12.0
#: Bytes a logit that the backward pass of one loss keeps: the 16-bit gradient in place of fused logits; else the fp32
#: softmax. They add up where several losses wait for it (multi-token prediction).
KEPT_FUSED_LOGIT_BYTES, KEPT_LOGIT_BYTES = 2.0, 4.0
#: Patches of an image for each token that the language model sees (2 x 2 merge), and tokens of an image where the
#: configuration does not say (336 px at 14 px patches, CLIP ViT-L).
PATCHES_PER_TOKEN, TOKENS_PER_IMAGE = 4, 576
FULLY_SHARDED = ("zero3", "fsdp")


def stored_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """Parameters on a rank that belong to the dense and to the expert data-parallel group, adapters included.

    The last stage has its own copy of a tied embedding, and of the one that MTP looks up in; not so where the whole
    model is one stage.
    """
    return at.remember((kind, "stored"), lambda: _stored_params(kind, at))


def _stored_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    dense = at.numel(w for w in kind.weights if not w.expert)
    expert = at.numel(w for w in kind.weights if w.expert)
    if kind.role == "mtp" or (kind.role == "head" and at.model.tied_embeddings):
        embedding = at.numel(w for w in at.model.embedding_weights() if w.name == "embedding")
        if kind.role == "mtp":
            dense = dense + np.where(at.one_stage, 0.0, embedding)
        else:
            dense = dense - np.where(at.one_stage, embedding, 0.0)
    if kind.adapted:
        more = adapter_params(kind, at)
        dense, expert = dense + more[0], expert + more[1]
    return dense, expert


def adapter_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """(dense, expert) elements of the LoRA adapters of a block on a rank."""
    dense, expert = at.none, at.none
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
    low, size = low_precision_params(kind, at), memory.low_precision_bytes(at.workload.precision, transposed_copy)
    primary = at.workload.params_dtype == "fp8"
    out = np.zeros((len(at.tp), 3))
    for index in distinct(at.keys.sharding):
        name = shardings[index]
        matrices = kind.role not in ("embed", "head")
        parts = [
            memory.static_bytes(
                stored[i], trained[i], groups[i], name, at.workload, low[i] if primary else 0.0, size, matrices
            )
            for i in range(2)
        ]
        total = np.stack([dense + expert for dense, expert in zip(*parts, strict=True)], axis=1)
        if not primary and at.target.low_precision_inputs and memory.held(name).level not in FULLY_SHARDED:
            # Transformer Engine keeps the quantised copies from one micro-batch to the next.
            total[:, 0] += (low[0] + low[1]) * size
        out = np.where((at.keys.sharding == index)[:, None], total, out)
    return out


def placeholder_bytes(kinds: Sequence[BlockKind], at: Local) -> FloatArray:
    """Gradients that Transformer Engine hands to autograd in place of those that it added to the buffer: one cached
    tensor for each shape of the layers' maps (``get_dummy_wgrad``)."""
    shapes: dict[tuple[bytes, bytes], FloatArray] = {}
    for kind in kinds if at.target.gradient_placeholders else ():
        for linear in at.linears(kind.weights) if kind.trained and kind.layer is not None else ():
            if linear.name != "router":
                size = linear.inputs * linear.outputs * activation_element_bytes(at.workload.precision)
                shapes[linear.inputs.tobytes(), linear.outputs.tobytes()] = size
    return sum(shapes.values(), at.none)


def low_precision_params(kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
    """(dense, expert) parameters of the maps that run in the workload's low precision; none in 16 and 32 bit."""
    out = [at.none, at.none]
    if at.workload.precision in memory.LOW_PRECISION_BYTES:
        for linear in at.linears(kind.weights):
            if linear.low_precision:
                out[int(linear.expert)] = out[int(linear.expert)] + at.numel(linear.weights)
    return out[0], out[1]


def gathered_bytes(kind: BlockKind, at: Local, shardings: tuple[str, ...]) -> FloatArray:
    """Full parameters and gradients of the units that are live under full sharding, gone after the unit."""
    if not at.target.reshard_after_forward:
        return at.none
    parameter, gradient = _gathered_element_bytes(at)
    dense, expert = _divided_params(kind, at, shardings)
    if not (dense.any() or expert.any()):
        return at.none
    trained = np.where(dense + expert > 0, sum(trained_params(kind, at)), 0.0)
    # The prefetched unit is a layer like this one; embedding and head have layers for neighbours, which are smaller.
    units = memory.FSDP_LIVE_UNITS if kind.layer is not None else 1
    # The head's gradient is first live in 16 bits, beside the gradient of the logits.
    if kind.role == "head":
        gradient = min(gradient, parameter)
    out: FloatArray = (dense + expert) * parameter * units + trained * gradient
    return out


def retained_bytes(kind: BlockKind, at: Local, shardings: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
    """(parameters, gradients) that stay whole for the step where full sharding does not drop them after a unit: the
    gradients of all micro-batches are added up before they are scattered."""
    nothing = at.none
    if at.target.reshard_after_forward:
        return nothing, nothing
    parameter, gradient = _gathered_element_bytes(at)
    dense, expert = _divided_params(kind, at, shardings)
    return (dense + expert) * parameter, np.where(dense + expert > 0, sum(trained_params(kind, at)), 0.0) * gradient


def _gathered_element_bytes(at: Local) -> tuple[int, int]:
    """Bytes of a gathered parameter (compute runs in 16 bits where the shards are fp32 main parameters) and of its
    gradient before it is scattered."""
    wide = at.workload.precision in ("fp32", "tf32")
    return (4 if wide else min(BYTES[at.workload.params_dtype], 2)), at.workload.gradient_bytes


def _divided_params(kind: BlockKind, at: Local, shardings: tuple[str, ...]) -> tuple[FloatArray, FloatArray]:
    """(dense, expert) parameters that full sharding divides over more than one rank."""
    dense, expert = stored_params(kind, at)
    dense_divides, expert_divides = at.remember(shardings, lambda: _divides(at, shardings))
    return np.where(dense_divides, dense, 0.0), np.where(expert_divides, expert, 0.0)


def _divides(at: Local, shardings: tuple[str, ...]) -> tuple[BoolArray, BoolArray]:
    """Where full sharding divides (dense, expert) parameters over more than one rank."""
    replicas = np.array([memory.held(name).replicas for name in shardings])[at.keys.sharding]
    full = np.array([memory.held(name).level in FULLY_SHARDED for name in shardings])[at.keys.sharding]
    return full & (at.dp * at.cp / replicas > 1), full & (at.edp / replicas > 1)


def logit_bytes(at: Local) -> FloatArray:
    """Live bytes of the logits and their loss on a rank; in chunks, of one chunk."""
    each = at.target.logit_bytes or (FUSED_LOGIT_BYTES if at.target.fused_cross_entropy else UNFUSED_LOGIT_BYTES)
    return each * _logits(at) / at.target.loss_chunks


def _logits(at: Local) -> FloatArray:
    out: FloatArray = at.tokens * at.padded(at.model.vocab_size) / at.tp
    return out


def kept_logit_bytes(at: Local) -> FloatArray:
    """Bytes that one loss keeps for its backward pass; a chunked loss runs it at once."""
    if at.target.loss_chunks > 1:
        return at.none
    return (KEPT_FUSED_LOGIT_BYTES if at.target.fused_cross_entropy else KEPT_LOGIT_BYTES) * _logits(at)


def offloaded_bytes(kind: BlockKind, at: Local, modes: tuple[RecomputeMode, ...]) -> FloatArray:
    """Bytes of a block that wait in host memory for one in-flight micro-batch, by ``activation_offload_modules``."""
    out = at.none
    if kind.layer is None or not at.target.activation_offload_modules:
        return out
    saved = layer_activations(kind.layer, at)
    for index in distinct(at.keys.recompute):
        out = np.where(at.keys.recompute == index, _offloaded(saved, modes[index], at), out)
    return out


def _offloaded(saved: Saved, mode: RecomputeMode, at: Local) -> FloatArray:
    """Of what recomputation keeps; nothing under ``full``, which keeps one input."""
    if mode.granularity == "full" or "moe" in mode.modules:
        return at.none
    again = {"moe_act": "moe_act", "layernorm": "qkv_linear", "core_attn": "core_attn"}
    gone = {again[module] for module in mode.modules if module in again}
    names = [name for name in at.target.activation_offload_modules if name not in gone]
    return sum((saved.offloadable[name] for name in names if name in saved.offloadable), at.none)


def patches(at: Local) -> FloatArray:
    """Vision patches of a micro-batch: one image a sequence."""
    tokens = (at.model.vision.tokens_per_image if at.model.vision else None) or TOKENS_PER_IMAGE
    out: FloatArray = at.sequences * tokens * PATCHES_PER_TOKEN
    return out


def activation_bytes(kind: BlockKind, at: Local, modes: tuple[RecomputeMode, ...]) -> tuple[FloatArray, FloatArray]:
    """(kept for one in-flight micro-batch, transient) bytes of a block, without workspaces and gathered parameters."""
    hidden = activation_element_bytes(at.workload.precision) * at.model.hidden_size
    kept, transient = at.none, at.none
    if kind.role == "embed":
        # Token ids and the mask; output before and after scatter.
        masks = at.model.hidden_size * at.own_tokens if at.workload.dropout else 0.0
        return 8.0 * at.tokens + masks, hidden * (at.tokens + at.own_tokens)
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
    for index in distinct(at.keys.recompute):
        some, work = kept_bytes(saved, modes[index], kind.layer, at)
        some = some - _offloaded(saved, modes[index], at)
        here = at.keys.recompute == index
        kept, transient = np.where(here, some, kept), np.where(here, work, transient)
    if kind.role == "mtp":
        # Normed hidden state and embedding, their concatenation, the projection, and a head of its own.
        kept = kept + 8 * hidden * at.own_tokens + kept_logit_bytes(at)
        transient = np.maximum(transient, logit_bytes(at) + hidden * at.tokens)
    return kept, transient


def weight_stash_bytes(kind: BlockKind, at: Local) -> FloatArray:
    """What a micro-batch keeps for the weight gradients of a block once its input gradient is done: the input and the
    output gradient of every GEMM whose weights, or adapters, are trained.

    Counted per GEMM; for a dense layer in bf16 that is all but the softmax statistics of what it kept before
    (arXiv 2401.10241, table 1: 32 of 34 bytes). Sequence parallelism keeps a rank's own share of what is gathered.
    """
    out = at.none
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
