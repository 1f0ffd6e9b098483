"""``estimate``: seconds and bytes of one plan, by the same cells, schedules and tail that search prices with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.specs.batch import CellKeys, FloatArray, IntArray
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.estimate import Estimate, StageEstimate
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Hsdp, Plan, Stage, expand_blocks, parse_range
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.workload import Workload

from . import memory, schedules, stage_memory
from .cells import CostModel
from .flops import model_flops
from .learned import interval_of
from .mixed_stage import joint_tail
from .multipliers import Multipliers
from .offload import OFFLOAD_BUFFERS, offload_s
from .overlap import overlap_of
from .plan_schedule import check_schedule, ends_meet, with_copies
from .protocol import STATIC, TERMS, CellCosts
from .step import StepTime, step_time


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


def estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    target: Target,
    plan: Plan,
    memory_headroom: float = 0.0,
    multipliers: tuple[Multipliers, ...] | None = None,
) -> Estimate:
    """What ``plan`` costs. ``memory_headroom`` is the share of usable memory left free for ``fits``.

    Raises :class:`SpecError` where the plan names a pool or a block that the cluster or model has not, loses or
    repeats a block, or asks of its schedule what that does not run.
    """
    costs, sums = stage_sums(model, cluster, workload, target, plan, multipliers)
    step = plan_step(costs, plan, sums)
    alive = schedules.activation_peak_bytes(
        schedules.get(plan.schedule), sums.activations, sums.stash, plan.num_microbatches
    )
    if plan.options.ep_comm_overlap and plan.pp > 1:
        # The forward of the next micro-batch runs beside a backward (Megatron's warm-up has one chunk more). On one
        # stage it takes the layers' room as the backward leaves them.
        alive = alive + sums.activations.max(axis=1)
    stages = [_stage(costs, plan, sums, p, float(alive[p]), step) for p in range(plan.pp)]
    low, high, level = interval_of(costs.traits[int(sums.pools[step.critical_stage])])
    exposed_s, host_bytes = _offload(costs, plan, sums)
    step_s = step.step_time_s + exposed_s
    used = plan.num_ranks
    peak = sum(_peaks(costs, plan))
    fit = memory.fits([s.allocated_bytes for s in stages], sums.fixed_bytes, sums.limit_bytes, memory_headroom)
    return Estimate(
        step_time_s=step_s,
        interval_s=(step_s * low, step_s * high),
        interval_level=level,
        tokens_per_s_per_gpu=workload.tokens_per_step / step_s / used,
        mfu=model_flops(model, workload) / step_s / peak if peak else 0.0,
        fits=bool(fit.all()),
        assumptions=_assumptions(costs, plan),
        gpus_used=used,
        gpus_offered=cluster.num_gpus,
        host_ram_bytes=host_bytes,
        breakdown_s=_breakdown(plan, sums, step) | ({"offload": exposed_s} if host_bytes else {}),
        critical_stage=step.critical_stage,
        rungs=_rungs(costs),
        stages=tuple(stages),
    )


def stage_sums(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    target: Target,
    plan: Plan,
    multipliers: tuple[Multipliers, ...] | None = None,
) -> tuple[CostModel, StageSums]:
    """The cost model that prices ``plan`` and the sums of its stages."""
    check_schedule(plan)
    modes, shardings = _lists(target, plan)
    costs = CostModel(
        model,
        cluster,
        workload,
        _with_options(target, plan),
        recompute_modes=modes,
        shardings=shardings,
        overlap=overlap_of(plan.options),
        graphs=_graphs(plan),
        multipliers=multipliers,
    )
    cells, rows = _cells(costs, plan, modes, shardings)
    instances = {instance: i for i, instance in enumerate(costs.blocks.instances)}
    _check_blocks(instances, plan)
    pool_index = {pool.name: g for g, pool in enumerate(cluster.pools)}
    stages = with_copies(plan)
    vpp = max(len(stage.chunks) for stage in stages)
    shape = (plan.pp, vpp)
    forward, backward = np.zeros((*shape, len(TERMS))), np.zeros((*shape, len(TERMS)))
    activations, weight, stash, host = (np.zeros(shape) for _ in range(4))
    static = np.zeros((plan.pp, len(STATIC)))
    transient, logits, dense, expert, limit, fixed, host_optimizer = (np.zeros(plan.pp) for _ in range(7))
    pools, first_ranks = np.zeros(plan.pp, dtype=np.int64), np.zeros(plan.pp, dtype=np.int64)
    starts = _pool_starts(plan)
    logits_of = costs.logit_bytes_of(cells)
    for p, stage in enumerate(stages):
        kinds = _kinds_and_rows(costs, stage, instances, rows[p])
        layers = [place for place, (_, b, _) in enumerate(kinds) if costs.kinds[b].layer is not None]
        offloaded, buffers = frozenset(layers[: plan.options.activation_offload_layers]), 0.0
        groups = []
        for group in stage.groups:
            if group.pool not in pool_index:
                raise SpecError(Fault(f"/stages/{p}/groups", f"unknown pool {group.pool}", tuple(pool_index)))
            g, share = pool_index[group.pool], group.micro_batches / plan.num_microbatches
            seconds = [(cells.forward_terms_s[row, g, b], cells.backward_terms_s[row, g, b]) for _, b, row in kinds]
            total = share * sum(float(f.sum() + w.sum()) for f, w in seconds)
            groups.append((total, g, share, seconds))
        _, g, share, seconds = max(groups, key=lambda item: item[0])
        for place, ((chunk, b, row), (one, two)) in enumerate(zip(kinds, seconds, strict=True)):
            forward[p, chunk] += share * one
            backward[p, chunk] += share * two
            static[p] += cells.static_bytes_by[row, b]
            weight[p, chunk] += share * cells.weight_gradient_s[row, g, b]
            stash[p, chunk] += cells.weight_stash_bytes[row, b]
            kept = cells.activation_bytes[row, b]
            (host if place in offloaded else activations)[p, chunk] += kept
            host[p, chunk] += 0.0 if cells.host_bytes is None else cells.host_bytes[row, b]
            buffers = max(buffers, OFFLOAD_BUFFERS * kept if place in offloaded else 0.0)
            dense[p] += cells.dense_params[row, b]
            expert[p] += cells.expert_params[row, b]
            if cells.transient_bytes[row, b] > transient[p]:
                transient[p] = cells.transient_bytes[row, b]
                logits[p] = logits_of[row] if costs.blocks.kinds[b] in ("head", "mtp") else 0.0
        transient[p] += buffers
        host_optimizer[p] = plan.options.optimizer_offload_fraction * static[p, STATIC.index("optimizer")]
        static[p, STATIC.index("optimizer")] -= host_optimizer[p]
        pools[p], first_ranks[p] = g, starts[p]
        indices = [item[1] for item in groups]
        limit[p], fixed[p] = cells.limit_bytes[indices].min(), cells.fixed_bytes[rows[p][0], indices].max()
    if schedules.get(plan.schedule).gathers_once:
        for terms in (forward, backward):
            terms[..., TERMS.index("dp_comm")] /= plan.num_microbatches
    return costs, StageSums(
        cells,
        np.array([r[0] for r in rows]),
        forward,
        backward,
        static,
        activations,
        transient,
        logits,
        dense,
        expert,
        pools,
        first_ranks,
        limit,
        fixed,
        weight,
        stash,
        host,
        host_optimizer,
    )


def plan_step(costs: CostModel, plan: Plan, sums: StageSums, keep_events: bool = False) -> StepTime:
    """Event time of a plan and its tail."""
    backward = sums.backward_terms_s.sum(axis=-1)
    tail = costs.tail(sums.cells, sums.rows, sums.pools, sums.dense, sums.expert, backward.sum(axis=1))
    tail = joint_tail(costs, plan, sums.cells, sums.rows, sums.dense, sums.expert, backward.sum(axis=1), tail)
    if not ends_meet(plan):
        ends = int(sums.pools[0]), int(sums.pools[-1])
        shared = costs.shared_embedding_s(sums.cells, sums.rows[:1], *ends, plan.pp)
        tail = replace(tail, grad_reduce_s=tail.grad_reduce_s + shared)
    send = costs.boundary_s(sums.cells, sums.rows[:-1], sums.pools[:-1], sums.pools[1:], sums.first_ranks[:-1])
    forward, beside = sums.forward_terms_s.sum(axis=-1), plan.vpp == 1 or costs.overlap.sends
    m = plan.num_microbatches
    return step_time(plan.schedule, forward, backward, send, m, tail, keep_events, beside, sums.weight_s)


def _lists(target: Target, plan: Plan) -> tuple[tuple[RecomputeMode, ...], tuple[str, ...]]:
    """The target's recompute modes and shardings, extended by those that the plan uses."""
    modes = list(target.recompute)
    modes += [mode for stage in plan.stages for mode in (stage.recompute, RecomputeMode()) if mode not in modes]
    shardings = list(target.sharding)
    shardings += [name for stage in plan.stages if (name := _sharding(stage)) not in shardings]
    return tuple(dict.fromkeys(modes)), tuple(dict.fromkeys(shardings))


