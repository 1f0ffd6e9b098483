"""Starting a plan: which host runs which ranks, and the scripts and manifests that see to it, for any target."""

from __future__ import annotations

from .program import Program
from .scripts import LAUNCHERS, launch_files

__all__ = ["LAUNCHERS", "Program", "launch_files"]
