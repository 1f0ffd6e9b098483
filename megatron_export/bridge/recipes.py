"""Bridge's recipes by name: the model, the GPUs, and the settings that its code states (data/recipes-0.6.json)."""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.specs.errors import Fault, SpecError


@lru_cache
def load_recipes() -> dict[str, dict[str, Any]]:
    """Recipe name -> ``model`` (Hugging Face id or None), ``num_gpus`` (or None), ``settings`` by key."""
    text = files("meshwright.megatron_export.bridge.data").joinpath("recipes-0.6.json").read_text("utf-8")
    recipes: dict[str, dict[str, Any]] = json.loads(text)["recipes"]
    return recipes


def recipe_of(name: str) -> dict[str, Any]:
    """A recipe; :class:`SpecError` with near names for an unknown one."""
    recipes = load_recipes()
    for known in (name, f"{name}_config"):
        if known in recipes:
            return recipes[known]
    near = tuple(difflib.get_close_matches(name, recipes, n=3, cutoff=0.6))
    raise SpecError(Fault("/--recipe", f"{name[:80]!r} is no recipe of Megatron-Bridge 0.6", near))


def settings_of_recipe(name: str) -> dict[str, Any]:
    """Settings of a recipe by key."""
    settings: dict[str, Any] = recipe_of(name)["settings"]
    return settings
