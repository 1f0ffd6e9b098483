"""Galvatron's costs for our search, at one strategy of the rest (embedding and head).

The search's space has one strategy for all layers and, in block mode, the number of layers that are recomputed. Its
sharding levels stand for Galvatron's: ``zero1`` for ZeRO-2, ``fsdp`` for ZeRO-3. Ulysses, pipelines and mixes of
sharding levels are not in it.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost_models.memory import ALLOCATED_OVER_RESERVED
from meshwright.cost_models.protocol import STATIC, TERMS, BlockTable, CellCosts, Tail
from meshwright.specs.batch import CellKeys, FloatArray, IntArray
from meshwright.specs.target import Target

from .galvatron_model import GalvatronModel, Strategy

#: Seconds of what Galvatron's model does not have: no plan with it wins, and sums stay finite.
NEVER_S = 1e9
_MEGABYTE = 2**20
#: What a layer waits for its reduction goes through the search as parameters to reduce, so many of them a second.
_PARAMS_PER_SECOND = 1e12
_REST, _LAYER, _NOTHING = 0, 1, 2


class GalvatronCosts:
    """Implements :class:`meshwright.cost_models.protocol.StageCosts` for plans of one stage on one pool."""

    def __init__(self, model: GalvatronModel, rest: Strategy, batch: int, room_mb: float, layers: int, target: Target):
        self.model, self.end, self.batch, self.room_mb, self.target = model, rest, batch, room_mb, target
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
        activations, transient, waits = np.zeros((rows, 3)), np.zeros((rows, 3)), np.zeros((rows, 3))
        forward[:, 0, :_NOTHING, 0] = NEVER_S
        for row in range(rows):
            way, chunks = self._way(keys, row), self._chunks(keys, row)
            if way is None or self.batch % (chunks * (self.model.world // self.end.width)):
                continue
            layer, rest = self.model.layer(way, self.batch, chunks), self.model.rest(self.end, self.batch, chunks)
            kept = self.model.kept_mb(way, self.batch, chunks)
            forward[row, 0, :_NOTHING, 0] = rest.compute_ms / 1e3, layer.forward_ms / 1e3
            backward[row, 0, _LAYER, 0] = (layer.compute_ms - layer.forward_ms) / 1e3
            static[row, :_NOTHING, 0] = rest.memory_mb * _MEGABYTE, (layer.memory_mb - kept) * _MEGABYTE
            activations[row, _LAYER] = kept * _MEGABYTE
            transient[row, :_NOTHING] = [
                self.model.buffer_mb(each, self.batch, chunks) * _MEGABYTE for each in (self.end, way)
            ]
            waits[row, _LAYER] = (layer.synced_ms - layer.compute_ms) / 1e3 * _PARAMS_PER_SECOND
        nothing = np.zeros((rows, 1, 3))
        return CellCosts(
            keys=keys,
            forward_terms_s=forward,
            backward_terms_s=backward,
            static_bytes_by=static,
            activation_bytes=activations,
            transient_bytes=transient,
            dense_params=waits,
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
        """What the layers wait for their reduction beyond the time of the rest, which hides it."""
        row, waits, _ = np.broadcast_arrays(row, dense_params, last_backward_s)
        hidden = cells.forward_s[row, 0, _REST]
        reduce_s = np.maximum(waits / _PARAMS_PER_SECOND - hidden, 0.0)
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

    def _way(self, keys: CellKeys, row: int) -> Strategy | None:
        """The strategy of a key; None where Galvatron has none."""
        mode = self.target.recompute[int(keys.recompute[row])]
        level = self.target.sharding[int(keys.sharding[row])]
        whole = keys.cp[row] == 1 and keys.ep[row] == 1 and keys.stage_ranks[row] == self.model.world
        if not whole or mode.granularity == "selective" or level not in ("zero1", "fsdp"):
            return None
        tp = int(keys.tp[row])
        alone = tp == self.model.world and level == "fsdp"  # one replica alone is never ZeRO-3 there
        known = tp == 1 or tp in self.model.activation_mb
        return Strategy(tp, False, level == "fsdp", mode.granularity == "full") if known and not alone else None