def _sharding(stage: Stage) -> str:
    """The level, or ``hsdp:N`` with N replicas of hybrid sharding."""
    return f"hsdp:{stage.sharding.hsdp.replicate}" if isinstance(stage.sharding, Hsdp) else stage.sharding


#: Modules of a layer whose host calls a CUDA graph scope of Megatron captures (``--cuda-graph-scope``).
GRAPH_SCOPES: dict[str, tuple[str, ...]] = {
    "full_iteration": ("*",),
    "attn": ("attention_linear", "attention_comm", "core_attn", "latent", "mla_up_proj", "layernorm", "residual"),
    "mamba": ("attention_linear", "attention_comm", "core_attn", "layernorm", "residual"),
    "mlp": ("mlp", "mlp_comm"),
    "moe": ("moe", "moe_act", "shared_experts", "moe_router", "moe_preprocess"),
    "moe_router": ("moe_router", "shared_experts"),
    "moe_preprocess": ("moe_preprocess",),
}


def _graphs(plan: Plan) -> frozenset[str]:
    """Host calls that CUDA graphs save; without a stated scope they capture whole layers."""
    if not plan.options.cuda_graph:
        return frozenset()
    scopes = plan.options.cuda_graph_scope or ("full_iteration",)
    return frozenset(module for scope in scopes for module in GRAPH_SCOPES[scope])


