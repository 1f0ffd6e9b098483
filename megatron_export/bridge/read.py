"""Plan, model and workload of Megatron-Bridge settings."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan
from meshwright.specs.workload import Workload

from ..megatron import MegatronArguments, model_from_arguments, plan_from_arguments, workload_from_arguments
from .interpret import is_finetuning, known_model, world_size_of
from .overrides import Overrides, read_overrides
from .translate import arguments_of, key_of, settings_of


def _read(source: str | Sequence[str] | Overrides, model: ModelSpec | None) -> tuple[Overrides, MegatronArguments]:
    overrides = source if isinstance(source, Overrides) else read_overrides(source)
    return overrides, arguments_of(settings_of(overrides), known_model(overrides, model))


def _named(error: SpecError) -> SpecError:
    """The same faults at Bridge's keys."""
    return SpecError(
        Fault(
            f"/{key_of(fault.pointer[3:].replace('-', '_'))}" if fault.pointer.startswith("/--") else fault.pointer,
            fault.message,
            fault.alternatives,
        )
        for fault in error.faults
    )


def plan_from_overrides(
    source: str | Sequence[str] | Overrides,
    model: ModelSpec,
    cluster: ClusterSpec,
    world_size: int | None = None,
) -> Plan:
    """The plan on the first ``world_size`` GPUs of the cluster (default: all), pools and nodes in its order.

    Raises :class:`SpecError` where the settings describe no plan (check the rules first for the reasons).
    """
    _, args = _read(source, model)
    try:
        return plan_from_arguments(args, model, cluster, world_size)
    except SpecError as error:
        raise _named(error) from None


def model_from_overrides(source: str | Sequence[str] | Overrides) -> ModelSpec:
    """The architecture by the recipe's preset, changed by ``model.*``, or by these alone; SpecError if unknown."""
    overrides, args = _read(source, None)
    preset = known_model(overrides, None)
    changed = {"model.num_layers", "model.hidden_size", "model.num_moe_experts"} & set(overrides.given)
    if preset is not None and not changed:
        return preset
    try:
        return model_from_arguments(args, preset.name if preset else "bridge-overrides")
    except SpecError as error:
        raise _named(error) from None


def workload_from_overrides(
    source: str | Sequence[str] | Overrides, world_size: int | None = None, model: ModelSpec | None = None
) -> Workload:
    """Batch, sequence and numerics. ``world_size`` defaults to what runner options or the recipe say."""
    overrides, args = _read(source, model)
    try:
        work = workload_from_arguments(args, world_size_of(overrides, world_size or 1))
    except SpecError as error:
        raise _named(error) from None
    tuned = is_finetuning(overrides, settings_of(overrides))
    return work.model_copy(update={"task": "sft"}) if tuned else work
