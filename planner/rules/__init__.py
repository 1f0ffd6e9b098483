"""Rules of a target as data: judged on one plan (``violations``) or on thousands of candidates (``bulk_legal``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import CandidateBatch
from meshwright.specs.cluster import GpuType
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

from .accelerate import ACCELERATE
from .bridge import BRIDGE, carried
from .deepspeed import DEEPSPEED
from .derive import (
    FP8_RECIPES,
    FSDP_STRATEGIES,
    OFFLOAD_ENVIRONMENT,
    checkpoint_format,
    context_sizes,
    facts_of_batch,
    facts_of_plan,
    layout_of_plan,
    state_dtypes,
    uses_fsdp,
)
from .experts import EXPERTS
from .facts import Facts
from .flagscale import flagscale_rules
from .grid import GRID
from .layout import Layout, LayoutError
from .models import MODELS
from .pipeline import PIPELINE
from .recompute import RECOMPUTE
from .rule import Rule, Violation, broken
from .sharding import SHARDING
from .torchtitan import TORCHTITAN

#: All rules of the Megatron target, in the order in which they are judged.
MEGATRON: tuple[Rule, ...] = (*GRID, *PIPELINE, *EXPERTS, *SHARDING, *RECOMPUTE, *MODELS)


#: Rules by the name that a target gives in its field ``rules``.
RULE_SETS: dict[str, tuple[Rule, ...]] = {
    "bridge": (*BRIDGE, *carried(MEGATRON)),
    "flagscale": flagscale_rules(MEGATRON),
    "megatron": MEGATRON,
    "torchtitan": TORCHTITAN,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}


def family(rule_id: str) -> str:
    """The family of a rule: ``megatron.P`` of ``megatron.P9``."""
    return re.sub(r"\d.*$", "", rule_id)


def violations(facts: Facts) -> list[Violation]:
    """Every rule that a plan breaks, with its numbers and near legal values; empty if the plan is legal."""
    return broken(RULE_SETS[facts.rule_set], facts)


def bulk_legal(
    batch: CandidateBatch,
    model: ModelSpec,
    workload: Workload,
    target: Target,
    gpus: Iterable[GpuType] = (),
    chosen: Mapping[str, Any] | None = None,
) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
    """Mask of the legal candidates, and how many each rule is the first to refuse; ``chosen`` as in
    :func:`facts_of_batch`."""
    facts = facts_of_batch(batch, model, workload, target, gpus, chosen)
    legal = np.ones(len(batch), dtype=np.bool_)
    rejected: dict[str, int] = {}
    for rule in RULE_SETS[facts.rule_set]:
        if not rule.applies(facts.version) or rule.id in target.waived_rules or family(rule.id) in target.waived_rules:
            continue
        refused = legal & ~np.broadcast_to(np.asarray(rule.holds(facts), dtype=np.bool_), legal.shape)
        if refused.any():
            rejected[rule.id] = int(refused.sum())
            legal &= ~refused
    return legal, rejected


def one_refusal(
    batch: CandidateBatch, model: ModelSpec, workload: Workload, target: Target, gpus: Iterable[GpuType] = ()
) -> Violation | None:
    """The first rule that the first candidate breaks, with its numbers, or None if it is legal."""
    arrays = facts_of_batch(batch.take(np.array([0])), model, workload, target, gpus)
    values: dict[str, Any] = {field.name: _scalar(getattr(arrays, field.name)) for field in fields(Facts)}
    found = violations(Facts(**values))
    return found[0] if found else None


def _scalar(value: object) -> object:
    """A fact of a batch of one as the fact of a plan."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1)[0].item()
    if isinstance(value, dict):
        return {key: _scalar(item) for key, item in value.items()}
    return value


__all__ = [
    "FP8_RECIPES",
    "FSDP_STRATEGIES",
    "MEGATRON",
    "OFFLOAD_ENVIRONMENT",
    "RULE_SETS",
    "Facts",
    "Layout",
    "LayoutError",
    "Rule",
    "Violation",
    "bulk_legal",
    "checkpoint_format",
    "context_sizes",
    "facts_of_batch",
    "facts_of_plan",
    "layout_of_plan",
    "one_refusal",
    "state_dtypes",
    "uses_fsdp",
    "violations",
]
