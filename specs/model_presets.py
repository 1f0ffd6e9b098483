"""Model presets by name: published configurations as data files, loaded when they are asked for."""

from __future__ import annotations

import difflib
import json
import re
from functools import lru_cache
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from .base import Document
from .errors import Fault, SpecError
from .hf import model_from_config
from .model import ModelSpec

#: Parts of a checkpoint's name that say how it was trained on, not how it is built.
_TUNED = re.compile(r"-(instruct|chat|it|base|hf|pt|thinking|bf16|fp8|2507|text)(?=-|$)")


class PresetEntry(Document):
    """Where a preset's configuration is, its other names, and where the configuration comes from."""

    config: str
    aliases: tuple[str, ...] = ()
    source: str


@lru_cache(maxsize=1)
def preset_index() -> dict[str, PresetEntry]:
    """All presets by name, sorted."""
    data = json.loads(_file("index.json"))["models"]
    return TypeAdapter(dict[str, PresetEntry]).validate_python(data)


def list_presets() -> list[str]:
    """The names of all presets, sorted."""
    return list(preset_index())


def find_preset(text: str) -> str | None:
    """The preset that ``text`` names, or None.

    Names are case-insensitive, may carry an organisation (``meta-llama/Llama-3.1-70B``) and words such as
    ``-Instruct`` that leave the architecture alone.
    """
    names = _names()
    plain = _plain(text)
    for name in (plain, plain.removeprefix("meta-"), _bare(plain), _bare(plain.removeprefix("meta-"))):
        if name in names:
            return names[name]
    return None


@lru_cache(maxsize=64)
def load_preset(name: str) -> ModelSpec:
    """The model of a preset. Raises :class:`SpecError` with near matches for a name that is none."""
    found = find_preset(name)
    if found is None:
        raise SpecError(unknown_preset(name))
    config: dict[str, Any] = json.loads(_file(preset_index()[found].config))
    return model_from_config(config, found)


def unknown_preset(text: str) -> Fault:
    """The fault of a name that is no preset, with near matches (all presets where none is near)."""
    names = _names()
    near = difflib.get_close_matches(_bare(_plain(text)[:100]), names, n=8, cutoff=0.6)
    matches = tuple(dict.fromkeys(names[name] for name in near))
    shown = text if len(text) <= 80 else text[:77] + "..."
    return Fault("", f"there is no model preset {shown!r}", matches or tuple(list_presets()))


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    """Every name and alias, and the bare form of each where it is unambiguous, to the preset's name."""
    exact = {alias: name for name, entry in preset_index().items() for alias in (name, *entry.aliases)}
    bare = {_bare(alias): name for alias, name in exact.items()}
    return bare | exact


def _plain(text: str) -> str:
    return text.strip().rsplit("/", 1)[-1].lower().replace("_", "-").replace(" ", "-")


def _bare(plain: str) -> str:
    return _TUNED.sub("", plain)


def _file(name: str) -> str:
    return files(__package__).joinpath("catalog", "models", name).read_text(encoding="utf-8")
