"""Rules on degrees, world size, tensor parallelism and batch (W, T, B of the table)."""

from __future__ import annotations

from math import lcm

from .facts import Facts
from .logic import both, divides, divisors, either, every, implies, multiples_around, nearest, no, options
from .rule import Rule


def _world(f: Facts) -> tuple[str, ...]:
    dense, expert = f.tp * f.pp * f.cp * f.gtp, f.etp * f.ep * f.pp * f.expert_gtp
    return options("world_size", multiples_around(lcm(int(dense), int(expert)), int(f.world_size)))


def _tp_of_heads(f: Facts) -> tuple[str, ...]:
    return options("tp", nearest(divisors(*f.heads), int(f.tp)))


def _tp_of_kv(f: Facts) -> tuple[str, ...]:
    def legal_for(tp: int, kv: int) -> bool:
        return kv % tp == 0 or (f.kv_head_replication and tp % kv == 0)

    legal = [tp for tp in divisors(*f.heads) if all(legal_for(tp, kv) for kv in f.kv_heads)]
    return options("tp", nearest(legal, int(f.tp)))


def _ep(f: Facts) -> tuple[str, ...]:
    return options("ep", nearest(divisors(*f.experts), int(f.ep)))


def _global_batch(f: Facts) -> tuple[str, ...]:
    step = int(f.micro_batch_size * f.dp)
    near = options("global_batch_size", multiples_around(step, int(f.global_batch_size)))
    per_rank = int(f.global_batch_size) // int(f.dp) if f.global_batch_size % f.dp == 0 else 0
    if not per_rank:
        return near
    return near + options("micro_batch_size", nearest(divisors(per_rank), int(f.micro_batch_size), 3))


