"""Sums of a plan's stages over their blocks: what its schedule, its tail and its memory are priced from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.specs.batch import CellKeys, FloatArray, IntArray
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Hsdp, Plan, Stage, expand_blocks, parse_range
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.workload import Workload

from . import schedules
from .cells import CostModel
from .graphs import graphs_of
from .multipliers import Multipliers
from .offload import OFFLOAD_BUFFERS
from .overlap import overlap_of
from .plan_schedule import check_schedule, ends_meet, with_copies
from .plan_switches import with_options
from .protocol import STATIC, TERMS, CellCosts
from .rank_order import stages_inside
from .uneven import Spans, uneven_pools, views


@dataclass(frozen=True)
class StageSums:
    """Sums of a plan's stages over their blocks, on their slowest group.

    ``forward_terms_s``, ``backward_terms_s`` [P, V, TERMS]; ``static`` [P, 3]; ``activations`` [P, V] for one
    micro-batch; ``transient``, ``logits`` [P]; ``dense``, ``expert`` trained parameters [P]; ``pools`` [P] of the
    slowest group; ``first_ranks`` [P] inside its pool. ``weight_s`` [P, V] is the part of the backward that weight
    gradients take, ``stash`` [P, V] the bytes they wait for. ``host`` [P, V] are activations in host memory for one
    micro-batch, ``host_optimizer`` [P] optimizer state there. V counts the chunks that a rank holds.
    """

    cells: CellCosts
    rows: IntArray
    forward_terms_s: FloatArray
    backward_terms_s: FloatArray
    static: FloatArray
    activations: FloatArray
    transient: FloatArray
    logits: FloatArray
    dense: FloatArray
    expert: FloatArray
    pools: IntArray
    first_ranks: IntArray
    limit_bytes: FloatArray
    fixed_bytes: FloatArray
    weight_s: FloatArray
    stash: FloatArray
    host: FloatArray
    host_optimizer: FloatArray


def stage_sums(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    target: Target,
    plan: Plan,
    multipliers: tuple[Multipliers, ...] | None = None,
    spans: Spans | None = None,
) -> tuple[CostModel, StageSums]:
    """The cost model that prices ``plan`` and the sums of its stages; ``spans`` as of :func:`.uneven.views`."""
    check_schedule(plan)
    modes, shardings = _lists(target, plan)
    seen = views(cluster, plan, spans) if uneven_pools(cluster) else None
    costs = CostModel(
        model,
        seen.layers if seen else cluster,
        workload,
        with_options(target, plan),
        recompute_modes=modes,
        shardings=shardings,
        overlap=overlap_of(plan.options),
        graphs=graphs_of(plan),
        multipliers=multipliers,
        host_optimizer=plan.options.optimizer_offload_fraction,
        rank_order=plan.rank_order,
    ).over_stages(plan.pp)
    if seen:
        costs.gradient_pools, costs.send_pools = seen.gradients, seen.sends
    cells, rows = _cells(costs, plan, modes, shardings)
    placed = _placed(costs, plan, cells, rows)
    pools, shares = _slowest_groups(costs, plan, cells, placed)
    return costs, _sums(costs, plan, cells, rows, placed, pools, shares)


@dataclass(frozen=True)
class _Placed:
    """Every block of a plan, one entry each: its ``stage`` and ``chunk``, its ``kind`` and the ``row`` of the cells
    that prices it. ``offloaded`` [N] is 1 where the block's activations wait in host memory. ``transient`` and
    ``logits`` [P] are those of the block of each stage that works with the most."""

    stage: IntArray
    chunk: IntArray
    kind: IntArray
    row: IntArray
    offloaded: FloatArray
    transient: FloatArray
    logits: FloatArray


def _placed(costs: CostModel, plan: Plan, cells: CellCosts, rows: list[tuple[int, int]]) -> _Placed:
    """The blocks of a plan. The block method recomputes the first ``num_layers`` layers of each chunk and keeps the
    others whole."""
    kind_of = dict(zip(costs.blocks.instances, costs.blocks.kind_of.tolist(), strict=True))
    stages = with_copies(plan)
    blocks = [[expand_blocks(chunk.blocks) for chunk in stage.chunks] for stage in stages]
    _check_blocks(kind_of, [chunks[: plan.vpp] for chunks in blocks])
    has_layer = [kind.layer is not None for kind in costs.kinds]
    has_loss = [name in ("head", "mtp") for name in costs.blocks.kinds]
    working, loss_bytes = cells.transient_bytes.tolist(), costs.logit_bytes_of(cells).tolist()
    entries: list[tuple[int, int, int, int, int]] = []
    transient, logits = np.zeros(plan.pp), np.zeros(plan.pp)
    for p, (stage, chunks) in enumerate(zip(stages, blocks, strict=True)):
        most, left = 0.0, plan.options.activation_offload_layers
        whole_after = _recomputed_layers(stage.recompute)
        for v, chunk in enumerate(chunks):
            layers = 0
            for block in chunk:
                b, row = kind_of[block], rows[p][0]
                if block[0] in ("decoder", "mtp"):
                    row = rows[p][1] if whole_after is not None and layers >= whole_after else row
                    layers += 1
                away = has_layer[b] and left > 0
                left -= away
                entries.append((p, v, b, row, int(away)))
                if working[row][b] > most:
                    most = working[row][b]
                    logits[p] = loss_bytes[row] if has_loss[b] else 0.0
        transient[p] = most
    stage_of, chunk_of, kind, row_of, offloaded = np.array(entries, dtype=np.int64).T
    return _Placed(stage_of, chunk_of, kind, row_of, offloaded.astype(float), transient, logits)


def _recomputed_layers(mode: RecomputeMode) -> int | None:
    """Layers of a chunk that the block method computes again; None under other methods."""
    return (mode.num_layers or 0) if mode.granularity == "full" and mode.method == "block" else None


def pool_members(costs: CostModel, plan: Plan) -> list[list[int]]:
    """For every stage the pool of each of its groups; SpecError where the cluster has no such pool."""
    index = {pool.name: g for g, pool in enumerate(costs.pools)}
    faults = [
        Fault(f"/stages/{p}/groups", f"unknown pool {group.pool}", tuple(index))
        for p, stage in enumerate(plan.stages)
        for group in stage.groups
        if group.pool not in index
    ]
    if faults:
        raise SpecError(faults[0])
    return [[index[group.pool] for group in stage.groups] for stage in plan.stages]


def _slowest_groups(costs: CostModel, plan: Plan, cells: CellCosts, placed: _Placed) -> tuple[IntArray, FloatArray]:
    """[P] pool of each stage's slowest group, and the share of the micro-batches that it runs."""
    pools, shares = np.zeros(plan.pp, dtype=np.int64), np.zeros(plan.pp)
    for p, (stage, members) in enumerate(zip(plan.stages, pool_members(costs, plan), strict=True)):
        parts = [group.micro_batches / plan.num_microbatches for group in stage.groups]
        found = list(zip(members, parts, strict=True))
        if len(found) > 1:
            here = placed.stage == p
            row, kind = placed.row[here], placed.kind[here]
            busy = [
                share * float(cells.forward_terms_s[row, g, kind].sum() + cells.backward_terms_s[row, g, kind].sum())
                for g, share in found
            ]
            found = [found[int(np.argmax(busy))]]
        pools[p], shares[p] = found[0]
    return pools, shares


