"""Megatron-LM: plans as argument lists and launch files, argument lists read back and judged."""

from __future__ import annotations

from .arguments import MegatronArguments, read_arguments
from .export import environment_of, export_megatron, megatron_arguments
from .interpret import check_arguments, facts_from_arguments
from .read_model import model_from_arguments, workload_from_arguments
from .read_plan import plan_from_arguments

__all__ = [
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
