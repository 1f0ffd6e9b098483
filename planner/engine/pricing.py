"""Stage sums of candidates: from cells to busy time, memory and tails of the stages of a split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshwright.cost_models import schedules
from meshwright.cost_models.memory import block_capacity_bytes
from meshwright.cost_models.protocol import TERMS, CellCosts, StageCosts, Tail
from meshwright.cost_models.schedules.wavefront import finish_times_s
from meshwright.cost_models.step import step_bound_s, with_tail_s
from meshwright.specs.batch import BoolArray, CandidateBatch, FloatArray, IntArray
from meshwright.specs.target import Target

from .arrangements import Arrangement
from .live import in_flight, live_mixes, schedule_name
from .partition import leading_stop
from .space import block_mode

#: Seconds below which a term left out for free leaves no work: keeps bounds finite.
LEAST_S = 1e-30


@dataclass(frozen=True)
class StageSums:
    """n candidates of one P and V with their splits, per rank of a stage.

    ``forward_s``, ``backward_s`` [n, P, V] seconds of a micro-batch; ``send_s`` [n, P] seconds of the boundary after a
    stage; ``memory_bytes``, ``capacity_bytes`` [n, P] allocated bytes; ``dense_params``, ``expert_params`` [n, P].
    """

    forward_s: FloatArray
    backward_s: FloatArray
    send_s: FloatArray
    memory_bytes: FloatArray
    capacity_bytes: FloatArray
    dense_params: FloatArray
    expert_params: FloatArray

    @property
    def fits(self) -> BoolArray:
        """[n] whether every stage fits."""
        return np.asarray((self.memory_bytes <= self.capacity_bytes).all(axis=-1), dtype=np.bool_)


def in_block_mode(batch: CandidateBatch, target: Target) -> BoolArray:
    """[N] whether a candidate is in block mode."""
    index = block_mode(target)
    return np.zeros(len(batch), dtype=np.bool_) if index is None else batch.recompute == index


def with_recompute(batch: CandidateBatch, which: BoolArray, modes: Sequence[str], granularity: str) -> CandidateBatch:
    """The batch with the recompute mode of the rows ``which`` replaced by the first one of a granularity."""
    if not which.any():
        return batch
    return replace(batch, recompute=np.where(which, modes.index(granularity), batch.recompute))


def over_stages(costs: StageCosts, stages: int) -> StageCosts:
    """The costs of plans of ``stages`` stages, where they depend on it: some rank orders do."""
    of: Callable[[int], StageCosts] | None = getattr(costs, "over_stages", None)
    return of(stages) if of else costs


@dataclass(frozen=True)
class _Chunks:
    """Splits of n candidates: cell row of every block [n, I], cuts [n, Q+1], chunk of every block [n, I], and the chunk
    at stage and virtual stage [P, V]."""

    index: IntArray
    row: IntArray
    cuts: IntArray
    chunk_of: IntArray
    order: IntArray

    def sum(self, values: FloatArray) -> FloatArray:
        """[n, I] -> [n, P, V]."""
        prefix = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=-1)], axis=-1)
        ends = np.take_along_axis(prefix, self.cuts, axis=1)
        out: FloatArray = (ends[:, 1:] - ends[:, :-1])[:, self.order]
        return out


class PricedBatch:
    """Candidates of one arrangement with the costs of their cells.

    Block arrays are per instance (axis I); pool arrays per stage (axis P).
    """

    def __init__(
        self, costs: StageCosts, batch: CandidateBatch, arrangement: Arrangement, target: Target, headroom: float
    ):
        costs = over_stages(costs, arrangement.pp)
        self.costs, self.batch, self.arrangement = costs, batch, arrangement
        self.is_block = in_block_mode(batch, target)
        modes = [mode.granularity for mode in target.recompute]
        kept, redone = (
            with_recompute(batch, self.is_block, modes, "none"),
            with_recompute(batch, self.is_block, modes, "full"),
        )
        keys, rows = kept.joined(redone).cells()
        self.cells: CellCosts = costs.cells(keys)
        self.row, self.full_row = rows[: len(batch)], rows[len(batch) :]
        cells = self.cells
        self.kind = costs.blocks.kind_of
        self.pools = np.array(arrangement.stage_pools, dtype=np.int64)
        self.counted = np.array([float(name == "decoder") for name, _ in costs.blocks.instances])
        self.forward_s, self.backward_s, self.static_bytes = cells.forward_s, cells.backward_s, cells.static_bytes
        self.busy = self.forward_s + self.backward_s
        capacity = block_capacity_bytes(cells.limit_bytes[None, :], cells.fixed_bytes, headroom)
        self._capacity = capacity[:, self.pools]

    def __len__(self) -> int:
        return len(self.row)

    def under(self, which: BoolArray, costs: StageCosts, static_bytes_by: FloatArray) -> PricedBatch:
        """The candidates ``which`` under costs of the same passes, whose blocks hold other bytes all the time."""
        out = copy(self)
        for name in ("_least_tail_s", "_send_of_rows", "shared_embedding_s"):
            out.__dict__.pop(name, None)
        out.costs = over_stages(costs, self.arrangement.pp)
        out.batch, out.is_block = self.batch.take(which), self.is_block[which]
        out.row, out.full_row = self.row[which], self.full_row[which]
        out.cells = replace(self.cells, static_bytes_by=static_bytes_by)
        out.static_bytes = out.cells.static_bytes
        return out

    def per_block(self, table: FloatArray, index: IntArray, full: bool = False) -> FloatArray:
        """[C, B] -> [n, I] for candidates ``index``; ``full``: as if block mode recomputed every layer."""
        return table[(self.full_row if full else self.row)[index]][:, self.kind]

    def busy_s(self, index: IntArray, full: bool = False) -> FloatArray:
        """[n, P, I] forward plus backward seconds of every block on the pool of every stage; ``full`` as above."""
        busy = self.busy[(self.full_row if full else self.row)[index]]
        return busy[:, self.pools][:, :, self.kind]

    def capacity_bytes(self, index: IntArray) -> FloatArray:
        """[n, P] bytes that the blocks of a stage may fill."""
        return self._capacity[self.row[index]]

    def held(self, index: IntArray) -> FloatArray:
        """[n, P] micro-batches in flight of 1F1B candidates."""
        pp = self.arrangement.pp
        return np.stack([in_flight(pp, 1, int(m))[:, 0].astype(float) for m in self.batch.num_microbatches[index]])

    def _live_bytes(self, index: IntArray, activation_bytes: FloatArray) -> FloatArray:
        """[n, P] activations at a stage's peak, from those of a micro-batch in each chunk [n, P, V]."""
        vpp, pp = int(self.batch.vpp[index[0]]), self.arrangement.pp
        out = np.empty(activation_bytes.shape[:2])
        counts = np.minimum(self.batch.num_microbatches[index], 4 * pp)
        for count in np.unique(counts):
            rows = counts == count
            mixes = live_mixes(pp, vpp, int(count))
            out[rows] = np.einsum("pkv,npv->npk", mixes, activation_bytes[rows]).max(axis=-1)
        return out

    def held_by_sends_s(self, index: IntArray) -> FloatArray:
        """[n, P] seconds that a 1F1B stage's own blocking sends hold it for a micro-batch: one ahead, one back."""
        ahead = self.send_s(index)
        back = np.concatenate([np.zeros((len(index), 1)), ahead[:, :-1]], axis=1)
        out: FloatArray = ahead + back
        return out

    def send_s(self, index: IntArray) -> FloatArray:
        """[n, P] seconds of one boundary after each stage; 0 after the last."""
        return self._send_of_rows[self.row[index]]

    @cached_property
    def _send_of_rows(self) -> FloatArray:
        rows, pp = np.arange(len(self.cells.keys)), self.arrangement.pp
        out = np.zeros((len(rows), pp))
        if pp > 1:
            first = np.array(self.arrangement.first_ranks, dtype=np.int64)
            out[:, :-1] = self.costs.boundary_s(
                self.cells, rows[:, None], self.pools[None, :-1], self.pools[None, 1:], first[None, :-1]
            )
        return out

    def least_step_s(self) -> FloatArray:
        """[N] a lower bound of the step time over every split, memory aside."""
        return self._least_pipeline_s(self.busy, self.least_recomputed()) + self.least_tail_s()

    def least_passes_s(self, without: tuple[str, ...] = ()) -> FloatArray:
        """[N] the same of the passes alone, the terms ``without`` for free, nothing recomputed where that is open."""
        kept = [index for index, term in enumerate(TERMS) if term not in without]
        forward, backward = self.cells.forward_terms_s[..., kept], self.cells.backward_terms_s[..., kept]
        return self._least_pipeline_s(forward.sum(axis=-1) + backward.sum(axis=-1), np.zeros(len(self), dtype=np.int64))

    def _least_pipeline_s(self, busy: FloatArray, recomputed: IntArray) -> FloatArray:
        """[N] seconds of all passes at least, with blocks of ``busy`` [C, G, B] and so many layers of a stage
        ``recomputed`` [N].

        Work is cut freely: with t_i the busy seconds of stage i, 1F1B needs at least ``sum_{j<i} t_j + M t_i`` for
        every i. Where no later stage is quicker all of them tie at the optimum, t_i = V/M (1-1/M)^i, which gives V; so
        stages count as quick as the quickest behind them. Alone, ``M t_i`` holds for any order; interleaving may hide
        all else.
        """
        work = np.maximum(busy[:, :, self.kind].sum(axis=-1), LEAST_S)[self.row][:, self.pools]
        count = self.batch.num_microbatches.astype(float)
        loaded = count / (1.0 / work).sum(axis=1)
        quickest_behind = np.minimum.accumulate(work[:, ::-1], axis=1)[:, ::-1]
        share = (1.0 - 1.0 / count)[:, None] ** np.arange(self.arrangement.pp)[None, :]
        passed_on = np.where(self.batch.vpp > 1, 0.0, count / (share / quickest_behind).sum(axis=1))
        if len(np.unique(self.pools)) > 1:
            loaded = self._priced_work_s(busy, loaded[:, None] / work)
            passed_on = self._priced_work_s(busy, passed_on[:, None] / quickest_behind)
        out: FloatArray = np.maximum(loaded, passed_on)
        return np.maximum(out, count * self._fullest_stage_s(busy, recomputed))

    def _priced_work_s(self, busy: FloatArray, price: FloatArray) -> FloatArray:
        """[N] what all blocks cost at least at a price [N, P] for a second of a stage, each block where it is cheapest.

        The prices are the multipliers of the pipeline's bounds, so this holds though GPU types differ in what they are
        good at.
        """
        kinds, counts = np.unique(self.kind, return_counts=True)
        least = np.full((len(self), len(kinds)), np.inf)
        for pool in np.unique(self.pools):
            cheapest = price[:, self.pools == pool].min(axis=1)
            least = np.minimum(least, cheapest[:, None] * busy[self.row, pool][:, kinds])
        out: FloatArray = least @ counts.astype(float)
        return out

    def _fullest_stage_s(self, busy: FloatArray, recomputed: IntArray) -> FloatArray:
        """[N] seconds that the stage with most decoder layers is busy at least for a micro-batch.

        Some stage has at least the mean, rounded up; of the quickest kind on the fastest pool, its share recomputed.
        """
        layers = np.unique(self.kind[self.counted > 0])
        busy = busy[:, np.unique(self.pools)][:, :, layers]
        quick = busy.min(axis=(1, 2))
        again = (busy[self.full_row] - busy[self.row]).min(axis=(1, 2)).clip(min=0.0)
        most = np.ceil(self.counted.sum() / self.arrangement.pp)
        out: FloatArray = most * quick[self.row] + np.minimum(recomputed, most) * again
        return out

    @cached_property
    def _least_tail_s(self) -> FloatArray:
        pp = self.arrangement.pp
        dense = self.cells.dense_params[:, self.kind].sum(axis=-1) / pp
        expert = self.cells.expert_params[:, self.kind].sum(axis=-1) / pp
        pools, rows = np.unique(self.pools), np.arange(len(dense))
        shape = (len(rows), len(pools))
        row, pool, dense, expert = (
            np.broadcast_to(part, shape) for part in (rows[:, None], pools[None, :], dense[:, None], expert[:, None])
        )
        tail = self.costs.tail(self.cells, row, pool, dense, expert, np.full(shape, np.inf))
        out: FloatArray = (tail.optimizer_s + tail.param_gather_s).min(axis=1) + self.shared_embedding_s
        return out

    def least_tail_s(self) -> FloatArray:
        """[N] optimizer and parameter gather of the mean stage on the fastest pool.

        Some stage has at least the mean parameters, and the slowest stage counts, so no split has a shorter tail.
        Gradient reduction is left out: the stage that ends last may have little of it. An embedding that both ends
        share is added up after it.
        """
        return self._least_tail_s[self.row]

    def least_fill(self) -> FloatArray:
        """[N] layers over the most that all stages could hold: above 1 nothing fits (necessary to fit).

        For every kind of decoder layer alone: stage i holds at most floor(capacity / (static + in flight x
        activations)) of it, with all its layers recomputed where the candidate may do so. The worst kind counts.
        """
        held = self.least_held()
        fill = np.zeros(len(self))
        for kind, count in zip(*np.unique(self.kind[self.counted > 0], return_counts=True), strict=True):
            need = (
                self.static_bytes[self.full_row, kind, None]
                + held * self.cells.activation_bytes[self.full_row, kind, None]
            )
            room = np.floor(self._capacity[self.row].clip(min=0.0) / np.maximum(need, 1.0)).sum(axis=1)
            fill = np.maximum(fill, count / np.maximum(room, 0.5))
        return fill

    def mean_fill(self) -> FloatArray:
        """[N] bytes of all blocks, as lean as a candidate may be, over what all stages may hold."""
        held = self.least_held().mean(axis=1)
        static, activations = self.static_bytes[:, self.kind], self.cells.activation_bytes[:, self.kind]
        need = static.sum(axis=1)[self.full_row] + held * activations.sum(axis=1)[self.full_row]
        transient = self.cells.transient_bytes[:, self.kind].max(axis=1)[self.full_row] * self.arrangement.pp
        fill: FloatArray = (need + transient) / np.maximum(self._capacity[self.row].clip(min=0.0).sum(axis=1), 1.0)
        return fill

    def least_held(self) -> FloatArray:
        """[N, P] micro-batches in flight at a stage, of the chunk that holds fewest."""
        pp = self.arrangement.pp
        vpp, count = self.batch.vpp, np.minimum(self.batch.num_microbatches, 4 * pp)
        code = vpp * (4 * pp + 1) + count
        unique, inverse = np.unique(code, return_inverse=True)
        rows = [in_flight(pp, int(c) // (4 * pp + 1), int(c) % (4 * pp + 1)).min(axis=1) for c in unique]
        return np.stack(rows).astype(float)[inverse.reshape(-1)]

    def least_recomputed(self) -> IntArray:
        """[N] leading layers of a stage that 1F1B candidates in block mode must recompute at least, 0 for all others.

        Of every kind alone, stage i holds n layers with k of them recomputed if static n + in flight (kept n - saved
        min(k, n)) fits. The least k is the first whose n add up to the layers that there are.
        """
        chosen = np.nonzero(self.is_block & (self.batch.vpp == 1))[0]
        out = np.zeros(len(self), dtype=np.int64)
        if not len(chosen):
            return out
        held, capacity = self.least_held()[chosen], self._capacity[self.row[chosen]].clip(min=0.0)
        for kind, count in zip(*np.unique(self.kind[self.counted > 0], return_counts=True), strict=True):
            static = self.static_bytes[self.row[chosen], kind, None]
            kept = held * self.cells.activation_bytes[self.row[chosen], kind, None]
            lean = held * self.cells.activation_bytes[self.full_row[chosen], kind, None]
            all_lean = np.floor(capacity / np.maximum(static + lean, 1.0))
            low, high = np.zeros(len(chosen), dtype=np.int64), np.full(len(chosen), int(count))
            while (low < high).any():
                middle = (low + high) // 2
                mixed = np.floor((capacity + middle[:, None] * (kept - lean)) / np.maximum(static + kept, 1.0))
                layers = np.where(mixed >= middle[:, None], mixed, np.minimum(all_lean, middle[:, None]))
                enough = layers.sum(axis=1) >= count
                low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
                low = np.minimum(low, count)
            out[chosen] = np.maximum(out[chosen], low)
        return out

    def fits(self, index: IntArray, cuts: IntArray, leading: IntArray) -> BoolArray:
        """[n] whether every stage of the splits fits; arguments as for :meth:`sums`."""
        return np.asarray((self._memory(self._chunks(index, cuts, leading)) <= self.capacity_bytes(index)).all(axis=1))

    def sums(self, index: IntArray, cuts: IntArray, leading: IntArray) -> StageSums:
        """Stage sums of candidates of one V for chunk cuts [n, P*V + 1], chunk q on stage q mod P.

        The first ``leading`` [n] decoder layers of a chunk are recomputed in full, the others as the candidate says.
        """
        chunks = self._chunks(index, cuts, leading)

        def seconds(table: FloatArray) -> FloatArray:
            """[C, G, B] -> [n, P, V], each stage on its pool."""
            out = np.zeros((len(index), self.arrangement.pp, chunks.order.shape[1]))
            for pool in np.unique(self.pools):
                values = chunks.sum(table[chunks.row, pool, self.kind])
                out = np.where((self.pools == pool)[None, :, None], values, out)
            return out

        return StageSums(
            forward_s=seconds(self.forward_s),
            backward_s=seconds(self.backward_s),
            send_s=self.send_s(index),
            memory_bytes=self._memory(chunks),
            capacity_bytes=self.capacity_bytes(index),
            dense_params=chunks.sum(self.cells.dense_params[chunks.row, self.kind]).sum(axis=2),
            expert_params=chunks.sum(self.cells.expert_params[chunks.row, self.kind]).sum(axis=2),
        )

    def _chunks(self, index: IntArray, cuts: IntArray, leading: IntArray) -> _Chunks:
        pp, vpp = self.arrangement.pp, int(self.batch.vpp[index[0]])
        block = np.arange(len(self.kind))
        chunk_of = (cuts[:, 1:, None] <= block).sum(axis=1)
        start = np.take_along_axis(cuts, chunk_of, axis=1)
        stop = np.take_along_axis(leading_stop(self.counted, leading), start, axis=1)
        redone = (block < stop) & (self.counted > 0)
        row = np.where(redone, self.full_row[index, None], self.row[index, None])
        return _Chunks(index, row, cuts, chunk_of, np.arange(pp * vpp).reshape(vpp, pp).T)

    def _memory(self, chunks: _Chunks) -> FloatArray:
        """[n, P] allocated bytes at a stage's peak."""
        row = chunks.row
        static = chunks.sum(self.static_bytes[row, self.kind]).sum(axis=2)
        activations = self._live_bytes(chunks.index, chunks.sum(self.cells.activation_bytes[row, self.kind]))
        peaks = np.zeros((len(row), chunks.order.size))
        np.maximum.at(
            peaks, (np.arange(len(row))[:, None], chunks.chunk_of), self.cells.transient_bytes[row, self.kind]
        )
        out: FloatArray = static + activations + peaks[:, chunks.order].max(axis=2)
        return out

    def tail(self, index: IntArray, sums: StageSums) -> Tail:
        """Tails [n, P] of splits."""
        rows = np.broadcast_to(self.row[index][:, None], sums.dense_params.shape)
        pools = np.broadcast_to(self.pools, rows.shape)
        last = sums.backward_s.sum(axis=2)
        tail = self.costs.tail(self.cells, rows, pools, sums.dense_params, sums.expert_params, last)
        shared = self.shared_embedding_s[self.row[index]][:, None]
        return replace(tail, grad_reduce_s=tail.grad_reduce_s + shared)

    @cached_property
    def shared_embedding_s(self) -> FloatArray:
        """[C] seconds to add up the gradients of an embedding held by the first and the last stage."""
        rows, ends = np.arange(len(self.cells.keys)), (int(self.pools[0]), int(self.pools[-1]))
        return self.costs.shared_embedding_s(self.cells, rows, *ends, self.arrangement.pp)

    def bound_s(self, index: IntArray, sums: StageSums) -> FloatArray:
        """[n] lower bound of the step time of splits: the schedule's, and their own tail."""
        name, count = schedule_name(int(self.batch.vpp[index[0]])), self.batch.num_microbatches[index][:, None]
        tail = self.tail(index, sums)
        return step_bound_s(name, sums.forward_s, sums.backward_s, sums.send_s[:, :-1], count, tail)

    def step_s(self, candidate: int, cuts: IntArray, leading: int = 0) -> FloatArray:
        """Step times [k] of k splits [k, P*V + 1] of one candidate, event by event."""
        index, count = np.full(len(cuts), candidate), int(self.batch.num_microbatches[candidate])
        sums = self.sums(index, cuts, np.full(len(cuts), leading))
        tail = self.tail(index, sums)
        if self.batch.vpp[candidate] == 1:
            finish = finish_times_s(sums.forward_s[:, :, 0], sums.backward_s[:, :, 0], sums.send_s[:, :-1], count)
        else:
            schedule = schedules.get(schedule_name(int(self.batch.vpp[candidate])))
            finish = schedules.finish_times_s(schedule, sums.forward_s, sums.backward_s, sums.send_s[:, :-1], count)
        return with_tail_s(finish, tail)
