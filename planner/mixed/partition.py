"""Which GPU types run which stages, and with which layers: one dynamic programme over layers and stages used by type.

A skeleton (degrees, GPUs of a stage, M micro-batches, recomputation) is laid over G pools. Stages of a pool are
neighbours; pools come in any order; of a pool any number of stages up to a limit may be used, none among them. The
programme grows pipelines from their last stage, where a stage with ``q`` stages from it to the end holds ``min(q, M)``
micro-batches, and gives for every order of pools and every number of stages of each the least value over all layer
splits of a lower bound of 1F1B's step:

    T >= R_0 + H,   R_i = sum_{j >= i} t_j,   t_j the busy seconds of stage j for a micro-batch and its sends,
    H  = max_i max( (M - q_i) t_i + R_{i+1}   for q_i < M,
                    max(M - q_i, 0) t_i + min(q_i - 1, M - 1) b_i ).

Both are chains of operations that wait for each other. The first: the first forward goes down to the last stage and its
backward up to i; i then has (M - q_i) forwards and backwards until the forward of the last micro-batch, which goes down
and up again. The second leaves out the last trip. With equal stages both give (M + P - 1) t, which 1F1B takes.
What lies behind enters through its least R and its least R + H, each over all splits, so the value is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.specs.batch import BoolArray, FloatArray, IntArray

_INF = np.inf


@dataclass(frozen=True)
class TypeTables:
    """Costs of one skeleton on G pools; block axis I. Bytes are a rank's, seconds a micro-batch's.

    ``busy_s`` [G, I] forward and backward, of which ``backward_s`` [G, I]; ``static_bytes``, ``activation_bytes`` (of a
    micro-batch) and ``transient_bytes`` [I]; ``capacity_bytes`` [G] what blocks may fill. A send to the next stage
    holds its stage ``inside_s`` [G] in the pool and ``across_s`` [G, G] from one pool to another.
    ``closing_s`` [G, S + 1, I + 1] what a first stage of blocks 0..b-1 of s stages adds after the last backward.
    ``counted`` [I] marks blocks of which every stage needs at least one (decoder layers). The first ``leading`` of them
    in a stage are recomputed, which adds ``extra_busy_s`` [G, I], ``extra_activation_bytes`` [I] (negative) and runs
    with ``extra_transient_bytes`` [I].
    """

    busy_s: FloatArray
    backward_s: FloatArray
    static_bytes: FloatArray
    activation_bytes: FloatArray
    transient_bytes: FloatArray
    capacity_bytes: FloatArray
    inside_s: FloatArray
    across_s: FloatArray
    closing_s: FloatArray
    micro_batches: int
    counted: FloatArray
    leading: int
    extra_busy_s: FloatArray
    extra_activation_bytes: FloatArray
    extra_transient_bytes: FloatArray


@dataclass(frozen=True)
class Layouts:
    """Pipelines with the pools of ``order`` from first to last: ``counts`` [C, len(order)] stages of each, and
    ``value_s`` [C] the least bound over all splits, inf where no split fits or all pass the limit."""

    order: tuple[int, ...]
    counts: IntArray
    value_s: FloatArray


@dataclass(frozen=True)
class _Spans:
    """Stages of one pool that start at block a and hold w + 1 blocks, [W, I + 1]: seconds without sends, of them
    backward, and the most micro-batches that they hold (negative where there may be no such stage)."""

    busy_s: FloatArray
    backward_s: FloatArray
    holds: FloatArray


def _sums(values: FloatArray, start: IntArray, stop: IntArray) -> FloatArray:
    """Sum of values[start:stop] elementwise; nothing where stop <= start."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    out: FloatArray = prefix[np.maximum(start, stop)] - prefix[start]
    return out


def _peaks(values: FloatArray, width: int) -> FloatArray:
    """[W, I + 1] maximum of values[a : a + w + 1]."""
    padded = np.concatenate([values, np.zeros(width + 1)])
    rows = [padded[: len(values) + 1]]
    for offset in range(1, width):
        rows.append(np.maximum(rows[-1], padded[offset : offset + len(values) + 1]))
    return np.stack(rows)


