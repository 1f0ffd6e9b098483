"""What schedules share that are told by their program orders alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.schedules import CHUNKS

from .base import (
    Orders,
    Schedule,
    Timeline,
    alive,
    boundary_sends,
    memory_states,
    replayed_micro_batches,
    stretched,
)
from .chains import chain_bound_s
from .engine import graph, run, run_many, seconds_by_kind
from .placement import Placement, looped

#: Groups of P micro-batches over which the steady pace of a long step is read.
PACE_GROUPS = 4


class ListedSchedule:
    """A schedule made of ``orders`` and ``placement``; everything else follows from its events."""

    name: str
    blocking = False
    splits_backward = False
    copies = 1
    ends_at_first = False
    gathers_once = False
    holds_all = False

    def legal(self, pp: int, vpp: int, m: int) -> str | None:
        least, most = CHUNKS[self.name]
        if vpp < least or (most is not None and vpp > most):
            wanted = f"{least}" if most == least else f"at least {least}"
            return f"{self.name} has {wanted} chunk{'s' if wanted != '1' else ''} a stage, got {vpp}"
        if m < 1:
            return f"{self.name} needs at least one micro-batch"
        return self.refusal(pp, vpp, m)

    def refusal(self, pp: int, vpp: int, m: int) -> str | None:
        """Why these degrees do not run, chunks aside."""
        return None

    def placement(self, pp: int, vpp: int) -> Placement:
        return looped(pp, vpp)

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        raise NotImplementedError

    def arrays(self, pp: int, vpp: int, m: int) -> Sequence[IntArray]:
        return [np.array(order, dtype=np.int64).reshape(-1, 3) for order in self.orders(pp, vpp, m)]

    def in_flight(self, pp: int, vpp: int, m: int) -> IntArray:
        out = []
        for order in self.orders(pp, vpp, m):
            live = alive(order, vpp)
            out.append(live[live.sum(axis=1).argmax()])
        return np.stack(out)

    def bound_s(
        self,
        forward_s: FloatArray,
        backward_s: FloatArray,
        send_s: FloatArray,
        m: int | IntArray,
        weight_s: FloatArray | None = None,
    ) -> FloatArray:
        """Longest of several chains of operations that must follow each other (:mod:`.chains`)."""
        pp, vpp = forward_s.shape[-2:]
        lead = forward_s.shape[:-2]
        weight = np.zeros_like(backward_s) if weight_s is None or not self.splits_backward else weight_s
        parts = [part.reshape(-1, pp, vpp) for part in (forward_s, backward_s, weight)]
        send = np.broadcast_to(boundary_sends(send_s, pp), (*lead, pp)).reshape(-1, pp)
        count = np.broadcast_to(np.asarray(m), (*lead, pp))[..., 0].reshape(-1)
        out = np.empty(len(count))
        for each in np.unique(count):
            rows = count == each
            one, two, apart = (part[rows] for part in parts)
            out[rows] = chain_bound_s(self, one, two, apart, send[rows], int(each))
        return out.reshape(lead)

    def simulate(
        self,
        forward_s: FloatArray,
        backward_s: FloatArray,
        send_s: FloatArray,
        m: int,
        keep_events: bool = False,
        weight_s: FloatArray | None = None,
    ) -> Timeline:
        pp, vpp = forward_s.shape
        sends = boundary_sends(send_s, pp)
        seconds = seconds_by_kind(forward_s, backward_s, weight_s)
        few = replayed_micro_batches(pp, m)
        timeline = run(graph(self, pp, vpp, few), seconds, sends, blocking=self.blocking, keep_events=keep_events)
        if few == m:
            return timeline
        return stretched(timeline, few, m, self.pace_s(timeline, few, seconds, sends))

    def pace_s(self, timeline: Timeline, few: int, seconds: FloatArray, sends: FloatArray) -> float:
        """Seconds of each further micro-batch after the ``few`` of ``timeline``, whose [4, P, V] seconds and [P] sends
        these are. Uneven chunks can make every stage wait, so the pace is read off the events."""
        pp, vpp = seconds.shape[-2:]
        fewer = few - PACE_GROUPS * pp
        shorter = run(graph(self, pp, vpp, fewer), seconds, sends, blocking=self.blocking)
        pace: float = (timeline.makespan_s - shorter.makespan_s) / (few - fewer)
        return pace


#: Candidates from which on a run of all at once, level by level, is faster than one after another.
TOGETHER = 4


def finish_times_s(
    schedule: Schedule,
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_s: FloatArray,
    m: int,
    weight_s: FloatArray | None = None,
) -> FloatArray:
    """[N, P] ``simulate(...).finish_s`` of N candidates: seconds [N, P, V], sends [N, P - 1] or [N, P]."""
    number, pp, vpp = forward_s.shape
    if number < TOGETHER or replayed_micro_batches(pp, m) < m:
        rows = range(number)
        weights = [None if weight_s is None else weight_s[row] for row in rows]
        timelines = [
            schedule.simulate(forward_s[row], backward_s[row], send_s[row], m, weight_s=weights[row]) for row in rows
        ]
        return np.stack([timeline.finish_s for timeline in timelines])
    seconds = seconds_by_kind(forward_s, backward_s, weight_s)
    return run_many(graph(schedule, pp, vpp, m), seconds, boundary_sends(send_s, pp), blocking=schedule.blocking)


@lru_cache(maxsize=256)
def states_at_peak(schedule: Schedule, pp: int, vpp: int, m: int) -> tuple[IntArray, ...]:
    """For every stage [K, 2 V] counts of live activations and of stashed weight-gradient inputs at possible peaks."""
    # More micro-batches than fill the pipeline change no mix of live activations, only the length of the order.
    few = m if schedule.holds_all else min(m, 4 * pp)
    return tuple(memory_states(schedule.arrays(pp, vpp, few), vpp))


def activation_peak_bytes(
    schedule: Schedule, activation_bytes: FloatArray, stash_bytes: FloatArray, m: int
) -> FloatArray:
    """[P] bytes of every stage when its activations take the most, from the order of its events.

    ``activation_bytes`` [P, V]: kept by one micro-batch of a chunk from its forward to its backward (or input
    gradient); ``stash_bytes`` [P, V]: what the weight gradient still needs from its input gradient on.
    """
    pp, vpp = activation_bytes.shape
    each = np.concatenate([activation_bytes, stash_bytes], axis=1)
    states = states_at_peak(schedule, pp, vpp, m)
    return np.array([(states[stage] @ each[stage]).max() for stage in range(pp)])
