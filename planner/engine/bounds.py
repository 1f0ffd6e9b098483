"""Whether any split of a candidate stays within a step time: a test that needs no split.

The order of layers is forgotten: a stage is the number of layers of a rare and of a common class that it holds. A stage
with too many, for its memory or for the time left, is refused; a candidate passes if all layers find room and each
chunk can have one. So what fails has no split within that time, and the test is a proof over all splits.

Stage i with V chunks and M micro-batches ends no sooner than the way down to it, M times its own work, its gradient
reduction; the step no sooner than the way back up from it and the reduction of the first stage, which ends last. What
the slowest optimizer and the slowest parameter gather add comes after both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.specs.batch import BoolArray, FloatArray, IntArray

from .live import live_mixes
from .pricing import PricedBatch

#: Layers of other kinds than the most frequent one that are counted apart; more are counted as if all were alike.
MOST_RARE = 6
#: Entries of a table made at once.
MOST_ENTRIES = 1_000_000
#: Two sums of the same seconds or bytes in another order differ by less than this share.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Test:
    """n candidates with the layers they recompute in each chunk, and what their stages cost.

    Axes [n, P, A+1, W+1]: a stage with a rare and b common layers. ``work_s``: M times a micro-batch; ``room``: whether
    memory holds it; ``reduce_s``: ``work_s`` and its gradient reduction. ``down_s``, ``up_s`` [n, P]: the way to a
    stage and back; ``passed_s`` [n, 2, 2]: what each rare and common layer before the stage adds to it, down and up
    (1F1B).
    ``first_reduce_s``, ``after_s`` [n]: the reduction of the first stage at least, and what follows the last one.
    ``whole_s`` [n]: the work of all stages together; infinite where it is known not to fit in memory.
    """

    index: IntArray
    leading: IntArray
    work_s: FloatArray
    room: BoolArray
    reduce_s: FloatArray
    down_s: FloatArray
    up_s: FloatArray
    passed_s: FloatArray
    first_reduce_s: FloatArray
    after_s: FloatArray
    whole_s: FloatArray

    def columns(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def take(self, rows: IntArray) -> Test:
        return Test(*(column[rows] for column in self.columns()))


class SplitBounds:
    """The test for the candidates of a batch."""

    def __init__(self, priced: PricedBatch):
        self.priced = priced
        kinds, counts = np.unique(priced.kind[priced.counted > 0], return_counts=True)
        order = np.argsort(-counts, kind="stable")
        self.kinds, self.layers, self.rare = kinds, int(counts.sum()), int(counts.sum() - counts.max())
        if not 0 < self.rare <= MOST_RARE:
            self.rare = 0
        #: Kinds that the classes do not tell apart: then what all stages need together says more.
        self.alike, self.counts = len(kinds) > 1 and not self.rare, counts
        self.common_kinds = kinds[order[:1]] if self.rare else kinds
        self.rare_kinds = kinds[order[1:]] if self.rare else kinds
        self.common = self.layers - self.rare
        decoders = np.flatnonzero(priced.counted)
        self.decoders = priced.kind[decoders]
        head, rear = priced.kind[: decoders[0]], priced.kind[decoders[-1] + 1 :]
        none = np.empty(0, dtype=np.int64)
        last = priced.arrangement.pp - 1
        self.fixed = [np.concatenate([head if i == 0 else none, rear if i == last else none]) for i in range(last + 1)]
        self.head, self.rear = head, rear
        types = [(int(pool), i == 0, i == last) for i, pool in enumerate(priced.pools)]
        self.stage_of_type = np.array([types.index(one) for one in sorted(set(types))])
        self.type_of = np.array([sorted(set(types)).index(one) for one in types])

    def pairs(self, index: IntArray, step_s: FloatArray) -> Test:
        """The candidates ``index`` that may have a split below ``step_s`` [n], once for each number of recomputed
        layers with which they may."""
        width = self._width(index, step_s)
        found = [self._pairs(index[rows], step_s[rows], width) for rows in self._portions(index, width)]
        return Test(*(np.concatenate(parts) for parts in zip(*(one.columns() for one in found), strict=True)))

    def first(self, index: IntArray, step_s: FloatArray) -> BoolArray:
        """[n] whether there is such a pair, looked for from the fewest recomputed layers on."""
        out = np.zeros(len(index), dtype=np.bool_)
        width = self._width(index, step_s)
        for rows in self._portions(index, width):
            out[rows] = np.isin(index[rows], self._pairs(index[rows], step_s[rows], width, first=True).index)
        return out

    def within(self, test: Test, step_s: float) -> Test:
        """Those that may still have a split below the shorter ``step_s``."""
        return test.take(np.flatnonzero(self._packs(test, step_s * (1 + ROUNDING) - test.after_s)))

    def _pairs(self, index: IntArray, step_s: FloatArray, width: int, first: bool = False) -> Test:
        priced = self.priced
        leading, limit_s = priced.least_recomputed()[index], step_s * (1 + ROUNDING)
        rows, found = np.arange(len(index)), []
        held = np.arange(self.rare + 1)[:, None], np.arange(width + 1)[None, :]
        most = held[0][-1, 0] + held[1][0, -1]  # more layers than a chunk can have are none more
        while True:
            test = self._timed(index[rows], leading[rows], *held)
            roomy = self._packs(test, limit_s[rows] - test.after_s)
            rows, test = rows[roomy], self._held(test.take(np.flatnonzero(roomy)), *held)
            fits = self._packs(test, limit_s[rows] - test.after_s)
            test = self._tailed(test.take(np.flatnonzero(fits)), *held)
            late = self._packs(test, limit_s[rows[fits]] - test.after_s)
            fits[fits] = late
            found.append(test.take(np.flatnonzero(late)))
            more = priced.is_block[index[rows]] & (leading[rows] < most) & ~(fits & first)
            rows = rows[more]
            if not len(rows):
                return Test(*(np.concatenate(parts) for parts in zip(*(one.columns() for one in found), strict=True)))
            leading[rows] += 1

    def _width(self, index: IntArray, step_s: FloatArray) -> int:
        """Common layers that a stage can hold at most."""
        if not len(index):
            return 0
        priced = self.priced
        others = (priced.arrangement.pp - 1) * int(priced.batch.vpp[index].min())
        each = priced.busy[priced.row[index]][:, :, self.common_kinds].min(axis=(1, 2))
        time = (step_s / (priced.batch.num_microbatches[index] * each)).max()
        return int(min(self.common, self.layers - others, time))

    def _packs(self, test: Test, left_s: FloatArray) -> BoolArray:
        """[n] whether all layers find room from the first stage to the last, as many as may be on each.

        More on early stages leaves less time to later ones, but never by more layers than were taken early. Each stage
        leaves the ones behind it a layer for every chunk.
        """
        priced, rare = self.priced, self.rare
        chunks = priced.batch.vpp[test.index][:, None]
        room_s = left_s[:, None] - test.down_s - test.up_s - test.first_reduce_s[:, None]
        enough = room_s.clip(min=0.0).sum(axis=1) >= test.whole_s
        placed = np.full((len(test.index), rare + 1), -np.inf)
        placed[:, 0] = 0.0
        before = np.arange(rare + 1)[None, :, None]
        for stage in range(priced.arrangement.pp):
            common = np.maximum(placed, 0.0)[:, :, None]
            passed = before * test.passed_s[:, None, :, 0] + common * test.passed_s[:, None, :, 1]
            down = left_s[:, None] - test.down_s[:, stage, None] - passed[:, :, 0]
            up = down - (test.up_s[:, stage] + test.first_reduce_s)[:, None] - passed[:, :, 1]
            after = np.full_like(placed, -np.inf)
            for taken in range(rare + 1):
                work, reduce_s = test.work_s[:, stage, taken, None], test.reduce_s[:, stage, taken, None]
                to = rare + 1 - taken
                within = (work <= up[:, :to, None]) & (reduce_s <= down[:, :to, None])
                within &= test.room[:, stage, taken, None]
                most = np.count_nonzero(within, axis=2) - 1
                total = np.where((most >= 0) & (most + taken >= chunks), placed[:, :to] + most, -np.inf)
                after[:, taken:] = np.maximum(after[:, taken:], total)
            behind = (priced.arrangement.pp - 1 - stage) * chunks
            placed = np.minimum(after, self.layers - behind - before[:, :, 0])
        return np.asarray((placed[:, rare] >= self.common) & enough)

    def _portions(self, index: IntArray, width: int) -> list[IntArray]:
        """Rows of ``index`` in portions whose tables are not too large; at least one."""
        entries = len(index) * self.priced.arrangement.pp * (self.rare + 1) * (width + 1)
        return np.array_split(np.arange(len(index)), max(1, min(len(index), -(-entries // MOST_ENTRIES))))

    def _classes(self, table: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[..., B] -> [...] the least of a rare and of a common layer; 0 where none is rare."""
        rare = table[..., self.rare_kinds].min(axis=-1) if self.rare else np.zeros(table.shape[:-1])
        return rare, table[..., self.common_kinds].min(axis=-1)

    def _sum(self, table: FloatArray, rare: IntArray, common: IntArray) -> FloatArray:
        """[..., B] -> [..., A+1, W+1] the least that so many layers add up to."""
        one, two = self._classes(table)
        out: FloatArray = one[..., None, None] * rare + two[..., None, None] * common
        return out

    def _cheapest(self, table: FloatArray, layers: IntArray) -> FloatArray:
        """[n, B] -> [n] what the cheapest ``layers`` [n] decoder layers add up to."""
        each = table[:, self.kinds]
        order = np.argsort(each, axis=1, kind="stable")
        there = self.counts[order]
        taken = (layers[:, None] - np.cumsum(there, axis=1) + there).clip(min=0)
        out: FloatArray = (np.minimum(taken, there) * np.take_along_axis(each, order, axis=1)).sum(axis=1)
        return out

    def _whole_s(self, index: IntArray, leading: IntArray, busy: FloatArray, extra: FloatArray) -> FloatArray:
        """[n] seconds of a micro-batch on all stages together, sends aside."""
        if not self.alike:
            return np.zeros(len(index))
        apart = self.priced.arrangement.pp * self.priced.batch.vpp[index] - 1
        redone = apart * np.minimum(leading, 1) + np.minimum(leading, self.layers - apart)
        work = busy.min(axis=1)[:, self.priced.kind].sum(axis=1)
        out: FloatArray = work + self._cheapest(extra.min(axis=1), redone)
        return out

    def _redone_s(self, extra: FloatArray, redone: IntArray, rare: IntArray, common: IntArray) -> FloatArray:
        """[n, P, A+1, W+1] the least that ``extra`` [n, P, B] of ``redone`` of so many layers adds up to."""
        one, two = (each[:, :, None, None] for each in self._classes(extra))
        of_rare = np.minimum(redone, np.where(one <= two, rare, (redone - common).clip(min=0)))
        out: FloatArray = of_rare * one + (redone - of_rare) * two
        return out

    def _timed(self, index: IntArray, leading: IntArray, rare: IntArray, common: IntArray) -> Test:
        """The test without memory and gradient reduction."""
        priced, pp, pools = self.priced, self.priced.arrangement.pp, self.priced.pools
        row, chunks = priced.row[index], priced.batch.vpp[index]
        count = priced.batch.num_microbatches[index].astype(float)
        plain = chunks == 1
        ahead = priced.send_s(index)
        back = np.concatenate([np.zeros((len(index), 1)), ahead[:, :-1]], axis=1)
        busy = priced.busy[row][:, pools]
        extra = (priced.busy[priced.full_row[index]][:, pools] - busy).clip(min=0.0)
        again = extra[:, :, self.kinds].min(axis=-1)
        work = self._sum(busy, rare, common)
        for stage in {0, pp - 1}:
            work[:, stage] += busy[:, stage, self.fixed[stage]].sum(axis=-1)[:, None, None]
        # Chunks of c layers recompute min(leading, c): in sum least where all but one chunk have a single layer.
        apart, first = (chunks - 1)[:, None, None], leading[:, None, None]
        redone = apart * np.minimum(first, 1) + np.minimum(first, (rare + common - apart).clip(min=0))
        work += self._redone_s(extra, redone[:, None], rare, common)
        # Recomputation may fall on added layers that are quicker: so many layers count as no slower than more of them.
        work = np.minimum.accumulate(work[..., ::-1], axis=-1)[..., ::-1]
        work += np.where(plain[:, None], ahead + back, 0.0)[:, :, None, None]
        work *= count[:, None, None, None]
        whole_s = self._whole_s(index, leading, busy, extra)
        whole_s = count * (whole_s + np.where(plain, (ahead + back).sum(axis=1), 0.0))
        # Chunk j of the first P holds layer j or a later one: the first i chunks take as long as i layers at least.
        ways, passed = [], []
        for table, sends in ((priced.forward_s, ahead), (priced.backward_s, np.where(plain[:, None], back, ahead))):
            here = table[row][:, pools]
            quickest = here.min(axis=1)
            before = sends + np.where(plain[:, None], 0.0, quickest[:, self.decoders[:pp]])
            before[:, 0] += here[:, 0, self.fixed[0]].sum(axis=-1)
            ways.append(np.cumsum(before, axis=1) - before)
            passed.append(np.where(plain[:, None], np.stack(self._classes(quickest), axis=-1), 0.0))
        ways[1] += np.minimum(leading, 1)[:, None] * again.min(axis=1)[:, None] * np.arange(pp)
        after_s = priced.least_tail_s()[index]
        room = np.ones(work.shape, dtype=np.bool_)
        (down, up), nothing = ways, np.zeros_like(after_s)
        return Test(index, leading, work, room, work, down, up, np.stack(passed, axis=1), nothing, after_s, whole_s)

    def _tailed(self, test: Test, rare: IntArray, common: IntArray) -> Test:
        """The test with gradient reduction and the tail of the fullest stage."""
        priced, index = self.priced, test.index
        row, types = priced.row[index], self.stage_of_type
        cells = priced.cells
        # The reduction hides under a micro-batch's backward: the longest that the stage can have.
        pools = priced.pools[types]
        longest = priced.backward_s[np.where(test.leading > 0, priced.full_row[index], row)][:, pools]
        longest = np.maximum(longest, priced.backward_s[row][:, pools])

        def of_types(table: FloatArray) -> FloatArray:
            """[n, S or 1, B] -> [n, S, A+1, W+1]."""
            out = np.repeat(self._sum(table, rare, common), len(types) // table.shape[1], axis=1)
            for s, stage in enumerate(types):
                out[:, s] += table[:, s % table.shape[1], self.fixed[stage]].sum(axis=-1)[:, None, None]
            return out

        dense, expert = of_types(cells.dense_params[row][:, None]), of_types(cells.expert_params[row][:, None])
        tail = priced.costs.tail(
            cells, row[:, None, None, None], pools[None, :, None, None], dense, expert, -of_types(-longest)
        )
        shared = priced.shared_embedding_s[row]
        held = rare + common
        chunks = priced.batch.vpp[index][:, None, None]
        first = np.where(held >= chunks, tail.grad_reduce_s[:, self.type_of[0]], np.inf).min(axis=(1, 2))
        slowest = tail.optimizer_s + tail.param_gather_s
        full = held >= -(-self.layers // priced.arrangement.pp)
        slowest_s = np.where(full, slowest, np.inf).min(axis=(1, 2, 3)) + shared
        return replace(
            test,
            reduce_s=test.work_s + tail.grad_reduce_s[:, self.type_of],
            first_reduce_s=first,
            after_s=np.maximum(slowest_s, test.after_s),
        )

    def _held(self, test: Test, rare: IntArray, common: IntArray) -> Test:
        """The test with memory."""
        priced, index, pp = self.priced, test.index, self.priced.arrangement.pp
        cells = priced.cells
        row, full = priced.row[index], priced.full_row[index]
        chunks = priced.batch.vpp[index][:, None, None, None]
        leading = test.leading[:, None, None, None]
        live = self._live(index)  # [n, 2, P, 4]
        held = (rare + common)[None, None]
        kept, lean = cells.activation_bytes[row], cells.activation_bytes[full]
        kept_least, kept_most = (f(kept[:, self.kinds], axis=-1)[:, None, None, None] for f in (np.min, np.max))
        lean_least = np.minimum(lean[:, self.kinds].min(axis=-1)[:, None, None, None], kept_least)
        some = np.minimum(leading, 1)
        # Every chunk has one layer; more of them go where fewest micro-batches are in flight.
        redone = np.minimum(held, leading * chunks)
        rest = np.maximum((held - redone) * kept_least, self._sum(kept, rare, common)[:, None] - kept_most * redone)
        one = np.where(some > 0, lean_least, kept_least)
        more = np.where(some > 0, (redone - chunks) * lean_least + rest, rest - chunks * kept_least)
        more = np.maximum(more, 0.0)
        static = np.minimum(priced.static_bytes[row], priced.static_bytes[full])
        transient = np.minimum(cells.transient_bytes[row], cells.transient_bytes[full])
        peak = np.repeat(transient[:, self.kinds].min(axis=-1)[:, None], pp, axis=1)
        ends = [(stage, blocks) for stage, blocks in ((0, self.head), (pp - 1, self.rear)) if len(blocks)]
        need = np.zeros((1, 1, 1, 1))
        for mix in range(live.shape[1]):
            every, least = (live[:, mix, :, k, None, None] for k in range(2))
            held_bytes = every * one + least * more
            for stage, blocks in ends:
                times = live[:, mix, stage, 2 if stage == 0 else 3]
                held_bytes[:, stage] += (times * kept[:, blocks].sum(axis=-1))[:, None, None]
            need = np.maximum(need, held_bytes)
        need = need + self._sum(static, rare, common)[:, None]
        for stage, blocks in ends:
            need[:, stage] += static[:, blocks].sum(axis=-1)[:, None, None]
            peak[:, stage] = np.maximum(peak[:, stage], transient[:, blocks].max(axis=-1))
        capacity = priced.capacity_bytes(index) * (1 + ROUNDING)
        if self.alike:
            all_chunks = pp * priced.batch.vpp[index]
            redone = np.minimum(self.layers, test.leading * all_chunks)
            rest = self._cheapest(kept, self.layers - np.where(redone > 0, redone, all_chunks))
            inner = rest + np.maximum(redone - all_chunks, 0) * lean_least[:, 0, 0, 0]
            whole = static[:, self.priced.kind].sum(axis=1) + peak.sum(axis=1)
            every, least = live[..., 0].max(axis=1), live[..., 1].max(axis=1)
            whole += every.sum(axis=1) * one[:, 0, 0, 0] + least.min(axis=1) * inner
            test = replace(test, whole_s=np.where(whole <= capacity.sum(axis=1), test.whole_s, np.inf))
        return replace(test, room=need + peak[:, :, None, None] <= capacity[:, :, None, None])

    def _live(self, index: IntArray) -> FloatArray:
        """[n, 2, P, 4] micro-batches in flight at a stage's peak: over all chunks, in the chunk with fewest, in the
        first and in the last. Once in the mean of the mixes, which spares the last chunk, and once in the mix whose
        emptiest chunk holds most: a stage has room for every mix, so for any weighted mean of them."""
        priced, pp = self.priced, self.priced.arrangement.pp
        if not len(index):
            return np.zeros((0, 2, pp, 4))
        pairs = np.stack([priced.batch.vpp[index], np.minimum(priced.batch.num_microbatches[index], 4 * pp)], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        out = []
        for virtual, count in unique.tolist():
            mixes = live_mixes(pp, virtual, count)
            evenest = mixes[np.arange(pp), mixes.min(axis=2).argmax(axis=1)]
            both = np.stack([mixes.mean(axis=1), evenest])
            out.append(np.stack([both.sum(axis=2), both.min(axis=2), both[..., 0], both[..., -1]], axis=2))
        return np.stack(out)[inverse.reshape(-1)]
