"""Sailor's costs for our search: its layer times, memory model, and bandwidths between machines of a tensor group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from meshwright.cost_models.memory import ALLOCATED_OVER_RESERVED
from meshwright.cost_models.protocol import STATIC, TERMS, BlockTable, CellCosts, Tail
from meshwright.specs.batch import CellKeys, FloatArray, IntArray

from .sailor_tables import MEMORY_BYTES, RESERVED_BYTES, STATIC_BYTES_PER_PARAMETER, Machine, SailorTables

#: Seconds of what was not profiled: no plan with it wins, and sums stay finite.
NEVER_S = 1e9


class SailorCosts:
    """Implements :class:`meshwright.cost_models.protocol.StageCosts`. ``pools``: Sailor's GPU name and zone by pool."""

    def __init__(self, tables: SailorTables, pools: Sequence[tuple[str, str]]):
        self.tables, self.pools = tables, tuple(pools)
        layers = tables.num_layers
        names: list[tuple[str, int]] = [("embed", 0), *(("decoder", i) for i in range(layers - 2)), ("head", 0)]
        self.blocks = BlockTable(
            kinds=tuple(f"layer {index}" for index in range(layers)),
            instances=tuple(names),
            kind_of=np.arange(layers, dtype=np.int64),
        )

    def cells(self, keys: CellKeys) -> CellCosts:
        """Only data and tensor parallelism that Sailor profiled; all else takes for ever."""
        rows, pools, blocks = len(keys), len(self.pools), len(self.blocks.kinds)
        forward = np.zeros((rows, pools, blocks, len(TERMS)))
        backward = np.zeros_like(forward)
        forward[..., 0] = NEVER_S
        params, activations = np.zeros((rows, blocks)), np.zeros((rows, blocks))
        for row in range(rows):
            tp, batch = int(keys.tp[row]), int(keys.micro_batch_size[row])
            if keys.cp[row] > 1 or keys.ep[row] > 1:
                continue
            for pool, (gpu, _) in enumerate(self.pools):
                if self.tables.profiled(gpu, tp, batch):
                    forward[row, pool, :, 0] = self.tables.forward_s(gpu, tp, batch)
                    backward[row, pool, :, 0] = self.tables.backward_s(gpu, tp, batch)
                    params[row] = self.tables.params(gpu, tp, batch)
                    activations[row] = self.tables.activation_bytes(gpu, tp, batch)
        static = np.zeros((rows, blocks, len(STATIC)))
        static[..., 0] = STATIC_BYTES_PER_PARAMETER * params
        usable = np.array([MEMORY_BYTES[gpu] - RESERVED_BYTES for gpu, _ in self.pools])
        return CellCosts(
            keys=keys,
            forward_terms_s=forward,
            backward_terms_s=backward,
            static_bytes_by=static,
            activation_bytes=activations,
            transient_bytes=np.zeros((rows, blocks)),
            dense_params=params,
            expert_params=np.zeros((rows, blocks)),
            fixed_bytes=np.zeros((rows, pools)),
            limit_bytes=usable / ALLOCATED_OVER_RESERVED,  # Sailor knows no fragmentation: undo ours
            weight_gradient_s=np.zeros((rows, pools, blocks)),
            weight_stash_bytes=np.zeros((rows, blocks)),
        )

    def tail(
        self,
        cells: CellCosts,
        row: IntArray,
        pool: IntArray,
        dense_params: FloatArray,
        expert_params: FloatArray,
        last_backward_s: FloatArray,
    ) -> Tail:
        """The gradients' all-reduce, hidden under nothing. Updates are left to the formula, as in the event scores."""

        def seconds(row: int, pool: int, params: float) -> float:
            tp, dp = int(cells.keys.tp[row]), int(cells.keys.dp[row])
            machine = self._machine(pool, tp)
            return NEVER_S if machine is None else self.tables.reduce_s((machine,) * dp, params)

        reduce_s = _each(seconds, row, pool, dense_params)
        return Tail(grad_reduce_s=reduce_s, optimizer_s=np.zeros_like(reduce_s), param_gather_s=np.zeros_like(reduce_s))

    def boundary_s(
        self, cells: CellCosts, row: IntArray, from_pool: IntArray, to_pool: IntArray, first_rank: IntArray
    ) -> FloatArray:
        """One message between the two machines; all layers but the head give equally many bytes."""

        def seconds(row: int, source: int, target: int) -> float:
            tp, batch = int(cells.keys.tp[row]), int(cells.keys.micro_batch_size[row])
            ends = self._machine(source, tp), self._machine(target, tp)
            gpu = self.pools[source][0]
            if ends[0] is None or ends[1] is None or not self.tables.profiled(gpu, tp, batch):
                return 0.0  # the cells of such a row take for ever
            return self.tables.send_s(ends[0], ends[1], float(self.tables.output_bytes(gpu, tp, batch)[1]))

        row, from_pool, to_pool, _ = np.broadcast_arrays(row, from_pool, to_pool, first_rank)
        return _each(seconds, row, from_pool, to_pool)

    def shared_embedding_s(
        self, cells: CellCosts, row: IntArray, first_pool: int, last_pool: int, stages: int
    ) -> FloatArray:
        """Nothing is shared."""
        return np.zeros(len(row))

    def _machine(self, pool: int, tp: int) -> Machine | None:
        gpu, zone = self.pools[pool]
        return Machine(gpu, tp, zone) if self.tables.profiled(gpu, tp, 1) and tp in (1, 2, 4) else None


def _each(function: Callable[..., float], *arguments: npt.ArrayLike) -> FloatArray:
    """``function`` of every element of the arguments broadcast; equal ones are worked out once."""
    arrays = np.broadcast_arrays(*(np.asarray(argument) for argument in arguments))
    flat = list(zip(*(array.reshape(-1).tolist() for array in arrays), strict=True))
    known = {values: function(*values) for values in dict.fromkeys(flat)}
    return np.array([known[values] for values in flat]).reshape(arrays[0].shape)
