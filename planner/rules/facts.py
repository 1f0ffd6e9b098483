"""``Facts``: everything the rules look at, of one plan (scalars) or of many (arrays in the same fields)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .layout import Layout
from .logic import Number, Truth

#: Environment variable that orders communication after compute on GPUs before Blackwell.
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


# Neither compared nor shown: the generated methods of so many fields would only cost start-up.
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Facts:
    """Values of a plan, its model and its target. 0, None, False and () mean "not set".

    Tuples of sizes list the distinct values over all layer kinds of the model, so that a rule on heads or widths
    holds for every layer. Degrees, batch numbers and recompute flags may be arrays of equal length.
    """

    # Target and hardware.
    #: Which of ``RULE_SETS`` judges, and the version of the framework, for rules that came or went.
    rule_set: str = "megatron"
    version: tuple[int, ...] = (0, 19)
    kv_head_replication: bool = True
    compute_capabilities: tuple[float, ...] = ()
    te_version: tuple[int, ...] | None = (2, 12)
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The launch script sets the environment as the plan needs it.
    environment_follows: bool = False
    precision: str = "bf16"
    gpus_without_precision: tuple[str, ...] = ()
    precision_alternatives: tuple[str, ...] = ()
    inexpressible: tuple[str, ...] = ()

    # Degrees.
    world_size: Number = 1
    tp: Number = 1
    pp: Number = 1
    cp: Number = 1
    ep: Number = 1
    etp: Number = 1
    dp: Number = 1
    edp: Number = 1
    vpp: Number = 1
    weight_shards: int = 0
    expert_weight_shards: int = 0
    rank_order: str = "tp-cp-ep-dp-pp"
    uniform_stages: bool = True
    rank_fault: str = ""
    dist_opt_instances: Number = 1

    # Batch and sequence.
    micro_batch_size: Number = 1
    global_batch_size: Number = 1
    num_microbatches: Number = 1
    eval_micro_batch_size: Number = 0
    eval_global_batch_size: Number = 0
    decrease_batch_size: bool = False
    batch_schedule_with_global_batch: bool = False
    seq_length: int = 1
    max_position_embeddings: int = 0
    variable_seq_lengths: bool = False

    # Model.
    missing: tuple[str, ...] = ()
    not_positive: tuple[str, ...] = ()
    num_layers: int = 1
    hidden_size: int = 1
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    head_dim_given: bool = True
    ffn_hidden_sizes: tuple[int, ...] = ()
    moe_ffn_hidden_sizes: tuple[int, ...] = ()
    shared_ffn_hidden_sizes: tuple[int, ...] = ()
    linear_heads: tuple[int, ...] = ()
    linear_head_pairs: tuple[tuple[int, int], ...] = ()
    mamba_heads: tuple[int, ...] = ()
    mamba_groups: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    topk: int = 0
    moe_layer_pattern_length: int | None = None
    linear_bias: bool = False
    tied_embeddings: bool = False
    mla: bool = False
    group_query_attention: bool = False
    gated_delta_net: bool = False
    sparse_attention: bool = False
    latent_moe: bool = False
    mtp_num_layers: int = 0
    position_embedding: str = "rope"
    rope_fusion: bool = False
    rope_type: str | None = None
    swiglu: bool = False
    squared_relu: bool = False
    quick_geglu: bool = False
    hyper_connections: bool = False

    # Pipeline split.
    split: str = "even"
    vpp_flags: tuple[str, ...] = ()
    layers_per_virtual_stage: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    layout: Layout | None = None
    layout_fault: str = ""
    hybrid_segments: int | None = None
    hybrid_has_bars: bool = False
    overlap_p2p: bool = True
    schedule: str = "1f1b"
    #: Schedules that the target runs.
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    microbatch_group_size: Number = 0
    p2p_backend: str = ""
    defer_embedding_wgrad: bool = False
    grad_accumulation_fusion: bool = True

    # Tensor and context parallelism.
    sequence_parallel: Truth = False
    tp_comm_overlap: Truth = False
    transformer_impl: str = "transformer_engine"
    cp_comm_type: tuple[str, ...] = ("p2p",)
    hierarchical_cp_sizes: tuple[int, ...] = ()
    hybrid_cp: bool = False
    per_token_loss: bool = False
    dataloader_type: str = "single"

    # Experts.
    dispatcher: str = "allgather"
    flex_backend: str = "deepep"
    deepep: bool = False
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    rank_capacity_factor: float | None = None
    load_balancing: tuple[str, ...] = ("aux_loss",)
    aux_loss_coefficients: int = 1
    score_function: str = "softmax"
    pre_softmax: bool = False
    expert_score_bias: bool = False
    router_groups: int = 0
    router_group_topk: int = 0
    shared_experts: bool = False
    shared_expert_overlap: bool = False
    moe_a2a_overlap: Truth = False
    delay_wgrad: Truth = False
    fp8_dispatch: bool = False
    dispatch_backward_overlap: bool = False
    grouped_gemm: bool = False
    permute_fusion: bool = False
    pad_for_quantization: bool = False

    # Data parallelism, optimizer, numerics.
    optimizer: str = "adam"
    dist_opt: Truth = False
    megatron_fsdp: Truth = False
    torch_fsdp2: bool = False
    overlap_grad_reduce: Truth = False
    overlap_param_gather: Truth = False
    param_gather_with_step: bool = False
    average_in_collective: bool = False
    ckpt_format: Any = "torch_dist"
    gloo: bool = True
    bucket_flags: tuple[str, ...] = ()
    precision_aware: bool = False
    optimizer_cpu_offload: bool = False
    state_dtypes: tuple[str, ...] = ()
    single_grouped_weight: bool = False
    bf16: bool = True
    fp16: bool = False
    fp8: bool = False
    fp8_recipe: str = "delayed"
    fp8_param_gather: bool = False
    fp4: bool = False
    fp4_param_gather: bool = False
    reuse_grad_buffer: bool = False

    # Recompute, offload, graphs.
    recompute_full: Truth = False
    recompute_selective: Truth = False
    recompute_method: str | None = None
    recompute_layers_given: Truth = False
    recompute_method_given: Truth = False
    recompute_modules: Mapping[str, Truth] = field(default_factory=dict)
    distribute_saved_activations: bool = False
    cpu_offload_layers: int = 0
    fine_grained_offload: bool = False
    offload_modules: tuple[str, ...] = ()
    cuda_graph: str = "none"
    cuda_graph_modules: tuple[str, ...] = ()
    graph_padding: bool = False
    nan_check: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    # torchtitan.
    #: The model family of torchtitan that holds the model, and whether it can be cut into pipeline stages.
    model_family: str = ""
    pipelines: bool = True
    dp_replicate: Number = 1
    dp_shard: Number = 1
    #: Stage chunks that a rank runs, and what is wrong with how a configuration asks for them.
    stages_per_rank: Number = 1
    stage_fault: str = ""
    expert_tensor_degree: Number = 1
    reduces_once: Truth = False
    #: Micro-batches of one run of the schedule, where gradients are added up over several; 0 = all of a step.
    microbatches_of_pass: Number = 0
    compiled: bool = False
    attention_backend: str = "sdpa"
    loss_chunks: int = 1
    #: Fields that the framework does not know or cannot take.
    config_faults: tuple[str, ...] = ()

    # FlagScale: pools of every stage; empty where a search has not chosen them yet.
    stage_pools: tuple[tuple[str, ...], ...] = ()

    # DeepSpeed and Accelerate configurations.
    #: Batch fields that are given nowhere.
    batch_missing: tuple[str, ...] = ()
    zero_stage: int = 0
    gradient_sum: bool = False
    skips_gradient_norm: bool = False
    optimizer_offload_share: float = 1.0
    secondary_shards: int = 1
    #: Processes and machines that the configuration states (0 = not), and sizes of its mesh.
    stated_ranks: int = 0
    stated_nodes: int = 0
    mesh: tuple[int, ...] = ()
    mesh_replicas: int = 1
    mesh_shards: int = 1
    sequence_ranks: int = 1
    distributed_type: str = ""
    fsdp_version: int = 0
    reshard: str = ""
    activation_checkpointing: bool = False
    checkpoint_offload: bool = False
    loads_on_one_rank: bool = False
    syncs_module_states: bool = True
    state_dict_type: str = ""
    ignored_fields: tuple[str, ...] = ()

    # Training flags that Megatron checks together.
    data_sources: int = 1
    train_iters_and_samples: bool = False
    save_without_interval: bool = False
    min_lr_above_lr: bool = False
    removed_flags: tuple[str, ...] = ()
    te_cross_entropy_fusion: bool = False

    # Megatron-Bridge's own configuration.
    #: Virtual stages as configured, 0 where left open; None where the layout is generated with them.
    stated_vpp: int | None = None
    data_seq_length: int = 0
    mixed_precision: str = "bf16_mixed"
    mixed_precision_known: bool = True
    finetuning: bool = False
    packed_sequences: bool = False
    #: Checkpoints are written or read.
    saves: bool = False
    te_rng_tracker: bool = False

    @property
    def is_moe(self) -> bool:
        return bool(self.experts)

    @property
    def fully_shards(self) -> Truth:
        """Whether torchtitan 0.2 wraps the model in FSDP, which is what gives it mixed precision."""
        return np.logical_or(np.asarray(self.dp_shard) > 1, np.asarray(self.cp) > 1)

    @property
    def in_flight(self) -> Number:
        """Micro-batches that one run of the schedule sees."""
        return np.where(np.asarray(self.microbatches_of_pass) > 0, self.microbatches_of_pass, self.num_microbatches)

    @property
    def rounds(self) -> Number:
        """Rounds of micro-batches of PyTorch's interleaved schedule."""
        return np.maximum(self.in_flight // self.pp, 1)

    @property
    def gtp(self) -> int:
        """Extra weight shards of dense layers beyond TP (1 = none)."""
        return self.weight_shards // int(self.tp) if self.weight_shards else 1

    @property
    def expert_gtp(self) -> int:
        """Extra weight shards of experts beyond ETP (1 = none)."""
        return self.expert_weight_shards // int(self.etp) if self.expert_weight_shards else 1

    @property
    def group(self) -> Number:
        """Micro-batches of a virtual-stage group; the default is PP."""
        return np.where(np.asarray(self.microbatch_group_size) > 0, self.microbatch_group_size, self.pp)

    @property
    def split_layers(self) -> int:
        """Layers that the even split divides: decoder layers, one for the embedding, one for the loss."""
        return self.num_layers + int(self.account_for_embedding) + int(self.account_for_loss)

    @property
    def even_split(self) -> bool:
        return self.split == "even" and self.first_stage_layers is None and self.last_stage_layers is None

    @property
    def uneven_ends(self) -> bool:
        """Whether the first or the last stage has a layer count of its own."""
        return self.first_stage_layers is not None or self.last_stage_layers is not None

    @property
    def middle(self) -> tuple[int, int]:
        """Layers and stages between the ends that have counts of their own."""
        ends = [count for count in (self.first_stage_layers, self.last_stage_layers) if count is not None]
        return self.num_layers - sum(ends), int(self.pp) - len(ends)

    @property
    def layout_faults(self) -> str:
        """Why the layout does not fit the model, as text; empty if it does."""
        if self.layout is None:
            return ""
        return "; ".join(self.layout.faults(self.num_layers, self.mtp_num_layers, int(self.pp)))

    @property
    def sm(self) -> float:
        """The lowest compute capability in use; infinite when unknown."""
        return min(self.compute_capabilities, default=float("inf"))

    @property
    def max_connections(self) -> str:
        """Value of CUDA_DEVICE_MAX_CONNECTIONS; empty means unset."""
        return self.environment.get(MAX_CONNECTIONS, "")

    @property
    def a2a_size(self) -> Number:
        """Ranks over which context parallelism exchanges heads."""
        if "a2a" in self.cp_comm_type:
            return self.cp
        if "a2a+p2p" in self.cp_comm_type and self.hierarchical_cp_sizes:
            return self.hierarchical_cp_sizes[0]
        return 1

    def recomputes(self, module: str) -> Truth:
        """Whether selective recompute lists ``module``."""
        return self.recompute_modules.get(module, False)

    def graphs(self, module: str) -> bool:
        """Whether a CUDA graph captures ``module``; no list of modules means all."""
        return self.cuda_graph != "none" and (not self.cuda_graph_modules or module in self.cuda_graph_modules)

    @property
    def unknown_recompute_modules(self) -> tuple[str, ...]:
        known = self.known_recompute_modules
        return tuple(sorted(name for name, on in self.recompute_modules.items() if on is True and name not in known))

    @property
    def known_recompute_modules(self) -> tuple[str, ...]:
        """Modules that selective recompute of the version knows."""
        return MODULES if self.version >= (0, 19) else tuple(name for name in MODULES if name != "gdn_norm_out")

    def te_at_least(self, *version: int) -> bool:
        """Whether TransformerEngine is there in at least this version."""
        return self.te_version is not None and self.te_version >= version


#: Modules that selective recompute of Megatron knows since 0.19 (TC:1947).
MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
)
