"""Targets: the frameworks and versions that plans are made for, as data."""

from __future__ import annotations

from .loader import list_targets, load_target

__all__ = ["list_targets", "load_target"]
