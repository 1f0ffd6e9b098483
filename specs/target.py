"""``Target``: the framework and version that a plan is for, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from .base import Document

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class RecomputeMode(Document):
    """Which activations are computed again in the backward pass.

    ``num_layers`` with method ``block`` counts the recomputed layers of each stage chunk (the others keep all); with
    ``uniform`` it is the group size.
    """

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[RecomputeModule, ...] = ()
    method: Literal["uniform", "block"] | None = None
    num_layers: PositiveInt | None = None

    @property
    def label(self) -> str:
        """Short form: ``none``, ``selective:layernorm+moe_act``, ``full`` or ``full:block:3``."""
        if self.granularity == "selective":
            return "selective:" + "+".join(self.modules)
        if self.granularity == "full" and self.method == "block":
            return f"full:block:{self.num_layers}"
        return self.granularity


class Target(Document):
    """Capabilities, defaults and environment of one framework version.

    ``verified`` says how well the exports for it are checked: ``code`` (its own code accepts them in CI), ``schema``
    or ``source-read``. ``rules`` names the rule set of ``meshwright.planner`` that holds for it.
    ``deepspeed_pipeline``: stages send a part from every tensor-parallel rank, and the gradients of a shared embedding
    are added up in the parameters' dtype (DeepSpeed ``PipelineEngine``), where Megatron sends the whole and adds fp32.
    """

    name: str
    framework: str
    version: str
    verified: Literal["code", "schema", "source-read"]
    rules: str
    uniform_degrees: bool = True
    pipeline_layouts: bool = True
    schedules: tuple[str, ...] = Field(min_length=1)
    sharding: tuple[str, ...] = Field(min_length=1)
    recompute: tuple[RecomputeMode, ...] = Field(min_length=1)
    recompute_block_layers: bool = False
    rank_orders: tuple[str, ...] = Field(min_length=1)
    vocab_divisor: PositiveInt = 128
    sequence_parallel: bool = True
    kv_head_replication: bool = True
    expert_tensor_parallel: bool = True
    attention_kinds: tuple[str, ...] = ()
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    fused_cross_entropy: bool = True
    fused_attention: bool = True
    grouped_gemm: bool = True
    deepspeed_pipeline: bool = False
    dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall"
    environment: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