def _with_options(target: Target, plan: Plan) -> Target:
    """The target with the switches that the plan sets."""
    options = plan.options
    chosen = {
        "loss_chunks": options.loss_chunks,
        "reshard_after_forward": options.reshard_after_forward,
        "activation_offload_modules": options.activation_offload_modules or None,
    }
    tensor_parallel = any(stage.degrees.tp > 1 for stage in plan.stages)
    return target.model_copy(
        update={
            # Without tensor parallelism the switch means nothing; keep the target's, as search does.
            "sequence_parallel": options.sequence_parallel or (target.sequence_parallel and not tensor_parallel),
            "overlap_grad_reduce": options.overlap_grad_reduce,
            "overlap_param_gather": options.overlap_param_gather,
            "fused_cross_entropy": options.fused_cross_entropy,
            "dispatcher": options.dispatcher or target.dispatcher,
            "moe_comm_overlap": options.ep_comm_overlap or target.moe_comm_overlap,
        }
        | {name: value for name, value in chosen.items() if value is not None}
    )


def _cells(
    costs: CostModel, plan: Plan, modes: tuple[RecomputeMode, ...], shardings: tuple[str, ...]
) -> tuple[CellCosts, list[tuple[int, int]]]:
    """Cells of all stages, and for each stage the rows (its own recompute mode, no recompute)."""
    columns: list[tuple[int, ...]] = []
    rows: list[tuple[int, int]] = []
    one_stage = int(ends_meet(plan))
    for stage in plan.stages:
        degrees = stage.degrees
        pair = []
        for mode in (stage.recompute, RecomputeMode()):
            key = (
                degrees.tp, degrees.cp, degrees.ep, degrees.etp, degrees.tp * degrees.cp * degrees.dp,
                stage.micro_batch_size, modes.index(mode), shardings.index(_sharding(stage)), one_stage,
            )  # fmt: skip
            if key not in columns:
                columns.append(key)
            pair.append(columns.index(key))
        rows.append((pair[0], pair[1]))
    return costs.cells(CellKeys(*np.array(columns, dtype=np.int64).T)), rows


