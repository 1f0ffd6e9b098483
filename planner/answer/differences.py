"""In what two plans differ, by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from meshwright.specs.goals import Difference
from meshwright.specs.plan import Plan

from .explain import decoder_layers, term_name

#: Choices and terms named in a reason, at most; a term below this share of the step is not, unless it is the largest.
MOST_CHOICES, MOST_TERMS, LEAST_SHARE = 6, 3, 0.005
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


def why(found: tuple[Difference, ...], moved_s: Mapping[str, float], step_time_s: float) -> str:
    """Why the second plan is quicker than the first, which takes ``step_time_s``: what was changed, and the terms that
    it spends less in, as shares of the first's step. ``moved_s``: seconds that the first spends more in each term."""
    told = [each for each in found if _matters(each, found, step_time_s)]
    told = told or list(found)
    changed = [f"{each.name.removeprefix('options.')} {_short(each.ours)} -> {_short(each.theirs)}" for each in told]
    words = ", ".join(changed[:MOST_CHOICES]) + (
        f" and {len(changed) - MOST_CHOICES} more" if len(changed) > MOST_CHOICES else ""
    )
    ranked = sorted(moved_s.items(), key=lambda item: (-item[1], item[0]))
    less = [(name, value) for name, value in ranked if value > 0]
    more = [(name, -value) for name, value in reversed(ranked) if value < -LEAST_SHARE * step_time_s]
    large = [item for item in less if item[1] > LEAST_SHARE * step_time_s] or less[:1]
    if not large:
        return words
    out = f"{words}: less {_shares(large[:MOST_TERMS], step_time_s)}"
    return out + (f", for more {_shares(more[:MOST_TERMS], step_time_s)}" if more else "")


def _matters(each: Difference, found: tuple[Difference, ...], step_time_s: float) -> bool:
    """Whether a difference is a choice of its own, and an option one that moves the step."""
    if each.name in ("dp", "schedule", "layers", "gpus") or (each.reason or "").startswith("follows"):
        return False
    if each.name == "etp":  # mostly follows tp
        return not any(o.name == "tp" and (o.ours, o.theirs) == (each.ours, each.theirs) for o in found)
    return not each.name.startswith("options.") or (
        each.worth_s is None or abs(each.worth_s) > LEAST_SHARE * step_time_s
    )


def _shares(terms: list[tuple[str, float]], step_time_s: float) -> str:
    shares = [(term_name(name), value / step_time_s) for name, value in terms]
    return ", ".join(f"{name} {share:.0%}" if share >= LEAST_SHARE else f"{name} {share:.1%}" for name, share in shares)


def _short(choice: Any) -> str:
    """A choice in few characters: hybrid sharding is an object in a document."""
    if isinstance(choice, dict) and "hsdp" in choice:
        return f"hsdp {choice['hsdp']['shard']} x {choice['hsdp']['replicate']}"
    return "+".join(map(str, choice)) or "none" if isinstance(choice, list | tuple) else str(choice)
