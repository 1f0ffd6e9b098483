"""What a plan document says beside its plan: cost, goal, other batches and clusters, experts, a plan in use."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from .base import Document
from .plan import Plan

Objective = Literal["time", "cost", "gpus", "batch"]


class ExpertPlacement(Document):
    """Which expert-parallel rank holds which experts.

    ``layers[l][r]`` are the experts of rank r in MoE layer l (one entry where one histogram stands for all layers); a
    framework that gives neighbours to a rank takes them as the new order of the experts and of the router's outputs.
    ``experts_per_rank`` is the most. ``max_over_mean`` is the load of the fullest rank over the mean, averaged over MoE
    layers, as is its ``lower_bound``; ``contiguous_...`` is what the same plan has without the new order,
    ``uneven_max_over_mean`` what ranks with any number of experts would reach, ``replicated_max_over_mean`` what one
    more place a rank for copies of hot experts would.
    """

    source: str
    ep: PositiveInt
    experts_per_rank: PositiveInt
    max_over_mean: float = Field(ge=1)
    lower_bound: float = Field(ge=1)
    worst_layer_max_over_mean: float = Field(ge=1)
    contiguous_max_over_mean: float = Field(ge=1)
    uneven_max_over_mean: float = Field(ge=1)
    replicated_max_over_mean: float = Field(ge=1)
    step_time_s: PositiveFloat
    contiguous_step_time_s: PositiveFloat
    layers: tuple[tuple[tuple[int, ...], ...], ...]


class Cost(Document):
    """Money for the GPUs that the plan uses, in the currency of the prices. ``total`` and ``days`` are for ``tokens``
    tokens at the plan's step time."""

    price_per_gpu_hour: dict[str, float]
    per_step: NonNegativeFloat
    per_million_tokens: NonNegativeFloat
    tokens: PositiveFloat | None = None
    total: NonNegativeFloat | None = None
    days: PositiveFloat | None = None


class Considered(Document):
    """A part of the cluster that was planned for, and the best plan on it."""

    cluster: str
    num_gpus: PositiveInt
    status: str
    step_time_s: PositiveFloat | None = None
    bound_s: NonNegativeFloat | None = None
    cost_per_step: NonNegativeFloat | None = None
    reason: str | None = None


class Goal(Document):
    """What was asked for and reached: ``value`` in ``unit``. ``bound`` is the least that any considered part of the
    cluster could reach, ``gap`` = 1 - bound / value. ``target_step_time_s`` is the longest step allowed."""

    objective: Objective
    unit: str
    value: NonNegativeFloat
    bound: NonNegativeFloat | None = None
    gap: NonNegativeFloat | None = None
    target_step_time_s: PositiveFloat | None = None
    considered: tuple[Considered, ...] = ()


class ParetoPoint(Document):
    """A plan that no other found plan beats in step time, free memory and cost at once.

    ``memory_headroom`` is the free share of the fullest stage. ``gpu_seconds`` are GPUs used times step time, ``cost``
    their price.
    """

    summary: str
    choices: dict[str, int | str]
    gpus_used: PositiveInt
    step_time_s: PositiveFloat
    memory_headroom: float
    gpu_seconds: PositiveFloat
    cost: NonNegativeFloat | None = None


class BatchPoint(Document):
    """The best plan at another global batch size. ``marginal_tokens_per_s``: tokens more than in the row before, over
    seconds more. ``share_of_best``: throughput over the highest of the sweep."""

    global_batch_size: PositiveInt
    status: str
    step_time_s: PositiveFloat | None = None
    tokens_per_s: PositiveFloat | None = None
    share_of_best: float | None = None
    marginal_tokens_per_s: float | None = None
    summary: str | None = None
    reason: str | None = None


class BatchSweep(Document):
    """Best plans over batch sizes. ``knee`` is the smallest batch with ``knee_share`` of the highest throughput."""

    knee: PositiveInt | None
    knee_share: float
    points: tuple[BatchPoint, ...]


class Difference(Document):
    """A choice in which two plans differ, by name. ``worth_s``: seconds saved by changing this one alone in the first
    plan, where that is a legal plan that fits; else ``reason`` says why there is none."""

    name: str
    ours: Any
    theirs: Any
    worth_s: float | None = None
    reason: str | None = None


class WhatIf(Document):
    """The best plan after one change. ``gain`` = step time before over after, less 1."""

    change: str
    status: str
    cluster: str
    num_gpus: PositiveInt
    step_time_s: PositiveFloat | None = None
    gain: float | None = None
    tokens_per_s: PositiveFloat | None = None
    summary: str | None = None
    differences: tuple[Difference, ...] = ()
    reason: str | None = None


class CurrentPlan(Document):
    """A plan that is in use, priced beside the best one. ``ratio`` = its step time over the best one's.

    ``terms_s``: seconds that it spends more than the best one in each term, largest change first. ``why``: what makes
    the best one quicker, in words; null where it is not.
    """

    summary: str
    step_time_s: PositiveFloat
    ratio: PositiveFloat
    fits: bool
    plan: Plan
    differences: tuple[Difference, ...] = ()
    terms_s: dict[str, float] = Field(default_factory=dict)
    why: str | None = None
