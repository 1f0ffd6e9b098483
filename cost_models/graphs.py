"""Which host calls CUDA graphs save."""

from __future__ import annotations

from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import GraphScope, Plan
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


#: What a search captures of models with experts: how many tokens an expert gets is not known when a graph is captured.
AROUND_EXPERTS: tuple[GraphScope, ...] = ("attn", "moe_router", "moe_preprocess")


def graphs_of(plan: Plan) -> frozenset[str]:
    """Host calls that CUDA graphs save; without a stated scope they capture whole layers."""
    if not plan.options.cuda_graph:
        return frozenset()
    scopes = plan.options.cuda_graph_scope or ("full_iteration",)
    return frozenset(module for scope in scopes for module in GRAPH_SCOPES[scope])


def scope_of_search(model: ModelSpec) -> tuple[GraphScope, ...]:
    """The CUDA graph scope that a search writes into its plans where the target's switches hold graphs; () for all."""
    return AROUND_EXPERTS if model.is_moe else ()


def graphs_of_search(model: ModelSpec, target: Target) -> frozenset[str]:
    """Host calls that the graphs of a search's plans save."""
    if "cuda_graph" not in target.switches:
        return frozenset()
    scopes = scope_of_search(model) or ("full_iteration",)
    return frozenset(module for scope in scopes for module in GRAPH_SCOPES[scope])