GRID: tuple[Rule, ...] = (
    Rule(
        "megatron.A1",
        lambda f: not f.missing,
        "required arguments are missing: {f.missing}",
        "A:1269 required_args, A:691",
        "validate",
    ),
    Rule(
        "megatron.A2",
        lambda f: not f.removed_flags,
        "flags are no longer valid: {f.removed_flags}",
        "A:591-604",
        "validate",
    ),
    Rule(
        "megatron.A3",
        lambda f: not f.not_positive,
        "must be positive: {f.not_positive}",
        "A:692, A:706, division by the degrees",
        "validate",
    ),
    Rule(
        "megatron.W1",
        lambda f: divides(f.tp * f.pp * f.cp * f.gtp, f.world_size),
        "world size {f.world_size} is not divisible by TP {f.tp} x PP {f.pp} x CP {f.cp} (weight shards x {f.gtp})",
        "A:432, PS:822",
        "validate",
        _world,
        after=("megatron.W8",),
    ),
    Rule(
        "megatron.W2",
        lambda f: divides(f.etp * f.ep * f.pp * f.expert_gtp, f.world_size),
        "world size {f.world_size} is not divisible by ETP {f.etp} x EP {f.ep} x PP {f.pp}",
        "PS:881",
        "groups",
        _world,
        after=("megatron.W8",),
    ),
    Rule(
        "megatron.W3",
        lambda f: f.tp * f.cp * f.dp * f.gtp == f.etp * f.ep * f.edp * f.expert_gtp,
        "the grids differ in size: TP {f.tp} x CP {f.cp} x DP {f.dp} against ETP {f.etp} x EP {f.ep} x EDP {f.edp}",
        "PS:887-896",
        "groups",
        after=("megatron.W1", "megatron.W2"),
    ),
    Rule(
        "megatron.W4",
        lambda f: f.rank_order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
        "rank order {f.rank_order} is not available",
        "training/initialize.py:395",
        "groups",
        lambda f: ("rank_order=tp-cp-ep-dp-pp", "rank_order=tp-cp-ep-pp-dp"),
    ),
    Rule(
        "megatron.W5",
        lambda f: either(f.rank_order.endswith("pp"), f.pp == 1, f.dp == f.edp),
        "rank order {f.rank_order} with PP {f.pp} needs equal DP {f.dp} and expert DP {f.edp} (ETP x EP == TP x CP)",
        "PS:898",
        "groups",
        after=("megatron.W1", "megatron.W2"),
    ),
    Rule(
        "megatron.W7",
        lambda f: divides(f.dist_opt_instances, f.dp * f.cp, f.edp),
        "{f.dist_opt_instances} distributed-optimizer instances must divide DP {f.dp} x CP {f.cp} and expert DP "
        "{f.edp}",
        "PS:922, PS:1447",
        "groups",
        lambda f: options("num_distributed_optimizer_instances", divisors(int(f.dp * f.cp), int(f.edp))[:8]),
        after=("megatron.W1", "megatron.W2"),
    ),
    Rule(
        "megatron.W8",
        lambda f: both(
            not f.weight_shards or both(f.weight_shards >= f.tp, divides(f.tp, f.weight_shards)),
            not f.expert_weight_shards or both(f.expert_weight_shards >= f.etp, divides(f.etp, f.expert_weight_shards)),
        ),
        "weight shards {f.weight_shards} (experts {f.expert_weight_shards}) must be multiples of TP {f.tp} (ETP "
        "{f.etp})",
        "MP:18-42",
        "validate",
    ),
    Rule(
        "megatron.W8b",
        lambda f: (
            (f.gtp == 1 and f.expert_gtp == 1)
            or (
                f.dist_opt_instances == 1
                and not f.average_in_collective
                and f.ckpt_format in ("torch", "torch_dist")
                and f.te_at_least(2, 19)
            )
        ),
        "extra weight shards exclude several distributed-optimizer instances and --ddp-average-in-collective, and need "
        "--ckpt-format torch or torch_dist and TransformerEngine 2.19",
        "A:1554-1568, PS:808, training/initialize.py:363",
        "validate",
        after=("megatron.W8",),
    ),
    Rule(
        "megatron.W9",
        lambda f: f.uniform_stages,
        "Megatron runs every stage at the same TP, CP, DP, EP, micro-batch size, sharding and recompute; "
        "this plan differs between stages",
        "PS:749 (one value of each degree)",
        "groups",
    ),
    Rule(
        "megatron.W10",
        lambda f: not f.rank_fault,
        "{f.rank_fault}",
        "PS:289 (rank order), core/num_microbatches_calculator.py (one number of micro-batches)",
        "groups",
        after=("megatron.W9",),
    ),
    Rule(
        "megatron.T1",
        lambda f: divides(f.tp, *f.heads),
        "attention heads {f.heads} are not divisible by TP {f.tp}",
        "TC:1321",
        "config",
        _tp_of_heads,
    ),
    Rule(
        "megatron.T2",
        lambda f: every(either(kv % f.tp == 0, both(f.tp % kv == 0, f.kv_head_replication)) for kv in f.kv_heads),
        "key/value heads {f.kv_heads} must be a multiple or a divisor of TP {f.tp}",
        "TC:1338",
        "config",
        _tp_of_kv,
        since=(0, 16),
    ),
    Rule(
        "megatron.T2o",
        lambda f: divides(f.tp, *f.kv_heads),
        "key/value heads {f.kv_heads} are not divisible by TP {f.tp}; copies of them came with 0.16",
        "TC (0.15)",
        "config",
        lambda f: options("tp", nearest(divisors(*f.heads, *f.kv_heads), int(f.tp))),
        until=(0, 16),
    ),
    Rule(
        "megatron.T3",
        lambda f: divides(f.tp, *f.ffn_hidden_sizes, *f.shared_ffn_hidden_sizes),
        "feed-forward widths {f.ffn_hidden_sizes} (shared experts {f.shared_ffn_hidden_sizes})"
        " are not divisible by TP {f.tp}",
        "TL:1038, TL:1408 divide()",
        "build",
        lambda f: options("tp", nearest(divisors(*f.ffn_hidden_sizes, *f.shared_ffn_hidden_sizes), int(f.tp))),
    ),
    Rule(
        "megatron.T3e",
        lambda f: divides(f.etp, *f.moe_ffn_hidden_sizes),
        "expert width {f.moe_ffn_hidden_sizes} is not divisible by ETP {f.etp}",
        "TL:1038, TL:1408 divide()",
        "build",
        lambda f: options("etp", nearest(divisors(*f.moe_ffn_hidden_sizes), int(f.etp))),
    ),
    Rule(
        "megatron.T3s",
        lambda f: divides(f.tp, *f.mamba_heads, *f.mamba_groups),
        "Mamba heads {f.mamba_heads} and groups {f.mamba_groups} are not divisible by TP {f.tp}",
        "core/ssm/mamba_mixer.py:262-274",
        "build",
        lambda f: options("tp", divisors(*f.mamba_heads, *f.mamba_groups)),
    ),
    Rule(
        "megatron.T6",
        lambda f: implies(f.sequence_parallel, divides(f.tp, f.seq_length // f.cp)),
        "sequence parallelism needs (sequence length {f.seq_length} / CP {f.cp}) divisible by TP {f.tp}",
        "tensor_parallel/mappings.py reduce-scatter",
        "step",
        lambda f: options("seq_length", multiples_around(int(f.cp) * lcm(2, int(f.tp)), f.seq_length)),
    ),
    Rule(
        "megatron.T7",
        lambda f: implies(f.tp_comm_overlap, f.sequence_parallel),
        "--tp-comm-overlap needs --sequence-parallel (and TP > 1)",
        "A:1442",
        "validate",
    ),
    Rule(
        "megatron.T8",
        lambda f: implies(
            both(either(f.tp > 1, f.cp > 1), f.sm < 10, no(f.megatron_fsdp), not f.torch_fsdp2, no(f.moe_a2a_overlap)),
            f.environment_follows or f.max_connections == "1",
        ),
        "TP {f.tp} or CP {f.cp} above 1 before Blackwell needs the environment variable CUDA_DEVICE_MAX_CONNECTIONS=1, "
        "it is {f.max_connections!r}",
        "A:1457-1490",
        "validate",
        lambda f: ("CUDA_DEVICE_MAX_CONNECTIONS=1",),
    ),
    Rule(
        "megatron.T9",
        lambda f: implies(both(f.is_moe, f.tp > 1), f.sequence_parallel),
        "a mixture-of-experts model with TP {f.tp} trains only with sequence parallelism",
        "ML:630",
        "step",
        lambda f: ("sequence_parallel", "tp=1"),
    ),
    Rule(
        "megatron.T10",
        lambda f: f.transformer_impl != "transformer_engine" or f.te_version is not None,
        "--transformer-impl transformer_engine needs TransformerEngine",
        "core/models/gpt/gpt_layer_specs.py",
        "build",
        lambda f: ("--transformer-impl local",),
    ),
    Rule(
        "megatron.T12",
        lambda f: f.head_dim_given or all(f.hidden_size % heads == 0 for heads in f.heads),
        "hidden size {f.hidden_size} is not divisible by {f.heads} attention heads, and --kv-channels is not given",
        "A:1331",
        "validate",
    ),
    Rule(
        "megatron.B1",
        lambda f: either(f.decrease_batch_size, divides(f.micro_batch_size * f.dp, f.global_batch_size)),
        "global batch {f.global_batch_size} is not divisible by micro-batch {f.micro_batch_size} x DP {f.dp}",
        "A:715, core/num_microbatches_calculator.py",
        "validate",
        _global_batch,
        after=("megatron.W1", "megatron.A1", "megatron.A3"),
    ),
    Rule(
        "megatron.B1e",
        lambda f: (
            divides(
                (f.eval_micro_batch_size or f.micro_batch_size) * f.dp, f.eval_global_batch_size or f.global_batch_size
            )
            if f.eval_micro_batch_size or f.eval_global_batch_size or f.decrease_batch_size
            else True
        ),
        "evaluation batch {f.eval_global_batch_size} (0 = the training one) is not divisible by its micro-batch "
        "{f.eval_micro_batch_size} (0 = the training one) x DP {f.dp}",
        "A:715",
        "validate",
        after=("megatron.W1", "megatron.A1", "megatron.A3", "megatron.B1"),
        since=(0, 18),
    ),
    Rule(
        "megatron.B5",
        lambda f: either(
            f.decrease_batch_size, f.num_microbatches * f.micro_batch_size * f.dp * f.gtp == f.global_batch_size
        ),
        "{f.num_microbatches} micro-batches of {f.micro_batch_size} on DP {f.dp} are not the global batch "
        "{f.global_batch_size}",
        "core/num_microbatches_calculator.py",
        "validate",
        after=("megatron.W1", "megatron.A1", "megatron.A3", "megatron.B1"),
    ),
    Rule(
        "megatron.B3",
        lambda f: not f.batch_schedule_with_global_batch,
        "--step-batch-size-schedule excludes --global-batch-size",
        "A:698",
        "validate",
    ),
)