def _kinds_and_rows(
    costs: CostModel, stage: Stage, instances: dict[tuple[str, int], int], rows: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """(chunk, block kind, row of the cells) of every block of a stage; the block method recomputes the first
    ``num_layers`` layers of each chunk and keeps the others whole."""
    out = []
    block_method = stage.recompute.granularity == "full" and stage.recompute.method == "block"
    for chunk_index, chunk in enumerate(stage.chunks):
        layers = 0
        for block in expand_blocks(chunk.blocks):
            row = rows[0]
            if block[0] in ("decoder", "mtp"):
                if block_method and layers >= (stage.recompute.num_layers or 0):
                    row = rows[1]
                layers += 1
            out.append((chunk_index, int(costs.blocks.kind_of[instances[block]]), row))
    return out


def _check_blocks(instances: dict[tuple[str, int], int], plan: Plan) -> None:
    seen: set[tuple[str, int]] = set()
    faults = []
    for p, stage in enumerate(plan.stages):
        for c, chunk in enumerate(stage.chunks):
            for block in expand_blocks(chunk.blocks):
                name = f"{block[0]}:{block[1]}" if block[0] in ("decoder", "mtp") else block[0]
                pointer = f"/stages/{p}/chunks/{c}/blocks"
                if block not in instances:
                    faults.append(Fault(pointer, f"{name} is not a block of the model under this workload"))
                elif block in seen:
                    faults.append(Fault(pointer, f"{name} stands in the plan twice"))
                seen.add(block)
    missing = [block for block in instances if block not in seen]
    if missing and not faults:
        faults.append(Fault("/stages", f"block {missing[0][0]}:{missing[0][1]} is in no stage"))
    if faults:
        raise SpecError(faults)


def _pool_starts(plan: Plan) -> list[int]:
    """Position of each stage's first rank inside its pool: stages fill a pool in order."""
    used: dict[str, int] = {}
    out = []
    for stage in plan.stages:
        out.append(used.get(stage.groups[0].pool, 0))
        for group in stage.groups:
            used[group.pool] = used.get(group.pool, 0) + sum(len(parse_range(text)) for text in group.ranks)
    return out


def _stage(costs: CostModel, plan: Plan, sums: StageSums, p: int, alive: float, step: StepTime) -> StageEstimate:
    """Memory and busy time of one stage, whose activations take ``alive`` bytes at their peak."""
    parts = stage_memory.parts(
        sums.static[p],
        alive,
        float(sums.transient[p]),
        float(sums.logits[p]),
        costs.target.gradient_buffer or plan.num_microbatches > 1,
    )
    allocated = sum(parts.values())
    return StageEstimate(
        allocated_bytes=allocated,
        reserved_bytes=round(float(memory.reserved_bytes(allocated, sums.fixed_bytes[p]))),
        limit_bytes=round(float(sums.limit_bytes[p])),
        first_step_bytes=stage_memory.first_step_bytes(parts, costs.workload),
        breakdown_bytes=parts,
        forward_s=float(sums.forward_terms_s[p].sum()),
        backward_s=float(sums.backward_terms_s[p].sum()),
        busy_s=float(step.timeline.busy_s[p]),
    )


def _offload(costs: CostModel, plan: Plan, sums: StageSums) -> tuple[float, int]:
    """(exposed seconds of a step, bytes of host memory on the fullest node) of what the plan offloads."""
    seconds, fullest = 0.0, 0
    schedule = schedules.get(plan.schedule)
    alive = schedules.activation_peak_bytes(schedule, sums.host, np.zeros_like(sums.host), plan.num_microbatches)
    for p, kept in enumerate(alive):
        place = int(sums.pools[p])
        passes = float(sums.forward_terms_s[p].sum()), float(sums.backward_terms_s[p].sum())
        state, moved = float(sums.host_optimizer[p]), float(sums.host[p].sum())
        params = state / memory.optimizer_bytes_per_param(costs.workload)
        seconds = max(seconds, offload_s(costs.devices[place].gpu, plan.num_microbatches, moved, passes, params))
        each = float(kept) + state
        fullest = max(fullest, round(each * costs.pools[place].gpus_per_node))
    return seconds, fullest


def _breakdown(plan: Plan, sums: StageSums, step: StepTime) -> dict[str, float]:
    """Seconds by term along the critical stage; ``bubble`` is the rest."""
    p = step.critical_stage
    runs = plan.num_microbatches / schedules.get(plan.schedule).copies
    terms = runs * (sums.forward_terms_s[p] + sums.backward_terms_s[p]).sum(axis=0)
    out = {name: float(value) for name, value in zip(TERMS, terms, strict=True)}
    out["pp_comm"] = float(step.timeline.send_s[p])
    out["grad_reduce"] = step.grad_reduce_s
    out["optimizer"] = step.optimizer_s
    out["param_gather"] = step.param_gather_s
    out["bubble"] = step.step_time_s - sum(out.values())
    return out


def _peaks(costs: CostModel, plan: Plan) -> list[float]:
    """Dense peak FLOP/s at the GEMM precision (tf32 units for fp32, as they are priced) of all ranks of each group."""
    peak_of = {pool.name: on.peak for pool, on in zip(costs.pools, costs.devices, strict=True)}
    return [
        sum(len(parse_range(text)) for text in group.ranks) * peak_of[group.pool]
        for stage in plan.stages
        for group in stage.groups
    ]


def _assumptions(costs: CostModel, plan: Plan) -> tuple[str, ...]:
    workload, out = costs.workload, list(costs.cluster.assumptions)
    if costs.model.is_moe and workload.moe_load_factor == 1.0:
        out.append("routed tokens are balanced over expert ranks (moe_load_factor 1.0)")
    longest = costs.model.max_position_embeddings
    if longest and workload.seq_length > longest:
        out.append(f"sequences of {workload.seq_length} tokens are longer than the model's stated maximum of {longest}")
    if costs.model.vision:
        out.append("one image a sequence passes the vision tower")
    if schedules.get(plan.schedule).copies > 1:
        out.append("gradients are reduced within each copy of the model; adding up the copies is not priced")
    if any(isinstance(stage.sharding, Hsdp) for stage in plan.stages):
        out.append("communication of hybrid sharding is priced as full sharding over the whole data-parallel group")
    out += [
        f"{on.gpu.name}: no operator measurements ship for {workload.precision}; rates from its family"
        for on in costs.devices
        if on.fit.rung != "shipped fit"
    ]
    return tuple(dict.fromkeys(out))


def _rungs(costs: CostModel) -> dict[str, str]:
    """Where each term's numbers come from: the worst rung of the pools."""
    fitted = all(on.fit.rung == "shipped fit" for on in costs.devices)
    measured = "shipped fit" if fitted else "spec roofline"
    out = dict.fromkeys((*TERMS, "pp_comm", "grad_reduce", "param_gather"), "shipped fit")
    out |= {"gemm": measured, "attention": measured, "recompute": measured}
    out |= {"memory_bound": "spec roofline", "optimizer": "spec roofline", "bubble": "event simulation"}
    return out
