"""Rules of Hugging Face Accelerate's configuration files: processes, mesh and FSDP.

Sources are files of accelerate 1.15.0: CA = commands/config/config_args.py, L = utils/launch.py, CL =
commands/launch.py, D = utils/dataclasses.py, P = parallelism_config.py.
"""

from __future__ import annotations

from math import prod

from .facts import Facts
from .logic import both, divides, either, multiples_around, options
from .models import PRECISION
from .rule import Rule


def _mesh(f: Facts) -> int:
    return prod(f.mesh) if f.mesh else 1


def _shards(f: Facts) -> tuple[str, ...]:
    """The size of the sharding dimension that makes the mesh hold all processes."""
    others = _mesh(f) // f.mesh_shards
    fits = int(f.world_size) % others == 0
    return options("dp_shard_size", [int(f.world_size) // others]) if fits else ()


def _batch(f: Facts) -> tuple[str, ...]:
    return options("global_batch_size", multiples_around(int(f.micro_batch_size * f.dp), int(f.global_batch_size)))


ACCELERATE: tuple[Rule, ...] = (
    Rule(
        "accelerate.A1",
        lambda f: not f.config_faults,
        "the file is not one that Accelerate reads: {f.config_faults}",
        "CA:148 from_yaml_file refuses unknown fields; the enumerations of D",
        "parse",
    ),
    Rule(
        "accelerate.W1",
        lambda f: either(f.stated_ranks == 0, f.stated_ranks == f.world_size),
        "num_processes is {f.stated_ranks}, the run has {f.world_size} ranks",
        "L prepare_multi_gpu_env: num_processes counts the ranks of all machines",
        "groups",
        lambda f: options("num_processes", [int(f.world_size)]),
    ),
    Rule(
        "accelerate.W2",
        lambda f: f.stated_nodes < 2 or f.stated_ranks % f.stated_nodes == 0,
        "num_processes {f.stated_ranks} is not a multiple of num_machines {f.stated_nodes}: the rest would not start",
        "L:208 nproc_per_node = num_processes // num_machines",
        "groups",
        lambda f: options("num_processes", multiples_around(f.stated_nodes, f.stated_ranks)),
    ),
    Rule(
        "accelerate.P1",
        lambda f: either(_mesh(f) == 1, _mesh(f) == f.world_size),
        "parallelism_config sizes {f.mesh} (replicate, shard, tp, cp, sp) do not multiply to the {f.world_size} ranks",
        "P _validate_accelerator",
        "groups",
        _shards,
    ),
    Rule(
        "accelerate.P2",
        lambda f: either(f.cp == 1, f.sequence_ranks == 1),
        "context parallelism ({f.cp}) and sequence parallelism ({f.sequence_ranks}) exclude each other",
        "P __post_init__",
        "config",
    ),
    Rule(
        "accelerate.P3",
        lambda f: not (f.mesh and f.mesh_replicas > 1 and f.mesh_shards == 1 and (f.tp > 1 or f.cp > 1)),
        "tensor or context parallelism needs dp_shard_size above 1 where dp_replicate_size is {f.mesh_replicas}",
        "P __post_init__",
        "config",
        lambda f: ("dp_replicate_size=1",),
    ),
    Rule(
        "accelerate.P4",
        lambda f: f.distributed_type != "FSDP" or f.fsdp_version != 2 or _mesh(f) == 1 or f.mesh_shards > 1 or f.cp > 1,
        "FSDP has nothing to shard over: dp_shard_size and cp_size are both 1",
        "P _validate_accelerator",
        "groups",
        after=("accelerate.P1",),
    ),
    Rule(
        "accelerate.P5",
        lambda f: not f.mesh or f.distributed_type != "FSDP" or f.fsdp_version == 2,
        "parallelism_config needs FSDP version 2, not {f.fsdp_version}",
        "CL:1211",
        "config",
        lambda f: ("fsdp_version=2",),
    ),
    Rule(
        "accelerate.F1",
        lambda f: f.fsdp_version != 2 or f.reshard in ("", "true", "false"),
        "fsdp_reshard_after_forward of FSDP2 is true or false, not {f.reshard}",
        "D:1867-1880",
        "config",
        lambda f: ("fsdp_reshard_after_forward=true", "fsdp_reshard_after_forward=false"),
    ),
    Rule(
        "accelerate.F2",
        lambda f: not f.checkpoint_offload or (f.activation_checkpointing and f.fsdp_version == 2),
        "fsdp_activation_checkpointing_offload needs fsdp_activation_checkpointing and FSDP version 2",
        "D:1967-1970",
        "config",
    ),
    Rule(
        "accelerate.F3",
        lambda f: not f.loads_on_one_rank or f.syncs_module_states,
        "fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states: the other ranks would start from noise",
        "L:306",
        "config",
        lambda f: ("fsdp_sync_module_states=true",),
    ),
    Rule(
        "accelerate.F4",
        lambda f: f.fsdp_version != 2 or f.state_dict_type != "LOCAL_STATE_DICT",
        "FSDP2 has no LOCAL_STATE_DICT",
        "D:2069",
        "config",
        lambda f: ("fsdp_state_dict_type=SHARDED_STATE_DICT", "fsdp_state_dict_type=FULL_STATE_DICT"),
    ),
    Rule(
        "accelerate.D1",
        lambda f: not f.ignored_fields,
        "deepspeed_config_file decides these, so they may not be given too: {f.ignored_fields}",
        "D:1508 _deepspeed_config_checks",
        "config",
    ),
    Rule(
        "accelerate.B1",
        lambda f: f.micro_batch_size * f.num_microbatches * f.dp == f.global_batch_size,
        "global batch {f.global_batch_size} is not a multiple of micro-batch {f.micro_batch_size} x {f.dp} "
        "data-parallel ranks",
        "one accumulation count for all ranks",
        "step",
        _batch,
        after=("accelerate.P1", "accelerate.W1"),
    ),
    Rule(
        "accelerate.W3",
        lambda f: both(f.pp == 1, f.ep == 1, f.rank_order == "tp-cp-ep-dp-pp", f.uniform_stages, not f.rank_fault),
        "Accelerate has no pipeline stages (PP {f.pp}) and no expert parallelism (EP {f.ep})",
        "P, the mesh is dp_replicate, dp_shard, cp, sp, tp",
        "groups",
    ),
    Rule(
        "accelerate.T1",
        lambda f: either(f.tp == 1, both(*(divides(f.tp, each) for each in (*f.heads, *f.kv_heads)))),
        "TP {f.tp} does not divide the heads {f.heads} and key-value heads {f.kv_heads}",
        "transformers tp_plan: colwise shards of the query, key and value projections",
        "build",
    ),
    *PRECISION,
)
