"""torchtitan: plans as TOML (0.2) or Python configurations (0.3 and later) with launch files, and both read back."""

from __future__ import annotations

from .export import configuration_files, export_torchtitan
from .interpret import (
    check_python,
    check_toml,
    facts_of_configuration,
    model_of_configuration,
    plan_from_python,
    plan_from_toml,
)
from .read import read_python, read_toml

__all__ = [
    "check_python",
    "check_toml",
    "configuration_files",
    "export_torchtitan",
    "facts_of_configuration",
    "model_of_configuration",
    "plan_from_python",
    "plan_from_toml",
    "read_python",
    "read_toml",
]
