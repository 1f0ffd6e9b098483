"""``Target``: the framework and version that a plan is for, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from .base import Document

RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "alternate_ops"
]
#: Inputs that Megatron's fine-grained offload moves to host memory (``--offload-modules``).
OffloadModule = Literal[
    "attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act", "fused_group_mlp"
]


#: Options that a search writes into its plans only where it is told to: they need more than a stock installation, or
#: hold memory that is not counted. ``tp_comm_overlap``: Transformer Engine's user buffers; ``ep_comm_overlap``: expert
#: exchange beside another micro-batch, one more of which is alive; ``delay_wgrad``: weight gradients fill it;
#: ``flex_dispatcher``: DeepEP's kernels; ``cuda_graph``: captured layers. ``moe_shared_expert_overlap``, exchange
#: beside the shared expert, needs nothing more, so that targets have it on.
Switch = Literal[
    "tp_comm_overlap", "ep_comm_overlap", "delay_wgrad", "flex_dispatcher", "cuda_graph", "moe_shared_expert_overlap"
]

#: What a request may allow: switches, and what a search leaves out otherwise:
#: ``activation_offload`` over PCIe, ``optimizer_offload``, a share of the optimizer in host memory, and
#: ``all_options``, with these every option that it tries one by one, in spaces of any size.
Allowed = Literal[Switch, "activation_offload", "optimizer_offload", "all_options"]


class RecomputeMode(Document):
    """Which activations are computed again in the backward pass.

    ``num_layers`` with method ``block`` counts the recomputed layers of each stage chunk (the others keep all); with
    ``uniform`` it is the group size. Module ``alternate_ops`` keeps only the results of attention and of every second
    product of a layer, and computes all else again (torchtitan's selective ``op`` policy).
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
    ``sharding_replicas`` are the sharding levels that may be replicated (instances of the optimizer, hybrid sharding),
    ``sharding_with_stages`` those that run with pipeline stages. ``optimizer_offload``: a share of the optimizer may
    live on the host; ``activation_offload_layers``: so may the activations of the first layers, on one stage without
    recompute. ``context_exchanges`` are the ways of context parallelism that a search may choose from.
    ``uneven_experts``: expert-parallel ranks may hold different numbers of experts.
    ``switches`` are options that a search turns on in every plan that may have them; ``waived_rules`` are ids or
    families of rules (``megatron.P9``, ``megatron.P``) that it does not apply, to see what they cost.
    ``deepspeed_pipeline``: stages send a part from every tensor-parallel rank, and the gradients of a shared embedding
    are added up in the parameters' dtype (DeepSpeed ``PipelineEngine``), where Megatron sends the whole and adds fp32.

    Memory: ``logit_bytes`` are live at once for each logit (by default 4 where cross-entropy is fused, else 12;
    Megatron's own works in place on an fp32 copy of 16-bit logits: 6). ``loss_chunks`` pieces of the sequence pass
    head and loss one after the other. ``low_precision_inputs``: GEMM inputs are kept quantised for the weight
    gradient (Transformer Engine), not in 16 bits (torchao). ``fused_activation``: one kernel computes a gated
    activation; else the result before the gate is kept too. ``gradient_buffer``: gradients have a buffer all the
    time; else one micro-batch's gradients come up while its activations go. ``gradient_placeholders``: gradients go
    straight to their buffer, and autograd gets a cached tensor of each weight's shape (Transformer Engine).
    ``gathered_inputs_kept``: under sequence parallelism the inputs of column-parallel maps are kept as gathered,
    not gathered again (DTensor). ``reshard_after_forward``: full sharding drops gathered parameters after each
    unit. ``moe_comm_overlap``: expert all-to-all runs beside the compute of another micro-batch.
    ``activation_offload_modules`` live in host memory between forward and backward.

    Time: ``fused_elementwise``: rotary embeddings and gates run as one kernel each, ``fused_norm``: so do norms; else
    PyTorch's eager operators. ``merged_projections``: maps of one input (queries, keys and values; gate and up) are
    one product.
    ``attention_kernel``: ``native`` to the GPU's generation (cuDNN, FlashAttention-3), or FlashAttention-2.
    ``casts``: how products get their low-precision operands, by Transformer Engine or by a recipe of torchao.
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
    logit_bytes: PositiveFloat | None = None
    loss_chunks: PositiveInt = 1
    low_precision_inputs: bool = True
    fused_activation: bool = True
    fused_elementwise: bool = True
    fused_norm: bool = True
    merged_projections: bool = True
    attention_kernel: Literal["native", "flash2"] = "native"
    casts: Literal["transformer_engine", "tensorwise", "rowwise", "blocks"] = "transformer_engine"
    gradient_buffer: bool = True
    gradient_placeholders: bool = False
    gathered_inputs_kept: bool = False
    reshard_after_forward: bool = True
    moe_comm_overlap: bool = False
    activation_offload_modules: tuple[OffloadModule, ...] = ()
    grouped_gemm: bool = True
    uneven_experts: bool = False
    sharding_replicas: tuple[str, ...] = ()
    sharding_with_stages: tuple[str, ...] = ("none", "zero1", "zero2")
    optimizer_offload: bool = False
    activation_offload_layers: bool = False
    context_exchanges: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    waived_rules: tuple[str, ...] = ()
    deepspeed_pipeline: bool = False
    dispatcher: Literal["allgather", "alltoall", "flex"] = "alltoall"
    environment: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    @property
    def shards_fully_on_one_stage_only(self) -> bool:
        """Whether sharding means full sharding on one stage and ``zero1`` on several, as in torchtitan."""
        return "fsdp" in self.sharding and "fsdp" not in self.sharding_with_stages and "fsdp" in self.sharding_replicas
