"""Seconds of collectives among ranks of one stage over the nested network levels of a pool.

A group is (``size``, ``stride``) in the stage's rank order: tp fastest, then cp, then dp (dense grid); etp fastest,
then ep, then edp (expert grid). A stage starts at a multiple of the inner spans, so a group of stride s has
``min(size, span / s)`` members inside one instance of a level. Sizes follow nccl-tests: ``volume`` is the whole
buffer (all-gather output, reduce-scatter input, all-reduce buffer, what one rank sends in an all-to-all).

t = alpha + volume/busbw * (n-1)/n + root * sqrt(volume); constants by link kind in ``data/collectives.json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import NetworkLevel

Array = npt.ArrayLike
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

#: Share of the compute that a collective takes while it runs beside it: SMs of its kernels and memory bandwidth
#: (calculon's processor_usage of NVLink, h100_80g_nvl8.json).
CONTENTION = 0.15


def exposed_s(busy_s: FloatArray, window_s: FloatArray) -> FloatArray:
    """What communication of ``busy_s`` adds to ``window_s`` of compute that it overlaps: the part that sticks out, and
    what the compute loses to it while both run."""
    out: FloatArray = np.maximum(busy_s - window_s, 0.0) + CONTENTION * np.minimum(busy_s, window_s)
    return out


@cache
def _constants() -> dict[str, Any]:
    text = files("meshwright.cost_models.data").joinpath("collectives.json").read_text()
    out: dict[str, Any] = json.loads(text)
    return out


def link_constants(level: NetworkLevel) -> dict[str, float]:
    """Start-up, per-step and size-dependent constants of the level's link kind."""
    return link_constants_of(level.kind)


def link_constants_of(kind: str) -> dict[str, float]:
    """As :func:`link_constants`, of a link kind."""
    links: dict[str, dict[str, float]] = _constants()["links"]
    return links[kind]


def members_inside(level: NetworkLevel, size: Array, stride: Array) -> FloatArray:
    """Members of a group inside one instance of ``level``, at least one."""
    inside: FloatArray = np.clip(level.span // np.asarray(stride, dtype=np.int64), 1, np.asarray(size)).astype(float)
    return inside


def usable_bandwidth(level: NetworkLevel) -> float:
    """Bytes/s per GPU and direction that a transfer across ``level`` reaches."""
    return level.bandwidth_bytes_per_s / level.oversubscription * link_constants(level)["busbw_eff"]


def sending_bandwidth(level: NetworkLevel, sharers: Array, senders: Array) -> FloatArray:
    """Bytes/s of each of ``senders`` GPUs that alone send across ``level``, of the ``sharers`` that share its ports."""
    alone = usable_bandwidth(level)
    port = level.port_bytes_per_s or level.bandwidth_bytes_per_s
    most = alone * port / level.bandwidth_bytes_per_s
    sharers, senders = np.asarray(sharers, dtype=float), np.asarray(senders, dtype=float)
    out: FloatArray = np.minimum(most, alone * sharers / np.minimum(np.maximum(senders, 1.0), sharers))
    return out


def collective_s(
    op: Collective, levels: Sequence[NetworkLevel], volume: Array, size: Array, stride: Array, copies: Array = 1.0
) -> FloatArray:
    """Seconds of one collective. Arguments broadcast; a group of one costs nothing.

    Ring algorithms: every member passes ``(n-1)/n`` of the volume on; where the ring leaves an instance of a level, its
    k members there use k NICs, but never pass the rate of the level inside. ``copies`` is the share of an
    all-to-all's bytes that crosses nodes (node-limited dispatch sends a token once to a node).
    """
    volume, size, stride, copies = np.broadcast_arrays(
        np.asarray(volume, dtype=float),
        np.asarray(size, dtype=np.int64),
        np.asarray(stride, dtype=np.int64),
        np.asarray(copies, dtype=float),
    )
    number = size.astype(float)
    passes = 2.0 if op == "all_reduce" else 1.0
    inner = np.ones_like(number)
    rate = np.full_like(number, np.inf)
    slowest = np.zeros_like(number)
    alpha = np.zeros_like(number)
    root = np.zeros_like(number)
    for level in levels:
        members = members_inside(level, size, stride)
        crossed = members > inner
        constants = link_constants(level)
        bandwidth = usable_bandwidth(level)
        # A ring visits every instance in turn; an all-to-all talks to all peers at once.
        steps = (members / inner - 1) * (1.0 if op == "all_to_all" else number / members)
        alpha = np.where(
            crossed, alpha + constants["start_s"] + (level.latency_s + constants["step_s"]) * steps * passes, alpha
        )
        if op == "all_to_all":
            leaving = volume * (members - inner) / number * (1.0 if level is levels[0] else copies)
            slowest = np.where(crossed, np.maximum(slowest, leaving / bandwidth), slowest)
        else:
            rate = np.where(crossed, np.minimum(rate, inner * bandwidth), rate)
        root = np.where(crossed, np.maximum(root, constants["root_s_per_sqrt_byte"]), root)
        inner = np.maximum(inner, members)
    beta = slowest if op == "all_to_all" else passes * volume * (number - 1) / number / rate
    out: FloatArray = np.where((number > 1) & (volume > 0), alpha + beta + root * np.sqrt(volume), 0.0)
    return out


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
        constants = link_constants(level)
        inside = levels[number - 1].span if number else 1
        rate = sending_bandwidth(level, inside, number_of)
        seconds = constants["start_s"] + level.latency_s + volume / rate
        # Pairs (first + r, first + distance + r), r < distance: all inside one inner instance only if both stages are.
        crosses = (first // inside) != ((first + 2 * distance - 1) // inside)
        out = np.where(crosses, np.maximum(out, seconds), out)
    return np.where(volume > 0, out, 0.0)
