"""A DeepSpeed configuration as typed values, with DeepSpeed's own defaults.

Source: runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py of deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..fields import Fields

#: Fields of zero_optimization, whose model forbids others. Values: 0.19.8, with those that older files still hold.
ZERO_FIELDS = frozenset(
    [
        "stage",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "compute_grad_norm",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "offload_param",
        "offload_optimizer",
        "zenflow",
        "sub_group_size",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "cpu_offload",
        "prefetch_bucket_size",
        "stage3_prefetch_bucket_size",
        "param_persistence_threshold",
        "stage3_param_persistence_threshold",
        "model_persistence_threshold",
        "stage3_model_persistence_threshold",
        "max_live_parameters",
        "stage3_max_live_parameters",
        "max_reuse_distance",
        "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential",
        "stage3_allgather_sequential",
        "stage3_gather_fp16_weights_on_model_save",
        "ignore_unused_parameters",
        "legacy_stage1",
        "round_robin_gradients",
        "parameter_alignment",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "memory_efficient_linear",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "leaf_module",
        "mics_shard_size",
        "mics_hierarchical_params_gather",
    ]
)
_DEVICES = ("none", "cpu", "nvme")
#: Optimizers that are a cost-model's own, by DeepSpeed's name in lower case.
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "muon": "muon"}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Values that rules and plans read. None is not given; ``automatic`` names fields that the trainer fills in."""

    stage: int
    micro_batch_size: int | None
    accumulation: int | None
    train_batch_size: int | None
    fp16: bool
    bf16: bool
    optimizer: str
    optimizer_device: str
    optimizer_share: float
    parameter_device: str
    tp: int
    sequence_ranks: int
    secondary_shards: int
    overlap: bool
    gradient_dtype: str | None
    gradient_sum: bool
    skips_gradient_norm: bool
    faults: tuple[str, ...]
    automatic: tuple[str, ...]
    notes: tuple[str, ...]


def settings_of(data: Mapping[str, Any]) -> DeepSpeedSettings:
    """The settings in ``data``; what is wrong with it is in their ``faults``."""
    fields = Fields(data)
    zero = fields.section("zero_optimization", ZERO_FIELDS)
    for name in ("bf16", "fp16"):
        fields.section(name)
    stage = fields.integer("zero_optimization.stage", 0, 0, 3) or 0
    notes: list[str] = []
    optimizer_device = _device(fields, "offload_optimizer", zero, "cpu_offload")
    parameter_device = _device(fields, "offload_param", zero, "cpu_offload_param")
    if parameter_device != "none" and stage < 3:
        notes.append(f"offload_param has no effect at ZeRO stage {stage}: only stage 3 moves parameters")
        parameter_device = "none"
    if optimizer_device != "none" and stage < 1:
        notes.append("offload_optimizer has no effect at ZeRO stage 0")
        optimizer_device = "none"
    dtypes = ("fp32", "fp16", "bf16")
    accumulated = fields.word("data_types.grad_accum_dtype", "", dtypes)
    named = fields.word("optimizer.type", "Adam", _names(data))
    if named.lower() not in _OPTIMIZERS:
        notes.append(f"optimizer {named} is priced as Adam")
    sum_or_mean = fields.word("gradient_allreduce_op", "mean", ("mean", "sum"))
    return DeepSpeedSettings(
        stage=stage,
        micro_batch_size=_size(fields, "train_micro_batch_size_per_gpu"),
        accumulation=_size(fields, "gradient_accumulation_steps"),
        train_batch_size=_size(fields, "train_batch_size"),
        fp16=bool(fields.truth("fp16.enabled")),
        bf16=bool(fields.truth("bf16.enabled")),
        optimizer=_OPTIMIZERS.get(named.lower(), "adam"),
        optimizer_device=optimizer_device,
        optimizer_share=fields.number("zero_optimization.offload_optimizer.ratio", 1.0, 0.0, 1.0),
        parameter_device=parameter_device,
        tp=max(fields.integer("tensor_parallel.autotp_size", 0) or 0, 1),
        sequence_ranks=fields.integer("sequence_parallel_size", 1, 1) or 1,
        secondary_shards=fields.integer("zero_optimization.zero_hpz_partition_size", 1) or 1,
        overlap=bool(fields.truth("zero_optimization.overlap_comm", stage == 3)),
        gradient_dtype=accumulated or None,
        gradient_sum=sum_or_mean == "sum",
        skips_gradient_norm=fields.truth("zero_optimization.compute_grad_norm", True) is False,
        faults=tuple(fields.faults),
        automatic=tuple(fields.automatic),
        notes=tuple(notes),
    )


def _size(fields: Fields, name: str) -> int | None:
    return fields.integer(name, None, 1)


def _device(fields: Fields, name: str, zero: Mapping[str, Any], old: str) -> str:
    """Where the state lives; the deprecated switch ``old`` says cpu."""
    if isinstance(zero.get(name), str):  # Fields would look into it
        fields.section(f"zero_optimization.{name}")
    device = fields.word(f"zero_optimization.{name}.device", "none", _DEVICES)
    return "cpu" if device == "none" and fields.truth(f"zero_optimization.{old}") else device


def _names(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Any optimizer: PyTorch's own are found by name."""
    section = data.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    return (kind,) if isinstance(kind, str) else ("Adam",)