def spans_of(tables: TypeTables, pool: int, limit_s: float = _INF) -> _Spans:
    """All stages of a pool that fit with one micro-batch and whose work alone does not pass ``limit_s``."""
    size = len(tables.counted)
    least = np.sort(tables.busy_s[pool]).cumsum() * tables.micro_batches
    width = max(1, int((least <= limit_s).sum()))
    start = np.arange(size + 1)[None, :]
    end = np.minimum(start + np.arange(1, width + 1)[:, None], size)
    inside = start + np.arange(1, width + 1)[:, None] <= size
    seen = np.concatenate([[0.0], np.cumsum(tables.counted)])
    redone = np.searchsorted(seen, seen[start] + tables.leading, side="left") if tables.leading else start
    redone = np.minimum(np.minimum(redone, size), end)
    more = tables.extra_busy_s[pool]
    busy = _sums(tables.busy_s[pool], start, end) + _sums(more, start, redone)
    backward = _sums(tables.backward_s[pool], start, end) + _sums(more, start, redone)
    kept = _sums(tables.activation_bytes, start, end) + _sums(tables.extra_activation_bytes, start, redone)
    peak = _peaks(tables.transient_bytes, width)
    if tables.leading:
        again = np.concatenate([np.zeros((1, size + 1)), _peaks(tables.extra_transient_bytes, width)])
        peak = np.maximum(peak, np.take_along_axis(again, redone - start, axis=0))
    room = tables.capacity_bytes[pool] - _sums(tables.static_bytes, start, end) - peak
    # A hair more than the quotient, so that what fits exactly is not lost to rounding.
    holds = np.floor(room / np.maximum(kept, 1e-9) * (1 + 1e-12) + 1e-12)
    legal = inside & (seen[end] - seen[start] >= 1) & (room >= 0) & (tables.micro_batches * busy <= limit_s)
    return _Spans(busy, backward, np.where(legal, holds, -1.0))


@dataclass(frozen=True)
class _Tails:
    """C unfinished pipelines, the same pools in the same order: stages of each [C, n], all [C], and from every block on
    the least R + H and the least R [C, I + 1]."""

    order: tuple[int, ...]
    counts: IntArray
    stages: IntArray
    value_s: FloatArray
    rest_s: FloatArray

    def take(self, keep: BoolArray) -> _Tails:
        return _Tails(self.order, self.counts[keep], self.stages[keep], self.value_s[keep], self.rest_s[keep])


#: Table entries that are worked on at once, which bounds memory to some ten MB.
MOST_ENTRIES = 500_000


