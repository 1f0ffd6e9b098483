"""Exchange of keys and values over the context-parallel group around a core attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.cluster import NetworkLevel

from .collectives import collective_s, contention, exposed_s, link_constants, members_inside, pair_bandwidth
from .local import Local
from .overlap import Overlap

#: Framework calls of an exchange: two tensors each way for an all-to-all on both sides of the attention, one gather
#: and its copy, and two sends and two receives of a ring's hop (TransformerEngine's context_parallel.py).
EXCHANGE_CALLS, GATHER_CALLS, HOP_CALLS = 8.0, 2.0, 4.0
#: The same of a scan: one tensor each way.
SCAN_EXCHANGE_CALLS = EXCHANGE_CALLS / 2


def context_exchange_s(
    at: Local,
    overlap: Overlap,
    levels: Sequence[NetworkLevel],
    attention_s: tuple[FloatArray, FloatArray],
    block: FloatArray,
    queries: FloatArray,
    outputs: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[C] exposed seconds forward and backward, and host calls, around ``attention_s`` (forward, backward).

    ``block``, ``queries``, ``outputs`` are a rank's bytes of keys and values, queries, and outputs. The ring passes
    blocks on under the attention to the block before. All-to-all (heads for tokens and back) and all-gather of keys
    and values (backward also the reduce-scatter of their gradients) hide under nothing, as in TransformerEngine's
    context_parallel.py. ``a2a+p2p`` exchanges heads in groups of neighbours and rings over the groups.
    """
    keys, kind = at.keys, overlap.context
    if kind == "allgather":
        whole = block * at.cp
        gather = collective_s("all_gather", levels, whole, keys.cp, keys.tp)
        scatter = collective_s("reduce_scatter", levels, whole, keys.cp, keys.tp)
        return gather, gather + scatter, np.where(at.cp > 1, GATHER_CALLS, 0.0)
    sizes = {"a2a": keys.cp, "a2a+p2p": np.minimum(overlap.context_a2a_size, keys.cp)}
    inner = sizes.get(kind, np.ones_like(keys.cp))
    heads = collective_s("all_to_all", levels, block + queries, inner, keys.tp)
    heads = heads + collective_s("all_to_all", levels, outputs, inner, keys.tp)
    ring, stride = keys.cp // inner, keys.tp * inner
    step, hops = _ring_step_s(levels, block, ring, stride), ring - 1.0
    share = contention("all_gather", levels, ring, stride)
    forward, backward = attention_s
    return (
        heads + hops * exposed_s(step, forward / ring, share),
        heads + hops * exposed_s(2 * step, backward / ring, share),
        np.where(inner > 1, EXCHANGE_CALLS, 0.0) + HOP_CALLS * hops,
    )


def _ring_step_s(levels: Sequence[NetworkLevel], block: FloatArray, size: IntArray, stride: IntArray) -> FloatArray:
    """Seconds to pass one block on in a ring: its slowest hop."""
    slowest, inner = np.zeros(block.shape), np.ones(block.shape)
    for level in levels:
        members = members_inside(level, size, stride)
        constants = link_constants(level)
        hop = constants["start_s"] + level.latency_s + constants["step_s"] + block / pair_bandwidth(level)
        slowest = np.where(members > inner, np.maximum(slowest, hop), slowest)
        inner = np.maximum(inner, members)
    return np.where(size > 1, slowest, 0.0)
