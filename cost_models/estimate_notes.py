"""What an estimate says of itself: seconds by term, assumptions, and where its numbers come from."""

from __future__ import annotations

from meshwright.specs.plan import Plan

from . import schedules
from .cells import CostModel
from .protocol import TERMS
from .stage_sums import StageSums
from .step import StepTime


def breakdown_s(plan: Plan, sums: StageSums, step: StepTime) -> dict[str, float]:
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


def assumptions_of(costs: CostModel, plan: Plan) -> tuple[str, ...]:
    """What the estimate takes for granted."""
    workload, out = costs.workload, list(costs.cluster.assumptions)
    if costs.model.is_moe and plan.ep in workload.moe_load_factor_by_ep:
        factor = workload.moe_load_factor_by_ep[plan.ep]
        out.append(f"the fullest of {plan.ep} expert ranks has {factor:.3f} times the mean load, in every MoE layer")
    elif costs.model.is_moe and workload.moe_load_factor == 1.0:
        out.append("routed tokens are balanced over expert ranks (moe_load_factor 1.0)")
    longest = costs.model.max_position_embeddings
    if longest and workload.seq_length > longest:
        out.append(f"sequences of {workload.seq_length} tokens are longer than the model's stated maximum of {longest}")
    if costs.model.vision:
        out.append("one image a sequence passes the vision tower")
    if schedules.get(plan.schedule).copies > 1:
        out.append("gradients are reduced within each copy of the model; adding up the copies is not priced")
    out += [
        f"{on.gpu.name}: no operator measurements ship for {workload.precision}; rates from its family"
        for on in costs.devices
        if on.fit.rung != "shipped fit"
    ]
    return tuple(dict.fromkeys(out))


def rungs_of(costs: CostModel) -> dict[str, str]:
    """Where each term's numbers come from: the worst rung of the pools."""
    fitted = all(on.fit.rung == "shipped fit" for on in costs.devices)
    measured = "shipped fit" if fitted else "spec roofline"
    out = dict.fromkeys((*TERMS, "pp_comm", "grad_reduce", "param_gather"), "shipped fit")
    out |= {"gemm": measured, "attention": measured, "recompute": measured}
    out |= {"memory_bound": "spec roofline", "optimizer": "spec roofline", "bubble": "event simulation"}
    return out
