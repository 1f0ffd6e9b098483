"""Megatron-Bridge: plans as overrides and a training program, overrides read back and judged."""

from __future__ import annotations

from .export import export_bridge
from .interpret import check_overrides, facts_from_overrides, preset_of
from .overrides import Overrides, read_overrides
from .read import model_from_overrides, plan_from_overrides, workload_from_overrides
from .recipes import load_recipes, recipe_of

__all__ = [
    "Overrides",
    "check_overrides",
    "export_bridge",
    "facts_from_overrides",
    "load_recipes",
    "model_from_overrides",
    "plan_from_overrides",
    "preset_of",
    "read_overrides",
    "recipe_of",
    "workload_from_overrides",
]
