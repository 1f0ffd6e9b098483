"""Plan <-> files of each target: what its framework reads, launch scripts, and configurations read back."""

from __future__ import annotations

from collections.abc import Callable

from .bridge import export_bridge
from .flagscale import export_flagscale
from .launch import LAUNCHERS
from .megatron import export_megatron
from .torchtitan import export_torchtitan

#: Export function by target framework: (document, launcher, hosts, site) -> file name to text.
EXPORTERS: dict[str, Callable[..., dict[str, str]]] = {
    "bridge": export_bridge,
    "flagscale": export_flagscale,
    "megatron": export_megatron,
    "torchtitan": export_torchtitan,
}

__all__ = ["EXPORTERS", "LAUNCHERS"]
