"""Rules of DeepSpeed: batch, ZeRO stage, numerics and what goes with pipeline stages.

Sources are files of deepspeed 0.19.8 below ``runtime/``: C = config.py, ZC = zero/config.py, E = engine.py, PE =
pipe/engine.py, PT = pipe/topology.py. What only the training script says (the model, its stages) is judged as far as it
is known.
"""

from __future__ import annotations

from .facts import Facts
from .logic import both, divides, either, implies, multiples_around, no, options
from .models import PRECISION
from .rule import Rule


def _world(f: Facts) -> tuple[str, ...]:
    return options("world_size", multiples_around(int(f.tp * f.pp * f.sequence_ranks), int(f.world_size)))


def _batch(f: Facts) -> tuple[str, ...]:
    """Totals that the micro-batch allows, the one of the stated accumulation first."""
    step = int(f.micro_batch_size * f.dp)
    steps = [step * int(f.num_microbatches)] if f.num_microbatches > 0 else []
    near = multiples_around(step, int(f.global_batch_size))
    return options("train_batch_size", dict.fromkeys([*steps, *near]))


DEEPSPEED: tuple[Rule, ...] = (
    Rule(
        "deepspeed.A1",
        lambda f: not f.config_faults,
        "the configuration is not one that DeepSpeed reads: {f.config_faults}",
        "config_utils.py:110, the sections' models forbid other fields; C:133 removed fields",
        "parse",
    ),
    Rule(
        "deepspeed.W1",
        lambda f: divides(f.tp * f.pp * f.sequence_ranks, f.world_size),
        "world size {f.world_size} is not divisible by TP {f.tp} x PP {f.pp} x sequence-parallel {f.sequence_ranks}",
        "C:460-471, PT ProcessTopology",
        "groups",
        _world,
    ),
    Rule(
        "deepspeed.W2",
        lambda f: both(f.cp == 1, f.ep == 1, f.rank_order == "tp-cp-ep-dp-pp", f.uniform_stages, not f.rank_fault),
        "a DeepSpeed configuration has data, tensor and pipeline parallelism, equal in all stages (CP {f.cp}, EP "
        "{f.ep}, rank order {f.rank_order})",
        "PT PipeModelDataParallelTopology",
        "groups",
    ),
    Rule(
        "deepspeed.B1",
        lambda f: not f.batch_missing,
        "train_batch_size or train_micro_batch_size_per_gpu must be given",
        "C:648",
        "config",
    ),
    Rule(
        "deepspeed.B2",
        lambda f: f.micro_batch_size * f.num_microbatches * f.dp == f.global_batch_size,
        "train_batch_size {f.global_batch_size} is not train_micro_batch_size_per_gpu {f.micro_batch_size} x "
        "gradient_accumulation_steps {f.num_microbatches} x {f.dp} data-parallel ranks",
        "C:602 _batch_assertion",
        "config",
        _batch,
        after=("deepspeed.W1", "deepspeed.B1"),
    ),
    Rule(
        "deepspeed.N1",
        lambda f: not (f.fp16 and f.bf16),
        "fp16 and bf16 cannot both be enabled",
        "C:511",
        "config",
        lambda f: ("fp16.enabled=false", "bf16.enabled=false"),
    ),
    Rule(
        "deepspeed.Z1",
        lambda f: implies(f.pp > 1, no(f.megatron_fsdp)),
        "ZeRO stages 2 and 3 do not go with pipeline stages (PP {f.pp})",
        "PE:76",
        "build",
        lambda f: ("zero_optimization.stage=0", "zero_optimization.stage=1", "pp=1"),
    ),
    Rule(
        "deepspeed.Z2",
        lambda f: f.optimizer_offload_share == 1.0 or f.zero_stage == 3,
        "offload_optimizer.ratio {f.optimizer_offload_share} needs ZeRO stage 3, not {f.zero_stage}",
        "ZC:395 offload_ratio_check",
        "config",
        lambda f: ("zero_optimization.offload_optimizer.ratio=1.0", "zero_optimization.stage=3"),
    ),
    Rule(
        "deepspeed.Z3",
        lambda f: not (f.gradient_sum and f.zero_stage == 3),
        "gradient_allreduce_op sum is not there with ZeRO stage 3",
        "C:694",
        "config",
        lambda f: ("gradient_allreduce_op=mean",),
    ),
    Rule(
        "deepspeed.Z4",
        lambda f: not f.skips_gradient_norm or f.zero_stage in (1, 2),
        "compute_grad_norm false needs ZeRO stage 1 or 2, not {f.zero_stage}",
        "ZC:388 compute_grad_norm_valid",
        "config",
        lambda f: ("zero_optimization.compute_grad_norm=true",),
    ),
    Rule(
        "deepspeed.Z5",
        lambda f: either(f.secondary_shards <= 1, divides(max(f.secondary_shards, 1), f.world_size)),
        "zero_hpz_partition_size {f.secondary_shards} does not divide the {f.world_size} ranks",
        "utils/groups.py _create_zero_param_parallel_group",
        "groups",
    ),
    *PRECISION,
)
