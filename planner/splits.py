"""Splitting priced candidates into stages: 1F1B by dynamic programming, virtual stages near-evenly."""

from __future__ import annotations

import numpy as np
from meshwright.specs.batch import FloatArray, IntArray

from .partition import StageTables, split_1f1b, split_chunks
from .pricing import PricedBatch


def stage_tables(
    priced: PricedBatch, index: IntArray, leading: IntArray | None = None, ignore_memory: bool = False
) -> StageTables:
    """What the 1F1B split of candidates ``index`` depends on; ``leading`` [n] layers of a stage are recomputed."""
    leading = np.zeros(len(index), dtype=np.int64) if leading is None else leading
    busy = priced.busy_s(index)
    held = priced.held(index)[:, :, 0]
    static = priced.per_block(priced.cells.static_bytes, index)
    activations = priced.per_block(priced.cells.activation_bytes, index)
    full_activations = priced.per_block(priced.cells.activation_bytes, index, full=True)
    capacity = priced.capacity_bytes(index)
    return StageTables(
        busy_s=busy,
        bytes_=static[:, None, :] + held[:, :, None] * activations[:, None, :],
        transient_bytes=priced.per_block(priced.cells.transient_bytes, index),
        capacity_bytes=np.full_like(capacity, np.inf) if ignore_memory else capacity,
        send_s=priced.held_by_sends_s(index),
        micro_batches=priced.batch.num_microbatches[index],
        counted=priced.counted,
        leading=leading,
        extra_busy_s=(priced.busy_s(index, full=True) - busy) * priced.counted,
        extra_bytes=held[:, :, None] * (full_activations - activations)[:, None, :] * priced.counted,
        extra_transient_bytes=priced.per_block(priced.cells.transient_bytes, index, full=True) * priced.counted,
    )


def split_plain(
    priced: PricedBatch,
    index: IntArray,
    best_s: float = np.inf,
    leading: IntArray | None = None,
    ignore_memory: bool = False,
) -> tuple[IntArray, FloatArray]:
    """Cuts [n, P+1] and bound of the step time [n] of 1F1B candidates, inf where no split fits.

    ``best_s`` is a step time already reached: stages that alone need longer are not tried.
    """
    tables = stage_tables(priced, index, leading, ignore_memory)
    width = None
    if np.isfinite(best_s):
        # any w neighbouring blocks take at least as long as the w cheapest ones
        cheapest = np.sort(tables.busy_s.min(axis=1), axis=-1).cumsum(axis=-1) * tables.micro_batches[:, None]
        width = max(1, int((cheapest <= best_s).sum(axis=-1).max()))
    split = split_1f1b(tables, width)
    return split.cuts, split.bound_s + priced.least_tail_s()[index]


def split_virtual(priced: PricedBatch, candidate: int) -> IntArray:
    """Chunk cuts [P*V + 1] of an interleaved candidate."""
    busy = priced.busy_s(np.array([candidate]))[0]
    return split_chunks(busy, priced.arrangement.pp, int(priced.batch.vpp[candidate]), priced.counted)


def fewest_recomputed(priced: PricedBatch, index: IntArray, best_s: float) -> tuple[IntArray, IntArray, FloatArray]:
    """For 1F1B candidates in block mode: (layers recomputed in every stage [n], cuts, bounds), inf where nothing fits.

    More recomputed layers never take less time or more memory, so the fewest that fit are the best; found by bisection
    of all candidates together.
    """
    layers = int(priced.counted.sum())
    low, high = np.zeros(len(index), dtype=np.int64), np.full(len(index), layers, dtype=np.int64)
    cuts, bounds = split_plain(priced, index, best_s, high)
    while (high - low > 1).any():
        middle = (low + high) // 2
        tried, found = split_plain(priced, index, best_s, middle)
        fits = np.isfinite(found) & (high - low > 1)
        cuts, bounds = np.where(fits[:, None], tried, cuts), np.where(fits, found, bounds)
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    return high, cuts, bounds


def fewest_recomputed_virtual(priced: PricedBatch, candidate: int, cuts: IntArray) -> int | None:
    """The fewest leading layers of a chunk whose recomputation lets an interleaved split fit; None if none does."""
    layers = int(np.diff(cuts).max())
    if not priced.sums(candidate, cuts, layers).fits:
        return None
    low, high = 0, layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if priced.sums(candidate, cuts, middle).fits else (middle, high)
    return high
