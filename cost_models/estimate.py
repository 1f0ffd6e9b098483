"""``estimate``: seconds and bytes of one plan, by the same cells, schedules and tail that search prices with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.estimate import Estimate, StageEstimate
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan, parse_range
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

from . import memory, schedules, stage_memory
from .cells import CostModel
from .estimate_notes import assumptions_of, breakdown_s, rungs_of
from .flops import model_flops
from .learned import interval_of
from .mixed_stage import joint_tail
from .multipliers import Multipliers
from .offload import activation_offload_s, host_update_s
from .plan_schedule import ends_meet
from .stage_sums import StageSums, stage_sums
from .step import StepTime, step_time
from .uneven import Spans, spans_of, uneven_pools


def estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    target: Target,
    plan: Plan,
    memory_headroom: float = 0.0,
    multipliers: tuple[Multipliers, ...] | None = None,
    spans: Spans | None = None,
) -> Estimate:
    """What ``plan`` costs. ``memory_headroom`` is the share of usable memory left free for ``fits``. ``spans`` are
    what its groups share of unequal leaves, in place of what its devices say.

    Raises :class:`SpecError` where the plan names a pool or a block that the cluster or model has not, loses or
    repeats a block, or asks of its schedule what that does not run.
    """
    if uneven_pools(cluster):
        found = [
            _estimate(model, cluster, workload, target, plan, memory_headroom, multipliers, each)
            for each in dict.fromkeys((spans or spans_of(plan, cluster), Spans()))
        ]
        return max(found, key=lambda one: one.step_time_s)
    return _estimate(model, cluster, workload, target, plan, memory_headroom, multipliers, None)


def _estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    target: Target,
    plan: Plan,
    memory_headroom: float,
    multipliers: tuple[Multipliers, ...] | None,
    spans: Spans | None,
) -> Estimate:
    costs, sums = stage_sums(model, cluster, workload, target, plan, multipliers, spans)
    step = plan_step(costs, plan, sums)
    alive = schedules.activation_peak_bytes(
        schedules.get(plan.schedule), sums.activations, sums.stash, plan.num_microbatches
    )
    if plan.options.ep_comm_overlap and plan.pp > 1:
        # The forward of the next micro-batch runs beside a backward (Megatron's warm-up has one chunk more). On one
        # stage it takes the layers' room as the backward leaves them.
        alive = alive + sums.activations.max(axis=1)
    stages = _stages(costs, plan, sums, alive, step)
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
        assumptions=assumptions_of(costs, plan),
        gpus_used=used,
        gpus_offered=cluster.num_gpus,
        host_ram_bytes=host_bytes,
        breakdown_s=breakdown_s(plan, sums, step) | ({"offload": exposed_s} if host_bytes else {}),
        critical_stage=step.critical_stage,
        rungs=rungs_of(costs) | ({"offload": "spec roofline"} if host_bytes else {}),
        stages=tuple(stages),
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


def _stages(costs: CostModel, plan: Plan, sums: StageSums, alive: FloatArray, step: StepTime) -> list[StageEstimate]:
    """Memory and busy time of the stages, whose activations take ``alive`` bytes at their peak."""
    buffer = costs.target.gradient_buffer or plan.num_microbatches > 1
    parts = [
        stage_memory.parts(static, float(live), float(transient), float(logits), buffer)
        for static, live, transient, logits in zip(
            sums.static.tolist(), alive, sums.transient, sums.logits, strict=True
        )
    ]
    allocated = [sum(part.values()) for part in parts]
    seconds = (
        terms.reshape(plan.pp, -1).sum(axis=1).tolist() for terms in (sums.forward_terms_s, sums.backward_terms_s)
    )
    columns = (
        allocated,
        memory.reserved_bytes(allocated, sums.fixed_bytes).tolist(),
        sums.limit_bytes.tolist(),
        parts,
        *seconds,
        step.timeline.busy_s.tolist(),
    )
    return [
        StageEstimate(
            allocated_bytes=total,
            reserved_bytes=round(reserved),
            limit_bytes=round(limit),
            first_step_bytes=stage_memory.first_step_bytes(part, costs.workload),
            breakdown_bytes=part,
            forward_s=forward,
            backward_s=backward,
            busy_s=busy,
        )
        for total, reserved, limit, part, forward, backward, busy in zip(*columns, strict=True)
    ]


def _offload(costs: CostModel, plan: Plan, sums: StageSums) -> tuple[float, int]:
    """(exposed seconds of a step, bytes of host memory on the fullest node) of what the plan offloads."""
    seconds, fullest = 0.0, 0
    if not (sums.host.any() or sums.host_optimizer.any()):
        return seconds, fullest
    schedule = schedules.get(plan.schedule)
    runs = plan.num_microbatches / schedule.copies  # each copy of the model runs its part of the micro-batches
    alive = schedules.activation_peak_bytes(schedule, sums.host, np.zeros_like(sums.host), plan.num_microbatches)
    for p, kept in enumerate(alive):
        place = int(sums.pools[p])
        passes = float(sums.forward_terms_s[p].sum()), float(sums.backward_terms_s[p].sum())
        state, moved = float(sums.host_optimizer[p]), float(sums.host[p].sum())
        params = state / memory.optimizer_bytes_per_param(costs.workload)
        gpu, overlapped = costs.devices[place].gpu, plan.options.optimizer_offload_overlap
        exposed = activation_offload_s(gpu, runs, moved, passes)
        seconds = max(seconds, exposed + host_update_s(gpu, costs.workload, params, overlapped))
        each = float(kept) + state
        fullest = max(fullest, round(each * costs.pools[place].gpus_per_node))
    return seconds, fullest


def _peaks(costs: CostModel, plan: Plan) -> list[float]:
    """Dense peak FLOP/s at the GEMM precision (tf32 units for fp32, as they are priced) of all ranks of each group."""
    peak_of = {pool.name: on.peak for pool, on in zip(costs.pools, costs.devices, strict=True)}
    return [
        sum(len(parse_range(text)) for text in group.ranks) * peak_of[group.pool]
        for stage in plan.stages
        for group in stage.groups
    ]
