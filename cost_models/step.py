"""Step time from stage sums: event by event for finalists, a lower bound in bulk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray

from . import schedules
from .protocol import Tail
from .schedules import Timeline

#: Interleaving whose sends hold their sender.
HELD_BY_SENDS = schedules.Interleaved(blocking=True)


@dataclass(frozen=True)
class StepTime:
    """A step: its timeline and the exposed tail, seconds. The critical stage is the one that works longest: the others
    wait for it, and less work there shortens the step."""

    step_time_s: float
    timeline: Timeline
    critical_stage: int
    grad_reduce_s: float
    optimizer_s: float
    param_gather_s: float


def step_time(
    schedule: str,
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_s: npt.ArrayLike,
    m: int,
    tail: Tail,
    keep_events: bool = False,
    sends_overlap: bool = True,
    weight_s: FloatArray | None = None,
) -> StepTime:
    """Event time of ``m`` micro-batches over stages [P, V], then the tail.

    ``weight_s`` [P, V] is the part of ``backward_s`` that weight gradients take, for schedules that run them apart.

    The gradient norm waits for the stage that ends last, its reduction included; the slowest optimizer and the
    slowest parameter gather follow. Sends of the interleaved schedule hold their sender unless ``sends_overlap``.
    """
    send = np.asarray(send_s, dtype=float)
    runner = schedules.get(schedule) if sends_overlap or schedule != "interleaved" else HELD_BY_SENDS
    timeline = runner.simulate(forward_s, backward_s, send, m, keep_events, weight_s)
    done = timeline.finish_s + tail.grad_reduce_s
    last = int(done.argmax())
    optimizer, gather = float(tail.optimizer_s.max()), float(tail.param_gather_s.max())
    return StepTime(
        step_time_s=float(done[last]) + optimizer + gather,
        timeline=timeline,
        critical_stage=int((timeline.busy_s + timeline.send_s).argmax()),
        grad_reduce_s=float(tail.grad_reduce_s[last]),
        optimizer_s=optimizer,
        param_gather_s=gather,
    )


def step_bound_s(
    schedule: str,
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_s: npt.ArrayLike,
    m: int | IntArray,
    tail: Tail,
    weight_s: FloatArray | None = None,
) -> FloatArray:
    """Lower bound [...] of :func:`step_time` for many candidates at once.

    Stage sums [..., P, V], sends [..., P - 1] or [..., P], tail [..., P], ``m`` a number or broadcast against
    [..., P]. Where stage 0 ends with the makespan, its reduction follows the schedule's bound, else that of some
    stage; any stage i ends no sooner than the forwards before it, where it has one model's, and its own work.
    """
    of = schedules.get(schedule)
    makespan = of.bound_s(forward_s, backward_s, np.asarray(send_s, dtype=float), m, weight_s)
    own = m * (forward_s + backward_s).sum(axis=-1) / of.copies
    first = forward_s[..., 0] if of.copies == 1 else np.zeros_like(own)
    ends = np.cumsum(first, axis=-1) - first + own + tail.grad_reduce_s
    reduction = tail.grad_reduce_s[..., 0] if of.ends_at_first else tail.grad_reduce_s.min(axis=-1)
    begun = np.maximum(makespan + reduction, ends.max(axis=-1))
    out: FloatArray = begun + tail.optimizer_s.max(axis=-1) + tail.param_gather_s.max(axis=-1)
    return out


def with_tail_s(finish_s: FloatArray, tail: Tail) -> FloatArray:
    """Step time [...] from the end of every stage's last backward [..., P] and the tail [..., P]."""
    done = (finish_s + tail.grad_reduce_s).max(axis=-1)
    out: FloatArray = done + tail.optimizer_s.max(axis=-1) + tail.param_gather_s.max(axis=-1)
    return out
