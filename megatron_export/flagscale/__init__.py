"""FlagScale: plans as an experiment with process meshes."""

from __future__ import annotations

from .export import export_flagscale

__all__ = ["export_flagscale"]
