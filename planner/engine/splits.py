"""Splitting priced candidates into stages: 1F1B by dynamic programming, virtual stages near-evenly."""

from __future__ import annotations

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .partition import StageTables, split_1f1b, split_chunks
from .pricing import PricedBatch

#: Share of the step by which the bound of a changed split must be lower for it to be simulated.
LEAST_GAIN = 5e-4
#: Moves of one block that are simulated before an interleaved split is changed or left.
MOVES_TRIED = 12


def stage_tables(
    priced: PricedBatch, index: IntArray, leading: IntArray | None = None, ignore_memory: bool = False
) -> StageTables:
    """What the 1F1B split of candidates ``index`` depends on; ``leading`` [n] layers of a stage are recomputed."""
    leading = np.zeros(len(index), dtype=np.int64) if leading is None else leading
    busy = priced.busy_s(index)
    held = priced.held(index)
    static = priced.per_block(priced.static_bytes, index)
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


def longest_stage(tables: StageTables, best_s: float) -> int:
    """Blocks that a stage can hold at most, in any candidate, without passing ``best_s`` or its memory.

    Any w neighbouring blocks take at least as long, and as much room, as the w cheapest ones.
    """
    busy = np.sort(tables.busy_s.min(axis=1), axis=-1).cumsum(axis=-1) * tables.micro_batches[:, None]
    lean = tables.bytes_ + np.where((tables.leading > 0)[:, None, None], tables.extra_bytes, 0.0)
    room = np.sort(lean, axis=-1).cumsum(axis=-1) <= tables.capacity_bytes[:, :, None]
    return max(1, int(min((busy <= best_s).sum(axis=-1).max(), room.sum(axis=-1).max())))


def split_plain(
    priced: PricedBatch,
    index: IntArray,
    best_s: float = np.inf,
    leading: IntArray | None = None,
    ignore_memory: bool = False,
) -> tuple[IntArray, FloatArray]:
    """Cuts [n, P+1] and bound of the passes of a step [n] of 1F1B candidates, inf where no split fits.

    ``best_s`` is a step time already reached: stages that alone need longer are not tried.
    """
    tables = stage_tables(priced, index, leading, ignore_memory)
    split = split_1f1b(tables, longest_stage(tables, best_s))
    return split.cuts, split.bound_s


def split_virtual(priced: PricedBatch, index: IntArray) -> IntArray:
    """Chunk cuts [n, P*V + 1] of interleaved candidates of one V."""
    return split_chunks(priced.busy_s(index), int(priced.batch.vpp[index[0]]), priced.counted)


def fewest_recomputed_virtual(priced: PricedBatch, index: IntArray, cuts: IntArray) -> IntArray:
    """[n] the fewest leading layers of a chunk whose recomputation lets an interleaved split fit, or all of them."""
    low = np.zeros(len(index), dtype=np.int64)
    longest = np.diff(cuts, axis=1).max(axis=1)
    high = np.where(priced.fits(index, cuts, low), 0, longest)
    left = np.nonzero(high > 0)[0]
    left = left[priced.fits(index[left], cuts[left], high[left])] if len(left) else left
    while len(left):
        middle = (low[left] + high[left]) // 2
        fits = priced.fits(index[left], cuts[left], middle)
        high[left[fits]], low[left[~fits]] = middle[fits], middle[~fits]
        left = left[high[left] - low[left] > 1]
    return high


def neighbouring_cuts(cuts: IntArray, counted: FloatArray, reach: int) -> IntArray:
    """[n, Q + 1] splits in which a chunk of ``cuts`` [Q + 1] gives a block to another, at most ``reach`` away.

    The chunks between the two keep their length and move on by one block. No chunk loses its last decoder layer.
    """
    chunks = len(cuts) - 1
    first, last = np.meshgrid(np.arange(1, chunks), np.arange(1, chunks), indexing="ij")
    near = (first <= last) & (last - first < reach)
    position = np.arange(chunks + 1)
    moved = (position >= first[near][:, None]) & (position <= last[near][:, None])
    every = np.clip(np.concatenate([cuts + moved, cuts - moved]), 0, len(counted))
    seen = np.concatenate([[0.0], np.cumsum(counted)])
    out: IntArray = every[(np.diff(seen[every], axis=1) >= 1).all(axis=1)]
    return out


def improved_cuts(
    priced: PricedBatch,
    candidate: int,
    cuts: IntArray,
    leading: int,
    step_s: float,
    tries: int,
    moves: int = MOVES_TRIED,
    least_gain: float = LEAST_GAIN,
) -> tuple[IntArray, float]:
    """A split [P*V + 1] and its step time, improved by single moves of a block while that shortens it.

    Of the moves that fit, the ``moves`` with the lowest bounds are simulated where these promise ``least_gain``;
    ``tries`` limits how many in all.
    """
    while tries > 0:
        every = neighbouring_cuts(cuts, priced.counted, priced.arrangement.pp)
        if not len(every):
            break
        index = np.full(len(every), candidate)
        sums = priced.sums(index, every, np.full(len(every), leading))
        bounds = np.where(sums.fits, priced.bound_s(index, sums), np.inf)
        chosen = np.argsort(bounds, kind="stable")[: min(moves, tries)]
        chosen = chosen[bounds[chosen] < step_s * (1 - least_gain)]
        if not len(chosen):
            break
        tries -= len(chosen)
        steps = priced.step_s(candidate, every[chosen], leading)
        best = int(steps.argmin())
        if steps[best] >= step_s:
            break
        cuts, step_s = every[chosen[best]], float(steps[best])
    return cuts, step_s
