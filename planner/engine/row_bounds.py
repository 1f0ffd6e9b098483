"""A sharper test of interleaved candidates: how the layers of a stage lie over its chunks.

The test of :mod:`.bounds` lets a stage put its layers into the chunk that holds fewest micro-batches. Then that chunk
is long, and Megatron's order makes later stages wait: micro-batch 0 reaches the last chunk of stage i only after some
stage before it has run a whole group of P micro-batches of all earlier chunks. Here a stage is (layers of the first
chunk, of the chunks between, of the last), and what a pipeline has come to is

- how many layers its first chunks hold, which says when micro-batch 0 arrives there, and
- when it can arrive at the last chunk, as early as may be.

Dynamic programming over stages keeps the earliest such time for each number of layers in first chunks and of layers not
taken though there was room. Costs of consecutive layers are the least of any such run that the place allows.

Micro-batch 0 begins the second chunk of stage 0 only when it has passed the first chunks of all stages, F layers. So
stage 0 starts from there, with F the fewest such layers that some passing layout has; while the layouts that then pass
have more, they start again from those.
"""

from __future__ import annotations

from itertools import product
from math import comb

import numpy as np

from meshwright.specs.batch import BoolArray, FloatArray, IntArray

from .bounds import ROUNDING, Test
from .live import live_mixes
from .pricing import PricedBatch

#: Ways to lay out the layers of a stage, times stages, beyond which a candidate is not tested.
MOST_WAYS = 11_000
#: Table entries as which looking at a way counts, beside those that it fills.
PER_WAY = 5_000
#: Times that the layouts of a candidate start again from more layers in first chunks; then it passes.
MOST_STARTS = 6


