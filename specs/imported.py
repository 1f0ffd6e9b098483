"""``Imported``: what a file or folder of another planner holds, in our nouns."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from .base import Document
from .cluster import ClusterSpec
from .hardware_profile import HardwareProfile


class Imported(Document):
    """A profile, a cluster, or both; ``notes`` say what was assumed and what was left out, and why."""

    schema_version: Literal[1] = 1
    format: str
    profile: HardwareProfile | None = None
    cluster: ClusterSpec | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.profile is None and self.cluster is None:
            raise ValueError("holds neither a profile nor a cluster")
        return self


def is_imported(data: dict[str, Any]) -> bool:
    """Whether plain data has the form of an :class:`Imported` document."""
    return "format" in data and ("profile" in data or "cluster" in data)
