"""Fixtures that several topics share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("specs", "cost_models", "profiler", "planner", "megatron_export", "api")

# Random cases are the same in every run, so that a red run can be repeated; a busy machine is no reason to fail.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> list[Path]:
    """Files of the rooms, relative to the repository, without what Python caches."""
    files = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    return sorted(path for path in files if "__pycache__" not in path.parts)
