"""Facts, verdict and plan of an Accelerate configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import Facts, violations
from meshwright.planner.rules.derive import version_of
from meshwright.planner.single import estimate_degrees
from meshwright.specs.attention import MLAAttention, SoftmaxAttention
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Hsdp, HsdpSharding, Plan
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from ..deepspeed import read_deepspeed
from ..reading import Described, Given, Reading
from .settings import AccelerateSettings, settings_of

#: What runs one replica a GPU without a plugin.
_REPLICATED = ("NO", "MULTI_GPU")


def read_accelerate(data: Mapping[str, Any], given: Given) -> Reading:
    """The verdict on a file that ``given`` completes: the model, the batch and the sequence length, which a training
    script says. Raises :class:`SpecError` for a plugin that has a format of its own."""
    settings = settings_of(data)
    if settings.distributed_type == "MEGATRON_LM":
        raise SpecError(Fault("", "is for Megatron-LM: check the arguments that it starts with (--format megatron)"))
    given = replace(given, world_size=given.world_size or settings.processes)
    facts = _facts(settings, given)
    broken = tuple(violations(facts))
    if settings.distributed_type == "DEEPSPEED":
        return _by_deepspeed(settings, given, broken)
    return Reading(
        violations=broken,
        describe=lambda cluster: _described(settings, given, facts, cluster),
        notes=_notes(settings),
        missing=tuple(_missing(settings, given, facts)),
    )


def _facts(settings: AccelerateSettings, given: Given) -> Facts:
    world = max(given.world_size, 1)
    replicas, shards, tp, cp, sp = settings.mesh or (1, 1, 1, 1, 1)
    tp, cp = (tp, cp) if prod(settings.mesh) > 1 else (1, 1)
    dp = max(world // (tp * cp), 1)
    micro, total = int(given.degrees.get("micro_batch_size", 0)), int(given.workload.get("global_batch_size", 0))
    known = bool(micro and total) and settings.distributed_type != "DEEPSPEED"
    attention = [kind.attention for kind in given.model.kinds] if given.model else []
    return Facts(
        rule_set="accelerate",
        version=version_of(given.target),
        world_size=world,
        tp=tp,
        cp=cp,
        dp=dp,
        etp=tp,
        heads=tuple({each.num_heads for each in attention if isinstance(each, SoftmaxAttention | MLAAttention)}),
        kv_heads=tuple({each.num_kv_heads for each in attention if isinstance(each, SoftmaxAttention)}),
        micro_batch_size=micro if known else 1,
        num_microbatches=total // (micro * dp) if known else 1,
        global_batch_size=total if known else dp,
        config_faults=settings.faults,
        stated_ranks=settings.processes,
        stated_nodes=settings.machines,
        mesh=settings.mesh,
        mesh_replicas=replicas,
        mesh_shards=shards,
        sequence_ranks=sp,
        distributed_type=settings.distributed_type,
        fsdp_version=settings.fsdp_version,
        reshard=settings.reshard,
        activation_checkpointing=settings.checkpointing,
        checkpoint_offload=settings.checkpoint_offload,
        loads_on_one_rank=settings.efficient_loading,
        syncs_module_states=settings.syncs_module_states,
        state_dict_type=settings.state_dict_type,
        ignored_fields=settings.ignored,
    )


def _by_deepspeed(settings: AccelerateSettings, given: Given, broken: tuple[Any, ...]) -> Reading:
    """What DeepSpeed makes of the section ``deepspeed_config``."""
    section = settings.deepspeed
    if "deepspeed_config_file" in section:
        fault = Fault("/configuration", "deepspeed_config_file says the plan; check that file (--format deepspeed)")
        return Reading(violations=broken, describe=_nothing, notes=_notes(settings), missing=(fault,))
    micro = int(given.degrees.get("micro_batch_size", 0))
    data: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro or "auto",
        "gradient_accumulation_steps": section.get("gradient_accumulation_steps", 1),
        "zero_optimization": {"stage": section.get("zero_stage", 2)},
    }
    for name in ("offload_optimizer", "offload_param"):
        device = section.get(f"{name}_device", "none")
        data["zero_optimization"][name] = {"device": device}
    if settings.precision in ("bf16", "fp16"):
        data[settings.precision] = {"enabled": True}
    inner = read_deepspeed(data, replace(given, target=load_target("deepspeed")))
    return replace(inner, violations=(*broken, *inner.violations), notes=(*_notes(settings), *inner.notes))


def _nothing(cluster: ClusterSpec) -> Described:
    raise SpecError(Fault("/configuration", f"says no plan for {cluster.num_gpus} GPUs"))


def _notes(settings: AccelerateSettings) -> tuple[str, ...]:
    fsdp = settings.distributed_type == "FSDP"
    out = []
    if fsdp and not settings.wraps:
        out.append("fsdp_auto_wrap_policy is not given: the whole model is one unit, gathered at once")
    if fsdp and settings.fsdp_version == 2 and settings.strategy != "FULL_SHARD":
        out.append(
            f"fsdp_sharding_strategy {settings.strategy} has no effect with FSDP2; fsdp_reshard_after_forward has"
        )
    return tuple(out)


def _missing(settings: AccelerateSettings, given: Given, facts: Facts) -> list[Fault]:
    out = []
    script = "is in the training script; give it to know whether it fits"
    if given.model is None:
        out.append(Fault("/model", script))
    out += [
        Fault(f"/workload/{name}", script) for name in ("global_batch_size", "seq_length") if name not in given.workload
    ]
    if "micro_batch_size" not in given.degrees:
        out.append(Fault("/degrees/micro_batch_size", script))
    if settings.distributed_type not in (*_REPLICATED, "FSDP"):
        out.append(Fault("/configuration", f"distributed_type {settings.distributed_type} is not priced"))
    if settings.parameter_offload:
        out.append(Fault("/configuration", "fsdp_offload_params is not priced"))
    if settings.checkpoint_offload:
        out.append(Fault("/configuration", "fsdp_activation_checkpointing_offload is not priced"))
    if settings.precision == "fp8":
        out.append(Fault("/configuration", "fp8 recipes of Accelerate are not priced"))
    if settings.distributed_type == "FSDP" and not settings.wraps:
        out.append(Fault("/configuration", "FSDP without fsdp_auto_wrap_policy is not priced"))
    if facts.sequence_ranks > 1:
        out.append(Fault("/configuration", "sp_size above 1 is not priced"))
    return out


def _described(settings: AccelerateSettings, given: Given, facts: Facts, cluster: ClusterSpec) -> Described:
    assert given.model is not None  # noqa: S101  ``missing`` is looked at first
    half = {"no": "fp32"}.get(settings.precision, settings.precision)
    workload = Workload.parse({**given.workload, "precision": half, "gradient_dtype": half}, "/workload")
    request = PlanRequest(model=given.model, cluster=cluster, workload=workload, target=given.target)
    level, replicas = _sharding(settings, given)
    recompute = "full" if settings.checkpointing else given.degrees.get("recompute")
    degrees = {"tp": facts.tp, "cp": facts.cp, "micro_batch_size": int(facts.micro_batch_size), "recompute": recompute}
    plan = estimate_degrees(request, {**degrees, "sharding": level}).plan
    assert plan is not None  # noqa: S101  a priced document has one
    if replicas > 1:
        plan = _hybrid(plan, replicas)
    kept = settings.strategy == "HYBRID_SHARD_ZERO2" and settings.fsdp_version == 1
    if level == "fsdp" and (kept or settings.reshard == "false"):
        options = plan.options.model_copy(update={"reshard_after_forward": False})
        plan = plan.model_copy(update={"options": options})
    return Described(plan, given.model, workload)


def _sharding(settings: AccelerateSettings, given: Given) -> tuple[str, int]:
    """(sharding level, replicas of the shards)."""
    if settings.distributed_type in _REPLICATED:
        return "none", 1
    replicas = settings.mesh[0] if settings.mesh else 1
    if settings.fsdp_version == 2:
        return "fsdp", replicas
    nodes = settings.machines
    return {
        "SHARD_GRAD_OP": ("zero2", 1),
        "NO_SHARD": ("none", 1),
        "HYBRID_SHARD": ("fsdp", nodes),  # shards inside a node (torch.distributed.fsdp)
        "HYBRID_SHARD_ZERO2": ("fsdp", nodes),
    }.get(settings.strategy, ("fsdp", 1))


def _hybrid(plan: Plan, replicas: int) -> Plan:
    shard = plan.num_ranks // (int(plan.tp or 1) * replicas)
    level = Hsdp(hsdp=HsdpSharding(replicate=replicas, shard=shard))
    stages = tuple(stage.model_copy(update={"sharding": level}) for stage in plan.stages)
    return plan.model_copy(update={"sharding": level, "stages": stages})
