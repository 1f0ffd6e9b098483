"""Known hardware: GPU types with their reference nodes, and links. Data files with the source of every value."""

from __future__ import annotations

from .entries import CatalogEntry, Link, NodeLevel, ReferenceNode
from .hardware import gpu, gpu_names, gpus, links, near_gpus, resolve_gpu

__all__ = [
    "CatalogEntry",
    "Link",
    "NodeLevel",
    "ReferenceNode",
    "gpu",
    "gpu_names",
    "gpus",
    "links",
    "near_gpus",
    "resolve_gpu",
]
