"""Seconds of a block kind on a rank of a pool: layers, embedding, head, vision tower, sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.cluster import NetworkLevel
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind
from meshwright.specs.target import RecomputeMode
from meshwright.specs.workload import BYTES

from .activations import recomputed_modules
from .block_memory import FULLY_SHARDED, patches, stored_params
from .blocks import BlockKind
from .collectives import Collective, collective_s, contention
from .feed_forward_time import add_dense_ffn, add_mixture, exchange_contention
from .few import distinct
from .layer_time import LayerTimer
from .local import Local
from .memory import held
from .mixer_time import mixer_pieces
from .operators import matmul_s, stream_s
from .overlap import sharded_exposed_s
from .pieces import CALLS, LOSS_EXCHANGE_CALLS, REDUCE_CALLS, Pieces
from .protocol import TERMS

#: Share of a unit's compute under which FSDP hides its collectives: forward and backward, AMD-AGI/Primus projection.
FSDP_HIDDEN_FORWARD, FSDP_HIDDEN_BACKWARD = 0.95, 0.92
#: Bytes a logit costs in the loss: one read and write of 16 bit fused with its gradient, against fp32 copies,
#: softmax and gradient unfused (passes counted in Megatron's vocab_parallel_cross_entropy).
FUSED_LOSS_BYTES, UNFUSED_LOSS_BYTES = 8.0, 30.0
#: Host calls of one vision layer.
VISION_CALLS = 20.0


def block_pieces(kind: BlockKind, timer: LayerTimer) -> Pieces:
    """Operators of one micro-batch by term and module, whatever is recomputed and sharded."""
    if kind.layer is not None:
        pieces = _layer(timer, kind.layer, kind.trained)
        if kind.role == "mtp":
            timer.norms(pieces, 3, 0)
            timer.linears(pieces, "mtp", tuple(w for w in kind.weights if w.name == "eh_proj"), kind.trained)
            _embedding(kind, timer, pieces)
            _head(timer, pieces, kind.trained)
        return pieces
    pieces = timer.pieces()
    if kind.role == "embed":
        _embedding(kind, timer, pieces)
    elif kind.role == "vision":
        _vision(kind, timer, pieces)
    elif kind.role == "head":
        timer.norms(pieces, 1, 0)
        _head(timer, pieces, kind.trained)
    return pieces


def block_seconds(
    kind: BlockKind,
    pieces: Pieces,
    recompute: IntArray,
    modes: tuple[RecomputeMode, ...],
    host_call_s: float,
    graphs: frozenset[str] = frozenset(),
) -> tuple[FloatArray, FloatArray]:
    """[C, TERMS] forward and backward under the recompute mode of each row, without ``dp_comm``."""
    forward, backward = pieces.finish(frozenset(), host_call_s, graphs)
    if kind.layer is None:
        return forward, backward
    for index in distinct(recompute):
        again = recomputed_modules(modes[index], kind.layer)
        if again:
            backward = np.where((recompute == index)[:, None], pieces.finish(again, host_call_s, graphs)[1], backward)
    return forward, backward


def _layer(timer: LayerTimer, layer: LayerKind, trained: bool) -> Pieces:
    """All operators of a decoder layer."""
    out = mixer_pieces(timer, layer.attention, trained)
    if isinstance(layer.feed_forward, DenseFFN):
        add_dense_ffn(timer, out, layer.feed_forward, trained)
    elif isinstance(layer.feed_forward, MoEFFN):
        add_mixture(timer, out, layer.feed_forward, trained)
    parts = (layer.attention is not None) + (layer.feed_forward is not None)
    timer.norms(out, max(layer.norms, parts), parts)
    if timer.overlap.expert and isinstance(layer.feed_forward, MoEFFN):
        # The forward exchange of one micro-batch runs beside the backward compute of another, and vice versa.
        forward, backward = out.compute()
        out.hide("ep_comm", "moe", backward, forward, exchange_contention(timer), timer.overlap.expert_hidden)
    return out


def _embedding(kind: BlockKind, timer: LayerTimer, pieces: Pieces) -> None:
    """Look up (read and write), scatter the gradient back; the vocabulary is split over TP."""
    at = timer.at
    size = timer.wide * at.model.hidden_size * at.tokens
    backward = stream_s(timer.on, 3 * size) if kind.trained else np.zeros_like(size)
    pieces.add("memory_bound", "embedding", stream_s(timer.on, 2 * size), backward, CALLS["embedding"])
    if at.sequence_parallel:
        out = collective_s("reduce_scatter", timer.levels, size, at.tp, 1)
        back = collective_s("all_gather", timer.levels, size, at.tp, 1)
    else:
        out = collective_s("all_reduce", timer.levels, size, at.tp, 1)
        back = np.zeros_like(out)
    pieces.add("tp_comm", "embedding", out, back, np.where(at.tp > 1, REDUCE_CALLS, 0.0))


def _head(timer: LayerTimer, pieces: Pieces, trained: bool) -> None:
    """Gather the hidden states, the output projection, the loss over a vocabulary split by TP."""
    at = timer.at
    gathered = timer.wide * at.model.hidden_size * at.tokens
    if at.sequence_parallel:
        gather = collective_s("all_gather", timer.levels, gathered, at.tp, 1)
        back = collective_s("reduce_scatter", timer.levels, gathered, at.tp, 1)
    else:
        gather = np.zeros_like(gathered)
        back = collective_s("all_reduce", timer.levels, gathered, at.tp, 1)
    for linear in at.linears(at.model.head_weights()):
        timer.linear(pieces, "head", linear, at.tokens, trained, "head")
    logits = at.tokens * at.padded(at.model.vocab_size) / at.tp
    moved = logits * (FUSED_LOSS_BYTES if at.target.fused_cross_entropy else UNFUSED_LOSS_BYTES)
    loss, loss_back = stream_s(timer.on, moved), stream_s(timer.on, moved / 2)
    pieces.add("memory_bound", "head", loss, loss_back, CALLS["loss"], corrected="head")
    # Maximum, target logit and sum of exponentials, fp32.
    sums = 3 * collective_s("all_reduce", timer.levels, BYTES["fp32"] * at.tokens, at.tp, 1)
    pieces.add("tp_comm", "head", gather + sums, back, np.where(at.tp > 1, LOSS_EXCHANGE_CALLS, 0.0))


def _vision(kind: BlockKind, timer: LayerTimer, pieces: Pieces) -> None:
    """The tower's parameters as one product a layer, whole on every TP rank."""
    tower = timer.at.model.vision
    if tower is None:
        return
    rows, width = patches(timer.at), timer.at.full(tower.hidden_size)
    depth = tower.parameters / tower.num_layers / width
    one = matmul_s(timer.on, rows, depth, width) * tower.num_layers
    back = 2 * one if kind.trained else np.zeros_like(one)
    pieces.add("gemm", "vision", one, back, VISION_CALLS * tower.num_layers)


