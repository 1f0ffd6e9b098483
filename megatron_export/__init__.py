"""Plan <-> files of each target: arguments, launch scripts, and argument lists read back."""

from __future__ import annotations

from collections.abc import Callable

from .arguments import MegatronArguments, read_arguments
from .export import environment_of, export_megatron, megatron_arguments
from .interpret import check_arguments, facts_from_arguments
from .launchers import LAUNCHERS
from .read_model import model_from_arguments, workload_from_arguments
from .read_plan import plan_from_arguments

#: Export function by target framework.
EXPORTERS: dict[str, Callable[..., dict[str, str]]] = {"megatron": export_megatron}

__all__ = [
    "EXPORTERS",
    "LAUNCHERS",
    "MegatronArguments",
    "check_arguments",
    "environment_of",
    "export_megatron",
    "facts_from_arguments",
    "megatron_arguments",
    "model_from_arguments",
    "plan_from_arguments",
    "read_arguments",
    "workload_from_arguments",
]
