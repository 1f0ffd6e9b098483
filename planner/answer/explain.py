"""Why this plan: what binds, why the layers lie as they do, what was left out, what the next best would lose."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.rank_order import DATA_INSIDE
from meshwright.specs.batch import IntArray
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import Explanation
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Hsdp, Plan, expand_blocks

from ..engine.finalists import Finalist, SearchResult

_TERM = {
    "gemm": "matrix multiplications",
    "attention": "attention",
    "memory_bound": "memory-bound operators",
    "host": "kernel launches",
    "tp_comm": "tensor-parallel communication",
    "cp_comm": "context-parallel communication",
    "ep_comm": "expert all-to-all",
    "dp_comm": "gathers and scatters of full sharding",
    "recompute": "recomputed activations",
    "pp_comm": "pipeline sends",
    "bubble": "the pipeline bubble",
    "grad_reduce": "gradient reduction",
    "optimizer": "the optimizer",
    "param_gather": "parameter gathering",
}
GIB = 2**30


def term_name(name: str) -> str:
    """A term of an estimate's breakdown in words."""
    return _TERM.get(name, name)


def decoder_layers(plan: Plan) -> list[int]:
    """Decoder layers of every stage."""
    return [
        sum(kind == "decoder" for chunk in stage.chunks for kind, _ in expand_blocks(chunk.blocks))
        for stage in plan.stages
    ]


