"""Seconds of collectives among ranks of one stage over the nested network levels of a pool.

A group is (``size``, ``stride``) in the stage's rank order: tp fastest, then cp, then dp (dense grid); etp fastest,
then ep, then edp (expert grid). A stage starts at a multiple of the inner spans, so a group of stride s has
``min(size, span / s)`` members inside one instance of a level. Sizes follow nccl-tests: ``volume`` is the whole
buffer (all-gather output, reduce-scatter input, all-reduce buffer, what one rank sends in an all-to-all).

Inside a node the measured curves of :mod:`.links` hold. Across nodes t = start + hops + volume/busbw * (n-1)/n, with
rings, trees and two-stage all-reduces from which the fastest is taken, as NCCL's own model does (its tuning.cc).
Constants and their sources: ``data/collectives.json``, fitted by ``benchmarks/fit_collectives.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import BoolArray, FloatArray, IntArray
from meshwright.specs.cluster import NetworkLevel

from .few import KEPT, Columns, few_columns, of_shape
from .links import Collective, curve_of, data, link_constants, pair_bandwidth, usable_bandwidth

__all__ = [
    "Collective", "collective_s", "contention", "expert_exchange_s", "exposed_s", "link_constants", "members_inside",
    "p2p_s", "pair_bandwidth", "usable_bandwidth",
]  # fmt: skip

Array = npt.ArrayLike

#: Share of the compute that a collective over NVLink takes while it runs beside it: SMs of its kernels and memory
#: bandwidth (calculon's processor_usage, h100_80g_nvl8.json, Apache-2.0). Other links: :func:`contention`.
CONTENTION = 0.15


def exposed_s(busy_s: FloatArray, window_s: FloatArray, share: Array = CONTENTION) -> FloatArray:
    """What communication of ``busy_s`` adds to ``window_s`` of compute that it overlaps: the part that sticks out, and
    the ``share`` of the compute lost to it while both run."""
    out: FloatArray = np.maximum(busy_s - window_s, 0.0) + np.asarray(share) * np.minimum(busy_s, window_s)
    return out


def contention(op: Collective, levels: Sequence[NetworkLevel], size: Array, stride: Array) -> FloatArray:
    """Share of the compute that ``op`` takes while it overlaps: that of the outermost link the group crosses.

    0.15 on NVLink and 0.02 on InfiniBand (calculon, h100_80g_nvl8.json); all-reduce added up in the switches (NVLS,
    SHARP) takes none. Links that calculon does not list take the value of the link they resemble (``contention`` of
    each kind in ``data/collectives.json``).
    """
    few = few_columns(size, stride)
    if few is not None:
        return of_shape(_few_contention(op, tuple(levels), few[1]), few[0])
    return _contention(op, levels, *np.broadcast_arrays(_integers(size), _integers(stride)))


@lru_cache(maxsize=KEPT)
def _few_contention(op: Collective, levels: tuple[NetworkLevel, ...], columns: Columns) -> tuple[float, ...]:
    size, stride = (_integers(column) for column in columns)
    return tuple(_contention(op, levels, size, stride).tolist())


def _integers(values: Array) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _contention(op: Collective, levels: Sequence[NetworkLevel], size: IntArray, stride: IntArray) -> FloatArray:
    out = np.zeros(size.shape)
    for step in _steps(levels, size, stride):
        curve = curve_of(step.level)
        free = op == "all_reduce" and (step.level.in_network_reduction or (curve is not None and curve.in_switch))
        out = np.where(step.crossed, 0.0 if free else link_constants(step.level)["contention"], out)
    return out


def members_inside(level: NetworkLevel, size: Array, stride: Array) -> FloatArray:
    """Members of a group inside one instance of ``level``, at least one."""
    inside: FloatArray = np.minimum(np.maximum(level.span // _integers(stride), 1), np.asarray(size)).astype(float)
    return inside


@dataclass(frozen=True, eq=False)
class _Step:
    """How groups meet one level: ``inner`` members inside each instance below, ``members`` inside one instance."""

    level: NetworkLevel
    inner: FloatArray
    members: FloatArray
    crossed: BoolArray

    @property
    def first(self) -> BoolArray:
        """Where this is the innermost level that the group crosses."""
        out: BoolArray = self.crossed & (self.inner == 1)
        return out


def _passed_on(step: _Step) -> FloatArray | float:
    """Links of a level that a byte of an all-to-all takes on average: 1 through a switch. Round a ring of n the ways to
    the n - 1 others add up to floor(n^2 / 4) links."""
    ways = step.members / step.inner
    return np.floor(ways**2 / 4) / np.maximum(ways - 1, 1.0) if step.level.ring else 1.0


def _steps(levels: Sequence[NetworkLevel], size: IntArray, stride: IntArray) -> list[_Step]:
    out, inner = [], np.ones(size.shape)
    for level in levels:
        members = np.maximum(members_inside(level, size, stride), inner)
        crossed = members > inner
        if crossed.any():
            out.append(_Step(level, inner, members, crossed))
        inner = members
    return out


def _inside_s(op: Collective, level: NetworkLevel, volume: FloatArray, size: FloatArray) -> FloatArray | None:
    """Seconds inside one instance of a level that has a measured curve; None where it has none.

    Groups beyond the measured ones add a hop of start-up for each GPU more, or, where the switches add up, one for
    each doubling.
    """
    curve = curve_of(level)
    if curve is None:
        return None
    usable = level.bandwidth_bytes_per_s / level.oversubscription
    out = curve.seconds(op, volume * (curve.bandwidth_bytes_per_s / usable), size)
    most = float(2**curve.groups)
    more = np.maximum(size, most)
    hops = np.log2(more / most) if op == "all_reduce" and curve.in_switch else more - most
    if op != "all_to_all":
        passes = 2.0 if op == "all_reduce" else 1.0
        out = out + passes * hops * level.latency_s
    extra: FloatArray = out + link_constants(level)["extra_start_s"]
    return extra


def sending_bandwidth(level: NetworkLevel, sharers: Array, senders: Array) -> FloatArray:
    """Bytes/s of each of ``senders`` GPUs that alone send across ``level``, of the ``sharers`` that share its ports."""
    alone = pair_bandwidth(level)
    port = level.port_bytes_per_s or level.bandwidth_bytes_per_s
    most = alone * port / level.bandwidth_bytes_per_s
    sharers, senders = np.asarray(sharers, dtype=float), np.asarray(senders, dtype=float)
    out: FloatArray = np.minimum(most, alone * sharers / np.minimum(np.maximum(senders, 1.0), sharers))
    return out


def collective_s(
    op: Collective, levels: Sequence[NetworkLevel], volume: Array, size: Array, stride: Array, copies: Array = 1.0
) -> FloatArray:
    """Seconds of one collective. Arguments broadcast; a group of one costs nothing.

    Every member of a ring passes ``(n-1)/n`` of the volume on; where the ring leaves an instance of a level, its k
    members there use k NICs, but never pass the rate of the level inside. ``copies`` is the share of an
    all-to-all's bytes that crosses nodes (node-limited dispatch sends a token once to a node).
    """
    few = few_columns(volume, size, stride, copies)
    if few is None:
        arrays = np.broadcast_arrays(
            np.asarray(volume, dtype=float), _integers(size), _integers(stride), np.asarray(copies, dtype=float)
        )
        return _collective_s(op, levels, *arrays)
    shape, columns = few
    if max(columns[0]) <= 0 or max(columns[1]) <= 1:
        return np.zeros(shape)
    return of_shape(_few_s(op, tuple(levels), columns), shape)


@lru_cache(maxsize=KEPT)
def _few_s(op: Collective, levels: tuple[NetworkLevel, ...], columns: Columns) -> tuple[float, ...]:
    """:func:`_collective_s` of few groups, which the operators, stages and plans of one model repeat."""
    rows = list(dict.fromkeys(zip(*columns, strict=True)))
    volume, size, stride, copies = (np.array(column) for column in zip(*rows, strict=True))
    seconds = _collective_s(op, levels, volume.astype(float), _integers(size), _integers(stride), copies.astype(float))
    of = dict(zip(rows, seconds.tolist(), strict=True))
    return tuple(of[row] for row in zip(*columns, strict=True))


def _collective_s(
    op: Collective,
    levels: Sequence[NetworkLevel],
    volume: FloatArray,
    size: IntArray,
    stride: IntArray,
    copies: FloatArray,
) -> FloatArray:
    """:func:`collective_s` of arrays of one shape."""
    number = size.astype(float)
    steps = _steps(levels, size, stride)
    if op == "all_to_all":
        out = _all_to_all(steps, volume, number, copies)
    else:
        out = _ring_s(op, steps, volume, number)
        if op == "all_reduce" and len(steps) > 1:
            out = np.minimum(out, _staged_s(steps, volume, number))
        elif op == "all_reduce" and steps and curve_of(steps[0].level) is None:
            out = np.minimum(out, _fabric_reduce_s(steps, volume, np.ones_like(number)))
    result: FloatArray = np.where((number > 1) & (volume > 0), out, 0.0)
    return result


def _hop_s(level: NetworkLevel) -> float:
    """Seconds a hop of a ring or tree over ``level`` takes under NCCL's protocol for large messages."""
    constants = link_constants(level)
    return constants["relay_s"] if curve_of(level) else level.latency_s + constants["step_s"]