class RowBounds:
    """The test for K pairs of a candidate and its recomputed layers, all of one V above 1, below ``limit_s``.

    A way to lay out a stage is (layers of the first chunk, of the chunks between, of the last). Arrays by way and stage
    [K, P]: ``early_s`` seconds of a micro-batch, there and back, in all chunks but the last, ``last_s`` in the last;
    infinite where memory does not hold it. ``near_even``: the chunks of a stage differ by at most a layer.
    """

    def __init__(self, priced: PricedBatch, pairs: Test, limit_s: float, near_even: bool = False):
        self.pairs, self.priced, self.near_even = pairs, priced, near_even
        index, self.pp, self.virtual = pairs.index, priced.arrangement.pp, int(priced.batch.vpp[pairs.index[0]])
        self.count = priced.batch.num_microbatches[index].astype(float)
        self.after_s = pairs.first_reduce_s + pairs.after_s
        self.total = int(priced.counted.sum())
        decoders = np.flatnonzero(priced.counted)
        self.order = priced.kind[decoders]
        self.head, self.rear = priced.kind[: decoders[0]], priced.kind[decoders[-1] + 1 :]
        self.busy = priced.busy[priced.row[index]][:, priced.pools]  # [K, P, B]
        quickest = self.busy.min(axis=1)[:, self.order]
        # Work of more layers than this on one stage passes the limit.
        time = (limit_s / (self.count * quickest.min(axis=1))).max()
        self.most = int(min(self.total - (self.pp - 1) * self.virtual, time))
        self.again = (priced.busy[priced.full_row[index]][:, priced.pools] - self.busy).clip(min=0.0)
        fixed = self.busy[:, 0, self.head].sum(axis=1)[:, None]
        nothing = np.zeros((len(index), 1))
        self.prefix = np.concatenate([nothing, np.cumsum(quickest, axis=1)], axis=1) + fixed
        cheapest = np.sort(self.again.min(axis=1)[:, self.order], axis=1)
        self.least_again = np.concatenate([nothing, np.cumsum(cheapest, axis=1)], axis=1)
        self.sends = 2 * priced.send_s(index)

        self.work = 0
        if self.able:
            self._lay_out(limit_s)

    @property
    def able(self) -> bool:
        """Whether the ways are few; Megatron's groups must be whole."""
        spare = max(self.most - self.virtual, 0)
        if self.near_even:
            return not (self.count % self.pp).any()
        ways = comb(spare + 2, 2) if self.virtual == 2 else comb(spare + 3, 3)
        return ways * self.pp <= MOST_WAYS and not (self.count % self.pp).any()

    def _lay_out(self, limit_s: float) -> None:
        """Find the ways."""
        priced, index, pp, virtual = self.priced, self.pairs.index, self.pp, self.virtual
        row, full, cells = priced.row[index], priced.full_row[index], priced.cells
        leading, between = self.pairs.leading[:, None], virtual - 2
        kept = np.repeat(cells.activation_bytes[row][:, None], pp, axis=1)
        lean = np.minimum(cells.activation_bytes[full], cells.activation_bytes[row])[:, self.order].min(axis=1)[:, None]
        static = np.minimum(priced.static_bytes[row], priced.static_bytes[full])[:, None].repeat(pp, axis=1)
        transient = np.minimum(cells.transient_bytes[row], cells.transient_bytes[full])
        live = np.zeros((len(index), *live_mixes(pp, virtual, 4 * pp).shape))
        for count in np.unique(self.count):
            mixes = live_mixes(pp, virtual, int(count))
            live[self.count == count, :, : mixes.shape[1]] = mixes
        first_live, last_live = live[..., 0], live[..., -1]  # [K, P, mixes]
        inner_live = live[..., 1:-1].sum(axis=-1)
        inner_least = live[..., 1:-1].min(axis=-1) if between else inner_live
        room = priced.capacity_bytes(index) * (1 + ROUNDING)
        room -= transient[:, self.order].min(axis=1)[:, None]
        fixed_s = np.zeros((2, len(index), pp))
        taken = np.zeros(live.shape[:3])
        for end, stage, blocks, of in ((0, 0, self.head, first_live), (1, pp - 1, self.rear, last_live)):
            fixed_s[end, :, stage] = self.busy[:, stage, blocks].sum(axis=1)
            taken[:, stage] += of[:, stage] * kept[:, stage, blocks].sum(axis=1)[:, None]
            room[:, stage] -= static[:, stage, blocks].sum(axis=1)
        runs = {}
        for name, table in (("busy", self.busy), ("again", self.again), ("kept", kept), ("static", static)):
            for chunk in {0, min(1, between), virtual - 1}:
                runs[name, chunk] = _least_runs(table[:, :, self.order], chunk * pp, self.most)
        self.ways: list[tuple[int, int, FloatArray, FloatArray, FloatArray]] = []
        whole = cells.activation_bytes[row][:, self.order].min(axis=1)[:, None]

        some, ends = np.arange(self.most + 1)[:, None, None], {0, virtual - 1}
        redone = np.minimum(leading, some).repeat(pp, axis=2)
        rest = {chunk: np.take_along_axis(runs["kept", chunk], some - redone, axis=0) for chunk in ends}
        held = {chunk: redone * lean + rest[chunk] for chunk in ends}
        took = {chunk: runs["busy", chunk] + np.take_along_axis(runs["again", chunk], redone, axis=0) for chunk in ends}
        left = ((limit_s * (1 + ROUNDING) - self.after_s) / self.count)[:, None]
        for first, last, extra in product(range(1, self.most), range(1, self.most), range(self.most if between else 1)):
            inner = between + extra
            layers = first + inner + last
            if layers > self.most or (self.near_even and not self._near_even(first, inner, last)):
                continue
            early, late = took[0][first] + fixed_s[0], took[virtual - 1][last] + fixed_s[1]
            middle = np.zeros_like(early)
            least = layers // virtual if self.near_even else 1  # layers of every chunk
            spare = inner - between * least
            if between:
                # Fewest are recomputed where one chunk has all layers but the least of each other.
                longest = least + (min(spare, 1) if self.near_even else spare)
                apart = spare if self.near_even else 1
                again = np.minimum(leading, least) * (between - apart) + np.minimum(leading, longest) * apart
                middle = inner * runs["busy", 1][1] + again * runs["again", 1][1]
                early = early + middle
            fits = early + late <= left
            if not fits.any():
                continue
            need = taken + first_live * held[0][first][..., None] + last_live * held[virtual - 1][last][..., None]
            size = runs["static", 0][first] + runs["static", virtual - 1][last]
            if between:
                some_redone = np.minimum(leading, least)
                one = some_redone * lean + (least - some_redone) * whole
                few = np.minimum(spare, between * np.maximum(leading - least, 0))
                more = few * np.minimum(lean, whole) + (spare - few) * whole
                need = need + inner_live * one[..., None] + inner_least * more[..., None]
                size = size + inner * runs["static", 1][1]
            fits &= need.max(axis=2) + size <= room
            if fits.any():
                self.ways.append((first, layers, np.where(fits, early, np.inf), late, middle[:, 0]))
        self.work = PER_WAY * pp * len(self.ways)

    def _near_even(self, first: int, inner: int, last: int) -> bool:
        """Whether so many layers may be in chunks of which none has two more than another."""
        short, longer = divmod(first + inner + last, self.virtual)
        most, between = short + (longer > 0), self.virtual - 2
        return short <= min(first, last) and max(first, last) <= most and between * short <= inner <= between * most

    def passes(self, step_s: float) -> BoolArray:
        """[K] whether there may be a split below ``step_s``."""
        if not self.able:
            return np.ones(len(self.pairs.index), dtype=np.bool_)
        out = np.zeros(len(self.pairs.index), dtype=np.bool_)
        rows, start = np.arange(len(out)), np.full(len(out), self.pp)
        for _ in range(MOST_STARTS):
            first = self._fewest_first(step_s, rows, start)
            out[rows[first == start]] = True
            more = (first > start) & (first <= self.total)
            rows, start = rows[more], first[more]
            if not len(rows):
                return out
        out[rows] = True
        return out

    def _redone(self, held: IntArray, stages: int, leading: IntArray, longest: int) -> IntArray:
        """Layers of ``held`` in the first chunks of so many stages that are recomputed at least."""
        some = np.minimum(leading, 1) * max(stages - 1, 0) + np.minimum(leading, (held - stages + 1).clip(min=0))
        return np.where(leading >= longest, held, np.minimum(some, held))

    def _fewest_first(self, step_s: float, rows: IntArray, start: IntArray) -> IntArray:
        """[K'] the fewest layers, from ``start`` on, in the first chunks of all stages of a layout of candidates
        ``rows`` that may be below ``step_s``, where stage 0 begins its second chunk after the first chunks of
        ``start`` layers; more than there are where no layout may."""
        pp, number, none = self.pp, len(rows), self.total + 1
        left = (step_s * (1 + ROUNDING) - self.after_s[rows])[:, None, None]
        work = self.count[rows, None]
        ways = []
        for first, layers, *seconds in self.ways:
            early_s, late_s, middle_s = (each[rows] for each in seconds)
            possible = np.asarray((work * (early_s + late_s) <= left[:, :, 0]).any(axis=0))
            ways.append((first, layers, early_s, late_s, middle_s, possible))
        if not ways:
            return np.full(number, none)
        layers_of, first_of = (np.stack([way[k] * way[-1] for way in ways]).max(axis=0) for k in (1, 0))
        slack = int(layers_of.sum()) - self.total
        if slack < 0:
            return np.full(number, none)
        width = min(self.total - pp * (self.virtual - 1), int(first_of.sum())) + 1
        leading, longest = self.pairs.leading[rows, None, None], int(first_of.max())
        prefix, least_again, sends = self.prefix[rows], self.least_again[rows], self.sends[rows]
        redone = self._redone(start, pp, leading[:, 0, 0], longest)
        at = np.arange(number)
        round_s = prefix[at, start] + least_again[at, redone] + sends[:, : pp - 1].sum(axis=1)
        earliest = np.full((number, slack + 1, width), np.inf)
        earliest[:, 0, 0] = round_s
        hops = np.zeros((number, 1, 1))
        held = np.arange(width)[None, None, :]  # layers in first chunks so far
        count = self.count[rows, None, None]
        for stage in range(pp):
            again = np.take_along_axis(least_again, self._redone(held, stage, leading, longest)[:, 0], axis=1)[:, None]
            arrives = (prefix[:, None, :width] + again + hops) * (stage > 0)
            after = np.full_like(earliest, np.inf)
            send = sends[:, stage, None, None]
            self.work += (earliest.size + PER_WAY) * sum(bool(possible[stage]) for *_, possible in ways)
            for first, layers, early_s, late_s, middle_s, possible in ways:
                early, late = early_s[:, stage, None, None], late_s[:, stage, None, None]
                short = layers_of[stage] - layers
                if short > slack or first >= width or not possible[stage]:
                    continue
                group = pp * np.where(np.isfinite(early), early, 0.0)
                before = earliest + pp * middle_s[:, None, None] if stage == 0 and self.virtual > 2 else earliest
                ready = np.maximum(before, arrives + group)
                within = np.maximum(arrives, ready - group) + count * (early + late) <= left
                then = np.where(within, ready + late + send, np.inf)
                to = after[:, short:, first:]
                np.minimum(to, then[:, : slack + 1 - short, : width - first], out=to)
            earliest, hops = after, hops + send
        reached = np.isfinite(earliest).any(axis=1) & (np.arange(width) >= start[:, None])
        return np.where(reached.any(axis=1), reached.argmax(axis=1), none)


def _least_runs(values: FloatArray, start: int, most: int) -> FloatArray:
    """[K, P, L] -> [most + 1, K, P]: the least sum of 0, 1, ... consecutive values of a stage's row, from ``start``
    plus the stage on; infinite where there are not as many."""
    out = np.full((most + 1, *values.shape[:2]), np.inf)
    out[0] = 0.0
    sums = np.concatenate([np.zeros((*values.shape[:2], 1)), np.cumsum(values, axis=2)], axis=2)
    for stage in range(values.shape[1]):
        for length in range(1, min(most, values.shape[2] - start - stage) + 1):
            of = sums[:, stage, start + stage :]
            out[length, :, stage] = (of[:, length:] - of[:, :-length]).min(axis=1)
    return out
