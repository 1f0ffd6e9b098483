"""Which layers have experts, and the experts themselves, under their many names."""

from __future__ import annotations

from dataclasses import dataclass

from ..feed_forward import MoEFFN
from .fields import Fields

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "experts_per_token", "moe_top_k")


@dataclass(frozen=True)
class Routing:
    """Number of experts, how many see a token, and how the router may group them."""

    num_experts: int
    top_k: int
    num_groups: int | None = None
    top_k_groups: int | None = None


def routing(fields: Fields, *, groups: bool = False, num_experts_names: tuple[str, ...] = NUM_EXPERTS) -> Routing:
    """Read the router's sizes; more experts a token than there are is a fault."""
    num_experts = fields.size(*_known_first(fields, num_experts_names))
    top_k = fields.size(*_known_first(fields, TOP_K))
    num_groups = fields.optional("n_group", "num_expert_group") if groups else None
    top_k_groups = fields.optional("topk_group") if groups else None
    if not fields.report.faults:
        if top_k > num_experts:
            fields.fault(_known_first(fields, TOP_K)[0], f"{top_k} experts a token, but there are {num_experts}")
        elif num_groups and num_experts % num_groups:
            fields.fault("n_group", f"{num_groups} groups do not divide {num_experts} experts")
    if num_groups == 1:
        num_groups = top_k_groups = None
    return Routing(num_experts, top_k, num_groups, top_k_groups)


def experts(
    route: Routing,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    router_bias: bool = False,
    score_bias: bool = False,
    shared_width: int = 0,
    shared_bias: bool = False,
    shared_gate: bool = False,
    latent: int | None = None,
) -> MoEFFN:
    """The MoE network of a layer."""
    return MoEFFN(
        num_experts=route.num_experts,
        top_k=route.top_k,
        expert_intermediate_size=width,
        gated=gated,
        bias=bias,
        router_bias=router_bias,
        expert_score_bias=score_bias,
        shared_intermediate_size=shared_width,
        shared_bias=shared_bias and shared_width > 0,
        shared_gate=shared_gate,
        latent_size=latent,
        num_expert_groups=route.num_groups,
        top_k_groups=route.top_k_groups,
    )


def sparse_after(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers are sparse in the DeepSeek way: ``mlp_layer_types``, or ``first_k_dense_replace`` dense layers and
    then every ``moe_layer_freq``-th."""
    types = fields.words("mlp_layer_types", num_layers, ("dense", "sparse"))
    if types is not None:
        return tuple(kind == "sparse" for kind in types)
    first = fields.setting("first_k_dense_replace", minimum=0)
    every = fields.stated("moe_layer_freq", minimum=1) if fields.has("moe_layer_freq") else 1
    return tuple(index >= first and index % every == 0 for index in range(num_layers))


def sparse_by_step(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers are sparse in the Qwen way: every ``decoder_sparse_step``-th but ``mlp_only_layers``."""
    step = fields.setting("decoder_sparse_step") if "decoder_sparse_step" in fields.defaults else 1
    only_dense = fields.integers("mlp_only_layers") or ()
    return tuple((index + 1) % step == 0 and index not in only_dense for index in range(num_layers))


def _known_first(fields: Fields, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names with those that the class knows in front, so that a fault names the right one."""
    return tuple(sorted(names, key=lambda name: name not in fields.data and name not in fields.defaults))
