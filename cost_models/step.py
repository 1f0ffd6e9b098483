"""Step time from stage sums: event by event for finalists, a lower bound in bulk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray

from . import schedules
from .protocol import Tail
from .schedules import Timeline


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
) -> StepTime:
    """Event time of ``m`` micro-batches over stages [P, V], then the tail.

    The gradient norm waits for the stage that ends last, its reduction included; the slowest optimizer and the
    slowest parameter gather follow. Sends between virtual stages hold their sender unless ``sends_overlap``.
    """
    send = np.asarray(send_s, dtype=float)
    runner = schedules.get(schedule) if sends_overlap else schedules.Interleaved(blocking=True)
    timeline = runner.simulate(forward_s, backward_s, send, m, keep_events)
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
    schedule: str, forward_s: FloatArray, backward_s: FloatArray, send_s: npt.ArrayLike, m: int | IntArray, tail: Tail
) -> FloatArray:
    """Lower bound [...] of :func:`step_time` for many candidates at once.

    Stage sums [..., P, V], sends [..., P - 1] or [..., P], tail [..., P], ``m`` a number or broadcast against
    [..., P]. Stage 0 ends with the makespan, so its
    reduction follows the schedule's bound; any stage i ends no sooner than the forwards before it and its own work.
    """
    makespan = schedules.get(schedule).bound_s(forward_s, backward_s, np.asarray(send_s, dtype=float), m)
    first = forward_s[..., 0]
    own = m * (forward_s + backward_s).sum(axis=-1)
    ends = np.cumsum(first, axis=-1) - first + own + tail.grad_reduce_s
    begun = np.maximum(makespan + tail.grad_reduce_s[..., 0], ends.max(axis=-1))
    out: FloatArray = begun + tail.optimizer_s.max(axis=-1) + tail.param_gather_s.max(axis=-1)
    return out


def with_tail_s(finish_s: FloatArray, tail: Tail) -> FloatArray:
    """Step time [...] from the end of every stage's last backward [..., P] and the tail [..., P]."""
    done = (finish_s + tail.grad_reduce_s).max(axis=-1)
    out: FloatArray = done + tail.optimizer_s.max(axis=-1) + tail.param_gather_s.max(axis=-1)
    return out
