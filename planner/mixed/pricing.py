"""Prices of skeletons over several pools: bounds before any layout is chosen, and the tables of the partition."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from meshwright.cost_models.memory import block_capacity_bytes
from meshwright.cost_models.protocol import CellCosts, StageCosts
from meshwright.specs.batch import BoolArray, FloatArray, IntArray
from meshwright.specs.target import Target

from ..engine.pricing import in_block_mode, with_recompute
from .partition import TypeTables
from .space import Skeletons


class PricedSkeletons:
    """Skeletons of one stage size with the costs of their cells. ``most`` [N, G] stages of each pool that may be used,
    at most ``max_stages`` in all."""

    def __init__(
        self, costs: StageCosts, skeletons: Skeletons, target: Target, headroom: float, max_stages: int, pools: int
    ):
        self.costs, self.skeletons, self.batch = costs, skeletons, skeletons.batch
        self.is_block: BoolArray = in_block_mode(self.batch, target)
        modes = [mode.granularity for mode in target.recompute]
        kept, redone = (with_recompute(self.batch, self.is_block, modes, kind) for kind in ("none", "full"))
        keys, rows = kept.joined(redone).cells()
        cells = costs.cells(keys)
        self.row, self.full_row = rows[: len(self.batch)], rows[len(self.batch) :]
        self.kind = costs.blocks.kind_of
        self.counted = np.array([float(name == "decoder") for name, _ in costs.blocks.instances])
        self.pools = pools
        self.max_stages = max_stages if len(self.batch) and int(self.batch.pp[0]) > 1 else 1
        self.most: IntArray = np.minimum(skeletons.most, self.max_stages)
        self.backward_s = cells.backward_s
        self.busy_s = cells.forward_s + self.backward_s
        self.static_bytes = cells.static_bytes
        none = np.empty((0, 0, 0, 0))  # these are not needed again, and there may be very many rows
        self.cells: CellCosts = replace(
            cells,
            forward_terms_s=none,
            backward_terms_s=none,
            static_bytes_by=none,
            weight_gradient_s=none,
            weight_stash_bytes=none,
            host_bytes=None,
        )
        capacity = block_capacity_bytes(self.cells.limit_bytes[None, :], self.cells.fixed_bytes, headroom)
        self.capacity_bytes: FloatArray = capacity
        self._tails: dict[int, FloatArray] = {}
        self._closings: dict[int, FloatArray] = {}

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def _shared_s(self) -> FloatArray:
        """[C, G] least seconds to add up a shared embedding, by the pool of the first stage."""
        rows = np.arange(len(self.cells.keys))
        if self.max_stages == 1:
            return np.zeros((len(rows), self.pools))
        every = [
            [self.costs.shared_embedding_s(self.cells, rows, first, last, 2) for last in range(self.pools)]
            for first in range(self.pools)
        ]
        out: FloatArray = np.array(every).min(axis=1).T
        return out

    def least_tail_s(self, stages: IntArray, row: IntArray) -> FloatArray:
        """[n] optimizer and gather of the mean of ``stages`` [n] stages on the fastest pool, for cell rows [n]."""
        dense = self.cells.dense_params[row][:, self.kind].sum(axis=1) / stages
        expert = self.cells.expert_params[row][:, self.kind].sum(axis=1) / stages
        shape = (len(row), self.pools)
        at, pool, dense, expert = (
            np.broadcast_to(part, shape)
            for part in (row[:, None], np.arange(self.pools)[None, :], dense[:, None], expert[:, None])
        )
        tail = self.costs.tail(self.cells, at, pool, dense, expert, np.full(shape, np.inf))
        out: FloatArray = (tail.optimizer_s + tail.param_gather_s).min(axis=1)
        return out

    @cached_property
    def least_after_s(self) -> FloatArray:
        """[C, G] what follows the last backward at least if the first stage is on a pool: gradient reduction,
        hidden as far as it ever can be, optimizer and gather of what stands before the layers and one layer."""
        kinds = np.unique(self.kind[self.counted > 0])
        before = self.kind[: int(np.nonzero(self.counted)[0][0])]

        def held(params: FloatArray) -> FloatArray:
            return np.asarray(params[:, before].sum(axis=1) + params[:, kinds].min(axis=1))

        shape = (len(self.cells.keys), self.pools)
        row, pool = np.arange(shape[0])[:, None], np.arange(self.pools)[None, :]
        dense, expert = held(self.cells.dense_params)[:, None], held(self.cells.expert_params)[:, None]
        at, pool = np.broadcast_to(row, shape), np.broadcast_to(pool, shape)
        dense, expert = np.broadcast_to(dense, shape), np.broadcast_to(expert, shape)
        tail = self.costs.tail(self.cells, at, pool, dense, expert, np.full(shape, np.inf))
        rows = np.arange(shape[0])
        mean = self.least_tail_s(np.full(len(rows), self.max_stages), rows)
        own = np.maximum(tail.optimizer_s + tail.param_gather_s, mean[:, None])
        out: FloatArray = tail.grad_reduce_s + own + self._shared_s
        return out

    def after_s(self, skeleton: int, layers: IntArray, hidden_s: float) -> FloatArray:
        """[n, G] as :attr:`least_after_s` for first stages of ``layers`` [n] layers whose last backward takes no longer
        than ``hidden_s``."""
        row, kinds = int(self.row[skeleton]), self._kinds[0]
        before = self.kind[: int(np.nonzero(self.counted)[0][0])]
        shape = (len(layers), self.pools)

        def held(params: FloatArray) -> FloatArray:
            each = params[row, before].sum() + params[row, kinds].min() * layers
            return np.broadcast_to(each[:, None], shape)

        at, pool = np.full(shape, row), np.broadcast_to(np.arange(self.pools)[None, :], shape)
        dense, expert = held(self.cells.dense_params), held(self.cells.expert_params)
        tail = self.costs.tail(self.cells, at, pool, dense, expert, np.full(shape, hidden_s))
        out: FloatArray = tail.grad_reduce_s + tail.optimizer_s + self._shared_s[row]
        return out

    def _least_after(self) -> FloatArray:
        """[N] the least of it over the pools that a skeleton may use."""
        out: FloatArray = np.where(self.most > 0, self.least_after_s[self.row], np.inf).min(axis=1)
        return out

    def tails_s(self, skeleton: int) -> FloatArray:
        """[S + 1] optimizer and parameter gather of the mean of s stages on the fastest pool."""
        row = int(self.row[skeleton])
        if row not in self._tails:
            stages = np.arange(1, self.max_stages + 1)
            self._tails[row] = np.concatenate([[0.0], self.least_tail_s(stages, np.full(len(stages), row))])
        return self._tails[row]

    def least_step_s(self) -> FloatArray:
        """[N] lower bound of a plain step over every layout and split, memory aside.

        Work is cut freely over stages: a pool's stage does at most ``u`` of the model's work a second, where each
        block counts as much as it takes on one of the pools (any weights give a bound; the largest counts). With the
        two chains of :mod:`.partition`, P stages, and the stages sorted by rate, a step takes at least

            max_j 1 / (U_j / (M - P + 2 j - 1))                       for P < M,
            max_j 1 / (sum_{i<=j} u_i / c_i / (1 + sum_{i<=j} 1 / c_i)),   c = max(M - q, 0) + min(q - 1, M - 1) b / t

        (duals of the linear programme; j stages work, U_j is the sum of their rates, the others add nothing).
        """
        best = np.zeros(len(self))
        for rates in self._rates:
            best = np.maximum(best, self._least_of(rates))
        return best + self._least_after()

    def rates_of(self, skeleton: int) -> list[FloatArray]:
        """[G] of one skeleton."""
        return [rates[skeleton] for rates in self._rates]

    def whole_s(self, skeleton: int) -> FloatArray:
        """[G] seconds of all blocks for a micro-batch."""
        out: FloatArray = self.busy_s[self.row[skeleton]][:, self.kind].sum(axis=1)
        return out

    def least_interleaved_s(self) -> FloatArray:
        """[N] lower bound of an interleaved step over every layout and split; inf where the schedule takes no layout.

        Interleaving runs micro-batches in groups of P: P divides M, and at least 2 P layers are needed. With P stages,
        the P fastest that pools have, all work all the time but while the first micro-batch comes down to them and the
        last goes up again. Stage i waits for the forward and the backward of a layer at least on i stages, so with
        these sums ``w_i`` and rates ``u_i`` the work 1 of a micro-batch needs ``T >= w_i + M x_i`` with
        ``sum_i u_i x_i >= 1``, and so ``T >= (M + sum_i u_i w_i) / sum_i u_i``; least with the fastest stages in front.
        """
        decoders = np.unique(self.kind[self.counted > 0])
        hop = self.busy_s[self.row][:, :, decoders].min(axis=(1, 2))
        m, largest = self.batch.num_microbatches, int(min(self.max_stages, self.counted.sum() // 2))
        stages = np.arange(2, max(largest, 2) + 1)
        work = np.zeros(len(self))
        for rates in self._rates:
            order = np.argsort(-rates, axis=1, kind="stable")
            rate = np.take_along_axis(rates, order, 1)
            ends = np.cumsum(np.take_along_axis(self.most, order, 1), axis=1)
            speed = waits = np.zeros((len(self), len(stages)))
            before = np.zeros((len(self), len(stages)))
            for g in range(rates.shape[1]):
                last = np.minimum(ends[:, g, None], stages)
                speed = speed + (last - before) * rate[:, g, None]
                waits = waits + (last * (last - 1) - before * (before - 1)) / 2 * rate[:, g, None]
                before = last
            whole = (m[:, None] % stages == 0) & (ends[:, -1, None] >= stages) & (stages <= largest)
            least = np.where(whole, (m[:, None] + waits * hop[:, None]) / np.maximum(speed, 1e-300), np.inf)
            work = np.maximum(work, least.min(axis=1))
        return work + self._least_after()

    @cached_property
    def _rates(self) -> list[FloatArray]:
        """[N, G] shares of the model's work a second, under different weights of the blocks."""
        counts = np.bincount(self.kind, minlength=self.busy_s.shape[2]).astype(float)
        decoders = np.bincount(self.kind, weights=self.counted, minlength=len(counts))
        busy = np.maximum(self.busy_s, 1e-300)
        out = []
        for number in (counts, decoders):
            for pool in range(self.pools):
                if not np.isfinite(busy[:, pool]).all():
                    continue
                weight = number * busy[:, pool]
                weight = weight / weight.sum(axis=1, keepdims=True)
                each = weight / np.maximum(number, 1.0)
                out.append((each[:, None, :] / busy).max(axis=2)[self.row])
        return out

    def _least_of(self, rates: FloatArray) -> FloatArray:
        """[N] the bound under the rates [N, G]."""
        order = np.argsort(-rates, axis=1, kind="stable")
        rate, most = np.take_along_axis(rates, order, 1), np.take_along_axis(self.most, order, 1)
        ends = np.cumsum(most, axis=1)
        m = self.batch.num_microbatches
        share = np.min(self.backward_s / np.maximum(self.busy_s, 1e-300), where=self.busy_s > 0, initial=1.0)
        least = np.full(len(m), np.inf)
        for count in np.unique(m):
            rows = np.nonzero(m == count)[0]
            least[rows] = self._by_stages(rate[rows], ends[rows], int(count), float(share))
        return least

    def _by_stages(self, rate: FloatArray, ends: IntArray, m: int, share: float) -> FloatArray:
        """[n] the bound of skeletons with ``m`` micro-batches; sorted rates and where their stages end [n, G]."""
        fewest, largest = (1 if self.max_stages == 1 else 2), int(min(self.max_stages, ends[:, -1].max()))
        stages = np.arange(fewest, largest + 1)
        q = stages[:, None] - np.arange(largest)[None, :]
        slope = np.maximum(m - q, 0) + np.minimum(q - 1, m - 1) * share
        per = np.where(q >= 1, 1.0 / np.maximum(slope, 1e-9), 0.0)
        weight = np.concatenate([np.zeros((len(stages), 1)), np.cumsum(per, axis=1)], axis=1)  # [P, largest + 1]
        spent = work = total = np.zeros((len(rate), len(stages)))
        before = np.zeros((len(rate), len(stages)), dtype=np.int64)
        value = slowest = np.full((len(rate), len(stages)), np.inf)
        at = np.arange(len(stages))[None, :]
        paced = (stages < m)[None, :]
        for g in range(rate.shape[1]):
            last = np.minimum(ends[:, g, None], stages[None, :])
            part = weight[at, last] - weight[at, before]
            spent, total = spent + part, total + part * rate[:, g, None]
            work = work + (last - before) * rate[:, g, None]
            value = np.minimum(value, (1.0 + spent) / np.maximum(total, 1e-300))
            span = np.maximum(m - stages[None, :] + 2 * last - 1, 1)
            pace = np.where(work > 0, span / np.maximum(work, 1e-300), np.inf)
            slowest = np.minimum(slowest, pace)
            before = last
        value = np.where(paced, np.maximum(value, slowest), value)
        value = np.where(ends[:, -1, None] >= stages[None, :], value, np.inf)
        out: FloatArray = value.min(axis=1)
        return out

    def fewest_recomputed(self, skeleton: int) -> int | None:
        """Layers that every stage must recompute at least for some layout to fit; None where none does.

        Of every kind of decoder layer alone, each stage of a pool, as near the end as the pool allows, holds what fits.
        """
        most = int(self.counted.sum()) if self.is_block[skeleton] else 0
        if not self._enough(self._held(skeleton, most)):
            return None
        if not most or self._enough(self._held(skeleton, 0)):
            return 0
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._enough(self._held(skeleton, middle)) else (middle, high)
        return high

    def least_loaded_s(self, skeleton: int, leading: int, least_s: float, most_s: float) -> float:
        """Lower bound of M times the longest stage: whole layers, memory by position, all stages that there are.

        At least ``least_s``; ``most_s`` where it is above that.
        """
        held = self._held(skeleton, leading)
        kinds, _ = self._kinds
        m = int(self.batch.num_microbatches[skeleton])
        own = self.busy_s[self.row[skeleton]][:, kinds].T * m
        again = self.busy_s[self.full_row[skeleton]][:, kinds].T * m - own

        def enough(limit_s: float) -> bool:
            redone = limit_s >= leading * (own + again)
            timed = np.where(redone, (limit_s - leading * again) / own, limit_s / (own + again))
            return self._enough(np.minimum(held, np.floor(timed + 1e-9)[:, :, None]))

        most_s = min(most_s, float((own + again).max()) * 2 * self.counted.sum())
        if not enough(most_s):
            return most_s
        low, high = least_s, most_s
        while high - low > 2e-3 * low + 1e-12:
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return low

    @cached_property
    def _kinds(self) -> tuple[IntArray, IntArray]:
        """Kinds of decoder layer and how many layers are of each."""
        kinds, counts = np.unique(self.kind[self.counted > 0], return_counts=True)
        return kinds, counts

    def _enough(self, held: FloatArray) -> bool:
        """Whether stages that hold so many layers [K, G, Q] of every kind alone hold all of that kind."""
        return bool((held.sum(axis=(1, 2)) >= self._kinds[1]).all())

    def _held(self, skeleton: int, leading: int) -> FloatArray:
        """[K, G, Q] layers of each kind alone that memory allows in the stage of each pool that is Q-th from the end,
        ``leading`` of them recomputed; 0 where the pool gives no such stage."""
        row, full = self.row[skeleton], self.full_row[skeleton]
        kinds, most = self._kinds[0], self.most[skeleton]
        stage = np.arange(1, int(most.max()) + 1)
        q = np.minimum(stage, int(self.batch.num_microbatches[skeleton]))
        static = self.static_bytes[row, kinds][:, None, None]
        kept = self.cells.activation_bytes[row, kinds][:, None, None] * q
        lean = self.cells.activation_bytes[full, kinds][:, None, None] * q
        capacity = np.maximum(self.capacity_bytes[row], 0.0)[None, :, None]
        mixed = np.floor((capacity + leading * (kept - lean)) / np.maximum(static + kept, 1.0))
        redone = np.floor(capacity / np.maximum(static + lean, 1.0))
        fit = np.where(mixed >= leading, mixed, np.minimum(redone, leading))
        out: FloatArray = np.where(stage[None, None, :] <= most[None, :, None], fit, 0.0)
        return out

    def longest(self, skeleton: int, limit_s: float) -> int:
        """Decoder layers that a stage can hold at most without working longer than ``limit_s``."""
        each = float(self.busy_s[self.row[skeleton]][:, self._kinds[0]].min())
        each *= int(self.batch.num_microbatches[skeleton])
        layers = int(self.counted.sum())
        return layers if not np.isfinite(limit_s) else min(layers, int(limit_s / each))

    def tables(self, skeleton: int, leading: int) -> TypeTables:
        """What the partition of a skeleton depends on, with ``leading`` layers of a stage recomputed."""
        row, full, kind = int(self.row[skeleton]), int(self.full_row[skeleton]), self.kind
        cells = self.cells
        busy, backward = self.busy_s[row][:, kind], self.backward_s[row][:, kind]
        more = (self.busy_s[full] - self.busy_s[row])[:, kind] * self.counted
        inside_s, across_s = self.sends_s(row)
        return TypeTables(
            busy_s=busy,
            backward_s=backward,
            static_bytes=self.static_bytes[row, kind],
            activation_bytes=cells.activation_bytes[row, kind],
            transient_bytes=cells.transient_bytes[row, kind],
            capacity_bytes=self.capacity_bytes[row],
            inside_s=inside_s,
            across_s=across_s,
            closing_s=self._closing_s(skeleton, backward),
            micro_batches=int(self.batch.num_microbatches[skeleton]),
            counted=self.counted,
            leading=leading,
            extra_busy_s=more,
            extra_activation_bytes=(cells.activation_bytes[full] - cells.activation_bytes[row])[kind] * self.counted,
            extra_transient_bytes=cells.transient_bytes[full, kind] * self.counted,
        )

    def sends_s(self, row: int) -> tuple[FloatArray, FloatArray]:
        """Seconds of a send to the next stage: [G] in a pool, where it is nearest, and [G, G] between pools."""
        pools = np.arange(self.pools)
        at, zero = np.full((self.pools, self.pools), row), np.zeros((self.pools, self.pools), dtype=np.int64)
        both = self.costs.boundary_s(self.cells, at, pools[:, None] + zero, pools[None, :] + zero, zero)
        return np.diagonal(both).copy(), both

    def _closing_s(self, skeleton: int, backward_s: FloatArray) -> FloatArray:
        """[G, S + 1, I + 1] gradient reduction of a first stage of blocks 0..b-1, and optimizer and gather: its own, or
        those of the mean of the stages if they take longer."""
        size, row = len(self.kind), int(self.row[skeleton])
        if row in self._closings:
            return self._closings[row]

        def upto(values: FloatArray) -> FloatArray:
            return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)

        shape = (self.pools, size + 1)
        dense = np.broadcast_to(upto(self.cells.dense_params[row, self.kind]), shape)
        expert = np.broadcast_to(upto(self.cells.expert_params[row, self.kind]), shape)
        pool = np.broadcast_to(np.arange(self.pools)[:, None], shape)
        tail = self.costs.tail(self.cells, np.full(shape, row), pool, dense, expert, upto(backward_s))
        own = tail.optimizer_s + tail.param_gather_s
        mean = self.tails_s(skeleton)
        reduced = tail.grad_reduce_s + self._shared_s[row][:, None]
        out: FloatArray = reduced[:, None, :] + np.maximum(own[:, None, :], mean[None, :, None])
        self._closings[row] = out
        return out
