"""``CostModel``: prices every block kind on every pool at the given cell keys, plus stage boundaries and the tail."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from meshwright.specs.batch import CellKeys, FloatArray, IntArray
from meshwright.specs.cluster import ClusterSpec, Pool
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.workload import BYTES, Workload

from . import memory
from .activations import Saved, kept_bytes, layer_activations, recomputed_modules
from .blocks import BlockKind, block_kinds, block_table
from .collectives import collective_s, link_constants, p2p_s, usable_bandwidth
from .layer_time import CALLS, LayerTimer, Pieces
from .local import Local, activation_element_bytes
from .operators import Device, device, matmul_s, stream_s
from .protocol import TERMS, BlockTable, CellCosts, Tail
from .tail import tail_of

#: Share of a unit's compute under which FSDP hides its collectives: forward and backward, AMD-AGI/Primus projection.
FSDP_HIDDEN_FORWARD, FSDP_HIDDEN_BACKWARD = 0.95, 0.92
#: Bytes a logit costs in the loss: one read and write of 16 bit fused with its gradient, against fp32 copies,
#: softmax and gradient unfused (cost per pass counted in Megatron's vocab_parallel_cross_entropy).
FUSED_LOSS_BYTES, UNFUSED_LOSS_BYTES = 8.0, 30.0
#: Live bytes a logit: 16-bit logits and gradient in place; unfused 16 bit, fp32 copy, fp32 gradient.
FUSED_LOGIT_BYTES, UNFUSED_LOGIT_BYTES = 4.0, 10.0
#: Patches of an image for each token that the language model sees (2 x 2 merge), and tokens of an image where the
#: configuration does not say (336 px at 14 px patches, CLIP ViT-L).
PATCHES_PER_TOKEN, TOKENS_PER_IMAGE = 4, 576
FULLY_SHARDED = ("zero3", "fsdp")


class CostModel:
    """Analytic costs of a model on a cluster (implements :class:`~.protocol.StageCosts`).

    ``recompute_modes`` and ``shardings`` are what the indices of the keys mean; by default the target's lists.
    ``tp_overlap`` prices Transformer Engine's overlap of TP collectives with products (``tp_comm_overlap``).
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
        tp_overlap: bool = False,
    ):
        self.model, self.cluster, self.workload, self.target = model, cluster, workload, target
        self.recompute_modes = recompute_modes if recompute_modes is not None else target.recompute
        self.shardings = shardings if shardings is not None else target.sharding
        self.tp_overlap = tp_overlap
        self.kinds: list[BlockKind] = [kind for kind, _ in block_kinds(model, workload)]
        self.devices: list[Device] = [device(cluster.gpu_of(pool), workload.precision) for pool in cluster.pools]

    @cached_property
    def blocks(self) -> BlockTable:
        return block_table(self.model, self.workload, self.target)

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.cluster.pools

    # -- cells -------------------------------------------------------------------------------------------------------

    def cells(self, keys: CellKeys) -> CellCosts:
        """Costs of all block kinds on all pools at ``keys``."""
        at = Local(self.model, self.workload, self.target, keys)
        count, pools, kinds = len(keys), len(self.pools), len(self.kinds)
        forward = np.zeros((count, pools, kinds, len(TERMS)))
        backward = np.zeros_like(forward)
        static = np.zeros((count, kinds, 3))
        kept, transient, dense, expert = (np.zeros((count, kinds)) for _ in range(4))
        for b, kind in enumerate(self.kinds):
            dense_stored, expert_stored = self._stored(kind, at)
            dense[:, b], expert[:, b] = self._trained(kind, at)
            static[:, b] = self._static(kind, at, dense_stored, expert_stored, dense[:, b], expert[:, b])
            kept[:, b], transient[:, b] = self._activations(kind, at)
            transient[:, b] += memory.WORKSPACE_BYTES + self._gathered(at, dense_stored + expert_stored)
            for g, pool in enumerate(self.pools):
                timer = LayerTimer(at, self.devices[g], pool.levels, self.tp_overlap)
                forward[:, g, b], backward[:, g, b] = self._seconds(kind, at, timer)
                self._sharded_comm(kind, at, pool, dense_stored, expert_stored, forward[:, g, b], backward[:, g, b])
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
        )

    # -- parameters --------------------------------------------------------------------------------------------------

    def _stored(self, kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
        """Parameters on a rank reduced over the dense and over the expert data-parallel group."""
        dense = at.numel(w for w in kind.weights if not w.expert)
        expert = at.numel(w for w in kind.weights if w.expert)
        if kind.role == "mtp":
            dense = dense + at.numel(self.model.embedding_weights())  # MTP looks up in its own copy of the embedding
        if kind.adapted:
            more = self._adapters(kind, at)
            dense, expert = dense + more[0], expert + more[1]
        return dense, expert

    def _adapters(self, kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
        dense, expert = np.zeros_like(at.tp), np.zeros_like(at.tp)
        lora = self.workload.lora
        for linear in at.linears(kind.weights) if lora else ():
            parts = at.adapter(linear, lora) if lora else None
            if parts and linear.expert:
                expert = expert + parts[0] + parts[1]
            elif parts:
                dense = dense + parts[0] + parts[1]
        return dense, expert

    def _trained(self, kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
        if kind.trained:
            return self._stored(kind, at)
        return self._adapters(kind, at)

    def _static(
        self,
        kind: BlockKind,
        at: Local,
        dense: FloatArray,
        expert: FloatArray,
        dense_trained: FloatArray,
        expert_trained: FloatArray,
    ) -> FloatArray:
        """[C, (weights, gradients, optimizer)] bytes."""
        out = np.zeros((len(at.tp), 3))
        for index in np.unique(at.keys.sharding):
            sharding = self.shardings[index]
            parts = [
                memory.static_bytes(stored, trained, shards, sharding, self.workload)
                for stored, trained, shards in (
                    (dense, dense_trained, at.dp * at.cp),
                    (expert, expert_trained, at.edp),
                )
            ]
            total = np.stack([a + b for a, b in zip(*parts, strict=True)], axis=1)
            out = np.where((at.keys.sharding == index)[:, None], total, out)
        low = [linear for linear in at.linears(kind.weights) if linear.low_precision]
        size = sum((at.numel(linear.weights) for linear in low), np.zeros_like(at.tp))
        transposed = any((d.gpu.compute_capability or 0.0) < 10.0 for d in self.devices)
        out[:, 0] += memory.low_precision_copy_bytes(size, self.workload.precision, transposed)
        return out

    def _gathered(self, at: Local, stored: FloatArray) -> FloatArray:
        """Full parameters and gradients of the units that are live under full sharding."""
        size = BYTES[self.workload.params_dtype] * memory.FSDP_LIVE_UNITS + BYTES[self.workload.gradient_dtype]
        sharded = np.isin(at.keys.sharding, [i for i, s in enumerate(self.shardings) if s in FULLY_SHARDED])
        return np.where(sharded, stored * size, 0.0)

    # -- activations -------------------------------------------------------------------------------------------------

    def logit_bytes(self, at: Local) -> FloatArray:
        """Live bytes of the logits and their loss on a rank."""
        each = FUSED_LOGIT_BYTES if self.target.fused_cross_entropy else UNFUSED_LOGIT_BYTES
        return each * at.tokens * at.padded(self.model.vocab_size) / at.tp

    def logit_bytes_of(self, cells: CellCosts) -> FloatArray:
        """[C] live logit bytes at the keys of ``cells``."""
        return self.logit_bytes(Local(self.model, self.workload, self.target, cells.keys))

    def _activations(self, kind: BlockKind, at: Local) -> tuple[FloatArray, FloatArray]:
        """(kept, transient) bytes of a block for one micro-batch."""
        hidden = activation_element_bytes(self.workload.precision) * self.model.hidden_size
        nothing = np.zeros_like(at.tp)
        if kind.role == "embed":
            return 8.0 * at.tokens, hidden * (at.tokens + at.own_tokens)  # token ids; output before and after scatter
        if kind.role == "head":
            return 2 * hidden * at.own_tokens, self.logit_bytes(at) + hidden * at.tokens
        if kind.role == "vision":
            tower = self.model.vision
            if tower is None:
                return nothing, nothing
            inner = (2 if tower.gated else 1) + 1
            kept = 2.0 * (8 * tower.hidden_size + inner * tower.intermediate_size) * tower.num_layers
            return kept * self._patches(at), nothing
        layer = kind.layer
        if layer is None:
            return nothing, nothing
        saved: Saved = layer_activations(layer, at)
        kept, transient = nothing, nothing
        for index in np.unique(at.keys.recompute):
            some, work = kept_bytes(saved, self.recompute_modes[index], layer, at)
            here = at.keys.recompute == index
            kept, transient = np.where(here, some, kept), np.where(here, work, transient)
        if kind.role == "mtp":
            # Normed hidden state and embedding, their concatenation, the projection, and a head of its own.
            kept = kept + 8 * hidden * at.own_tokens
            transient = np.maximum(transient, self.logit_bytes(at) + hidden * at.tokens)
        return kept, transient

    def _patches(self, at: Local) -> FloatArray:
        """Vision patches of a micro-batch: one image a sequence."""
        tokens = (self.model.vision.tokens_per_image if self.model.vision else None) or TOKENS_PER_IMAGE
        return at.sequences * tokens * PATCHES_PER_TOKEN

    # -- seconds -----------------------------------------------------------------------------------------------------

    def _seconds(self, kind: BlockKind, at: Local, timer: LayerTimer) -> tuple[FloatArray, FloatArray]:
        """[C, TERMS] forward and backward."""
        pieces = timer.pieces()
        if kind.role == "embed":
            self._embedding(kind, at, timer, pieces)
        elif kind.role == "vision":
            self._vision(kind, at, timer, pieces)
        elif kind.role == "head":
            timer.norms(pieces, 1, 0)
            self._head(at, timer, pieces, kind.trained)
        elif kind.layer is not None:
            timer.layer(pieces, kind.layer, kind.trained)
            if kind.role == "mtp":
                timer.norms(pieces, 3, 0)
                timer.linears(pieces, "mtp", tuple(w for w in kind.weights if w.name == "eh_proj"), kind.trained)
                self._embedding(kind, at, timer, pieces)
                self._head(at, timer, pieces, kind.trained)
        host = timer.on.fit.host_call_s
        forward, backward = pieces.finish(frozenset(), host)
        if kind.layer is None:
            return forward, backward
        for index in np.unique(at.keys.recompute):
            again = recomputed_modules(self.recompute_modes[index], kind.layer)
            if again:
                here = (at.keys.recompute == index)[:, None]
                backward = np.where(here, pieces.finish(again, host)[1], backward)
        return forward, backward

    def _embedding(self, kind: BlockKind, at: Local, timer: LayerTimer, pieces: Pieces) -> None:
        size = timer.wide * self.model.hidden_size * at.tokens
        backward = stream_s(timer.on, 3 * size) if kind.trained else np.zeros_like(size)
        pieces.add("memory_bound", "embedding", stream_s(timer.on, 2 * size), backward, CALLS["embedding"])
        forward_op, backward_op = ("reduce_scatter", "all_gather") if at.sequence_parallel else ("all_reduce", None)
        out = collective_s(forward_op, timer.levels, size, at.tp, 1)  # type: ignore[arg-type]
        back = collective_s(backward_op, timer.levels, size, at.tp, 1) if backward_op else np.zeros_like(out)  # type: ignore[arg-type]
        pieces.add("tp_comm", "embedding", out, back, 1)

    def _head(self, at: Local, timer: LayerTimer, pieces: Pieces, trained: bool) -> None:
        """Gather the hidden states, the output projection, the loss over a vocabulary split by TP."""
        gathered = timer.wide * self.model.hidden_size * at.tokens
        if at.sequence_parallel:
            gather = collective_s("all_gather", timer.levels, gathered, at.tp, 1)
            pieces.add("tp_comm", "head", gather, collective_s("reduce_scatter", timer.levels, gathered, at.tp, 1), 2)
        else:
            pieces.add(
                "tp_comm", "head", np.zeros_like(gathered), collective_s("all_reduce", timer.levels, gathered, at.tp, 1)
            )
        for linear in at.linears(self.model.head_weights()):
            timer.linear(pieces, "head", linear, at.tokens, trained)
        logits = at.tokens * at.padded(self.model.vocab_size) / at.tp
        moved = logits * (FUSED_LOSS_BYTES if self.target.fused_cross_entropy else UNFUSED_LOSS_BYTES)
        pieces.add("memory_bound", "head", stream_s(timer.on, moved), stream_s(timer.on, moved / 2), CALLS["loss"])
        sums = 3 * collective_s("all_reduce", timer.levels, 4.0 * at.tokens, at.tp, 1)  # max, target, sum of exps
        pieces.add("tp_comm", "head", sums, np.zeros_like(sums), 3)

    def _vision(self, kind: BlockKind, at: Local, timer: LayerTimer, pieces: Pieces) -> None:
        tower = self.model.vision
        if tower is None:
            return
        rows, width = self._patches(at), float(tower.hidden_size)
        depth = np.full_like(rows, tower.parameters / width / tower.num_layers)
        one = matmul_s(timer.on, rows, depth, width) * tower.num_layers
        pieces.add("gemm", "vision", one, 2 * one if kind.trained else np.zeros_like(one), 20.0 * tower.num_layers)

    def _sharded_comm(
        self,
        kind: BlockKind,
        at: Local,
        pool: Pool,
        dense: FloatArray,
        expert: FloatArray,
        forward: FloatArray,
        backward: FloatArray,
    ) -> None:
        """Gather parameters for each pass and scatter gradients (FSDP, ZeRO-2/3), hidden under the block's compute."""
        keys = at.keys
        compute = [TERMS.index(term) for term in ("gemm", "attention", "memory_bound", "recompute")]
        for index in np.unique(keys.sharding):
            sharding = self.shardings[index]
            if sharding not in (*FULLY_SHARDED, "zero2"):
                continue
            here = keys.sharding == index

            def both(op: str, size: int) -> FloatArray:
                seconds = collective_s(op, pool.levels, dense * size, keys.dp * keys.cp, keys.tp)  # type: ignore[arg-type]
                return seconds + collective_s(op, pool.levels, expert * size, keys.edp, keys.etp * keys.ep)  # type: ignore[arg-type]

            trains = kind.trained or kind.adapted
            scatter = both("reduce_scatter", BYTES[self.workload.gradient_dtype]) * trains
            gather = both("all_gather", BYTES[self.workload.params_dtype]) * (sharding in FULLY_SHARDED)
            at_term = TERMS.index("dp_comm")
            hidden = FSDP_HIDDEN_FORWARD * forward[:, compute].sum(axis=1)
            forward[:, at_term] = np.where(here, np.maximum(gather - hidden, 0.0), forward[:, at_term])
            hidden = FSDP_HIDDEN_BACKWARD * backward[:, compute].sum(axis=1)
            exposed = np.maximum(gather + scatter - hidden, 0.0)
            backward[:, at_term] = np.where(here, exposed, backward[:, at_term])

    # -- step --------------------------------------------------------------------------------------------------------

    def tail(
        self,
        cells: CellCosts,
        row: IntArray,
        pool: IntArray,
        dense_params: FloatArray,
        expert_params: FloatArray,
        last_backward_s: FloatArray,
    ) -> Tail:
        """See :meth:`~.protocol.StageCosts.tail`."""
        return tail_of(
            cells.keys.take(np.asarray(row).reshape(-1)),
            np.shape(row),
            pool,
            dense_params,
            expert_params,
            last_backward_s,
            pools=self.pools,
            devices=self.devices,
            workload=self.workload,
            target=self.target,
            shardings=self.shardings,
        )

    def boundary_s(
        self, cells: CellCosts, row: IntArray, from_pool: IntArray, to_pool: IntArray, first_rank: IntArray
    ) -> FloatArray:
        """See :meth:`~.protocol.StageCosts.boundary_s`. Sequence parallelism sends each rank's own part."""
        row, source, sink, first = np.broadcast_arrays(row, from_pool, to_pool, first_rank)
        keys = cells.keys
        tokens = keys.micro_batch_size * self.workload.seq_length / keys.cp
        if self.target.sequence_parallel:
            tokens = tokens / keys.tp
        volume = (activation_element_bytes(self.workload.precision) * self.model.hidden_size * tokens)[row]
        distance = keys.stage_ranks[row]
        out = np.zeros(row.shape)
        for g, pool in enumerate(self.pools):
            inside = (source == g) & (sink == g)
            if inside.any():
                out = np.where(inside, p2p_s(pool.levels, volume, distance, first), out)
        between = self.cluster.inter_pool
        if between is not None and (source != sink).any():
            outer = np.array([usable_bandwidth(pool.levels[-1]) for pool in self.pools])
            bandwidth = np.minimum(np.minimum(outer[source], outer[sink]), usable_bandwidth(between))
            seconds = link_constants(between)["start_s"] + between.latency_s + volume / bandwidth
            out = np.where(source != sink, seconds, out)
        return out
