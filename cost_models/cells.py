"""``CostModel``: prices every block kind on every pool at the given cell keys, plus stage boundaries and the tail."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import CellKeys, FloatArray, IntArray, row_codes
from meshwright.specs.cluster import ClusterSpec, GpuType, Pool
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.workload import BYTES, Workload

from . import memory
from .block_memory import (
    activation_bytes,
    gathered_bytes,
    logit_bytes,
    offloaded_bytes,
    placeholder_bytes,
    retained_bytes,
    static_bytes,
    trained_params,
    weight_stash_bytes,
)
from .block_time import add_sharded_comm, block_pieces, block_seconds
from .blocks import BlockKind, block_kinds, table_of
from .collectives import link_constants, p2p_s, sending_bandwidth
from .graphs import graphs_of_search
from .layer_time import LayerTimer
from .learned import STACK_OF_TARGET, Traits, architecture_of, shape_of, shipped_multipliers
from .local import Local, activation_element_bytes
from .multipliers import Multipliers
from .operators import Device, device
from .overlap import Overlap, default_overlap
from .pieces import ALTERNATE
from .protocol import STATIC, TERMS, BlockTable, CellCosts, Tail
from .rank_order import replica_send_s, stage_levels, stage_pools, stages_inside
from .tail import tail_of

#: Blackwell (10.0) multiplies 8-bit operands in either layout; Hopper and Ada need a transposed copy of the weights.
EITHER_LAYOUT = 10.0


class CostModel:
    """Analytic costs of a model on a cluster (implements :class:`~.protocol.StageCosts`).

    ``recompute_modes`` and ``shardings`` are what the indices of the keys mean; by default the target's lists. A mode
    of the block method is priced as if every layer were recomputed; who places layers uses ``none`` for the rest.
    ``overlap`` says which communication hides and how; by default what search writes into its plans.
    ``graphs`` are the modules whose calls the host does not launch one by one (``*``: all); by default what search
    writes into its plans.
    ``multipliers`` correct the terms, one set for each pool; by default the shipped ones.
    ``host_optimizer`` is the share of the parameters that the host updates. ``rank_order`` says where ranks sit
    (:mod:`.rank_order`); by default as in the target's first. It needs :meth:`over_stages` where it puts the pipeline
    inside.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        workload: Workload,
        target: Target,
        *,
        recompute_modes: tuple[RecomputeMode, ...] | None = None,
        shardings: tuple[str, ...] | None = None,
        overlap: Overlap | None = None,
        graphs: frozenset[str] | None = None,
        multipliers: tuple[Multipliers, ...] | None = None,
        host_optimizer: float = 0.0,
        rank_order: str | None = None,
    ):
        self.model, self.cluster, self.workload, self.target = model, cluster, workload, target
        self.recompute_modes = recompute_modes if recompute_modes is not None else target.recompute
        self.shardings = shardings if shardings is not None else target.sharding
        self.overlap = default_overlap(model, target.switches, target.context_exchanges) if overlap is None else overlap
        self.graphs = graphs_of_search(model, target) if graphs is None else graphs
        self.host_optimizer = host_optimizer
        self.rank_order = rank_order or target.rank_orders[0]
        self.stages_inside = 1
        #: Options of plans priced by this, beside those that a search always writes.
        self.plan_options: Mapping[str, object] = {}
        #: Pools as the groups that share parameters, and sends between stages, meet them (:mod:`.uneven`).
        self.gradient_pools = self.send_pools = cluster.pools
        kinds = block_kinds(model, workload)
        self.kinds: list[BlockKind] = [kind for kind, _ in kinds]
        self.blocks: BlockTable = table_of(kinds)
        self.devices: list[Device] = [device(cluster.gpu_of(pool), workload.precision) for pool in cluster.pools]
        self.traits = [traits_of(model, cluster.gpu_of(pool), workload, target) for pool in cluster.pools]
        self.multipliers = multipliers or tuple(shipped_multipliers(traits) for traits in self.traits)

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.cluster.pools

    def over_stages(self, stages: int) -> CostModel:
        """The costs of plans of ``stages`` stages, where the rank order makes them others."""
        inside = stages_inside(self.rank_order, stages)
        if inside == self.stages_inside:
            return self
        out = copy(self)
        out.stages_inside = inside
        return out

    def ordered(self, rank_order: str) -> CostModel:
        """The same costs under another rank order."""
        out = copy(self)
        out.rank_order, out.stages_inside = rank_order, 1
        return out

    def cells(self, keys: CellKeys) -> CellCosts:
        """Costs of all block kinds on all pools at ``keys``. A pool without the precision costs infinite seconds."""
        at = Local(self.model, self.workload, self.target, keys)
        # Operators do not depend on what is recomputed or sharded: rows that differ in that only share their price.
        plain, rows = (keys, None) if len(keys) == 1 else _without_modes(keys)
        at_plain = at if rows is None else Local(self.model, self.workload, self.target, plain)
        count, pools, kinds = len(keys), len(self.pools), len(self.kinds)
        forward, backward = (np.zeros((count, pools, kinds, len(TERMS))) for _ in range(2))
        static = np.zeros((count, kinds, len(STATIC)))
        weight_gradient = np.zeros((count, pools, kinds))
        kept, transient, stash, dense, expert, host = (np.zeros((count, kinds)) for _ in range(6))
        transposed = any((on.gpu.compute_capability or 0.0) < EITHER_LAYOUT for on in self.devices)
        alternate = any(ALTERNATE in mode.modules for mode in self.recompute_modes)
        timers = [
            LayerTimer(at_plain, on, pool.levels, self.overlap, by, alternate)
            for on, pool, by in zip(self.devices, self.pools, self.multipliers, strict=True)
        ]
        # Sharded parameters cross the network in the passes; where the pipeline is inside, keys have one tp*cp.
        block = int((keys.tp * keys.cp).max(initial=1))
        sharded = [stage_levels(pool.levels, block, self.stages_inside) for pool in self.gradient_pools]
        always = memory.WORKSPACE_BYTES + placeholder_bytes(self.kinds, at)
        for b, kind in enumerate(self.kinds):
            dense[:, b], expert[:, b] = trained_params(kind, at)
            static[:, b] = static_bytes(kind, at, self.shardings, transposed)
            for column, more in enumerate(retained_bytes(kind, at, self.shardings)):
                static[:, b, column] += more
            host[:, b] = offloaded_bytes(kind, at, self.recompute_modes)
            kept[:, b], transient[:, b] = activation_bytes(kind, at, self.recompute_modes)
            stash[:, b] = weight_stash_bytes(kind, at)
            transient[:, b] += always + gathered_bytes(kind, at, self.shardings)
            for g in range(pools):
                if not self.devices[g].supported:
                    forward[:, g, b, TERMS.index("gemm")] = backward[:, g, b, TERMS.index("gemm")] = np.inf
                    continue
                pieces = block_pieces(kind, timers[g])
                pieces = pieces if rows is None else pieces.take(rows)
                by = self.multipliers[g]
                call_s = self.devices[g].fit.host_call_s * by.host
                one, two = block_seconds(kind, pieces, keys.recompute, self.recompute_modes, call_s, self.graphs)
                scatter = add_sharded_comm(kind, at, sharded[g], self.shardings, one, two, by.dp_comm)
                forward[:, g, b], backward[:, g, b] = one, two
                weight_gradient[:, g, b] = pieces.weight_gradient + scatter
        fixed = memory.fixed_bytes(keys.tp, keys.cp, keys.ep, keys.stage_ranks)
        limits = np.array([self.cluster.gpu_of(pool).usable_memory_bytes for pool in self.pools], dtype=float)
        return CellCosts(
            keys=keys,
            forward_terms_s=forward,
            backward_terms_s=backward,
            static_bytes_by=static,
            activation_bytes=kept,
            transient_bytes=transient,
            dense_params=dense,
            expert_params=expert,
            fixed_bytes=np.repeat(fixed[:, None], pools, axis=1),
            limit_bytes=limits,
            weight_gradient_s=weight_gradient,
            weight_stash_bytes=stash,
            host_bytes=host,
        )

    def logit_bytes_of(self, cells: CellCosts) -> FloatArray:
        """[C] live logit bytes at the keys of ``cells``."""
        return logit_bytes(Local(self.model, self.workload, self.target, cells.keys))

    def tail(
        self,
        cells: CellCosts,
        row: IntArray,
        pool: IntArray,
        dense_params: FloatArray,
        expert_params: FloatArray,
        last_backward_s: FloatArray,
        pools: tuple[Pool, ...] | None = None,
    ) -> Tail:
        """See :meth:`~.protocol.StageCosts.tail`. ``pools`` replaces the cluster's, with the same GPU types, where
        groups reach beyond a pool (:mod:`.mixed_stage`)."""
        if self.stages_inside > 1:
            return self._tail_by_block(
                cells, pools or self.gradient_pools, row, pool, dense_params, expert_params, last_backward_s
            )
        keys = cells.keys.take(np.asarray(row).reshape(-1))
        pools = pools or self.gradient_pools
        return self._tail(keys, np.shape(row), pool, dense_params, expert_params, last_backward_s, pools)

    def _tail_by_block(self, cells: CellCosts, pools: tuple[Pool, ...], *arguments: npt.ArrayLike) -> Tail:
        """The tail where replicas of the pipeline are runs of ranks: levels hold what depends on tp*cp."""
        row, *others = np.broadcast_arrays(*arguments)
        block, flat = (cells.keys.tp * cells.keys.cp)[row].reshape(-1), [part.reshape(-1) for part in others]
        out = Tail(*np.zeros((3, *block.shape)))
        for size in np.unique(block).tolist():
            here = block == size
            pool, dense, expert, backward = (part[here] for part in flat)
            keys, inside = cells.keys.take(row.reshape(-1)[here]), stage_pools(pools, size, self.stages_inside)
            part = self._tail(keys, pool.shape, pool, dense, expert, backward, inside)
            for field in fields(Tail):
                getattr(out, field.name)[here] = getattr(part, field.name)
        return Tail(*(getattr(out, field.name).reshape(row.shape) for field in fields(Tail)))

    def _tail(
        self,
        keys: CellKeys,
        shape: tuple[int, ...],
        pool: IntArray,
        dense_params: FloatArray,
        expert_params: FloatArray,
        last_backward_s: FloatArray,
        pools: tuple[Pool, ...],
    ) -> Tail:
        return tail_of(
            keys,
            shape,
            pool,
            dense_params,
            expert_params,
            last_backward_s,
            pools=pools,
            devices=self.devices,
            workload=self.workload,
            target=self.target,
            shardings=self.shardings,
            multipliers=self.multipliers,
            bucket_params=self.overlap.bucket_params,
            host_optimizer=self.host_optimizer,
        )

    def boundary_s(
        self, cells: CellCosts, row: IntArray, from_pool: IntArray, to_pool: IntArray, first_rank: IntArray
    ) -> FloatArray:
        """See :meth:`~.protocol.StageCosts.boundary_s`. Sequence parallelism sends each rank's own part."""
        row, source, sink, first = np.broadcast_arrays(row, from_pool, to_pool, first_rank)
        own = Local(self.model, self.workload, self.target, cells.keys).own_tokens
        if self.target.deepspeed_pipeline and not self.target.sequence_parallel:
            # Each rank sends its part of what all ranks of the TP group hold; the receivers gather it, as if once more.
            own = own / cells.keys.tp
        volume = (activation_element_bytes(self.workload.precision) * self.model.hidden_size * own)[row]
        ranks = cells.keys.stage_ranks[row]
        return self._transfer_s(cells.keys, row, volume, source, sink, first, ranks)

    def shared_embedding_s(
        self, cells: CellCosts, row: IntArray, first_pool: int, last_pool: int, stages: int
    ) -> FloatArray:
        """See :meth:`~.protocol.StageCosts.shared_embedding_s`."""
        row = np.asarray(row)
        frozen = self.workload.task == "lora" or "embedding" in self.workload.frozen
        shared = self.model.tied_embeddings or (self.workload.mtp and self.model.mtp is not None)
        if stages == 1 or frozen or not shared:
            return np.zeros(row.shape)
        at = Local(self.model, self.workload, self.target, cells.keys)
        table = at.padded(self.model.vocab_size) * self.model.hidden_size / at.tp
        dtype = self.workload.params_dtype if self.target.deepspeed_pipeline else self.workload.gradient_dtype
        volume = (table * BYTES[dtype])[row]  # a ring of two passes the whole once
        where = np.zeros(row.shape, dtype=np.int64)
        ranks = cells.keys.stage_ranks[row]
        distance = (stages - 1) * ranks
        return self._transfer_s(cells.keys, row, volume, where + first_pool, where + last_pool, where, distance)

    def _transfer_s(
        self,
        keys: CellKeys,
        row: IntArray,
        volume: FloatArray,
        source: IntArray,
        sink: IntArray,
        first: IntArray,
        distance: IntArray,
    ) -> FloatArray:
        """Seconds in which each rank of a stage sends ``volume`` bytes from pool position ``first`` on by
        ``distance``, or to another pool, whose slower end corrects them. Positions count stages in their usual order.
        """
        out, senders = np.zeros(volume.shape), keys.stage_ranks[row]
        for g, pool in enumerate(self.send_pools):
            inside = (source == g) & (sink == g)
            if inside.any():
                if self.stages_inside == 1:
                    seconds = p2p_s(pool.levels, volume, distance, first, senders)
                else:
                    block = (keys.tp * keys.cp)[row]
                    ahead, jump = (count // senders * block for count in (first, distance))
                    seconds = replica_send_s(pool.levels, volume, ahead, jump, block, self.stages_inside, keys.dp[row])
                out = np.where(inside, self.multipliers[g].pp_comm * seconds, out)
        if (source != sink).any():
            per_node = np.array([pool.gpus_per_node for pool in self.pools])
            outer = np.array([sending_bandwidth(p.levels[-1], p.gpus_per_node, senders) for p in self.pools])
            own = np.minimum(*(np.take_along_axis(outer, end[None], 0)[0] for end in (source, sink)))
            sharers = np.minimum(per_node[source], per_node[sink])
            factor = np.array([by.pp_comm for by in self.multipliers])
            for g, h in combinations(range(len(self.pools)), 2):
                joined = ((source == g) & (sink == h)) | ((source == h) & (sink == g))
                between = self.cluster.between(g, h)
                if between is None or not joined.any():
                    continue
                bandwidth = np.minimum(own, sending_bandwidth(between, sharers, senders))
                seconds = link_constants(between)["start_s"] + between.latency_s + volume / bandwidth
                out = np.where(joined, np.maximum(factor[source], factor[sink]) * seconds, out)
        return out


def traits_of(model: ModelSpec, gpu: GpuType, workload: Workload, target: Target) -> Traits:
    """What the corrections of a pool depend on."""
    stack = STACK_OF_TARGET.get(target.framework, target.framework)
    shape = shape_of(model) if model.is_moe else ""
    return Traits(stack, target.version, gpu.name, architecture_of(gpu), workload.precision, model.is_moe, shape)


def _without_modes(keys: CellKeys) -> tuple[CellKeys, IntArray]:
    """The distinct keys apart from recompute and sharding (both 0), and for every row which of them it is."""
    zero = np.zeros(len(keys), dtype=np.int64)
    plain = replace(keys, recompute=zero, sharding=zero)
    columns = [getattr(plain, field.name) for field in fields(plain)]
    _, first, inverse = np.unique(row_codes(columns), return_index=True, return_inverse=True)
    return plain.take(first), inverse.reshape(-1)