def _ring_s(op: Collective, steps: Sequence[_Step], volume: FloatArray, number: FloatArray) -> FloatArray:
    """One flat ring; a group inside one instance of a measured level takes its curve."""
    passes = 2.0 if op == "all_reduce" else 1.0
    alpha, root, rate = np.zeros_like(volume), np.zeros_like(volume), np.full_like(volume, np.inf)
    measured: FloatArray | None = None
    alone = np.zeros(volume.shape, dtype=bool)
    for step in steps:
        level, constants = step.level, link_constants(step.level)
        whole = step.first & (step.members == number)
        if whole.any():
            inside = _inside_s(op, level, volume, number)
            if inside is not None:
                measured = inside if measured is None else np.where(whole, inside, measured)
                alone |= whole
        hops = (step.members / step.inner - 1) * (number / step.members)
        alpha = np.where(step.crossed, alpha + constants["start_s"] + _hop_s(level) * hops * passes, alpha)
        rate = np.where(step.crossed, np.minimum(rate, step.inner * usable_bandwidth(level)), rate)
        ramp = constants["root_s_per_sqrt_byte"] * np.sqrt(volume / step.inner)
        root = np.where(step.crossed, np.maximum(root, ramp), root)
    out = alpha + passes * (volume * (number - 1) / number / rate + root)
    if measured is not None:
        out = np.where(alone, measured, out)
    return out


