"""In what two plans differ, by name."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from meshwright.specs.goals import Difference
from meshwright.specs.plan import Plan

from .explain import decoder_layers

DEGREES = ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch_size")


def differences(first: Plan, second: Plan) -> tuple[Difference, ...]:
    """Choices in which ``second`` differs from ``first``: degrees, schedule, recompute, sharding, rank order, layers of
    the stages, GPUs, and options by their own names (``options.overlap_p2p``)."""
    mine, other = choices(first), choices(second)
    return tuple(
        Difference(name=name, ours=mine[name], theirs=other[name]) for name in mine if mine[name] != other[name]
    )


def choices(plan: Plan) -> dict[str, Any]:
    """All choices of a plan as plain values."""
    out: dict[str, Any] = {name: getattr(plan, name) for name in DEGREES}
    out["schedule"] = plan.schedule
    out["recompute"] = plan.recompute.label
    out["sharding"] = plan.sharding if isinstance(plan.sharding, str) else plan.sharding.model_dump(mode="json")
    out["rank_order"] = plan.rank_order
    out["layers"] = in_runs(decoder_layers(plan))
    out["gpus"] = ", ".join(name for name, _ in groupby(stage.groups[0].gpu for stage in plan.stages))
    return out | {f"options.{name}": value for name, value in plan.options.model_dump(mode="json").items()}


def in_runs(layers: list[int]) -> str:
    """Layers of the stages: ``3, 2 x 14, 1``."""
    runs = [(value, len(list(members))) for value, members in groupby(layers)]
    return ", ".join(f"{value} x {count}" if count > 1 else str(value) for value, count in runs)


def in_words(found: tuple[Difference, ...], most: int = 6) -> str:
    """The first differences as ``tp 4 instead of 8``."""
    words = [f"{each.name} {each.theirs} instead of {each.ours}" for each in found[:most]]
    return ", ".join(words) + (f" and {len(found) - most} more" if len(found) > most else "")
