"""Galvatron's costs for our search, at one strategy of the rest (embedding and head).

The search splits the layers of a stage into first ones that are recomputed and others that are not. Here those are the
two strategies of a :data:`Mix`, one for each sharding level that the search tries, so that it finds the counts of any
pair of ZeRO-2 or -3 with or without recompute at one tensor-parallel degree. Ulysses and pipelines are not in it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from meshwright.cost_models.memory import ALLOCATED_OVER_RESERVED
from meshwright.cost_models.protocol import STATIC, TERMS, BlockTable, CellCosts, Tail
from meshwright.specs.batch import CellKeys, FloatArray, IntArray
from meshwright.specs.target import Target

from .galvatron_model import GalvatronModel, Strategy

#: Seconds of what Galvatron's model does not have: no plan with it wins, and sums stay finite.
NEVER_S = 1e9
_MEGABYTE = 2**20
_REST, _LAYER, _NOTHING = 0, 1, 2

#: The two strategies of a plan's layers, each (ZeRO-3, recomputed), by the sharding level that stands for them.
Mix = dict[str, tuple[tuple[bool, bool], tuple[bool, bool]]]
#: All pairs of the four.
MIXES: tuple[Mix, ...] = (
    {"zero1": ((False, False), (False, True)), "fsdp": ((True, False), (True, True))},
    {"zero1": ((False, True), (True, True)), "fsdp": ((False, False), (True, False))},
    {"zero1": ((False, False), (True, True)), "fsdp": ((True, False), (False, True))},
)


class GalvatronCosts:
    """Implements :class:`meshwright.cost_models.protocol.StageCosts` for plans of one stage on one pool.

    One micro-batch is in flight, so that all that a layer holds may count as its activations: the search lets those
    differ between the two strategies. What layers wait for their reduction follows from how long they run backward.
    """

    def __init__(
        self, model: GalvatronModel, rest: Strategy, mix: Mix, batch: int, room_mb: float, layers: int, target: Target
    ):
        self.model, self.end, self.mix = model, rest, mix
        self.batch, self.room_mb, self.target = batch, room_mb, target
        self._layer = cache(model.layer)
        self.blocks = BlockTable(
            kinds=("rest", "layer", "nothing"),
            instances=(("embed", 0), *(("decoder", index) for index in range(layers)), ("head", 0)),
            kind_of=np.array([_REST, *[_LAYER] * layers, _NOTHING], dtype=np.int64),
        )

    def cells(self, keys: CellKeys) -> CellCosts:
        """Layers by key and the rest at its own strategy; what the model does not have takes for ever."""
        rows = len(keys)
        forward, backward = np.zeros((rows, 1, 3, len(TERMS))), np.zeros((rows, 1, 3, len(TERMS)))
        static = np.zeros((rows, 3, len(STATIC)))
        activations, transient = np.zeros((rows, 3)), np.zeros((rows, 3))
        forward[:, 0, :_NOTHING, 0] = NEVER_S
        for row in range(rows):
            pair, chunks = self._pair(keys, row), self._chunks(keys, row)
            if pair is None or self.batch % (chunks * (self.model.world // self.end.width)):
                continue
            way = pair[self._lean(keys, row)]
            layer, rest = self._layer(way, self.batch, chunks), self.model.rest(self.end, self.batch, chunks)
            forward[row, 0, :_NOTHING, 0] = rest.compute_ms / 1e3, layer.forward_ms / 1e3
            backward[row, 0, _LAYER, 0] = (layer.compute_ms - layer.forward_ms) / 1e3
            static[row, _REST, 0] = rest.memory_mb * _MEGABYTE
            activations[row, _LAYER] = layer.memory_mb * _MEGABYTE
            transient[row, :_NOTHING] = [
                self.model.buffer_mb(each, self.batch, chunks) * _MEGABYTE for each in (self.end, way)
            ]
        nothing = np.zeros((rows, 1, 3))
        return CellCosts(
            keys=keys,
            forward_terms_s=forward,
            backward_terms_s=backward,
            static_bytes_by=static,
            activation_bytes=activations,
            transient_bytes=transient,
            dense_params=np.tile(np.arange(3.0) == _LAYER, (rows, 1)).astype(float),  # layers, for the tail
            expert_params=np.zeros((rows, 3)),
            fixed_bytes=np.zeros((rows, 1)),
            # Galvatron knows no fragmentation: undo ours. A byte of slack for sums in another order.
            limit_bytes=np.array([(self.room_mb * _MEGABYTE + 1) / ALLOCATED_OVER_RESERVED]),
            weight_gradient_s=nothing,
            weight_stash_bytes=np.zeros((rows, 3)),
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
        """What the layers wait for their reduction beyond the time of the rest, which hides it.

        Of two strategies the one that runs backward longer waits less, so that the time which all layers run backward
        says how many are of it.
        """
        row, layers, backward_s = np.broadcast_arrays(row, dense_params, last_backward_s)
        first_s, waits_s, less = (np.zeros(len(cells.keys)) for _ in range(3))
        for at in np.unique(row):
            pair, chunks = self._pair(cells.keys, int(at)), self._chunks(cells.keys, int(at))
            if pair is None:
                continue
            cost = [self._layer(way, self.batch, chunks) for way in pair]
            one, other = ((each.compute_ms - each.forward_ms) / 1e3 for each in cost)
            wait, shorter = ((each.synced_ms - each.compute_ms) / 1e3 for each in cost)
            first_s[at], waits_s[at] = one, wait
            less[at] = (wait - shorter) / (other - one) if other > one else 0.0
        later_s = np.where(less[row] > 0, backward_s - layers * first_s[row], 0.0)
        waits = layers * waits_s[row] - np.where(later_s > 0, less[row], 0.0) * np.maximum(later_s, 0.0)
        reduce_s = np.maximum(waits - cells.forward_s[row, 0, _REST], 0.0)
        return Tail(grad_reduce_s=reduce_s, optimizer_s=np.zeros_like(reduce_s), param_gather_s=np.zeros_like(reduce_s))

    def boundary_s(
        self, cells: CellCosts, row: IntArray, from_pool: IntArray, to_pool: IntArray, first_rank: IntArray
    ) -> FloatArray:
        """There is one stage."""
        return np.full(np.broadcast(row, from_pool, to_pool, first_rank).shape, NEVER_S)

    def shared_embedding_s(
        self, cells: CellCosts, row: IntArray, first_pool: int, last_pool: int, stages: int
    ) -> FloatArray:
        """There is one stage."""
        return np.zeros(len(row))

    def _chunks(self, keys: CellKeys, row: int) -> int:
        return self.batch // int(keys.dp[row] * keys.micro_batch_size[row])

    def _lean(self, keys: CellKeys, row: int) -> bool:
        return self.target.recompute[int(keys.recompute[row])].granularity == "full"

    def _pair(self, keys: CellKeys, row: int) -> tuple[Strategy, Strategy] | None:
        """The strategies of a key's layers, the quicker one first; None where Galvatron has none."""
        level, tp = self.target.sharding[int(keys.sharding[row])], int(keys.tp[row])
        whole = keys.cp[row] == 1 and keys.ep[row] == 1 and keys.stage_ranks[row] == self.model.world
        if not whole or level not in self.mix or (tp > 1 and tp not in self.model.activation_mb):
            return None
        # One replica alone is never ZeRO-3 there.
        one, other = (Strategy(tp, False, zero3 and tp < self.model.world, again) for zero3, again in self.mix[level])
        chunks = self._chunks(keys, row)
        costs = [self._layer(way, self.batch, chunks).compute_ms for way in (one, other)]
        return (one, other) if costs[0] <= costs[1] else (other, one)
