"""``Estimate``: seconds and bytes of a plan."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from .base import Document


class StageEstimate(Document):
    """Memory and busy time of one stage (its fullest rank).

    ``breakdown_bytes`` sums to ``allocated_bytes``, the peak of a steady step; ``first_step_bytes`` is that of the
    first one, before the optimizer has moments. ``busy_s`` is compute and exposed communication of all its
    micro-batches.
    """

    allocated_bytes: NonNegativeInt
    reserved_bytes: NonNegativeInt
    limit_bytes: PositiveInt
    first_step_bytes: NonNegativeInt | None = None
    breakdown_bytes: dict[str, NonNegativeInt]
    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    busy_s: NonNegativeFloat


class Estimate(Document):
    """What a plan costs. ``breakdown_s`` follows the critical stage and sums to ``step_time_s``.

    ``rungs`` says for each term where its numbers come from (measured layer, measured operator, shipped fit, spec
    roofline). ``host_ram_bytes`` is what offload needs on the fullest node. ``interval_s`` holds the step time with
    probability ``interval_level``.
    """

    step_time_s: PositiveFloat
    interval_s: tuple[PositiveFloat, PositiveFloat]
    interval_level: float = Field(gt=0, lt=1)
    tokens_per_s_per_gpu: PositiveFloat
    mfu: NonNegativeFloat
    fits: bool
    assumptions: tuple[str, ...]
    gpus_used: PositiveInt
    gpus_offered: PositiveInt
    host_ram_bytes: NonNegativeInt
    breakdown_s: dict[str, float]
    critical_stage: NonNegativeInt
    rungs: dict[str, str]
    stages: tuple[StageEstimate, ...] = Field(min_length=1)
