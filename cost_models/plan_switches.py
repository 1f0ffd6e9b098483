"""What a plan's options change in the target that prices it."""

from __future__ import annotations

from meshwright.specs.plan import Plan
from meshwright.specs.target import Target


def with_options(target: Target, plan: Plan) -> Target:
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