def _staged_s(steps: Sequence[_Step], volume: FloatArray, number: FloatArray) -> FloatArray:
    """All-reduce in stages: reduce-scatter inside the innermost level, all-reduce of the shards outside, all-gather.

    The stages of successive chunks overlap as in AMD-AGI/Primus' hierarchical_allreduce (collective_model.py, MIT).
    Infinite where the group stays inside one level.
    """
    constants = data()["staged"]
    inside, within = np.zeros_like(volume), np.ones_like(volume)
    for step in steps:
        if not step.first.any() or curve_of(step.level) is None:
            continue
        both = _inside_s("reduce_scatter", step.level, volume, step.members)
        gather = _inside_s("all_gather", step.level, volume, step.members)
        if both is not None and gather is not None:
            inside = np.where(step.first, both + gather, inside)
            within = np.where(step.first, step.members, within)
    outside = _fabric_reduce_s(steps, volume, within)
    shard = volume / within
    hidden = constants["overlap"] * np.minimum(1.0, shard / constants["full_overlap_bytes"])
    out = np.maximum(inside, outside) + (1 - hidden) * np.minimum(inside, outside)
    return np.where(within < number, out, np.inf)


def _fabric_reduce_s(steps: Sequence[_Step], volume: FloatArray, within: FloatArray) -> FloatArray:
    """All-reduce of shards of ``volume / within`` among instances of the innermost level: ring, tree or in-network."""
    shard = volume / within
    instances = np.ones_like(volume)
    ring, tree, start = (np.zeros_like(volume) for _ in range(3))
    rate, root = np.full_like(volume, np.inf), np.zeros_like(volume)
    reduces = np.ones(volume.shape, dtype=bool)
    for step in steps:
        outer = step.crossed & (step.inner >= within)
        ways = np.where(outer, step.members / step.inner, 1.0)
        constants, hop = link_constants(step.level), _hop_s(step.level)
        start = np.where(outer, start + constants["start_s"], start)
        ring = ring + hop * (ways - 1) * instances
        tree = tree + hop * np.ceil(np.log2(ways))
        rate = np.where(outer, np.minimum(rate, step.inner / within * usable_bandwidth(step.level)), rate)
        ramp = constants["root_s_per_sqrt_byte"] * np.sqrt(volume / step.inner)
        root = np.where(outer, np.maximum(root, ramp), root)
        reduces &= ~outer | step.level.in_network_reduction
        instances = instances * ways
    as_ring = start + 2 * (ring + shard * (instances - 1) / instances / rate + root)
    as_tree = start + 2 * (tree + shard / (rate * data()["staged"]["tree_rate"]) + root)
    # The switches add up: every shard goes up once and comes down once, on both directions of the port at once.
    in_network = np.where(reduces, start + 2 * tree + shard / rate + root, np.inf)
    out: FloatArray = np.minimum(np.minimum(as_ring, as_tree), in_network)
    return out


