"""Rules of torchtitan: degrees, batch, stages, experts and sharding.

Sources are files of the wheels, 0.2.2 where nothing else is said: PD = distributed/parallel_dims.py, PP =
distributed/pipeline_parallel.py, T = train.py, JC = config/job_config.py, and of PyTorch 2.13, SC =
torch/distributed/pipelining/schedules.py.
"""

from __future__ import annotations

import numpy as np

from .facts import Facts
from .logic import (
    Truth,
    both,
    divides,
    divisors,
    either,
    implies,
    multiples_around,
    nearest,
    no,
    options,
)
from .models import MODELS
from .rule import Rule
from .torchtitan_models import PYTHON_CONFIG


def _world(f: Facts) -> tuple[str, ...]:
    step = int(f.dp_replicate * f.dp_shard * f.cp * f.tp * f.pp)
    return options("world_size", multiples_around(step, int(f.world_size))) if step > 0 else ()


def _tp(f: Facts) -> tuple[str, ...]:
    return options("tp", nearest(divisors(*f.heads, *f.kv_heads), int(f.tp)))


def _global_batch(f: Facts) -> tuple[str, ...]:
    step = int(f.micro_batch_size * f.dp)
    return options("global_batch_size", multiples_around(step, int(f.global_batch_size)))


def _micro_batches(f: Facts) -> tuple[str, ...]:
    return options("num_microbatches", multiples_around(int(f.pp), max(int(f.num_microbatches), int(f.pp))))


def _sequence_step(f: Facts) -> int:
    return int(f.tp * 2 * f.cp) if f.version < PYTHON_CONFIG or f.cp > 1 else int(f.tp)


def _expert_ranks(f: Facts) -> object:
    return f.dp_shard * f.cp * f.tp


def _interleaves(f: Facts) -> Truth:
    return np.logical_and(f.schedule in ("1f1b", "interleaved"), np.asarray(f.vpp) > 1)


def _foreign(f: Facts) -> bool:
    """Whether the plan asks for something that only Megatron has."""
    return bool(
        f.cpu_offload_layers
        or f.fine_grained_offload
        or f.optimizer_cpu_offload
        or f.cuda_graph != "none"
        or np.any(f.moe_a2a_overlap)
        or np.any(f.delay_wgrad)
        or f.fp8_dispatch
        or f.shared_expert_overlap
    )


