"""Stage sums of candidates: from cells to busy time, memory and tails of the stages of a split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from meshwright.cost_models import schedules
from meshwright.cost_models.memory import block_capacity_bytes
from meshwright.cost_models.protocol import CellCosts, StageCosts, Tail
from meshwright.cost_models.step import step_time
from meshwright.specs.batch import BoolArray, CandidateBatch, FloatArray, IntArray
from meshwright.specs.target import Target

from .arrangements import Arrangement
from .partition import leading_stop
from .space import block_mode


def in_flight(pp: int, vpp: int, micro_batches: int) -> IntArray:
    """[P, V] micro-batches whose activations are alive at a stage's peak, by chunk."""
    # The warm-up holds at most 2P + VP chunk forwards, which is less than 4 groups of P micro-batches.
    return _in_flight(pp, vpp, min(micro_batches, 4 * pp))


@lru_cache(maxsize=4096)
def _in_flight(pp: int, vpp: int, micro_batches: int) -> IntArray:
    return schedules.get(schedule_name(vpp)).in_flight(pp, vpp, micro_batches)


def schedule_name(vpp: int) -> str:
    """The schedule that a number of virtual stages means."""
    return "interleaved" if vpp > 1 else "1f1b"


@dataclass(frozen=True)
class StageSums:
    """One candidate with its split: seconds [P, V] of a micro-batch, bytes [P], trained parameters [P]."""

    forward_s: FloatArray
    backward_s: FloatArray
    send_s: FloatArray
    memory_bytes: FloatArray
    capacity_bytes: FloatArray
    tail: Tail

    @property
    def fits(self) -> bool:
        return bool((self.memory_bytes <= self.capacity_bytes).all())


def with_recompute(batch: CandidateBatch, which: BoolArray, modes: list[str], granularity: str) -> CandidateBatch:
    """The batch with the recompute mode of the rows ``which`` replaced by the first one of a granularity."""
    if not which.any():
        return batch
    return replace(batch, recompute=np.where(which, modes.index(granularity), batch.recompute))