def _sums(
    costs: CostModel,
    plan: Plan,
    cells: CellCosts,
    rows: list[tuple[int, int]],
    placed: _Placed,
    pools: IntArray,
    shares: FloatArray,
) -> StageSums:
    stage, row, kind = placed.stage, placed.row, placed.kind
    pool, share = pools[stage], shares[stage]
    vpp = plan.vpp * schedules.get(plan.schedule).copies

    def by_stage(values: FloatArray) -> FloatArray:
        return _summed(values, stage, plan.pp)

    def by_chunk(values: FloatArray) -> FloatArray:
        out = _summed(values, stage * vpp + placed.chunk, plan.pp * vpp)
        return out.reshape(plan.pp, vpp, *values.shape[1:])

    forward = by_chunk(share[:, None] * cells.forward_terms_s[row, pool, kind])
    backward = by_chunk(share[:, None] * cells.backward_terms_s[row, pool, kind])
    if schedules.get(plan.schedule).gathers_once:
        for total in (forward, backward):
            total[..., TERMS.index("dp_comm")] /= plan.num_microbatches
    static = by_stage(cells.static_bytes_by[row, kind])
    host_optimizer = plan.options.optimizer_offload_fraction * static[:, STATIC.index("optimizer")]
    static[:, STATIC.index("optimizer")] -= host_optimizer
    kept, transient = cells.activation_bytes[row, kind], placed.transient
    host = kept * placed.offloaded
    if host.any():
        buffers = np.zeros(plan.pp)
        np.maximum.at(buffers, stage, OFFLOAD_BUFFERS * host)
        transient = transient + buffers
    own_rows = [pair[0] for pair in rows]
    members = pool_members(costs, plan)
    limits, fixed = cells.limit_bytes.tolist(), cells.fixed_bytes.tolist()
    return StageSums(
        cells=cells,
        rows=np.array(own_rows),
        forward_terms_s=forward,
        backward_terms_s=backward,
        static=static,
        activations=by_chunk(kept - host),
        transient=transient,
        logits=placed.logits,
        dense=by_stage(cells.dense_params[row, kind]),
        expert=by_stage(cells.expert_params[row, kind]),
        pools=pools,
        first_ranks=np.array(_pool_starts(plan), dtype=np.int64),
        limit_bytes=np.array([min(limits[g] for g in on) for on in members]),
        fixed_bytes=np.array([max(fixed[own][g] for g in on) for own, on in zip(own_rows, members, strict=True)]),
        weight_s=by_chunk(share * cells.weight_gradient_s[row, pool, kind]),
        stash=by_chunk(cells.weight_stash_bytes[row, kind]),
        host=by_chunk(host if cells.host_bytes is None else host + cells.host_bytes[row, kind]),
        host_optimizer=host_optimizer,
    )


