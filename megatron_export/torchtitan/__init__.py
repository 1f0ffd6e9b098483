"""torchtitan: plans as TOML (0.2) or Python configurations (0.3 and later) with launch files."""

from __future__ import annotations

from .export import configuration_files, export_torchtitan

__all__ = ["configuration_files", "export_torchtitan"]