class PricedBatch:
    """Candidates of one arrangement with the costs of their cells.

    Block arrays are per instance (axis I); pool arrays per stage (axis P).
    """

    def __init__(
        self, costs: StageCosts, batch: CandidateBatch, arrangement: Arrangement, target: Target, headroom: float
    ):
        self.costs, self.batch, self.arrangement = costs, batch, arrangement
        self.is_block = batch.recompute == block_mode(target)
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
        self._forward, self._backward, self._static = cells.forward_s, cells.backward_s, cells.static_bytes
        capacity = block_capacity_bytes(cells.limit_bytes[None, :], cells.fixed_bytes, headroom)
        self._capacity = capacity[:, self.pools]

    def __len__(self) -> int:
        return len(self.row)

    def per_block(self, table: FloatArray, index: IntArray, full: bool = False) -> FloatArray:
        """[C, B] -> [n, I] for candidates ``index``; ``full``: as if block mode recomputed every layer."""
        return table[(self.full_row if full else self.row)[index]][:, self.kind]

    def busy_s(self, index: IntArray, full: bool = False) -> FloatArray:
        """[n, P, I] forward plus backward seconds of every block on the pool of every stage; ``full`` as above."""
        total = (self._forward + self._backward)[(self.full_row if full else self.row)[index]]
        return total[:, self.pools][:, :, self.kind]

    def capacity_bytes(self, index: IntArray) -> FloatArray:
        """[n, P] bytes that the blocks of a stage may fill."""
        return self._capacity[self.row[index]]

    def held(self, index: IntArray) -> FloatArray:
        """[n, P, V] micro-batches in flight."""
        pp = self.arrangement.pp
        rows = [in_flight(pp, int(self.batch.vpp[i]), int(self.batch.num_microbatches[i])).astype(float) for i in index]
        return np.stack(rows)

    def held_by_sends_s(self, index: IntArray) -> FloatArray:
        """[n, P] seconds that a 1F1B stage's own blocking sends hold it for a micro-batch: one ahead, one back."""
        ahead = self.send_s(index)
        back = np.concatenate([np.zeros((len(index), 1)), ahead[:, :-1]], axis=1)
        return ahead + back

    def send_s(self, index: IntArray) -> FloatArray:
        """[n, P] seconds of one boundary after each stage; 0 after the last."""
        pp = self.arrangement.pp
        out = np.zeros((len(index), pp))
        if pp > 1:
            first = np.array(self.arrangement.first_ranks, dtype=np.int64)
            out[:, :-1] = self.costs.boundary_s(
                self.cells, self.row[index][:, None], self.pools[None, :-1], self.pools[None, 1:], first[None, :-1]
            )
        return out

    def least_step_s(self) -> FloatArray:
        """[N] a lower bound of the step time over every split, memory aside.

        Work is cut freely: with t_i the share of stage i, 1F1B needs at least ``sum_{j<i} t_j + M t_i`` for every i.
        All of them tie at the optimum, t_i = V/M (1-1/M)^i, which gives V. Interleaving can hide all but M t_i.
        """
        work = (self._forward + self._backward)[:, :, self.kind].sum(axis=-1)[self.row][:, self.pools]
        count = self.batch.num_microbatches.astype(float)[:, None]
        decay = np.where(self.batch.vpp[:, None] > 1, 1.0, 1.0 - 1.0 / count)
        share = decay ** np.arange(self.arrangement.pp)[None, :]
        pipeline = count[:, 0] / (share / work).sum(axis=1)
        return pipeline + self.least_tail_s()

    @cached_property
    def _least_tail_s(self) -> FloatArray:
        pp = self.arrangement.pp
        dense = self.cells.dense_params[:, self.kind].sum(axis=-1) / pp
        expert = self.cells.expert_params[:, self.kind].sum(axis=-1) / pp
        pools, rows = np.unique(self.pools), np.arange(len(dense))
        hidden = np.full((len(rows), len(pools)), np.inf)
        tail = self.costs.tail(self.cells, rows[:, None], pools[None, :], dense[:, None], expert[:, None], hidden)
        out: FloatArray = tail.total_s.min(axis=1)
        return out

    def least_tail_s(self) -> FloatArray:
        """[N] tail of the mean stage on the fastest pool with its gradient reduction hidden as far as it can be.

        The stage with the most parameters has at least the mean, so no split has a shorter tail.
        """
        return self._least_tail_s[self.row]

    def least_fill(self) -> FloatArray:
        """[N] decoder layers over the most that all stages could hold: above 1 nothing fits (a necessary condition).

        A stage holds at most capacity / (static + in flight x activations of the lightest decoder layer) layers.
        """
        layers = np.unique(self.kind[self.counted > 0])
        rows = self.full_row  # the leanest that a candidate can be: with all its layers recomputed
        static, activations = self._static[rows][:, layers], self.cells.activation_bytes[rows][:, layers]
        schedules_of = np.stack(
            [self.batch.vpp, np.minimum(self.batch.num_microbatches, 4 * self.arrangement.pp)], axis=1
        )
        unique, inverse = np.unique(schedules_of, axis=0, return_inverse=True)
        pp = self.arrangement.pp
        held = np.stack([in_flight(pp, int(v), int(m)).min(axis=1).astype(float) for v, m in unique])[
            inverse.reshape(-1)
        ]
        lightest = (static[:, None, :] + held[:, :, None] * activations[:, None, :]).min(axis=-1)
        room = (self._capacity[self.row].clip(min=0.0) / np.maximum(lightest, 1.0)).sum(axis=1)
        fill: FloatArray = self.counted.sum() / np.maximum(room, 1e-12)
        return fill

    def sums(self, candidate: int, cuts: IntArray, leading: int = 0) -> StageSums:
        """Stage sums of one candidate for chunk cuts [P*V + 1], chunk q on stage q mod P.

        The first ``leading`` decoder layers of every chunk are recomputed in full, the others as the candidate says.
        """
        index = np.array([candidate])
        pp, vpp = self.arrangement.pp, int(self.batch.vpp[candidate])
        stop = leading_stop(self.counted, np.array([leading]))[0]
        block = np.arange(len(self.kind))
        chunk_of = np.searchsorted(cuts, block, side="right") - 1
        redone = (block < stop[cuts[chunk_of]]) & (self.counted > 0)
        row = np.where(redone, self.full_row[candidate], self.row[candidate])
        order = np.arange(pp * vpp).reshape(vpp, pp).T  # [P, V] -> chunk

        def chunked(values: FloatArray) -> FloatArray:
            prefix = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
            return (prefix[..., cuts[1:]] - prefix[..., cuts[:-1]])[..., order]

        stage = np.arange(pp)
        forward = chunked(self._forward[row, :, self.kind].T)[self.pools, stage]
        backward = chunked(self._backward[row, :, self.kind].T)[self.pools, stage]
        static = chunked(self._static[row, self.kind]).sum(axis=1)
        activations = (chunked(self.cells.activation_bytes[row, self.kind]) * self.held(index)[0]).sum(axis=1)
        transient_of = self.cells.transient_bytes[row, self.kind]
        peaks = np.array([transient_of[a:b].max(initial=0.0) for a, b in pairwise(cuts)])[order]
        tail = self.costs.tail(
            self.cells,
            np.full(pp, self.row[candidate]),
            self.pools,
            chunked(self.cells.dense_params[row, self.kind]).sum(axis=1),
            chunked(self.cells.expert_params[row, self.kind]).sum(axis=1),
            backward.sum(axis=1),
        )
        return StageSums(
            forward_s=forward,
            backward_s=backward,
            send_s=self.send_s(index)[0],
            memory_bytes=static + activations + peaks.max(axis=1),
            capacity_bytes=self.capacity_bytes(index)[0],
            tail=tail,
        )

    def bound_s(self, candidate: int, sums: StageSums) -> float:
        """Lower bound of the step time of a split."""
        schedule = schedules.get(schedule_name(int(self.batch.vpp[candidate])))
        pipeline = schedule.bound_s(
            sums.forward_s, sums.backward_s, sums.send_s[:-1], int(self.batch.num_microbatches[candidate])
        )
        return float(pipeline) + float(sums.tail.total_s.min())

    def step_s(self, candidate: int, sums: StageSums) -> float:
        """Step time of a split, event by event."""
        return step_time(
            schedule_name(int(self.batch.vpp[candidate])),
            sums.forward_s,
            sums.backward_s,
            sums.send_s[:-1],
            int(self.batch.num_microbatches[candidate]),
            sums.tail,
        ).step_time_s