def _summed(values: FloatArray, at: IntArray, count: int) -> FloatArray:
    """[count, ...] sums of the ``values`` [N, ...] whose ``at`` [N] is the same."""
    width = values[0].size
    places = (at[:, None] * width + np.arange(width)).reshape(-1)
    out = np.bincount(places, weights=values.reshape(-1), minlength=count * width)
    return out.astype(float).reshape(count, *values.shape[1:])


def _lists(target: Target, plan: Plan) -> tuple[tuple[RecomputeMode, ...], tuple[str, ...]]:
    """The target's recompute modes and shardings, extended by those that the plan uses."""
    modes = (*target.recompute, *(stage.recompute for stage in plan.stages), RecomputeMode())
    shardings = (*target.sharding, *(_sharding(plan, stage) for stage in plan.stages))
    return tuple(dict.fromkeys(modes)), tuple(dict.fromkeys(shardings))


def _sharding(plan: Plan, stage: Stage) -> str:
    """The level, ``hsdp:N`` with N replicas of hybrid sharding, or ``zero1:N`` with N instances of the optimizer."""
    if isinstance(stage.sharding, Hsdp):
        return f"hsdp:{stage.sharding.hsdp.replicate}"
    instances = plan.options.dist_opt_instances
    return stage.sharding if instances == 1 or stage.sharding == "none" else f"{stage.sharding}:{instances}"


def _cells(
    costs: CostModel, plan: Plan, modes: tuple[RecomputeMode, ...], shardings: tuple[str, ...]
) -> tuple[CellCosts, list[tuple[int, int]]]:
    """Cells of all stages, and for each stage the rows of its layers: recomputed, and kept whole where the block
    method keeps some (else the same)."""
    columns: dict[tuple[int, ...], int] = {}
    rows: list[tuple[int, int]] = []
    one_stage, before = int(ends_meet(plan)), None
    for stage in plan.stages:
        settings = stage.degrees, stage.micro_batch_size, stage.recompute, stage.sharding
        if settings == before:
            rows.append(rows[-1])
            continue
        before = settings
        degrees = stage.degrees
        whole = stage.recompute if _recomputed_layers(stage.recompute) is None else RecomputeMode()
        pair = []
        for mode in (stage.recompute, whole):
            key = (
                degrees.tp, degrees.cp, degrees.ep, degrees.etp, degrees.tp * degrees.cp * degrees.dp,
                stage.micro_batch_size, modes.index(mode), shardings.index(_sharding(plan, stage)), one_stage,
            )  # fmt: skip
            pair.append(columns.setdefault(key, len(columns)))
        rows.append((pair[0], pair[1]))
    return costs.cells(CellKeys(*np.array(list(columns), dtype=np.int64).T)), rows


def _check_blocks(
    instances: Mapping[tuple[str, int], int], blocks: Sequence[Sequence[Sequence[tuple[str, int]]]]
) -> None:
    """SpecError unless ``blocks`` of every chunk of every stage are ``instances``, each once."""
    seen: set[tuple[str, int]] = set()
    faults = []
    for p, chunks in enumerate(blocks):
        for c, chunk in enumerate(chunks):
            for block in chunk:
                if block in instances and block not in seen:
                    seen.add(block)
                    continue
                name = f"{block[0]}:{block[1]}" if block[0] in ("decoder", "mtp") else block[0]
                pointer = f"/stages/{p}/chunks/{c}/blocks"
                if block in instances:
                    faults.append(Fault(pointer, f"{name} stands in the plan twice"))
                else:
                    faults.append(Fault(pointer, f"{name} is not a block of the model under this workload"))
    missing = [block for block in instances if block not in seen]
    if missing and not faults:
        faults.append(Fault("/stages", f"block {missing[0][0]}:{missing[0][1]} is in no stage"))
    if faults:
        raise SpecError(faults)


def _pool_starts(plan: Plan) -> list[int]:
    """Position of each stage's first rank inside its pool: stages fill a pool in order. Where the pipeline is inside
    data parallelism, as if it were not."""
    if stages_inside(plan.rank_order, plan.pp) > 1:
        return [index * (plan.num_ranks // plan.pp) for index in range(plan.pp)]
    used: dict[str, int] = {}
    out = []
    for stage in plan.stages:
        out.append(used.get(stage.groups[0].pool, 0))
        for group in stage.groups:
            used[group.pool] = used.get(group.pool, 0) + sum(len(parse_range(text)) for text in group.ranks)
    return out
