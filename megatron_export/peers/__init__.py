"""Plans in the formats of other planners, so that their simulators can judge them and their runtimes run them."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.specs.document import PlanDocument

from ..flagscale.meshes import export_meshes
from .flashflex import export_flashflex
from .galvatron import export_galvatron
from .metis import export_metis
from .nest import export_nest
from .sailor import export_sailor

#: What writes a plan in each format, whatever target it was made for.
PEER_EXPORTERS: dict[str, Callable[[PlanDocument], dict[str, str]]] = {
    "flagscale": export_meshes,
    "flashflex": export_flashflex,
    "galvatron": export_galvatron,
    "metis": export_metis,
    "nest": export_nest,
    "sailor": export_sailor,
}

__all__ = ["PEER_EXPORTERS"]