def seconds(value: float) -> str:
    """A duration with a readable unit."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def describe(plan: Plan) -> str:
    """A plan in one line."""
    parts = [f"tp {plan.tp}", f"pp {plan.pp}"]
    parts += [f"{name} {value}" for name, value in (("cp", plan.cp), ("ep", plan.ep)) if value != 1]
    if plan.ep != 1 or plan.etp != plan.tp:
        parts.append(f"etp {plan.etp}")
    parts.append(f"dp {plan.dp}")
    if plan.vpp > 1:
        parts.append(f"vpp {plan.vpp}")
    parts.append(f"micro-batch {plan.micro_batch_size} x {plan.num_microbatches}")
    if isinstance(plan.sharding, Hsdp):
        sharding = f"hsdp {plan.sharding.hsdp.shard} x {plan.sharding.hsdp.replicate}"
    else:
        sharding = str(plan.sharding)
    return ", ".join([*parts, sharding, f"recompute {plan.recompute.label}", *_extras(plan)])


def _extras(plan: Plan) -> list[str]:
    """Options of a plan that are worth a word in its line."""
    options, out = plan.options, []
    if plan.rank_order != DATA_INSIDE:
        out.append(f"rank order {plan.rank_order}")
    if options.dist_opt_instances > 1:
        out.append(f"{options.dist_opt_instances} optimizer instances")
    if options.cp_comm_type not in (None, "p2p"):
        out.append(f"cp by {options.cp_comm_type}")
    if options.optimizer_offload_fraction:
        out.append(f"{options.optimizer_offload_fraction:.0%} of the optimizer in host memory")
    if options.activation_offload_layers:
        out.append(f"activations of {options.activation_offload_layers} layers in host memory")
    return out


def explain(
    result: SearchResult, best: Finalist, plan: Plan, estimate: Estimate, cluster: ClusterSpec
) -> list[Explanation]:
    """All reasons for a plan, most important first."""
    out = [_time(estimate), _memory(plan, estimate)]
    layout = _layout(best, plan)
    if layout:
        out.append(layout)
    order = _order(best, plan)
    if order:
        out.append(order)
    out += left_out(result, plan, cluster)
    out += _rules(result)
    return out


def _time(estimate: Estimate) -> Explanation:
    shares = sorted(estimate.breakdown_s.items(), key=lambda item: -item[1])[:3]
    words = ", ".join(f"{_TERM.get(name, name)} {value / estimate.step_time_s:.0%}" for name, value in shares)
    return Explanation(
        kind="binding-time",
        message=f"stage {estimate.critical_stage} is critical; its step goes to {words}",
        data={"stage": estimate.critical_stage, "terms": dict(shares)},
    )


def _memory(plan: Plan, estimate: Estimate) -> Explanation:
    fill = [stage.reserved_bytes / stage.limit_bytes for stage in estimate.stages]
    stage = int(np.argmax(fill))
    term, size = max(estimate.stages[stage].breakdown_bytes.items(), key=lambda item: item[1])
    gpu = plan.stages[stage].groups[0].gpu
    return Explanation(
        kind="binding-memory",
        message=f"stage {stage} ({gpu}) is the fullest at {fill[stage]:.0%} of its usable memory; "
        f"{term} take most of it ({size / GIB:.1f} GiB)",
        data={"stage": stage, "fill": fill[stage], "term": term, "bytes": size},
    )


def even_cuts(best: Finalist) -> IntArray | None:
    """Cuts with equal decoder layers in every chunk (the first ones one more); None if that is the plan."""
    counted = best.batch.counted > 0
    chunks = len(best.cuts) - 1
    share = [len(part) for part in np.array_split(np.arange(int(counted.sum())), chunks)]
    positions = np.nonzero(counted)[0]
    inner = [int(positions[total]) for total in np.cumsum(share)[:-1]]
    cuts = np.array([0, *inner, len(counted)], dtype=np.int64)
    return None if np.array_equal(cuts, best.cuts) else cuts


def _layout(best: Finalist, plan: Plan) -> Explanation | None:
    layers = decoder_layers(plan)
    if len(set(layers)) == 1:
        return None
    index, leading = np.array([best.candidate]), np.array([best.leading])
    sums = best.batch.sums(index, best.cuts[None], leading)
    busy = (sums.forward_s + sums.backward_s)[0].sum(axis=1)
    gpus = [stage.groups[0].gpu for stage in plan.stages]
    why = (
        "faster GPUs get more layers, so that stages take near-equal time for a micro-batch"
        if len(set(gpus)) > 1
        else "layers differ in cost or do not divide evenly, and the ends hold embedding and loss"
    )
    message = f"layers are split unevenly: {why} ({_runs(gpus, layers, busy.tolist())})"
    data: dict[str, object] = {"layers": layers, "gpus": gpus, "micro_batch_s": busy.tolist()}
    even = even_cuts(best)
    if even is not None:
        other = best.batch.sums(index, even[None], leading)
        even_s = float(best.batch.step_s(best.candidate, even[None], best.leading)[0])
        data["even_step_time_s"] = even_s
        if not other.fits[0]:
            stage = int(np.argmax(other.memory_bytes[0] / other.capacity_bytes[0]))
            message += f"; an even split does not fit: stage {stage} ({gpus[stage]}) would overflow"
            data["even_overflows_stage"] = stage
        elif even_s > best.step_time_s:
            message += f"; an even split would take {seconds(even_s)}, {even_s / best.step_time_s - 1:.1%} longer"
    return Explanation(kind="layout", message=message, data=data)


def _order(best: Finalist, plan: Plan) -> Explanation | None:
    """What keeping the stages of a replica together is worth."""
    costs = best.batch.costs
    if plan.rank_order == DATA_INSIDE or not isinstance(costs, CostModel):
        return None
    which = np.arange(len(best.batch)) == best.candidate
    usual = best.batch.under(which, costs.ordered(DATA_INSIDE), best.batch.cells.static_bytes_by)
    usual_s = float(usual.step_s(0, best.cuts[None], best.leading)[0])
    if usual_s <= best.step_time_s:
        return None
    return Explanation(
        kind="placement",
        message=f"ranks are ordered {plan.rank_order}: the stages of a replica are neighbours and send to each other "
        f"over the faster levels, gradients cross the slower ones; ordered {DATA_INSIDE} the same plan would take "
        f"{seconds(usual_s)} a step, {usual_s / best.step_time_s - 1:.1%} longer",
        data={"rank_order": plan.rank_order, "usual_step_time_s": usual_s},
    )


def _runs(gpus: list[str], layers: list[int], busy_s: list[float]) -> str:
    """Neighbouring stages with the same GPU and layers in one phrase."""
    phrases = []
    for (gpu, count), members in groupby(range(len(gpus)), key=lambda i: (gpus[i], layers[i])):
        stages = list(members)
        span = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
        low, high = min(busy_s[i] for i in stages), max(busy_s[i] for i in stages)
        time = seconds(low) if seconds(low) == seconds(high) else f"{seconds(low)} to {seconds(high)}"
        phrases.append(f"{span} on {gpu}: {count} layers, {time}")
    return ", ".join(phrases)


def left_out(result: SearchResult, plan: Plan | None, cluster: ClusterSpec) -> list[Explanation]:
    """Pools that the plan does not use, and why."""
    out = [
        Explanation(kind="left-out", message=reason, data={"pool": cluster.pools[index].name})
        for index, reason in sorted(result.refused_pools.items())
    ]
    if plan is None:
        return out
    used = set(plan.pools)
    for index, pool in enumerate(cluster.pools):
        if pool.name in used or index in result.refused_pools:
            continue
        with_pool = [f for f in result.finalists if index in f.batch.arrangement.pools]
        message = f"pool {pool.name} ({pool.num_gpus} {pool.gpu}) is left out: every plan with it is predicted slower"
        if with_pool:
            closest = min(with_pool, key=lambda finalist: finalist.order)
            best = result.best
            assert best is not None  # noqa: S101  a plan exists, so there is a best finalist
            message += f"; the best one by {closest.step_time_s / best.step_time_s - 1:.1%}"
        out.append(Explanation(kind="left-out", message=message, data={"pool": pool.name}))
    return out


def _rules(result: SearchResult) -> list[Explanation]:
    top = result.rejected.most_common(3)
    if not top:
        return []
    words = ", ".join(f"{rule} ({count})" for rule, count in top)
    return [
        Explanation(
            kind="rules",
            message=f"the target's rules removed {result.pruned['illegal']} of {result.candidates} candidates, "
            f"most by {words}",
            data={"rejected": dict(sorted(result.rejected.items()))},
        )
    ]