def _all_to_all(steps: Sequence[_Step], volume: FloatArray, number: FloatArray, copies: FloatArray) -> FloatArray:
    """All peers at once: every level carries its share at the same time, the slowest counts."""
    out = np.zeros_like(volume)
    for place, step in enumerate(steps):
        level, constants = step.level, link_constants(step.level)
        inside = None
        if step.first.any():
            # Bytes for the k - 1 peers inside: what a group of k alone would send of volume * k / n.
            inside = _inside_s("all_to_all", level, volume * step.members / number, step.members)
        leaving = volume * (step.members - step.inner) / number * _passed_on(step)
        leaving = leaving * (copies if curve_of(level) is None or place else 1.0)
        hop_s = level.latency_s + constants["exchange_step_s"]
        alpha = constants["start_s"] + hop_s * (step.members / step.inner - 1)
        fabric = alpha + leaving / usable_bandwidth(level) + constants["root_s_per_sqrt_byte"] * np.sqrt(leaving)
        seconds = fabric if inside is None else np.where(step.first, inside, fabric)
        out = np.where(step.crossed, np.maximum(out, seconds), out)
    return out


def expert_exchange_s(
    levels: Sequence[NetworkLevel], volume: Array, size: Array, stride: Array, node_copies: Array, rank_copies: Array
) -> FloatArray:
    """Seconds of one dispatch or combine by kernels that send a token once to a node and once to a rank (DeepEP).

    ``volume`` is what the rank would send with a copy for every expert; ``node_copies`` and ``rank_copies`` are the
    shares of it that remain with one copy a node and one a rank. Rates: DeepEP on Hopper at its usual 20 SMs,
    TensorRT-LLM's two-sided exchange on GB200 racks of 8 to 64, both from aiconfigurator's tables (``dedup`` in
    ``data/collectives.json``).
    """
    volume, size, stride, node_copies, rank_copies = np.broadcast_arrays(
        np.asarray(volume, dtype=float),
        _integers(size),
        _integers(stride),
        np.asarray(node_copies, dtype=float),
        np.asarray(rank_copies, dtype=float),
    )
    number, constants = size.astype(float), data()["dedup"]
    inside, outside, start = (np.zeros_like(volume) for _ in range(3))
    for step in _steps(levels, size, stride):
        bandwidth = step.level.bandwidth_bytes_per_s / step.level.oversubscription
        if curve_of(step.level) is not None:
            # The kernels move every copy, the one that stays included.
            rate = min(constants["inside_share"] * bandwidth, constants["most_bytes_per_s"])
            inside = np.where(step.crossed, volume * rank_copies / rate, inside)
            start = np.where(step.crossed, constants["start_s"], start)
        else:
            sent = volume * node_copies * (step.members - step.inner) / number * _passed_on(step)
            across = sent / (constants["fabric_share"] * bandwidth)
            outside = np.where(step.crossed, np.maximum(outside, across), outside)
            start = np.where(step.crossed, constants["fabric_start_s"], start)
    both = np.maximum(inside, outside) + constants["not_overlapped"] * np.minimum(inside, outside)
    result: FloatArray = np.where((number > 1) & (volume > 0), start + both, 0.0)
    return result


def p2p_s(
    levels: Sequence[NetworkLevel], volume: Array, distance: Array, first_rank: Array = 0, senders: Array | None = None
) -> FloatArray:
    """Seconds to send ``volume`` bytes from pool position ``first_rank`` + r to the rank ``distance`` further on.

    ``senders`` ranks (default: ``distance``, a stage) send at once; the slowest pair counts: any pair whose ends lie in
    different instances of a level.
    """
    number_of = np.asarray(distance if senders is None else senders, dtype=np.int64)
    volume, distance, first = np.broadcast_arrays(
        np.asarray(volume, dtype=float), np.asarray(distance, dtype=np.int64), np.asarray(first_rank, dtype=np.int64)
    )
    out = np.zeros_like(volume)
    for number, level in enumerate(levels):
        inside = levels[number - 1].span if number else 1
        rate = sending_bandwidth(level, inside, number_of)
        seconds = link_constants(level)["send_start_s"] + level.latency_s + volume / rate
        # Pairs (first + r, first + distance + r), r < senders: all inside one inner instance only if both stages are.
        crosses = (first // inside) != ((first + distance + number_of - 1) // inside)
        out = np.where(crosses, np.maximum(out, seconds), out)
    return np.where(volume > 0, out, 0.0)
