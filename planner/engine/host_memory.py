"""Plans that keep a part of their bytes in host memory: of the optimizer, or of activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.memory import optimizer_bytes_per_param
from meshwright.cost_models.offload import (
    C2C,
    OFFLOAD_BUFFERS,
    activation_offload_s,
    host_link_bandwidth,
    host_update_s,
)
from meshwright.cost_models.protocol import STATIC, CellCosts, Tail
from meshwright.specs.batch import CellKeys, FloatArray, IntArray

from .. import rules
from ..request import PlanRequest
from .explore import Search
from .finalists import Finalist
from .pricing import PricedBatch, in_block_mode, with_recompute

#: Share of a node's memory that plans may fill: the rest is left to the operating system, data loading and copies of
#: checkpoints. An assumption.
HOST_SHARE = 0.75


class OffloadedOptimizer:
    """Costs where the host holds and updates the ``fraction`` of the optimizer's state, transfers beside the update."""

    def __init__(self, costs: CostModel, fraction: float):
        self._costs, self.fraction = costs, fraction
        self.shardings, self.blocks = costs.shardings, costs.blocks
        self.boundary_s, self.shared_embedding_s = costs.boundary_s, costs.shared_embedding_s
        self.rank_order = costs.rank_order
        self.plan_options = {
            **costs.plan_options,
            "optimizer_offload_fraction": fraction,
            "optimizer_offload_overlap": True,
        }
        self._lighter = CostModel(
            costs.model, costs.cluster, costs.workload, costs.target, overlap=costs.overlap, graphs=costs.graphs,
            multipliers=costs.multipliers, host_optimizer=self.fraction, rank_order=costs.rank_order,
        )  # fmt: skip
        self._lighter.stages_inside = costs.stages_inside

    def over_stages(self, stages: int) -> OffloadedOptimizer:
        """See :meth:`~meshwright.cost_models.cells.CostModel.over_stages`."""
        placed = self._costs.over_stages(stages)
        return self if placed is self._costs else OffloadedOptimizer(placed, self.fraction)

    def cells(self, keys: CellKeys) -> CellCosts:
        """See :meth:`~meshwright.cost_models.protocol.StageCosts.cells`."""
        cells = self._costs.cells(keys)
        return replace(cells, static_bytes_by=without_optimizer(cells.static_bytes_by, self.fraction))

    def tail(
        self,
        cells: CellCosts,
        row: IntArray,
        pool: IntArray,
        dense_params: FloatArray,
        expert_params: FloatArray,
        last_backward_s: FloatArray,
    ) -> Tail:
        """The optimizer's share on the device, and the host's after it."""
        tail = self._lighter.tail(cells, row, pool, dense_params, expert_params, last_backward_s)
        keys = cells.keys.take(np.asarray(row).reshape(-1))
        shape = np.shape(row)
        dense_ranks, expert_ranks = (r.reshape(shape) for r in (keys.stage_ranks // keys.tp, keys.edp))
        held = self.fraction * (dense_params / dense_ranks + expert_params / expert_ranks)
        return replace(tail, optimizer_s=tail.optimizer_s + self._update_s(held, np.broadcast_to(pool, held.shape)))

    def _update_s(self, params: FloatArray, pool: IntArray) -> FloatArray:
        """Seconds of the host for ``params`` of each rank of ``pool``; linear in them."""
        each = [host_update_s(on.gpu, self._costs.workload, 1.0, True) for on in self._costs.devices]
        out: FloatArray = params * np.array(each)[pool]
        return out


def may_offload_activations(request: PlanRequest) -> bool:
    """Whether plans of a request may keep activations in host memory.

    What PCIe moves while GPUs share the host's memory is not measured, so over it only where the request allows it.
    """
    able = request.target.activation_offload_layers and "offload" not in request.forbid
    able = able and "activation_offload_layers" not in request.fix
    asked = {"activation_offload", "all_options"} & set(request.allow)
    gpus = [request.cluster.gpu_of(pool) for pool in request.cluster.pools]
    return able and (bool(asked) or all(host_link_bandwidth(gpu) == C2C for gpu in gpus))


def may_offload_optimizer(request: PlanRequest) -> bool:
    """Whether plans of a request may keep a share of the optimizer in host memory, under zero1 (rules D8a and D9).

    The host's pace is not measured, so only where the request allows it.
    """
    target, workload = request.target, request.workload
    asked = {"optimizer_offload", "all_options"} & set(request.allow)
    able = bool(asked) and target.optimizer_offload and "zero1" in target.sharding and "offload" not in request.forbid
    pinned = request.fix.get("sharding", "zero1") == "zero1"
    able = able and pinned and not {"optimizer_offload_fraction", "activation_offload_layers"} & request.fix.keys()
    return able and workload.optimizer == "adam" and workload.params_dtype != "fp8"


def without_optimizer(static_bytes_by: FloatArray, fraction: float) -> FloatArray:
    """Static bytes [..., STATIC] without the ``fraction`` of the optimizer's."""
    out = static_bytes_by.copy()
    out[..., STATIC.index("optimizer")] *= 1 - fraction
    return out


def least_host_update_s(request: PlanRequest, priced: PricedBatch, fraction: float) -> FloatArray:
    """[N] least seconds in which the host updates its ``fraction`` of the parameters of zero1 candidates.

    Some stage has at least the mean, and the slowest counts.
    """
    cells, batch, pp = priced.cells, priced.batch, priced.arrangement.pp
    dense = cells.dense_params[:, priced.kind].sum(axis=-1)[priced.row] / (pp * batch.dp * batch.cp)
    expert = cells.expert_params[:, priced.kind].sum(axis=-1)[priced.row] / (pp * batch.edp)
    gpus = [request.cluster.gpu_of(request.cluster.pools[index]) for index in set(priced.arrangement.pools)]
    each = min(host_update_s(gpu, request.workload, 1.0, True) for gpu in gpus)
    out: FloatArray = fraction * each * (dense + expert)
    return out


def within_host_memory(request: PlanRequest, finalist: Finalist) -> bool:
    """Whether the nodes of a finalist hold what it keeps of the optimizer in their memory."""
    priced, costs = finalist.batch, finalist.batch.costs
    if not isinstance(costs, OffloadedOptimizer):
        return True
    index = np.array([finalist.candidate])
    sums = priced.sums(index, finalist.cuts[None], np.array([finalist.leading]))
    batch = priced.batch
    ranks = float(batch.dp[index][0] * batch.cp[index][0]), float(batch.edp[index][0])
    params = costs.fraction * (sums.dense_params[0] / ranks[0] + sums.expert_params[0] / ranks[1])
    state = params * optimizer_bytes_per_param(request.workload)
    return all(
        _holds(request, pool, bytes_) for pool, bytes_ in zip(priced.arrangement.stage_pools, state, strict=True)
    )


def _holds(request: PlanRequest, pool_index: int, bytes_a_gpu: float) -> bool:
    pool = request.cluster.pools[pool_index]
    room = HOST_SHARE * (pool.host_memory_bytes or 0)
    return bytes_a_gpu * pool.gpus_per_node <= room


def offloaded_layers(
    search: Search, base: list[PricedBatch], limit_s: float, layers: int | None = None
) -> list[Finalist]:
    """Plans of one stage, nothing recomputed, whose first layers' activations wait in host memory: ``layers``, or as
    few as make it fit, since more only take longer. Those quicker than ``limit_s``, with their exact step times."""
    request, out = search.request, []
    modes = [mode.granularity for mode in request.target.recompute]
    for priced in base:
        if priced.arrangement.pp > 1:
            continue
        none = priced.is_block | np.isin(priced.batch.recompute, [k for k, name in enumerate(modes) if name == "none"])
        index = np.flatnonzero(none & (priced.least_passes_s() < limit_s))
        if not len(index):
            continue
        batch = priced.batch.take(index)
        plain = with_recompute(batch, in_block_mode(batch, request.target), modes, "none")
        gpus = [request.cluster.gpu_of(request.cluster.pools[pool]) for pool in priced.arrangement.pools]
        inputs = request.model, request.workload, request.target
        legal, _ = rules.bulk_legal(plain, *inputs, gpus, {**search.chosen, "cpu_offload_layers": 1})
        search.result.candidates += int(legal.sum())
        for candidate in index[legal].tolist():
            found = _fewest_layers(request, priced, candidate, layers)
            if found is not None and found.step_time_s < limit_s:
                out.append(found)
    return out


def _fewest_layers(request: PlanRequest, priced: PricedBatch, candidate: int, pinned: int | None) -> Finalist | None:
    cuts = np.array([[0, len(priced.kind)]])
    index, none = np.array([candidate]), np.array([0])
    sums = priced.sums(index, cuts, none)
    over = float(sums.memory_bytes[0, 0] - sums.capacity_bytes[0, 0])
    if over <= 0 and pinned is None:
        return None  # the search has it
    layers = [k for k, counted in enumerate(priced.counted) if counted]
    kept = priced.cells.activation_bytes[priced.row[candidate], priced.kind[layers]]
    moved = np.cumsum(kept)[:-1]  # the last layer stays (R4)
    saved = moved - OFFLOAD_BUFFERS * np.maximum.accumulate(kept)[:-1]
    enough = np.flatnonzero(saved >= over)
    if pinned is not None:
        enough = enough[enough == pinned - 1]
    if not len(enough) or not _holds(request, priced.arrangement.pools[0], float(moved[enough[0]])):
        return None
    passes = float(sums.forward_s[0].sum()), float(sums.backward_s[0].sum())
    gpu = request.cluster.gpu_of(request.cluster.pools[priced.arrangement.pools[0]])
    count = int(priced.batch.num_microbatches[candidate])
    step_s = float(priced.step_s(candidate, cuts, 0)[0])
    step_s += activation_offload_s(gpu, count, float(moved[enough[0]]), passes)
    options = {"activation_offload_layers": int(enough[0]) + 1}
    return Finalist(priced, candidate, cuts[0], step_s, step_s, options=options)
