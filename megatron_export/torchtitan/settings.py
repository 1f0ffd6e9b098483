"""A plan in torchtitan's sections and keys, as both its TOML and its Python configurations have them."""

from __future__ import annotations

from typing import Any

from meshwright.planner.rules.derive import replicas_of, version_of
from meshwright.planner.rules.torchtitan_models import PYTHON_CONFIG
from meshwright.specs.plan import Plan, expand_blocks
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

Settings = dict[str, dict[str, Any]]

#: torchtitan's schedules by ours.
SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
#: Steps of an export that nobody has edited yet.
STEPS = 20


def settings_of(plan: Plan, workload: Workload, target: Target) -> Settings:
    """Sections ``training``, ``parallelism``, ``activation_checkpoint`` and ``compile`` of a legal plan."""
    version = version_of(target)
    return {
        "training": _training(plan, workload, version, target),
        "parallelism": _parallelism(plan, version, target),
        "activation_checkpoint": _checkpoint(plan),
        "compile": {"enable": True, "components": ["model", "loss"]},
    }


def _training(plan: Plan, workload: Workload, version: tuple[int, ...], target: Target) -> dict[str, Any]:
    size, count = plan.stages[0].micro_batch_size, plan.num_microbatches
    numerics = {"mixed_precision_param": "float32" if workload.precision == "fp32" else "bfloat16"}
    if target.version == "main":
        return {
            "num_tokens_per_microbatch_per_dp_rank": size * workload.seq_length,
            "num_tokens_per_train_step": workload.global_batch_size * workload.seq_length,
            "max_context_length": workload.seq_length,
            "steps": STEPS,
            "disable_cuda_graphs": True,
            **numerics,
        }
    return {
        # Under pipeline stages a local batch is all micro-batches of a step; else one of them, accumulated.
        "local_batch_size": size * (count if plan.pp > 1 else 1),
        "global_batch_size": workload.global_batch_size,
        "seq_len": workload.seq_length,
        "steps": STEPS,
        **({"disable_cuda_graphs": True} if version >= PYTHON_CONFIG else {}),
        **numerics,
    }


def _parallelism(plan: Plan, version: tuple[int, ...], target: Target) -> dict[str, Any]:
    degrees = plan.stages[0].degrees
    replicas = replicas_of(plan)
    out: dict[str, Any] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": degrees.dp // replicas,
        "fsdp_reshard_after_forward": "always" if plan.pp > 1 and plan.sharding != "zero1" else "default",
        "tensor_parallel_degree": degrees.tp,
        "context_parallel_degree": degrees.cp,
        "expert_parallel_degree": degrees.ep,
        "pipeline_parallel_degree": plan.pp,
    }
    if version < PYTHON_CONFIG:
        out["expert_tensor_parallel_degree"] = degrees.etp if degrees.ep > 1 else 1
    else:
        # The default spmd_types needs a newer torch than 2.13.
        out["spmd_backend"] = "partial_dtensor"
    if plan.pp > 1:
        out["pipeline_parallel_schedule"] = SCHEDULES[plan.schedule]
        if target.version == "main":
            out["num_pp_microbatches"] = plan.num_microbatches
        else:
            out["pipeline_parallel_microbatch_size"] = plan.stages[0].micro_batch_size
        out["module_fqns_per_model_part"] = modules_of(plan, "output" if version < PYTHON_CONFIG else "lm_head")
    return out


def modules_of(plan: Plan, head: str) -> list[list[str]]:
    """Module names of every stage chunk, in the order of the pipeline."""
    chunks = sorted((chunk for stage in plan.stages for chunk in stage.chunks), key=lambda chunk: chunk.order)
    names = {"embed": ["tok_embeddings"], "head": ["norm", head]}
    return [
        [name for kind, index in expand_blocks(chunk.blocks) for name in names.get(kind, [f"layers.{index}"])]
        for chunk in chunks
    ]


def _checkpoint(plan: Plan) -> dict[str, Any]:
    mode = plan.stages[0].recompute.granularity
    return {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})}
