"""What every pipeline schedule offers, and the event replay that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray

#: Micro-batches that are replayed event by event; the rest of a longer step goes on at the steady pace.
MAX_REPLAYED = 2048

#: One operation of a stage in program order: (is backward, chunk of the stage, micro-batch).
Operation = tuple[bool, int, int]
#: Program order of every stage.
Orders = tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True)
class Event:
    """One operation on the time axis, in seconds from the start of the step; ``send_s`` is part of the span."""

    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    start_s: float
    end_s: float
    send_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When every stage works in one step. Arrays of length P, seconds.

    ``busy_s`` is compute alone, ``send_s`` the time a stage is held by its own blocking sends, ``idle_s`` the rest up
    to ``finish_s``, the end of the stage's last backward (sends included). ``makespan_s`` is the largest finish.
    """

    start_s: FloatArray
    finish_s: FloatArray
    busy_s: FloatArray
    send_s: FloatArray
    idle_s: FloatArray
    makespan_s: float
    events: tuple[Event, ...] = ()


class Schedule(Protocol):
    """A pipeline schedule: legality, memory, closed form and events. Stage sums are shaped [..., P, V]."""

    name: str

    def legal(self, pp: int, vpp: int, m: int) -> str | None:
        """Why the schedule cannot run at these degrees, or None if it can."""
        ...

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        """Program order of every stage."""
        ...

    def in_flight(self, pp: int, vpp: int, m: int) -> IntArray:
        """[P, V] micro-batches of every chunk whose activations are alive when a stage first holds the most."""
        ...

    def bound_s(
        self, forward_s: FloatArray, backward_s: FloatArray, send_s: FloatArray, m: int | IntArray
    ) -> FloatArray:
        """Provable lower bound [...] of the makespan; equal to it for equal stages without sends.

        ``m`` may be an array that broadcasts against [..., P].
        """
        ...

    def simulate(
        self, forward_s: FloatArray, backward_s: FloatArray, send_s: FloatArray, m: int, keep_events: bool = False
    ) -> Timeline:
        """Event by event, from [P, V] seconds of one micro-batch and the seconds of the sends between stages."""
        ...


def boundary_sends(send_s: npt.ArrayLike, pp: int) -> FloatArray:
    """[..., P] seconds of the send from each stage to the next.

    Given P - 1 values, the way back from the last stage to the first (virtual stages only) is as slow as the slowest.
    """
    send = np.asarray(send_s, dtype=float)
    if send.ndim == 0:
        send = np.full(max(pp - 1, 0), float(send))
    if send.shape[-1] == pp:
        return send
    if send.shape[-1] != pp - 1:
        raise ValueError(f"send_s holds {send.shape[-1]} boundaries, want {pp - 1} or {pp}")
    back = send.max(axis=-1, keepdims=True) if pp > 1 else np.zeros((*send.shape[:-1], 1))
    return np.concatenate([send, back], axis=-1)


def alive(order: Sequence[Operation], vpp: int) -> IntArray:
    """[steps, V] activations of each chunk that are alive after every operation of one stage."""
    change = np.zeros((len(order), vpp), dtype=np.int64)
    for step, (backward, chunk, _) in enumerate(order):
        change[step, chunk] = -1 if backward else 1
    return np.cumsum(change, axis=0)


def in_flight_states(orders: Orders, vpp: int) -> list[IntArray]:
    """For every stage the distinct [K, V] mixes of live activations at which the total is largest.

    With virtual stages the total stays level while its mix over chunks changes: the memory peak is the largest
    ``mix @ chunk_bytes``, whichever mix that is.
    """
    out = []
    for order in orders:
        live = alive(order, vpp)
        total = live.sum(axis=1)
        out.append(np.unique(live[total == total.max()], axis=0))
    return out


def replayed_micro_batches(pp: int, m: int) -> int:
    """Micro-batches to replay out of ``m``: all, or as many whole groups of P as ``MAX_REPLAYED`` allows."""
    return m if m <= MAX_REPLAYED else max(MAX_REPLAYED // pp, 1) * pp


def stretched(timeline: Timeline, replayed: int, m: int, pace_s: float) -> Timeline:
    """The timeline of ``m`` micro-batches from that of the first ``replayed``, each further one taking ``pace_s``."""
    busy, send = timeline.busy_s * (m / replayed), timeline.send_s * (m / replayed)
    finish = timeline.finish_s + (m - replayed) * pace_s
    return Timeline(timeline.start_s, finish, busy, send, finish - busy - send, float(finish.max()), timeline.events)


def replay(
    orders: Orders,
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_s: FloatArray,
    m: int,
    *,
    blocking: bool,
    keep_events: bool = False,
) -> Timeline:
    """Run the program orders event by event.

    ``forward_s``, ``backward_s`` [P, V]; ``send_s`` [P]. An operation starts when its stage is free and its input has
    arrived. A blocking send holds the sending stage until the data has arrived; otherwise it only delays the receiver.
    """
    pp, vpp = forward_s.shape
    last = pp * vpp - 1
    seconds = (forward_s.T.ravel().tolist(), backward_s.T.ravel().tolist())  # by position q = chunk * P + stage
    ahead = np.concatenate([np.tile(send_s, vpp)[:-1], [0.0]]).tolist()  # seconds from position q to q + 1
    back = [0.0, *ahead[:-1]]  # seconds from position q to q - 1
    hold = (ahead, back) if blocking else ([0.0] * (last + 1), [0.0] * (last + 1))
    ready: tuple[list[list[float]], list[list[float]]] = (
        [[-1.0] * m for _ in range(last + 1)],
        [[-1.0] * m for _ in range(last + 1)],
    )  # when an operation's result is at its consumer
    ready_forward, ready_backward = ready
    clock, begin = [0.0] * pp, [0.0] * pp
    position = [0] * pp
    events: list[Event] = []
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for stage in range(pp):
            order, at, now = orders[stage], position[stage], clock[stage]
            end = len(order)
            while at < end:
                backward, chunk, micro_batch = order[at]
                q = chunk * pp + stage
                if not backward:
                    arrived = ready_forward[q - 1][micro_batch] if q else 0.0
                elif q < last:
                    arrived = ready_backward[q + 1][micro_batch]
                else:
                    arrived = 0.0  # the loss follows its own forward in program order
                if arrived < 0:
                    break
                start = arrived if arrived > now else now
                if at == 0:
                    begin[stage] = start
                done = start + seconds[backward][q]
                now = done + hold[backward][q]
                # With a blocking send the stage is free exactly when the data has arrived.
                ready[backward][q][micro_batch] = now if blocking else done + (back if backward else ahead)[q]
                if keep_events:
                    events.append(Event(stage, chunk, micro_batch, backward, start, now, hold[backward][q]))
                at += 1
            left -= at - position[stage]
            position[stage], clock[stage] = at, now
        if left == before:
            raise ValueError("the program orders wait for each other")
    finish, start_of = np.array(clock), np.array(begin)
    busy = m * (forward_s + backward_s).sum(axis=1)
    held = m * (np.array(hold[0]) + np.array(hold[1])).reshape(vpp, pp).sum(axis=0)
    return Timeline(start_of, finish, busy, held, finish - busy - held, float(finish.max()), tuple(events))