def _grown(
    spans: _Spans,
    ahead_s: float,
    back_s: float,
    behind: _Tails,
    micro_batches: int,
    limit_s: float,
    first: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """(value, rest) [C, I + 1] with one stage more in front; with ``first`` [C, I + 1] closing seconds, from block 0.

    The stage sends for ``ahead_s`` to the next one and for ``back_s`` to the one before it."""
    size, width = behind.value_s.shape[1] - 1, len(spans.busy_s)
    reach = 1 if first is not None else size + 1
    value, rest = np.full((len(behind.stages), reach), _INF), np.full((len(behind.stages), reach), _INF)
    filled = np.flatnonzero(np.isfinite(behind.value_s).any(axis=0))
    if not len(filled):
        return value, rest
    # Blocks from which a stage reaches one that something goes on from.
    low, high = max(int(filled[0]) - width, 0), min(int(filled[-1]), reach)
    ends = np.minimum(np.arange(low, high)[None, :] + np.arange(1, width + 1)[:, None], size)
    holds, busy, backward = (each[:, low:high] for each in (spans.holds, spans.busy_s, spans.backward_s))
    t, b = busy + (ahead_s + back_s), backward + back_s
    for start in range(0, len(value), max(1, MOST_ENTRIES // max(ends.size, 1))):
        rows = slice(start, start + max(1, MOST_ENTRIES // max(ends.size, 1)))
        q = behind.stages[rows, None, None] + 1
        left, back = np.maximum(micro_batches - q, 0), np.minimum(q - 1, micro_batches - 1)
        ahead, later = behind.value_s[rows][:, ends], behind.rest_s[rows][:, ends]
        again = back * b
        trips = q < micro_batches
        again = np.maximum(again, later) if trips.all() else np.where(trips, np.maximum(again, later), again)
        found = t + np.maximum(ahead, later + left * t + again)
        if first is not None:
            found += first[rows][:, ends]
        ok = (holds >= np.minimum(q, micro_batches)) & (found <= limit_s)
        value[rows, low:high] = np.where(ok, found, _INF).min(axis=1)
        rest[rows, low:high] = np.where(ok, t + later, _INF).min(axis=1)
    return value, rest


def layouts(
    tables: TypeTables, most: tuple[int, ...], limit_s: float, allowed: BoolArray, step: tuple[int, ...] | None = None
) -> Iterator[Layouts]:
    """Every order of pools with all numbers of stages that ``allowed`` [most_0 + 1, ..., most_{G-1} + 1] names.

    ``most`` [G] stages of each pool at most; ``limit_s``: pipelines whose bound passes it are left out (their value is
    inf). A pool gives a multiple of ``step`` stages (default 1).
    """
    count = len(most)
    size = len(tables.counted)
    steps = step or (1,) * count
    spans = [spans_of(tables, g, limit_s) for g in range(count)]
    end = np.full((1, size + 1), _INF)
    end[0, size] = 0.0
    empty = _Tails((), np.zeros((1, 0), dtype=np.int64), np.zeros(1, dtype=np.int64), end, end)
    todo: list[tuple[_Tails, int]] = [(empty, g) for g in range(count)]
    while todo:
        behind, pool = todo.pop()
        unused = [g for g in range(count) if g != pool and g not in behind.order]
        # Rows from which something allowed can still be reached with this pool in front.
        fewer = allowed[tuple(slice(1, None) if g == pool else slice(None) for g in range(count))]
        possible = np.asarray(fewer.any(axis=(pool, *unused)))
        keep: BoolArray = np.atleast_1d(np.asarray(possible[tuple(_by_pool(behind))], dtype=np.bool_))
        if not keep.any():
            continue
        tails = behind.take(keep)
        order = (pool, *behind.order)
        closed: dict[int, list[_Tails]] = {g: [] for g in unused}
        done: list[tuple[IntArray, FloatArray]] = []
        for k in range(1, most[pool] + 1):
            alive: BoolArray = np.asarray(np.isfinite(tails.value_s).any(axis=1), dtype=np.bool_)
            if not alive.any():
                break
            tails = tails.take(alive)
            inside = float(tables.inside_s[pool])
            ahead = inside if k > 1 else float(tables.across_s[pool, behind.order[0]]) if behind.order else 0.0
            counts = np.concatenate([np.full((len(tails.stages), 1), k), tails.counts], axis=1)
            if k % steps[pool] == 0:
                index = [np.zeros(len(counts), dtype=np.int64)] * count
                for place, g in enumerate(order):
                    index[g] = counts[:, place]
                final = allowed[tuple(index)]
                if final.any():
                    some = tails.take(final)
                    closing = tables.closing_s[pool, some.stages + 1]
                    value, _ = _grown(spans[pool], ahead, 0.0, some, tables.micro_batches, limit_s, closing)
                    done.append((counts[final], value[:, 0]))
                by_link: dict[float, tuple[FloatArray, FloatArray]] = {}
                for g in unused:
                    back = float(tables.across_s[g, pool])
                    if back not in by_link:
                        by_link[back] = _grown(spans[pool], ahead, back, tails, tables.micro_batches, limit_s)
                    closed[g].append(_Tails(order, counts, tails.stages + 1, *by_link[back]))
            if k == most[pool]:
                break
            value, rest = _grown(spans[pool], ahead, inside, tails, tables.micro_batches, limit_s)
            tails = _Tails(behind.order, tails.counts, tails.stages + 1, value, rest)
        if done:
            yield Layouts(order, np.concatenate([c for c, _ in done]), np.concatenate([v for _, v in done]))
        todo += [(_joined(closed[g]), g) for g in unused if closed[g]]


def _by_pool(tails: _Tails) -> list[IntArray]:
    """Counts of a tail's pools by rising pool index, which is how projections of ``allowed`` are indexed."""
    return [tails.counts[:, tails.order.index(g)] for g in sorted(tails.order)]


def _joined(parts: list[_Tails]) -> _Tails:
    return _Tails(
        parts[0].order,
        np.concatenate([p.counts for p in parts]),
        np.concatenate([p.stages for p in parts]),
        np.concatenate([p.value_s for p in parts]),
        np.concatenate([p.rest_s for p in parts]),
    )


def best_split(tables: TypeTables, stage_pools: tuple[int, ...]) -> tuple[IntArray, float]:
    """Cuts [P + 1] of a good split of the pipeline with these pools, and its bound as above; bound inf if none fits.

    The split follows the programme's choices; its own bound, summed exactly, is given, not the programme's.
    """
    count, size, m = len(stage_pools), len(tables.counted), tables.micro_batches
    spans = {g: spans_of(tables, g) for g in set(stage_pools)}
    value, rest = np.full(size + 1, _INF), np.full(size + 1, _INF)
    value[size] = rest[size] = 0.0
    choice: list[IntArray] = []
    for i in range(count - 1, -1, -1):
        g = stage_pools[i]
        ahead, behind = _sends_s(tables, stage_pools, i)
        q = count - i
        held, left, back = min(q, m), max(m - q, 0), min(q - 1, m - 1)
        width = len(spans[g].busy_s)
        t, b = spans[g].busy_s + (ahead + behind), spans[g].backward_s + behind
        stop = np.minimum(np.arange(size + 1)[None, :] + np.arange(1, width + 1)[:, None], size)
        later = rest[stop]
        again = np.maximum(back * b, later) if q < m else back * b
        found = t + np.maximum(value[stop], later + left * t + again)
        if i == 0:
            found[:, 0] += tables.closing_s[g, count, 1 : 1 + width]
        found = np.where(spans[g].holds >= held, found, _INF)
        best = found.argmin(axis=0)
        columns = np.arange(size + 1)
        value, rest = found[best, columns], (t + later)[best, columns]
        choice.append(best + 1)
    cuts = [0]
    for i in range(count):
        cuts.append(min(size, cuts[-1] + int(choice[count - 1 - i][cuts[-1]])))
    return np.array(cuts, dtype=np.int64), float(value[0])


def _sends_s(tables: TypeTables, stage_pools: tuple[int, ...], stage: int) -> tuple[float, float]:
    """Seconds that a stage's own sends hold it for a micro-batch: to the next one, and back to the one before."""

    def send(one: int, other: int) -> float:
        return float(tables.inside_s[one] if one == other else tables.across_s[one, other])

    g, ahead, back = stage_pools[stage], 0.0, 0.0
    if stage + 1 < len(stage_pools):
        ahead = send(g, stage_pools[stage + 1])
    if stage:
        back = send(stage_pools[stage - 1], g)
    return ahead, back


#: Labels of one block that a tightened bound keeps; beyond it neighbours are merged, which keeps it a bound.
MOST_LABELS = 64


def tight_bound_s(tables: TypeTables, stage_pools: tuple[int, ...], limit_s: float) -> float:
    """The least of the two chains over all splits of one pipeline, ``limit_s`` where all pass it.

    As :func:`best_split`, with all pairs (R, R + H) of the rest that no other pair beats in both, so that both are of
    one split.
    """
    count, size, m = len(stage_pools), len(tables.counted), tables.micro_batches
    spans = {g: spans_of(tables, g, limit_s) for g in set(stage_pools)}
    labels: list[FloatArray] = [np.empty((2, 0)) for _ in range(size + 1)]
    labels[size] = np.zeros((2, 1))
    for i in range(count - 1, -1, -1):
        g, q = stage_pools[i], count - i
        ahead, behind = _sends_s(tables, stage_pools, i)
        held, left, back = min(q, m), max(m - q, 0), min(q - 1, m - 1)
        grown: list[FloatArray] = [np.empty((2, 0)) for _ in range(size + 1)]
        for a in range(size + 1) if i else (0,):
            parts = []
            for w in range(len(spans[g].busy_s)):
                if a + w + 1 > size or spans[g].holds[w, a] < held or not labels[a + w + 1].shape[1]:
                    continue
                rest, value = labels[a + w + 1]
                t, b = spans[g].busy_s[w, a] + ahead + behind, spans[g].backward_s[w, a] + behind
                again = np.maximum(back * b, rest) if q < m else np.full_like(rest, back * b)
                found = t + np.maximum(value, rest + left * t + again)
                if i == 0:
                    found = found + tables.closing_s[g, count, w + 1]
                parts.append(np.stack([t + rest, found]))
            if parts:
                grown[a] = _undominated(np.concatenate(parts, axis=1), limit_s)
        labels = grown
    return float(labels[0][1].min(initial=limit_s))


def _undominated(labels: FloatArray, limit_s: float) -> FloatArray:
    """Pairs [2, n] below the limit of which none is beaten in both, rising in the first; merged where they are many."""
    labels = labels[:, labels[1] < limit_s]
    labels = labels[:, np.lexsort((labels[1], labels[0]))]
    best = np.minimum.accumulate(labels[1])
    keep = np.concatenate([[True], labels[1][1:] < best[:-1]]) if labels.shape[1] else np.zeros(0, dtype=bool)
    labels = labels[:, keep]
    if labels.shape[1] > MOST_LABELS:
        edges = np.linspace(0, labels.shape[1], MOST_LABELS + 1).astype(int)
        labels = np.stack([labels[0][edges[:-1]], labels[1][edges[1:] - 1]])
    return labels
