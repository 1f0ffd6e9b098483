"""Layer split by dynamic programming over stages, exact for the 1F1B bound under memory limits.

The pipeline of one candidate is a row of I blocks (embedding, decoder layers, head, ...) cut into P contiguous stages.
With t_i(a, b) the busy seconds of stage i for blocks a..b-1, one micro-batch and its own sends, and M micro-batches,
1F1B takes at least ``max_i( sum_{j<i} t_j + M t_i )``: stage i cannot start before the first micro-batch has passed the
stages before it, cannot finish before its last backward has gone back through them, and works M t_i itself.
From the back this is V_i(a) = min_b max( M t_i(a,b), t_i(a,b) + V_{i+1}(b) ), which is exact: the best tail does not
depend on the head. Stages whose memory does not fit are left out of the minimum.

Everything is vectorised over N candidates that share P and the block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

_INF = np.inf
#: Prefixes of splits looked at for one candidate. Equal layers have very many splits of equal bound.
MAX_PREFIXES = 10_000


@dataclass(frozen=True)
class StageTables:
    """What the split of N candidates depends on; block axis I, stage axis P.

    ``busy_s`` [N, P, I] seconds of a block for one micro-batch on the pool of the stage (forward and backward).
    ``bytes_`` [N, P, I] static bytes of a block plus its activations of all micro-batches in flight at the stage.
    ``transient_bytes`` [N, I] peak while a block runs; ``capacity_bytes`` [N, P] what blocks may fill.
    ``send_s`` [N, P] what a stage's own sends hold it for a micro-batch. ``micro_batches`` [N].
    ``counted`` [I] marks blocks of which every stage needs at least one (decoder layers).

    The first ``leading`` [N] counted blocks of every stage are recomputed: they add ``extra_busy_s`` and
    ``extra_bytes`` [N, P, I] (negative: what is no longer kept) and run with ``extra_transient_bytes`` [N, I].
    """

    busy_s: FloatArray
    bytes_: FloatArray
    transient_bytes: FloatArray
    capacity_bytes: FloatArray
    send_s: FloatArray
    micro_batches: IntArray
    counted: FloatArray
    leading: IntArray
    extra_busy_s: FloatArray
    extra_bytes: FloatArray
    extra_transient_bytes: FloatArray


@dataclass(frozen=True)
class Split:
    """``cuts`` [N, P+1]: stage i holds blocks cuts[i]..cuts[i+1]-1. ``bound_s`` [N]: inf where nothing fits."""

    cuts: IntArray
    bound_s: FloatArray


def _prefixes(values: FloatArray, width: int) -> tuple[FloatArray, FloatArray]:
    """[..., I] -> [..., I+1, 1] sums of the values before a, and a view [..., I+1, W] of those before a+w for w = 1..W,
    the sum of all past the end."""
    lead, size = values.shape[:-1], values.shape[-1]
    padded = np.zeros((*lead, size + 1 + width))
    np.cumsum(values, axis=-1, out=padded[..., 1 : size + 1])
    padded[..., size + 1 :] = padded[..., size, None]
    return padded[..., : size + 1, None], np.lib.stride_tricks.sliding_window_view(padded[..., 1:], width, axis=-1)


def _range_sum(values: FloatArray, width: int) -> FloatArray:
    """[..., I] -> [..., I+1, W]: sum of values a..a+w-1 for w = 1..width, inf past the end."""
    before, until = _prefixes(values, width)
    end = np.arange(values.shape[-1] + 1)[:, None] + np.arange(1, width + 1)[None, :]
    return np.where(end <= values.shape[-1], until - before, _INF)


def leading_stop(counted: FloatArray, leading: IntArray) -> IntArray:
    """[N, I+1]: where the first ``leading`` counted blocks from block a on end."""
    size = len(counted)
    seen = np.concatenate([[0.0], np.cumsum(counted)])  # counted blocks before each position
    wanted = seen[None, :] + leading[:, None]
    stop: IntArray = np.searchsorted(seen, wanted, side="left")
    start = np.arange(size + 1)[None, :]
    return np.where(leading[:, None] > 0, np.minimum(stop, size), start)


def _leading_max(values: FloatArray, stop: IntArray, width: int) -> FloatArray:
    """[N, I], stop [N, I+1] -> [N, I+1, W]: maximum of values from a to the earlier of stop and a+w."""
    whole = _range_max(values, width)
    longest = np.clip(stop - np.arange(stop.shape[1])[None, :], 0, width)
    offset = np.minimum(np.arange(width)[None, None, :], longest[:, :, None] - 1)
    taken = np.take_along_axis(whole, np.maximum(offset, 0), axis=-1)
    out: FloatArray = np.where(longest[:, :, None] > 0, taken, 0.0)
    return out


def _range_max(values: FloatArray, width: int) -> FloatArray:
    """[..., I] -> [..., I+1, W]: maximum of values a..a+w-1 (0 past the end, where sums are already inf)."""
    size = values.shape[-1]
    out = np.zeros((*values.shape[:-1], size + 1, width))
    padded = np.concatenate([values, np.zeros((*values.shape[:-1], width + 1))], axis=-1)
    running = np.zeros((*values.shape[:-1], size + 1))
    for offset in range(width):
        running = np.maximum(running, padded[..., offset : offset + size + 1])
        out[..., offset] = running
    return out


@dataclass(frozen=True)
class _Values:
    """The dynamic programme's tables.

    ``spans[i]`` [N, I+1, W]: seconds of stage i for blocks a..a+w, inf where that may not be. ``ahead[i]`` [N, I+1]:
    the least bound of stages i.. for blocks a... ``end`` [I+1, W]: where a stage stops.
    """

    spans: list[FloatArray]
    ahead: list[FloatArray]
    end: IntArray


def _solve(tables: StageTables, width: int | None) -> _Values:
    number, stages, size = tables.busy_s.shape
    width = size if width is None else min(width, size)
    count = tables.micro_batches[:, None, None].astype(float)
    end = np.minimum(np.arange(size + 1)[:, None] + np.arange(1, width + 1)[None, :], size)
    inside = np.arange(size + 1)[:, None] + np.arange(1, width + 1)[None, :] <= size
    enough = inside & (_range_sum(tables.counted[None, :], width)[0] >= 1)
    transient = _range_max(tables.transient_bytes, width)
    stop = leading_stop(tables.counted, tables.leading)
    recomputes = bool((tables.leading > 0).any())
    if recomputes:
        transient = np.maximum(transient, _leading_max(tables.extra_transient_bytes, stop, width))
    busy, bytes_, extra_busy, extra_bytes = (
        _prefixes(each, width) for each in (tables.busy_s, tables.bytes_, tables.extra_busy_s, tables.extra_bytes)
    )
    leads = end[None] < stop[:, :, None]

    def of_leading(stage: int, sums: tuple[FloatArray, FloatArray]) -> FloatArray:
        """[N, I+1, W] sum of the recomputed blocks, those from a to the earlier of stop and end."""
        before, until = (part[:, stage] for part in sums)
        out: FloatArray = np.where(leads, until, np.take_along_axis(before, stop[:, :, None], axis=1)) - before
        return out

    ahead: list[FloatArray] = []
    spans: list[FloatArray] = []
    for stage in range(stages - 1, -1, -1):
        span = busy[1][:, stage] - busy[0][:, stage] + tables.send_s[:, stage, None, None]
        need = bytes_[1][:, stage] - bytes_[0][:, stage] + transient
        if recomputes:
            span = span + of_leading(stage, extra_busy)
            need = need + of_leading(stage, extra_bytes)
        span = np.where(enough & (need <= tables.capacity_bytes[:, stage, None, None]), span, _INF)
        if stage == stages - 1:
            value = np.where(end[None] == size, count * span, _INF)
        else:
            later = ahead[-1][np.arange(number)[:, None, None], end[None]]
            value = np.maximum(count * span, span + later)
        spans.append(span)
        ahead.append(value.min(axis=-1))
    return _Values(spans[::-1], ahead[::-1], end)


def split_1f1b(tables: StageTables, width: int | None = None) -> Split:
    """The best split of every candidate under the 1F1B bound; among equals the most even one.

    ``width`` limits the blocks of a stage (all by default); a caller that gives it knows that longer stages cannot win.
    """
    values = _solve(tables, width)
    return Split(_trace(tables, values), values.ahead[0][:, 0])


def _trace(tables: StageTables, values: _Values) -> IntArray:
    """Walk forward through splits that keep the optimum, each stage as near as it can to an even share of the rest."""
    number, stages, size = tables.busy_s.shape
    rows = np.arange(number)
    count = tables.micro_batches[:, None].astype(float)
    cuts = np.zeros((number, stages + 1), dtype=np.int64)
    cuts[:, stages] = size
    budget = values.ahead[0][:, 0].copy()
    for stage in range(stages - 1):
        start = cuts[:, stage]
        span = values.spans[stage][rows, start]
        stop = values.end[start]
        later = values.ahead[stage + 1][rows[:, None], stop]
        slack = budget[:, None] * (1 + 1e-12)  # sums in another order differ by rounding
        keeps = (count * span <= slack) & (span + later <= slack)
        rest = np.array([tables.busy_s[row, stage, start[row] :].sum() for row in rows]) / (stages - stage)
        away = np.where(keeps & np.isfinite(span), np.abs(span - rest[:, None]), _INF)
        best = away.argmin(axis=-1)
        cuts[:, stage + 1] = stop[rows, best]
        spent = span[rows, best]
        budget = budget - np.where(np.isfinite(spent), spent, 0.0)
    return cuts


def splits_by_bound(
    tables: StageTables, limit_s: float = _INF, patience: int = MAX_PREFIXES
) -> Iterator[tuple[float, IntArray | None]]:
    """Every split of one candidate (N = 1) that fits and whose bound is below ``limit_s``, as (bound, cuts) in rising
    order of bound, made on demand.

    Best-first over prefixes of the pipeline; what the stages ahead need at least comes from the dynamic programme.
    After ``patience`` prefixes it gives up: the last item is then (bound of all splits not given, None).
    """
    values = _solve(tables, None)
    stages, size = tables.busy_s.shape[1:]
    count = float(tables.micro_batches[0])
    heap: list[tuple[float, tuple[int, ...], float, float]] = [(float(values.ahead[0][0, 0]), (0,), 0.0, 0.0)]
    while heap:
        bound, cuts, spent, longest = heappop(heap)
        if not bound < limit_s:
            return
        if patience == 0:
            yield bound, None
            return
        patience -= 1
        stage, start = len(cuts) - 1, cuts[-1]
        if stage == stages:
            yield bound, np.array(cuts, dtype=np.int64)
            continue
        span, stop = values.spans[stage][0, start], values.end[start]
        reach = np.maximum(longest, spent + count * span)
        if stage == stages - 1:
            total, ends = reach, stop == size
        else:
            total, ends = np.maximum(reach, spent + span + values.ahead[stage + 1][0, stop]), stop < size
        for k in np.flatnonzero(ends & (total < limit_s)).tolist():
            heappush(heap, (float(total[k]), (*cuts, int(stop[k])), float(spent + span[k]), float(reach[k])))


def split_chunks(busy_s: FloatArray, virtual: int, counted: FloatArray) -> IntArray:
    """Cuts [N, P*V + 1] of N candidates into chunks of near-equal time, chunk q on stage q mod P; ``busy_s`` [N, P, I].

    Minimises the 8-norm of chunk times, which is close to the longest chunk but leaves no free slack elsewhere.
    Raises ValueError where there are fewer counted blocks than chunks.
    """
    number, stages, size = busy_s.shape
    chunks = stages * virtual
    if counted.sum() < chunks:
        raise ValueError(f"{chunks} chunks need as many decoder layers, there are {int(counted.sum())}")
    # No near-even chunk is longer than this, unless blocks are so unequal that only the full width has a split.
    for width in (min(size, 4 * -(-size // chunks) + 4), size):
        end = np.minimum(np.arange(size + 1)[:, None] + np.arange(1, width + 1)[None, :], size)
        enough = _range_sum(counted[None, :], width)[0] >= 1
        scale = busy_s.sum(axis=-1).max(axis=-1)[:, None, None] / chunks
        powered: list[FloatArray] = []
        for stage in range(stages):
            if stage and np.array_equal(busy_s[:, stage], busy_s[:, stage - 1]):
                powered.append(powered[-1])  # stages of one GPU type take the same time
                continue
            share = np.where(enough, _range_sum(busy_s[:, stage], width), _INF) / np.maximum(scale, 1e-300)
            square = share * share
            fourth = square * square
            # Of equal splits the one with short early chunks: they hold the most micro-batches.
            powered.append(fourth * fourth + 1e-9 * np.arange(width))
        value = np.full((number, size + 1), _INF)
        value[:, size] = 0.0
        choices: list[IntArray] = []
        for chunk in range(chunks - 1, -1, -1):
            total = powered[chunk % stages] + value[:, end]
            best = total.argmin(axis=-1)
            choices.append(end[np.arange(size + 1)[None, :], best])
            value = np.take_along_axis(total, best[..., None], axis=-1)[..., 0]
        if np.isfinite(value[:, 0]).all():
            break
    rows = np.arange(number)
    cuts = np.zeros((number, chunks + 1), dtype=np.int64)
    for position, choice in enumerate(reversed(choices)):
        cuts[:, position + 1] = choice[rows, cuts[:, position]]
    return cuts
