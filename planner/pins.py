"""Options of a plan that a request pins with ``fix``: their names and values, and the target that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Switch, Target

#: Options that are on or off; those of experts mean nothing without them.
SWITCHES: tuple[Switch, ...] = tuple(switch for switch in get_args(Switch) if switch != "flex_dispatcher")
OF_EXPERTS = ("ep_comm_overlap", "delay_wgrad", "moe_shared_expert_overlap", "dispatcher")
COUNTS = {"cp_a2a_size": 1, "dist_opt_instances": 1, "activation_offload_layers": 0}
DISPATCHERS = ("alltoall", "flex")
#: All that can be pinned, by the names that ``plan.options`` has.
PINNABLE = ("cp_comm_type", *COUNTS, "optimizer_offload_fraction", "dispatcher", *SWITCHES)


def pinned_options(fix: Mapping[str, int | str]) -> dict[str, Any]:
    """The pinned options with their values; ValueError for a value that is none of its option."""
    return {name: _value(name, value) for name, value in fix.items() if name in PINNABLE}


def _value(name: str, value: int | str) -> Any:
    if name in SWITCHES:
        if value not in ("true", "false"):
            raise ValueError(f"fix: {name} must be true or false, got {value!r}")
        return value == "true"
    if name in COUNTS:
        least = COUNTS[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1_000_000:
            raise ValueError(f"fix: {name} must be a whole number from {least}, got {value!r}")
        return value
    if name == "optimizer_offload_fraction":
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ValueError(f"fix: {name} must be a share from 0 to 1, got {value!r}")
        return share
    if name == "dispatcher" and value not in DISPATCHERS:
        raise ValueError(f"fix: dispatcher must be {' or '.join(DISPATCHERS)}, got {value!r}")
    return value


def option_fault(fix: Mapping[str, int | str], model: ModelSpec, target: Target) -> str | None:
    """Why a target cannot run what is pinned, or the model has no place for it."""
    pinned = pinned_options(fix)
    for name in pinned:
        if name in OF_EXPERTS and not model.is_moe:
            return f"{name} means nothing: the model has no experts"
    kind = pinned.get("cp_comm_type")
    if kind is not None and kind not in target.context_exchanges:
        valid = ", ".join(target.context_exchanges) or "none"
        return f"{target.name} has no cp_comm_type {kind!r}; use one of {valid}"
    hierarchical = kind == "a2a+p2p"
    if hierarchical and not ({"cp", "cp_a2a_size"} <= fix.keys()):
        return "cp_comm_type=a2a+p2p needs cp=N and cp_a2a_size=M, the ranks that exchange heads"
    if "cp_a2a_size" in pinned and not hierarchical:
        return "cp_a2a_size belongs to cp_comm_type=a2a+p2p"
    if hierarchical and int(fix["cp"]) % pinned["cp_a2a_size"]:
        return f"cp_a2a_size must divide cp, got {pinned['cp_a2a_size']} and {fix['cp']}"
    copies, share = pinned.get("dist_opt_instances", 1), pinned.get("optimizer_offload_fraction", 0.0)
    layers = pinned.get("activation_offload_layers", 0)
    if copies > 1 and "zero1" not in target.sharding_replicas:
        return f"{target.name} has no instances of the distributed optimizer; leave dist_opt_instances out"
    if share and not (target.optimizer_offload and "zero1" in target.sharding):
        return f"{target.name} cannot offload its optimizer; leave optimizer_offload_fraction out"
    if layers and not target.activation_offload_layers:
        return f"{target.name} cannot offload activations; leave activation_offload_layers out"
    if sum(map(bool, (copies > 1, share, layers))) > 1:
        return "dist_opt_instances, optimizer_offload_fraction and activation_offload_layers exclude each other here"
    if (copies > 1 or share) and fix.get("sharding", "zero1") != "zero1":
        return f"sharding={fix['sharding']} has no {'dist_opt_instances' if copies > 1 else 'optimizer offload'}"
    return None


def switched(target: Target, switches: tuple[Switch, ...]) -> Target:
    """The target with these switches on and no others."""
    update: dict[str, object] = {"switches": tuple(sorted(switches))}
    if "flex_dispatcher" in switches:
        update["dispatcher"] = "flex"
    if "ep_comm_overlap" in switches:
        update["moe_comm_overlap"] = True
    if {"ep_comm_overlap", "cuda_graph"} & set(switches):  # these refuse full recompute, in which block mode is judged
        update["recompute_block_layers"] = False
    return target.model_copy(update=update)


def with_switches(target: Target, fix: Mapping[str, int | str], forbid: tuple[str, ...] = ()) -> Target:
    """The target with the switches that are pinned on, and without those pinned off or forbidden."""
    pinned = pinned_options(fix)
    off = {name for name, value in pinned.items() if value is False} | set(forbid)
    on = {name for name, value in pinned.items() if value is True}
    dispatcher = pinned.get("dispatcher")
    if dispatcher is not None:
        (on if dispatcher == "flex" else off).add("flex_dispatcher")
    kept: tuple[Switch, ...] = tuple(s for s in get_args(Switch) if s in on or (s in target.switches and s not in off))
    if set(kept) != set(target.switches):
        target = switched(target, kept)
    if dispatcher not in (None, target.dispatcher):
        target = target.model_copy(update={"dispatcher": dispatcher})
    return target
