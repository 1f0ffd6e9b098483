"""Seconds of feed-forward parts: dense ones, and mixtures of experts with their dispatch."""

from __future__ import annotations

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.workload import BYTES

from .collectives import collective_s, contention, expert_exchange_s, members_inside
from .layer_time import LayerTimer
from .overlap import DEDUP_SMS, FP8_ELEMENT_BYTES
from .pieces import CALLS, Pieces

#: Passes of the router over its fp32 scores: softmax or sigmoid, group and expert top-k, bias and probabilities. An
#: assumption: no measurement of a router ships.
ROUTER_PASSES = 8


def add_dense_ffn(timer: LayerTimer, out: Pieces, ffn: DenseFFN, trained: bool) -> None:
    """Book a dense feed-forward part."""
    before = out.forward.get("gemm", out.none)
    timer.linears(out, "mlp", ffn.weights(timer.at.model.hidden_size), trained)
    timer.activation(out, "mlp", ffn.intermediate_size / timer.at.tp * timer.at.tokens, ffn.gated)
    timer.tensor_parallel(out, "mlp_comm", out.forward["gemm"] - before)


def add_mixture(timer: LayerTimer, out: Pieces, moe: MoEFFN, trained: bool) -> None:
    """Router, dispatch, grouped experts, combine, and the shared expert beside them."""
    at = timer.at
    weights = moe.weights(at.model.hidden_size)
    width = moe.latent_size or at.model.hidden_size
    own = at.own_tokens
    timer.linears(out, "moe", tuple(w for w in weights if not w.expert and not w.name.startswith("shared")), trained)
    scores = ROUTER_PASSES * BYTES["fp32"] * moe.num_experts * own
    timer.stream(out, "moe", "router", scores, scores / 2, graph="moe_router")
    sent = timer.wide * width * own * moe.top_k
    pairs = at.expert_tokens(moe.top_k)
    received = timer.wide * width * pairs
    moved = _permuted(timer, moe, timer.wide * width * own, sent, received)
    timer.stream(out, "moe", "permute", moved, moved, timer.on.fit.permute, graph="moe_preprocess", times=2)
    _dispatch(timer, out, moe, sent)
    experts = [linear for linear in at.linears(weights) if linear.expert]
    for linear in experts:
        timer.linear(out, "moe", linear, pairs / linear.groups, trained)
    inner = pairs * moe.expert_intermediate_size / at.etp
    timer.activation(out, "moe_act", inner, moe.gated)
    if moe.shared_intermediate_size:
        busy, before = out.compute(), out.forward["gemm"]
        shared = tuple(w for w in weights if w.name.startswith("shared"))
        timer.linears(out, "shared_experts", shared, trained)
        timer.activation(out, "shared_experts", moe.shared_intermediate_size / at.tp * at.tokens, moe.gated)
        timer.tensor_parallel(out, "shared_experts", out.forward["gemm"] - before)
        if timer.overlap.shared_expert:
            forward, backward = (after - since for after, since in zip(out.compute(), busy, strict=True))
            out.hide("ep_comm", "moe", forward, backward, exchange_contention(timer), 1.0)


def _permuted(timer: LayerTimer, moe: MoEFFN, tokens: FloatArray, sent: FloatArray, received: FloatArray) -> FloatArray:
    """Bytes that sorting tokens by expert moves on the way out, and as many on the way back; a step reads and writes.

    A copy for every expert is made before an all-to-all and sorted by local expert after it. The ``flex`` dispatcher
    sends the tokens as they lie and makes the copies from what arrives, one of a token for each rank (Megatron's
    _DeepepManager and _HybridEPManager).
    """
    at = timer.at
    if at.target.dispatcher != "flex":
        return tokens + sent + 2 * received
    arrived = tokens * touched(at.ep, moe.top_k, None) * at.load
    return arrived + received


def exchange_contention(timer: LayerTimer) -> FloatArray | float:
    """Share of the compute that an expert exchange takes beside it."""
    if timer.at.target.dispatcher == "flex":
        return DEDUP_SMS / timer.on.gpu.num_sms
    return contention("all_to_all", timer.levels, timer.at.keys.ep, timer.at.keys.etp)


def _dispatch(timer: LayerTimer, out: Pieces, moe: MoEFFN, sent: FloatArray) -> None:
    """All-to-all over EP and all-gather / reduce-scatter over ETP, both ways; the fullest rank's load counts.

    The ``flex`` dispatcher sends a token once to each node and each rank it touches.
    """
    at, keys = timer.at, timer.at.keys
    load = at.load
    calls = np.where(at.ep > 1, 2.0 * CALLS["all_to_all"], 0.0)
    if at.target.dispatcher == "allgather":
        everyone = sent / moe.top_k * at.ep * at.etp
        gather = collective_s("all_gather", timer.levels, everyone, keys.ep * keys.etp, 1)
        scatter = collective_s("reduce_scatter", timer.levels, everyone, keys.ep * keys.etp, 1)
        out.add("ep_comm", "moe", gather + scatter, gather + scatter, calls, "moe_preprocess")
        return

    def exchange_s(volume: FloatArray) -> FloatArray:
        if at.target.dispatcher != "flex":
            return collective_s("all_to_all", timer.levels, volume, keys.ep, keys.etp)
        inside = members_inside(timer.levels[0], keys.ep, keys.etp)
        nodes = touched(at.ep / inside, moe.top_k, moe.top_k_groups) / moe.top_k
        ranks = touched(at.ep, moe.top_k, None) / moe.top_k
        return expert_exchange_s(timer.levels, volume, keys.ep, keys.etp, nodes, ranks)

    exchange = exchange_s(sent * load)
    dispatch = exchange_s(sent * load * FP8_ELEMENT_BYTES / timer.wide) if timer.overlap.fp8_dispatch else exchange
    # Backward, the gradients of the results go out and those of the tokens come back, both in 16 bit.
    out.add("ep_comm", "moe", dispatch + exchange, 2 * exchange, calls)
    gathered = sent * load * at.etp
    gather = collective_s("all_gather", timer.levels, gathered, keys.etp, 1)
    scatter = collective_s("reduce_scatter", timer.levels, gathered, keys.etp, 1)
    out.add("tp_comm", "moe", gather + scatter, gather + scatter, 0)


def touched(nodes: FloatArray, top_k: int, most: int | None) -> FloatArray:
    """Expected number of distinct nodes that ``top_k`` experts drawn evenly lie on, at most ``most``."""
    nodes = np.maximum(np.asarray(nodes, dtype=float), 1.0)
    expected = nodes * (1.0 - (1.0 - 1.0 / nodes) ** top_k)
    out: FloatArray = np.minimum(expected, most) if most else expected
    return out