def add_sharded_comm(
    kind: BlockKind,
    at: Local,
    levels: Sequence[NetworkLevel],
    shardings: tuple[str, ...],
    forward: FloatArray,
    backward: FloatArray,
    factor: float = 1.0,
) -> FloatArray:
    """Book ``dp_comm``: gather parameters for each pass and scatter gradients (FSDP, ZeRO-2/3), hidden under the
    block's own compute and under what its launches take beyond that. Under hybrid sharding both stay inside a replica.

    Returns [C] what of the backward's follows weight gradients, where they run apart: input gradients need the
    parameters, weight gradients do not; the scatter waits for the latter. The exposed time is shared out by size.
    """
    keys = at.keys
    compute = [TERMS.index(term) for term in ("gemm", "attention", "memory_bound", "recompute")]
    term, host = TERMS.index("dp_comm"), TERMS.index("host")
    dense, expert = stored_params(kind, at)
    trains = kind.trained or kind.adapted

    def over_shards(op: Collective, size: int, replicas: int) -> FloatArray:
        ranks, expert_ranks = (np.maximum(group // replicas, 1) for group in (keys.dp * keys.cp, keys.edp))
        seconds = collective_s(op, levels, dense * size, ranks, keys.tp)
        out: FloatArray = seconds + collective_s(op, levels, expert * size, expert_ranks, keys.etp * keys.ep)
        return factor * out

    scattering = np.zeros_like(at.tp)
    for index in distinct(keys.sharding):
        kept, here = held(shardings[index]), keys.sharding == index
        if kept.level not in (*FULLY_SHARDED, "zero2"):
            continue
        ranks = np.maximum(keys.dp * keys.cp // kept.replicas, 1)
        nothing, share = at.none, contention("all_gather", levels, ranks, keys.tp)
        gradient, parameter = BYTES[at.workload.gradient_dtype], BYTES[at.workload.params_dtype]
        scatter = over_shards("reduce_scatter", gradient, kept.replicas) if trains else nothing
        gather = over_shards("all_gather", parameter, kept.replicas) if kept.level != "zero2" else nothing
        for seconds, busy, most in (
            (forward, gather, FSDP_HIDDEN_FORWARD),
            (backward, gather + scatter, FSDP_HIDDEN_BACKWARD),
        ):
            device = seconds[:, compute].sum(axis=1)
            exposed = sharded_exposed_s(busy, device, seconds[:, host], most, share)
            seconds[:, term] = np.where(here, exposed, seconds[:, term])
        of_scatter = scatter / np.maximum(gather + scatter, 1e-30)
        scattering = np.where(here, of_scatter * backward[:, term], scattering)
    return scattering
