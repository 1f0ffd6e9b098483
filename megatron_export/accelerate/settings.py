"""An Accelerate configuration file as typed values, with Accelerate's own defaults.

Source: commands/config/config_args.py, commands/launch.py and utils/dataclasses.py of accelerate 1.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..fields import Fields

#: Fields of the file; others are refused (ClusterConfig).
FIELDS = frozenset(
    [
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "num_processes",
        "machine_rank",
        "num_machines",
        "gpu_ids",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "same_network",
        "main_training_function",
        "enable_cpu_affinity",
        "fp8_config",
        "deepspeed_config",
        "fsdp_config",
        "parallelism_config",
        "megatron_lm_config",
        "mpirun_config",
        "downcast_bf16",
        "tpu_name",
        "tpu_zone",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "command_file",
        "commands",
        "tpu_vm",
        "tpu_env",
        "dynamo_config",
        "dynamo_backend",
        "fp16",
    ]
)
DISTRIBUTED = [
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
    "MULTI_HPU",
    "MULTI_NEURON",
]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_MESH = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
#: Fields that a file of DeepSpeed decides where one is named (utils/dataclasses.py:1508).
_DECIDED_BY_FILE = [
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
]


@dataclass(frozen=True)
class AccelerateSettings:
    """Values that rules and plans read. ``mesh`` is replicate, shard, tp, cp, sp, or () where none is given;
    ``deepspeed`` is the section of that name, ``strategy`` FSDP1's word for what is sharded."""

    distributed_type: str
    processes: int
    machines: int
    precision: str
    mesh: tuple[int, ...]
    fsdp_version: int
    strategy: str
    reshard: str
    checkpointing: bool
    checkpoint_offload: bool
    parameter_offload: bool
    efficient_loading: bool
    syncs_module_states: bool
    state_dict_type: str
    wraps: bool
    deepspeed: Mapping[str, Any]
    ignored: tuple[str, ...]
    faults: tuple[str, ...]


def settings_of(data: Mapping[str, Any]) -> AccelerateSettings:
    """The settings in ``data``; what is wrong with it is in their ``faults``."""
    fields = Fields(data)
    fields.faults += [f"{str(name)[:60]} is unknown" for name in data if name not in FIELDS]
    if "distributed_type" not in data:
        fields.faults.append("distributed_type is missing")
    kind = fields.word("distributed_type", "NO", DISTRIBUTED)
    if data.get("distributed_type") is False:  # YAML reads NO as false, which Accelerate's writer quotes
        fields.faults[-1:] = []
    precision = "no" if data.get("mixed_precision") is False else None
    precision = precision or fields.word("mixed_precision", "no", ("no", "fp16", "bf16", "fp8"))
    fsdp, deepspeed = fields.section("fsdp_config"), fields.section("deepspeed_config")
    version = fields.integer("fsdp_config.fsdp_version", 1, 1, 2) or 1
    reshard, strategy = _resharding(fields, fsdp, version)
    return AccelerateSettings(
        distributed_type=kind,
        processes=max(fields.integer("num_processes", 0, -1) or 0, 0),
        machines=fields.integer("num_machines", 1, 1) or 1,
        precision=precision,
        mesh=_mesh(fields, data),
        fsdp_version=version if kind == "FSDP" else 0,
        strategy=strategy,
        reshard=reshard,
        checkpointing=bool(fields.truth("fsdp_config.fsdp_activation_checkpointing")),
        checkpoint_offload=bool(fields.truth("fsdp_config.fsdp_activation_checkpointing_offload")),
        parameter_offload=bool(fields.truth("fsdp_config.fsdp_offload_params")),
        efficient_loading=kind == "FSDP" and bool(fields.truth("fsdp_config.fsdp_cpu_ram_efficient_loading", True)),
        syncs_module_states=bool(fields.truth("fsdp_config.fsdp_sync_module_states", True)),
        state_dict_type=fields.word("fsdp_config.fsdp_state_dict_type", "", _STATE_DICTS),
        wraps=fields.word("fsdp_config.fsdp_auto_wrap_policy", "NO_WRAP", _WRAPS) != "NO_WRAP",
        deepspeed=deepspeed,
        ignored=tuple(name for name in _DECIDED_BY_FILE if name in deepspeed)
        if "deepspeed_config_file" in deepspeed
        else (),
        faults=tuple(fields.faults),
    )


def _mesh(fields: Fields, data: Mapping[str, Any]) -> tuple[int, ...]:
    section = fields.section("parallelism_config")
    if not section:
        return ()
    prefix = "parallelism_config_"
    names = {name: f"{prefix}{name}" if f"{prefix}{name}" in section else name for name in _MESH}
    return tuple(fields.integer(f"parallelism_config.{names[name]}", 1, 1) or 1 for name in _MESH)


def _resharding(fields: Fields, fsdp: Mapping[str, Any], version: int) -> tuple[str, str]:
    """(what FSDP2 is told of parameters after the forward pass, FSDP1's strategy)."""
    value = fsdp.get("fsdp_reshard_after_forward")
    word = "" if value is None else str(value).lower()
    given = fsdp.get("fsdp_sharding_strategy")
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= len(STRATEGIES):
        strategy = STRATEGIES[given - 1]
    else:
        strategy = fields.word("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD", STRATEGIES)
    return (word if version == 2 else ""), strategy
