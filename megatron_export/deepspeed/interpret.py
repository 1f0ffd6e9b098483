"""Facts, verdict and plan of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import Facts, violations
from meshwright.planner.rules.derive import version_of
from meshwright.planner.single import estimate_degrees
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.workload import Workload

from ..reading import Described, Given, Reading
from .settings import DeepSpeedSettings, settings_of

_LEVELS = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class _Batch:
    """Sizes with what follows from the others (0 = not known)."""

    micro: int
    steps: int
    total: int


def read_deepspeed(data: Mapping[str, Any], given: Given) -> Reading:
    """The verdict on a configuration that ``given`` completes: the model, the sequence length, and stages, all of which
    a training script says."""
    settings = settings_of(data)
    tp = _degree(given, "tp", settings.tp)
    pp = int(given.degrees.get("pp", 1))
    parts = tp * pp * settings.sequence_ranks
    dp = max(given.world_size // parts, 1)
    batch = batch_of(settings, given, dp)
    facts = facts_of(settings, given, tp, pp, dp, batch)
    missing = [*_missing(settings, given, batch)]
    return Reading(
        violations=tuple(violations(facts)),
        describe=lambda cluster: _described(settings, given, tp, pp, batch, cluster),
        notes=(*settings.notes, *_assumed(settings, given)),
        missing=tuple(missing),
    )


def batch_of(settings: DeepSpeedSettings, given: Given, dp: int) -> _Batch:
    """Sizes as ``_set_batch_related_parameters`` completes them; what ``given`` says stands in for ``auto``."""
    micro = settings.micro_batch_size or _if_automatic(settings, "train_micro_batch_size_per_gpu", given.degrees)
    total = settings.train_batch_size or _if_automatic(settings, "train_batch_size", given.workload)
    steps = settings.accumulation or 0
    if not micro and "train_micro_batch_size_per_gpu" in settings.automatic:
        return _Batch(0, steps, total)
    if total and micro:
        steps = steps or total // micro // dp
    elif total:
        micro = total // dp // (steps or 1)
        steps = steps or 1
    elif micro:
        stated = int(given.workload.get("global_batch_size", 0))
        steps = steps or (stated // micro // dp if "gradient_accumulation_steps" in settings.automatic else 1)
        total = micro * steps * dp
    return _Batch(micro, steps, total)


def facts_of(settings: DeepSpeedSettings, given: Given, tp: int, pp: int, dp: int, batch: _Batch) -> Facts:
    """What the rules of DeepSpeed look at."""
    known = bool(batch.micro and batch.total)
    asked = bool(settings.micro_batch_size or settings.train_batch_size or settings.automatic)
    return Facts(
        rule_set="deepspeed",
        version=version_of(given.target),
        world_size=given.world_size,
        tp=tp,
        pp=pp,
        dp=dp,
        etp=tp,
        micro_batch_size=batch.micro if known else 1,
        num_microbatches=batch.steps if known else 1,
        global_batch_size=batch.total if known else dp,
        batch_missing=() if asked else ("train_batch_size",),
        fp16=settings.fp16,
        bf16=settings.bf16,
        megatron_fsdp=settings.stage >= 2,
        zero_stage=settings.stage,
        config_faults=settings.faults,
        optimizer_offload_share=settings.optimizer_share if settings.optimizer_device != "none" else 1.0,
        gradient_sum=settings.gradient_sum,
        skips_gradient_norm=settings.skips_gradient_norm,
        secondary_shards=settings.secondary_shards,
        sequence_ranks=settings.sequence_ranks,
    )


def _missing(settings: DeepSpeedSettings, given: Given, batch: _Batch) -> list[Fault]:
    """Inputs that the plan needs and nobody has given."""
    out = []
    if given.model is None:
        out.append(Fault("/model", "is in the training script; give it to know whether it fits"))
    if "seq_length" not in given.workload:
        out.append(Fault("/workload/seq_length", "is in the training script; give it to know whether it fits"))
    if not batch.micro:
        out.append(Fault("/degrees/micro_batch_size", "is auto in the configuration; give the trainer's"))
    elif not batch.total or not batch.steps:
        out.append(Fault("/workload/global_batch_size", "is auto in the configuration; give the trainer's"))
    if settings.parameter_device != "none":
        out.append(Fault("/configuration", "parameters in host memory or on NVMe are not priced"))
    if settings.sequence_ranks > 1:
        out.append(Fault("/configuration", "sequence_parallel_size above 1 is not priced"))
    return out


def _assumed(settings: DeepSpeedSettings, given: Given) -> tuple[str, ...]:
    if settings.bf16 or settings.fp16 or "precision" in given.workload:
        return ()
    half = precision_of(settings, {})
    return (
        ("precision bf16: it is auto in the configuration",) if half == "bf16" else ("precision fp32: none is enabled",)
    )


def _described(
    settings: DeepSpeedSettings, given: Given, tp: int, pp: int, batch: _Batch, cluster: ClusterSpec
) -> Described:
    assert given.model is not None  # noqa: S101  ``missing`` is looked at first
    request = PlanRequest(
        model=given.model,
        cluster=cluster,
        workload=workload_of(settings, given.workload, batch.total),
        target=given.target,
    )
    document = estimate_degrees(
        request,
        {
            "tp": tp,
            "pp": pp,
            "micro_batch_size": batch.micro,
            "sharding": _LEVELS[settings.stage],
            "recompute": given.degrees.get("recompute"),
        },
    )
    plan = document.plan
    assert plan is not None  # noqa: S101  a priced document has one
    changes: dict[str, Any] = {"overlap_grad_reduce": settings.overlap and pp == 1}
    if settings.optimizer_device == "cpu":
        changes |= {"optimizer_offload_fraction": settings.optimizer_share}
    elif settings.optimizer_device == "nvme":
        raise SpecError(Fault("/configuration", "an optimizer on NVMe is not priced", ("cpu",)))
    plan = plan.model_copy(update={"options": plan.options.model_copy(update=changes)})
    return Described(plan, given.model, request.workload, given.target)


def workload_of(settings: DeepSpeedSettings, stated: Mapping[str, Any], total: int) -> Workload:
    """Batch and numerics: 16-bit gradients are added up as they are unless ``grad_accum_dtype`` says otherwise."""
    half = precision_of(settings, stated)
    return Workload.parse(
        {
            **{name: value for name, value in stated.items() if name != "precision"},
            "global_batch_size": total,
            "precision": half,
            "gradient_dtype": settings.gradient_dtype or half,
            "optimizer": settings.optimizer,
        },
        "/workload",
    )


def precision_of(settings: DeepSpeedSettings, stated: Mapping[str, Any]) -> str:
    """The precision that is enabled; where that is ``auto``, what is stated, else bf16."""
    if settings.bf16 or settings.fp16:
        return "bf16" if settings.bf16 else "fp16"
    automatic = {"bf16.enabled", "fp16.enabled"} & set(settings.automatic)
    return str(stated.get("precision", "bf16")) if automatic else "fp32"


def _if_automatic(settings: DeepSpeedSettings, field: str, values: Mapping[str, Any]) -> int:
    """What the trainer would fill in for ``auto``."""
    name = "global_batch_size" if field == "train_batch_size" else "micro_batch_size"
    return int(values.get(name, 0)) if field in settings.automatic else 0


def _degree(given: Given, name: str, own: int) -> int:
    stated = int(given.degrees.get(name, own))
    if own > 1 and stated != own:
        raise SpecError(Fault(f"/degrees/{name}", f"is {stated}, but the configuration says {own}"))
    return stated
