"""Interleaved pipelines over several pools: bounds for every number of stages, and a balanced split of a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import permutations

import numpy as np

from meshwright.specs.batch import BoolArray, FloatArray, IntArray

from ..engine.live import in_flight
from .pricing import PricedSkeletons

#: Times that a stage may hold fewer layers as the others are known to take longer.
STARTS = 4
#: Halvings of the interval in which a bound lies.
HALVINGS = 9
#: Recomputed layers of a chunk told apart; beyond it a chunk counts as recomputed in full for its memory.
MOST_LEADING = 8


@dataclass(frozen=True)
class VirtualCounts:
    """Numbers of stages of each pool [C, G] for one skeleton and V virtual stages, and an order of pools [C, G] (unused
    ones last), with a lower bound [C] of the step over every split, the step [C] that a balanced split should take, and
    the recomputed layers of a chunk [C] that it needs. ``tail_s`` [C] of the bound follows the last backward."""

    counts: IntArray
    order: IntArray
    least_s: FloatArray
    likely_s: FloatArray
    leading: IntArray
    tail_s: FloatArray

    def followed_by(self, after_s: FloatArray) -> VirtualCounts:
        """The same where at least ``after_s`` [G] follows the last backward of a first stage on a pool."""
        least = np.where(self.counts > 0, after_s, np.inf).min(axis=1, initial=np.inf)
        more = np.maximum(least - self.tail_s, 0.0)
        return replace(self, least_s=self.least_s + more, likely_s=self.likely_s + more, tail_s=self.tail_s + more)


class Interleaving:
    """Interleaved pipelines of one skeleton with V virtual stages whose stages each hold chunks of near-equal length.

    A stage of n layers has chunks of floor(n / V) and ceil(n / V) layers. It works ``M t`` for a step, and memory holds
    what the schedule has in flight at its position. Of several kinds of layer the commonest alone counts where the
    others stand in front of it (``rare``: the stages that may hold those get no limit of memory or balance), else all
    count as the leanest and quickest of them.
    """

    def __init__(self, priced: PricedSkeletons, skeleton: int, virtual: int):
        self.priced, self.skeleton, self.virtual = priced, skeleton, virtual
        self.m, self.all_layers = int(priced.batch.num_microbatches[skeleton]), int(priced.counted.sum())
        row, full = priced.row[skeleton], priced.full_row[skeleton]
        kinds, self.rare = common_kinds(priced.kind[priced.counted > 0])
        self.kinds, self.layers = kinds, self.all_layers - self.rare
        self.own_s = priced.busy_s[row][:, kinds].min(axis=1)
        self.again_s = np.maximum((priced.busy_s[full] - priced.busy_s[row])[:, kinds].min(axis=1), 0.0)
        self.static = float(priced.static_bytes[row, kinds].min())
        self.kept = float(priced.cells.activation_bytes[row, kinds].min())
        self.lean = float(priced.cells.activation_bytes[full, kinds].min())
        self.capacity = priced.capacity_bytes[row] - float(priced.cells.transient_bytes[row, kinds].min())
        layers = np.nonzero(priced.counted > 0)[0]
        ends = priced.kind[: layers[0]], priced.kind[layers[-1] + 1 :]
        #: [G, 2] seconds of what stands before the first layer and after the last one.
        self.ends_s = np.stack([priced.busy_s[row][:, kind].sum(axis=1) for kind in ends], axis=1)
        self.leads = np.arange(MOST_LEADING + 1 if priced.is_block[skeleton] else 1)

    def room(self, stages: int) -> IntArray:
        """[G, P, leads] layers that a stage of a pool may hold at each position (0 first)."""
        number = np.arange(1, self.layers + 1)
        place = np.arange(self.virtual)
        each = number[:, None] // self.virtual + (place >= self.virtual - number[:, None] % self.virtual)
        redone = np.minimum(each[None], self.leads[:, None, None])
        if len(self.leads) > 1:
            redone[-1] = each
        bytes_ = self.kept * (each[None] - redone) + self.lean * redone
        held = in_flight(stages, self.virtual, self.m).astype(float)
        need = np.einsum("pv,lnv->pln", held, bytes_) + self.static * number
        out: IntArray = np.stack([(need <= capacity).sum(axis=2) for capacity in self.capacity])
        return out

    def counts(self, allowed: BoolArray, limit_s: float = np.inf) -> VirtualCounts:
        """All allowed numbers of stages that the schedule takes (whole groups of P micro-batches, a layer a chunk) and
        whose bound is below ``limit_s``."""
        every = np.argwhere(allowed)
        stages = every.sum(axis=1)
        fits = (stages > 1) & (stages * self.virtual <= self.all_layers)
        fits &= (self.m >= stages) & (self.m % np.maximum(stages, 1) == 0)
        every, stages = every[fits], stages[fits]
        if not len(every):
            return VirtualCounts(every, every, np.empty(0), np.empty(0), np.empty(0, dtype=np.int64), np.empty(0))
        free = np.zeros(len(every))
        for rates in self.priced.rates_of(self.skeleton):
            free = np.maximum(free, self.m / (every * rates[None, :]).sum(axis=1))
        after = self.priced.least_after_s[self.priced.row[self.skeleton]]
        tail = np.maximum(self.priced.tails_s(self.skeleton)[stages], np.where(every > 0, after, np.inf).min(axis=1))
        below = free + tail < limit_s
        rows, order = _orders(every[below] > 0)
        rows = np.nonzero(below)[0][rows]
        every, stages, free, tail = every[rows], stages[rows], free[rows], tail[rows]
        low, possible = np.zeros((len(every), len(self.leads))), np.zeros((len(every), len(self.leads)), dtype=np.bool_)
        for count in np.unique(stages):
            rows = np.nonzero(stages == count)[0]
            low[rows], possible[rows] = self._loads_s(
                every[rows], order[rows], int(count), free[rows], limit_s - tail[rows]
            )
        low = np.where(possible & (low + tail[:, None] < limit_s), low, np.inf)
        load, leading = low.min(axis=1), self.leads[low.argmin(axis=1)]
        likely = np.maximum(load, low.min(axis=1)) * (1.0 + (stages - 1) / (self.m * self.virtual))
        below = np.isfinite(load)
        return VirtualCounts(
            every[below], order[below], (load + tail)[below], (likely + tail)[below], leading[below], tail[below]
        )

    def _forward_share(self) -> tuple[float, float]:
        """Least and largest share of the forward in the time of a decoder layer, over kinds and pools."""
        row, kinds = self.priced.row[self.skeleton], self.kinds
        share = 1 - self.priced.backward_s[row][:, kinds] / self.priced.busy_s[row][:, kinds]
        return float(share.min()), float(share.max())

    def _sends_s(self, pool: IntArray) -> FloatArray:
        """[C] seconds of the sends of the first micro-batch's forward through all chunks, and once up the pipeline, for
        the pools [C, P] of stages; back to the first stage a send takes as long as the slowest of the others."""
        inside, across = self.priced.sends_s(self.priced.row[self.skeleton])
        hops = np.where(pool[:, :-1] == pool[:, 1:], inside[pool[:, 1:]], across[pool[:, :-1], pool[:, 1:]])
        out: FloatArray = (self.virtual + 1) * hops.sum(axis=1) + (self.virtual - 1) * hops.max(axis=1)
        return out

    def _loads_s(
        self, every: IntArray, order: IntArray, stages: int, least_s: FloatArray, most_s: FloatArray
    ) -> tuple[FloatArray, BoolArray]:
        """Lower bounds [C, leads] of the passes, and whether they are below ``most_s`` [C].

        A time T is too short where all stages together, none above T / M and its memory nor above what its chain
        allows, hold too few layers. What all stages add to a chain is least with the layers on the quickest stages that
        may hold them; that again allows fewer layers, and so on, some times.
        The chain of stage i: it runs at most ``(V - 1) P + 2 (P - 1 - i) + 1`` chunk forwards before its first
        backward, which waits for the whole forward of the first micro-batch and the last chunk's backward behind i;
        after its last backward comes that of the first chunk in front. With f and b the forward and backward of a
        stage, f' and b' of one of its chunks,

            T >= M (f_i + b_i) + sum_j f_j - P f_i + (2 i + 1 - P) f'_i + sum_{j != i} b'_j + s,

        and the head's forward and backward for i < P - 1, the embedding's for i > 0; in its own stage the embedding's
        forward counts at least ``M - min(2 P - 2, M - 1)`` times. s are the sends on that chain: V times down the
        pipeline, V - 1 times back to its first stage, once up again.
        """
        place = np.arange(stages)
        ends = np.cumsum(np.take_along_axis(every, order, 1), axis=1)
        rank = (place[None, :, None] >= ends[:, None, :]).sum(axis=2)
        pool = np.take_along_axis(order, rank, 1)
        room = self.room(stages)  # [G, P, leads]
        room[:, : self.rare] = self.layers
        sends_s = self._sends_s(pool)
        regular = place >= self.rare
        lean = 2 * place + 1 - stages
        few, many = self._forward_share()
        v, m = self.virtual, self.m

        def holds(limit_s: FloatArray, rows: IntArray, lead: IntArray) -> BoolArray:
            at = pool[rows]
            own, again, leads = self.own_s[at], self.again_s[at], self.leads[lead][:, None]
            more = np.zeros(at.shape)
            more[:, 0], more[:, -1] = self.ends_s[at[:, 0], 0], self.ends_s[at[:, -1], 1]
            budget = limit_s[:, None] / m - more
            each = np.where(
                budget >= v * leads * (own + again), (budget - v * leads * again) / own, budget / (own + again)
            )
            full = np.minimum(np.floor(each + 1e-9).clip(0, None), room[at, place[None, :], lead[:, None]])
            # The longest chain of a stage rises by ``rate`` a layer from ``base`` at least, and by more if recomputed.
            slope = stages * many - np.where(lean > 0, few * regular, many) * lean / np.where(regular, v, 1)
            rate = own * (m - slope - (1 - many) / v * regular)
            most_first = min(2 * stages - 2, m - 1)  # forwards of the first chunk taken off the chain of stage 0
            ends = more.sum(axis=1, keepdims=True) + (m - 1) * more
            ends[:, 0] -= most_first * more[:, 0]
            base = ends - abs(lean) * np.where(lean > 0, few, many) * own * (v - 1) / v * regular
            base = base + sends_s[rows, None]
            redo, one = m * v * leads * again, np.where(regular, v, 0)
            by_cost = np.argsort(own, axis=1, kind="stable")
            sorted_own = np.take_along_axis(own, by_cost, 1)
            for _ in range(STARTS):
                whole = full.sum(axis=1, keepdims=True)
                possible = (full >= one).all(axis=1) & (whole[:, 0] >= self.layers)
                least = np.maximum(one, self.layers - whole + full)
                # What all stages add to each chain: least with the layers where they are quickest.
                spare = np.take_along_axis((full - least).clip(0, None), by_cost, 1)
                left = (self.layers - least.sum(axis=1, keepdims=True)).clip(0, None)
                taken = np.minimum((left - np.cumsum(spare, axis=1) + spare).clip(0, None), spare)
                held = (least * own).sum(axis=1) + (taken * sorted_own).sum(axis=1)
                chunks = np.maximum(
                    (np.floor(least / v) * regular * own).sum(axis=1),
                    (held - (own * np.where(regular, v - 1, full)).sum(axis=1)) / v,
                )
                budget = limit_s[:, None] - (few * held + (1 - many) * chunks)[:, None]
                room_s = budget - base
                with np.errstate(divide="ignore", invalid="ignore"):
                    each = np.where(
                        room_s >= v * leads * rate + redo, (room_s - redo) / rate, room_s / (rate + m * again)
                    )
                each = np.where(rate > 0, np.minimum(np.floor(each + 1e-9), full), full).clip(0, None)
                # So many layers on the stage are still too many where their own chain is too long.
                short, long = np.floor(each / v) * regular, np.where(regular, np.ceil(each / v), each)
                chain = m * (each * own + np.minimum(each, v * leads) * again) + ends - stages * many * each * own
                chain += (lean * np.where(lean > 0, few * short, many * long) - (1 - many) * short) * own
                each -= (chain + sends_s[rows, None] > budget * (1 + 1e-9)) & (each > 0)
                if (each >= full).all() or not possible.any():
                    break
                full = each
            return np.asarray(possible & (full >= one).all(axis=1) & (full.sum(axis=1) >= self.layers))

        rows, lead = (grid.reshape(-1) for grid in np.indices((len(every), len(self.leads))))
        worst = 4 * m * self.layers * float((self.own_s + self.again_s).max())
        high = np.minimum(np.broadcast_to(most_s[rows], rows.shape), worst)
        possible = holds(high, rows, lead)
        out, keep = np.zeros(len(rows)), np.nonzero(possible)[0]
        low, high = least_s[rows[keep]], high[keep]
        for _ in range(HALVINGS if len(keep) else 0):
            middle = (low + high) / 2
            ok = holds(middle, rows[keep], lead[keep])
            low, high = np.where(ok, low, middle), np.where(ok, middle, high)
        out[keep] = low
        shape = (len(every), len(self.leads))
        return out.reshape(shape), possible.reshape(shape)


def chunk_cuts(work: Interleaving, stage_pools: tuple[int, ...], leading: int) -> IntArray | None:
    """Cuts [P V + 1] of a balanced interleaved split, chunk q on stage q mod P; None where memory leaves no room.

    Layers go one by one to the stage that is then least loaded and has room, embedding and head counted where they
    sit; a stage's layers are spread over its chunks evenly, the longer chunks last, as the first hold most.
    """
    priced, virtual = work.priced, work.virtual
    pp, kind = len(stage_pools), priced.kind
    busy = priced.busy_s[int(priced.row[work.skeleton])]
    decoder = np.nonzero(priced.counted > 0)[0]
    first = int(decoder[0])
    layer_s = busy[:, kind[decoder]].mean(axis=1)
    before, after = work.ends_s[:, 0], work.ends_s[:, 1]
    place = int(np.searchsorted(work.leads, leading))
    room = [int(work.room(pp)[g, i, place]) for i, g in enumerate(stage_pools)]
    if min(room) < virtual:
        return None
    counts = np.full(pp, virtual)
    load = np.array([layer_s[g] * virtual for g in stage_pools])
    load[0] += before[stage_pools[0]]
    load[-1] += after[stage_pools[-1]]
    heap: list[tuple[float, int]] = []
    for i, g in enumerate(stage_pools):
        heappush(heap, (float(load[i] + layer_s[g]), i))
    for _ in range(len(decoder) - pp * virtual):
        while heap:
            value, i = heappop(heap)
            if counts[i] < room[i]:
                break
        else:
            return None
        counts[i] += 1
        heappush(heap, (value + float(layer_s[stage_pools[i]]), i))
    lengths = _spread(counts, virtual, round(float(after[stage_pools[-1]] / layer_s[stage_pools[-1]])))
    cuts = np.concatenate([[0], first + np.cumsum(lengths.T.reshape(-1))])
    cuts[-1] = len(kind)
    return cuts.astype(np.int64)


def common_kinds(kinds: IntArray) -> tuple[IntArray, int]:
    """The kinds of decoder layer that count in a bound, and how many layers in front are of other kinds."""
    found, counts = np.unique(kinds, return_counts=True)
    common = found[counts.argmax()]
    rare = int((kinds != common).sum())
    if rare and (kinds[:rare] != common).all():
        return np.array([common]), rare
    return found, 0


def _orders(used: BoolArray) -> tuple[IntArray, IntArray]:
    """Rows of ``used`` [C, G], each once for every order of its pools, and these orders, unused pools last."""
    pools = used.shape[1]
    rows, orders = [], []
    for order in permutations(range(pools)):
        placed = used[:, order]
        # Unused pools stand last and in rising order, so that no order is given twice.
        last = ~(~placed[:, :-1] & placed[:, 1:]).any(axis=1) if pools > 1 else np.ones(len(used), dtype=np.bool_)
        for one in range(pools - 1):
            if order[one] > order[one + 1]:
                last &= placed[:, one] | placed[:, one + 1]
        found = np.nonzero(last)[0]
        rows.append(found)
        orders.append(np.broadcast_to(np.array(order), (len(found), pools)))
    return np.concatenate(rows), np.concatenate(orders)


def _spread(counts: IntArray, virtual: int, extra: int) -> IntArray:
    """[P, V] layers of the chunks of stages with ``counts`` layers; the last chunk of all holds ``extra`` layers' worth
    more."""
    out = np.empty((len(counts), virtual), dtype=np.int64)
    place = np.arange(virtual)
    for i, count in enumerate(counts):
        out[i] = count // virtual + (place >= virtual - count % virtual)
    if extra and virtual > 1:
        total = int(counts[-1]) + extra
        even = total // virtual + (place >= virtual - total % virtual)
        even[-1] -= extra
        while even[-1] < 1:
            even[-1] += 1
            even[int(even.argmax())] -= 1
        out[-1] = even
    return out