TORCHTITAN: tuple[Rule, ...] = (
    Rule(
        "torchtitan.A1",
        lambda f: not f.config_faults,
        "the configuration is not one that torchtitan reads: {f.config_faults}",
        "config/manager.py:147 _dict_to_dataclass; 0.3: dataclasses with slots refuse other names",
        "parse",
    ),
    Rule(
        "torchtitan.W2",
        lambda f: not f.not_positive,
        "must be at least 1 (dp_shard may be -1, the rest): {f.not_positive}",
        "PD:46-52",
        "groups",
    ),
    Rule(
        "torchtitan.W1",
        lambda f: f.dp_replicate * f.dp_shard * f.cp * f.tp * f.pp == f.world_size,
        "dp_replicate {f.dp_replicate} x dp_shard {f.dp_shard} x cp {f.cp} x tp {f.tp} x pp {f.pp} is not the world "
        "size {f.world_size}",
        "PD:54-57",
        "groups",
        _world,
        after=("torchtitan.W2",),
    ),
    Rule(
        "torchtitan.W3",
        lambda f: f.rank_order == "tp-cp-ep-dp-pp",
        "rank order {f.rank_order} is not available: the mesh is pp, dp_replicate, dp_shard, cp, tp",
        "PD:100-104",
        "groups",
        lambda f: ("rank_order=tp-cp-ep-dp-pp",),
    ),
    Rule(
        "torchtitan.W4",
        lambda f: f.uniform_stages and not f.rank_fault,
        "all stages need equal degrees, micro-batches, recompute and sharding, and ranks in order {f.rank_fault}",
        "PD:14, one ParallelDims for the run",
        "groups",
    ),
    Rule(
        "torchtitan.E1",
        lambda f: divides(f.ep * f.expert_tensor_degree, _expert_ranks(f)),
        "EP {f.ep} x ETP {f.expert_tensor_degree} does not divide dp_shard {f.dp_shard} x cp {f.cp} x tp {f.tp}",
        "PD:154-168, the sparse mesh unflattens the world",
        "groups",
        lambda f: options("ep", nearest(divisors(int(f.dp_shard * f.cp * f.tp)), int(f.ep))),
        after=("torchtitan.W1", "torchtitan.W2"),
    ),
    Rule(
        "torchtitan.E2",
        lambda f: implies(f.ep > 1, either(f.etp == 1, f.etp == f.tp)),
        "expert tensor parallelism {f.etp} must be 1 or TP {f.tp}",
        "PD:59",
        "groups",
        lambda f: ("etp=1", f"etp={int(f.tp)}"),
        until=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.E2n",
        lambda f: implies(f.ep > 1, f.etp == 1),
        "there is no expert tensor parallelism {f.etp} any more",
        "0.3 PD:141-153",
        "groups",
        lambda f: ("etp=1",),
        since=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.E3",
        lambda f: implies(f.ep == 1, f.etp == f.tp),
        "without expert parallelism the experts are split by TP {f.tp}, not by {f.etp}",
        "models/llama4/infra/parallelize.py:560 TensorParallel()",
        "build",
        lambda f: (f"etp={int(f.tp)}",),
    ),
    Rule(
        "torchtitan.E4",
        lambda f: divides(f.ep, *f.experts),
        "EP {f.ep} does not divide the {f.experts} experts",
        "distributed/expert_parallel.py:86, tokens are viewed by rank",
        "step",
        lambda f: options("ep", nearest(divisors(*f.experts), int(f.ep))),
    ),
    Rule(
        "torchtitan.E5",
        lambda f: implies(f.dispatcher == "flex", both(f.ep > 1, f.etp == 1)),
        "DeepEP needs EP above 1 and expert tensor parallelism 1, got EP {f.ep} and ETP {f.etp}",
        "models/llama4/infra/parallelize.py:114-125",
        "build",
        lambda f: ("expert_parallel_comm_backend=standard",),
    ),
    Rule(
        "torchtitan.T1",
        lambda f: divides(f.tp, *f.heads, *f.kv_heads),
        "TP {f.tp} must divide the {f.heads} heads and the {f.kv_heads} key-value heads; they are not replicated",
        "models/llama3/model/model.py:242 view by local heads; 0.3 models/common/decoder.py:148-160",
        "step",
        _tp,
    ),
    Rule(
        "torchtitan.T2",
        lambda f: divides(
            f.tp * np.where((np.asarray(f.cp) > 1) | (f.version < PYTHON_CONFIG), 2 * f.cp, 1), f.seq_length
        ),
        "sequence length {f.seq_length} is not divisible by TP {f.tp} x 2 x CP {f.cp} (in 0.3 without the 2 where CP "
        "is 1)",
        "PD:363, models/llama3/infra/parallelize.py:65; 0.3 trainer.py:307",
        "build",
        lambda f: options("seq_length", multiples_around(_sequence_step(f), f.seq_length)),
    ),
    Rule(
        "torchtitan.T3",
        lambda f: no(both(f.tp_comm_overlap, not f.compiled)),
        "asynchronous tensor parallelism needs compile.enable with the model",
        "distributed/tensor_parallel.py:16",
        "build",
        lambda f: ("compile.enable=true",),
    ),
    Rule(
        "torchtitan.C1",
        lambda f: either(
            f.cp == 1,
            f.attention_backend == ("sdpa" if f.version < PYTHON_CONFIG else "flex")
            or (f.version < PYTHON_CONFIG and f.attention_backend == "flex" and f.model_family == "llama3"),
        ),
        "context parallelism does not run with {f.attention_backend} attention in {f.model_family}",
        "models/deepseek_v3/infra/parallelize.py:68; 0.3 distributed/full_dtensor.py:44",
        "build",
        lambda f: ("cp=1",),
    ),
    Rule(
        "torchtitan.C2",
        lambda f: implies(f.cp > 1, f.cp_comm_type == ("allgather",)),
        "context parallelism gathers keys and values; there is no {f.cp_comm_type}",
        "torch/distributed/tensor/experimental/_context_parallel/_attention.py:77",
        "step",
        lambda f: ("cp_comm_type=allgather",),
    ),
    Rule(
        "torchtitan.C3",
        lambda f: either(f.cp == 1, f.model_family != "gpt_oss"),
        "context parallelism is not there for {f.model_family}",
        "models/gpt_oss/model/args.py:92",
        "build",
        lambda f: ("cp=1",),
        until=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.B1",
        lambda f: f.global_batch_size == f.micro_batch_size * f.num_microbatches * f.dp,
        "global batch {f.global_batch_size} is not {f.num_microbatches} micro-batches of {f.micro_batch_size} on "
        "{f.dp} replicas",
        "T:198-207, PP:187",
        "build",
        _global_batch,
        after=("torchtitan.W1", "torchtitan.W2"),
    ),
    Rule(
        "torchtitan.P1",
        lambda f: either(f.pp == 1, f.pipelines),
        "{f.model_family} cannot be cut into pipeline stages in this version",
        "models/qwen3/__init__.py:199 pipelining_fn=None, T:221",
        "build",
        lambda f: ("pp=1",),
        until=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.P2",
        lambda f: not (f.layout_fault or f.stage_fault),
        "the stages cannot be built: {f.layout_fault}{f.stage_fault}",
        "PP:74-140, PP:380",
        "build",
    ),
    Rule(
        "torchtitan.P3",
        lambda f: implies(both(f.schedule == "1f1b", f.pp > 1, f.vpp == 1), f.in_flight >= f.pp),
        "1F1B needs at least as many micro-batches as stages: {f.in_flight} for {f.pp}",
        "SC:1019",
        "build",
        lambda f: (f"num_microbatches={int(f.pp)}",),
    ),
    Rule(
        "torchtitan.P4",
        lambda f: implies(_interleaves(f), f.in_flight % f.rounds == 0),
        "interleaved stages need micro-batches in whole rounds of at least PP {f.pp}, got {f.in_flight}",
        "SC:2936",
        "build",
        _micro_batches,
    ),
    Rule(
        "torchtitan.P5",
        lambda f: implies(_interleaves(f), f.group == f.in_flight // f.rounds),
        "interleaved stages run {f.in_flight} micro-batches in groups of {f.group}, but the schedule takes "
        "them in equal rounds of at least PP {f.pp}",
        "SC:2931",
        "step",
        _micro_batches,
        after=("torchtitan.P4",),
    ),
    Rule(
        "torchtitan.P6",
        lambda f: no(both(f.tied_embeddings, f.pp > 1)),
        "tied embeddings cannot be cut into pipeline stages",
        "0.3 models/common/decoder.py:141",
        "build",
        lambda f: ("pp=1",),
        since=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.P7",
        lambda f: f.layout is None or not f.layout.faults(f.num_layers, f.mtp_num_layers, int(f.pp)),
        "the stages do not hold the model once, in order: {f.layout_faults}",
        "PP:369-400",
        "build",
        after=("torchtitan.P2",),
    ),
    Rule(
        "torchtitan.L1",
        lambda f: divides(f.loss_chunks * f.cp, f.seq_length),
        "the loss is taken in {f.loss_chunks} pieces, which do not divide {f.seq_length} tokens over CP {f.cp}",
        "0.3 components/loss.py:671",
        "step",
        lambda f: options("seq_length", multiples_around(int(f.loss_chunks * f.cp), f.seq_length)),
    ),
    Rule(
        "torchtitan.F1",
        lambda f: implies(f.reduces_once, f.pp > 1),
        "zero1 (parameters gathered once a step) is what sharding means under pipeline stages; with one stage it is "
        "fsdp",
        "models/llama3/infra/parallelize.py:327",
        "build",
        lambda f: ("sharding=fsdp",),
    ),
    Rule(
        "torchtitan.F2",
        lambda f: either(f.fully_shards, f.dp_replicate == 1, f.dp_replicate == f.world_size, both(f.ep > 1)),
        "replicas without sharding (DDP) allow no other degree: dp_replicate {f.dp_replicate} of {f.world_size} ranks",
        "models/llama3/infra/parallelize.py:136",
        "build",
        lambda f: ("sharding=fsdp",),
        until=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.F3",
        lambda f: either(
            f.precision == "fp32",
            f.fully_shards,
            both(f.tp == 1, f.pp == 1),
            both(f.ep > 1, f.model_family in ("deepseek_v3", "llama4")),
        ),
        "TP or PP without sharded data or context parallelism trains in fp32, whatever mixed_precision_param says",
        "distributed/utils.py:251, silently but for a line of the log",
        "step",
        lambda f: ("data_parallel_shard_degree=2", "precision=fp32"),
        after=("torchtitan.F2",),
        until=PYTHON_CONFIG,
    ),
    Rule(
        "torchtitan.F4",
        lambda f: f.dp_replicate * f.dp_shard == f.dp,
        "{f.dp_replicate} replicas do not divide the data-parallel degree {f.dp}",
        "PD:95",
        "groups",
        lambda f: options("data_parallel_replicate_degree", divisors(int(f.dp))),
        after=("torchtitan.W2",),
    ),
    Rule(
        "torchtitan.O1",
        lambda f: not _foreign(f),
        "torchtitan has no offload of single activations or optimizer shares, no captured layers and no overlap of "
        "expert exchange as the plan asks for",
        "JC, no such keys",
        "parse",
    ),
    Rule(
        "torchtitan.M1",
        lambda f: not f.inexpressible,
        "no model of torchtitan, as exported here, holds: {f.inexpressible}",
        "models/__init__.py, models/*/model/args.py",
        "build",
    ),
    next(rule for rule in MODELS if rule.id == "hardware.precision"),
)
