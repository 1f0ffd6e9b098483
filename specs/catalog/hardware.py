"""Look up GPU types and links by any of their names. Data: ``gpus/*.json`` and ``links.json``, read on first use."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import Fault, SpecError
from .entries import CatalogEntry, Link

_VENDOR_WORDS = re.compile(r"^(?:nvidia|amd|tesla|geforce|instinct)[\s_-]*", re.IGNORECASE)


def gpu(name: str, pointer: str = "") -> CatalogEntry:
    """The GPU type called ``name``, in any of its spellings; :class:`SpecError` at ``pointer`` with near matches."""
    return resolve_gpu(name, pointer)[0]


def resolve_gpu(name: str, pointer: str = "") -> tuple[CatalogEntry, str | None]:
    """:func:`gpu`, and the assumption made when ``name`` leaves the memory size or the form open."""
    found = _index().get(_key(name))
    if found is None:
        raise SpecError(Fault(pointer, f"unknown GPU type {_short(name)}", near_gpus(name)))
    canonical, loose = found
    assumption = f"GPU {name.strip()} taken as {canonical}: the name leaves memory size or form open" if loose else None
    return _entry(canonical), assumption


def gpus() -> list[CatalogEntry]:
    """Every GPU type of the catalog, by generation."""
    return [_entry(name) for name in _raw_gpus()]


def gpu_names() -> list[str]:
    """The canonical names of all GPU types."""
    return list(_raw_gpus())


@cache
def links() -> dict[str, Link]:
    """All links by name."""
    raw = json.loads(files(__package__).joinpath("links.json").read_text(encoding="utf-8"))
    return {name: Link(name=name, **fields) for name, fields in raw.items()}


def near_gpus(name: str, count: int = 5) -> tuple[str, ...]:
    """Canonical names whose spellings come closest to ``name``; all names when none comes close."""
    from difflib import get_close_matches

    key = _key(name[:60])
    close = get_close_matches(key, list(_index()), n=3 * count, cutoff=0.5)
    close += [known for known in _index() if len(key) >= 2 and known.startswith(key)]
    names = dict.fromkeys(_index()[known][0] for known in close)
    return tuple(names)[:count] or tuple(_raw_gpus())


def _key(name: str) -> str:
    """A name without vendor words, case and separators: ``NVIDIA A100-SXM4-80GB`` becomes ``a100sxm480gb``."""
    text = name.strip()
    while (shorter := _VENDOR_WORDS.sub("", text)) != text:
        text = shorter
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _short(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")


@cache
def _raw_gpus() -> dict[str, dict[str, Any]]:
    folder = files(__package__).joinpath("gpus")
    out: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".json"):
            out.update(json.loads(file.read_text(encoding="utf-8")))
    return out


@cache
def _index() -> dict[str, tuple[str, bool]]:
    """Spelling key -> (canonical name, whether the spelling leaves something open)."""
    out: dict[str, tuple[str, bool]] = {}
    for name, raw in _raw_gpus().items():
        spellings = [(name, False), *((alias, False) for alias in raw["aliases"])]
        spellings += [(alias, True) for alias in raw["loose_aliases"]]
        for spelling, loose in spellings:
            owner, _ = out.setdefault(_key(spelling), (name, loose))
            if owner != name:
                raise AssertionError(f"catalog: {spelling} names both {owner} and {name}")
    return out


@cache
def _entry(name: str) -> CatalogEntry:
    raw = _raw_gpus()[name]
    about = ("node", "aliases", "loose_aliases")
    fields = {key: value for key, value in raw.items() if key not in about}
    return CatalogEntry.model_validate({"gpu": {"name": name, **fields}, **{key: raw[key] for key in about}})
