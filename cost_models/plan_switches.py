"""What a plan's options change in the target that prices it."""

from __future__ import annotations

from meshwright.specs.plan import Plan
from meshwright.specs.target import Target

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


def graphs_of(plan: Plan) -> frozenset[str]:
    """Host calls that CUDA graphs save; without a stated scope they capture whole layers."""
    if not plan.options.cuda_graph:
        return frozenset()
    scopes = plan.options.cuda_graph_scope or ("full_iteration",)
    return frozenset(module for scope in scopes for module in GRAPH_SCOPES[scope])


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
