"""What every pipeline schedule offers: nouns and the protocol.

An operation is a forward, a backward, or one of the two halves of a backward: the input gradient, which the stage
before waits for, and the weight gradient, which nobody waits for (zero-bubble schedules, arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray

from .placement import Placement

#: Micro-batches that are replayed event by event; the rest of a longer step goes on at the steady pace.
MAX_REPLAYED = 2048

#: Kinds of operations. A backward does both of its halves at once. A joined forward runs as one with the operation
#: after it, so that its result leaves only when both are done.
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, JOINED_FORWARD = 0, 1, 2, 3, 4

#: One operation of a stage in program order: (kind, chunk of the stage, micro-batch).
Operation = tuple[int, int, int]
#: Program order of every stage.
Orders = tuple[tuple[Operation, ...], ...]


@dataclass(frozen=True)
class Event:
    """One operation on the time axis, in seconds from the start of the step; ``send_s`` is part of the span.

    ``backward`` is true of all but forwards; ``kind`` says which.
    """

    stage: int
    chunk: int
    micro_batch: int
    backward: bool
    start_s: float
    end_s: float
    send_s: float = 0.0
    kind: int = FORWARD


@dataclass(frozen=True)
class Timeline:
    """When every stage works in one step. Arrays of length P, seconds.

    ``busy_s`` is compute alone, ``send_s`` the time a stage is held by its own blocking sends, ``idle_s`` the rest up
    to ``finish_s``, the end of the stage's last operation (sends included). ``makespan_s`` is the largest finish.
    """

    start_s: FloatArray
    finish_s: FloatArray
    busy_s: FloatArray
    send_s: FloatArray
    idle_s: FloatArray
    makespan_s: float
    events: tuple[Event, ...] = ()


class Schedule(Protocol):
    """A pipeline schedule: legality, memory, bound and events.

    Stage sums are shaped [..., P, V], V the model chunks that a rank holds: ``vpp`` of the plan times ``copies``. Where
    different groups share a stage's micro-batches, the sums are those of a mean micro-batch (seconds times the share).
    """

    name: str
    #: Whether a send occupies its sender until the data has arrived.
    blocking: bool
    #: Whether weight gradients run apart from input gradients. Frameworks do not combine that with recomputation.
    splits_backward: bool
    #: Copies of the model over the ranks: 2 where two directions run at once; the second chunk is the mirrored stage.
    copies: int
    #: Whether the first stage is always the last to end.
    ends_at_first: bool
    #: Whether sharded parameters are gathered once for all micro-batches of a chunk.
    gathers_once: bool
    #: Whether live activations grow with the micro-batches for as long as there are any.
    holds_all: bool

    def __hash__(self) -> int: ...

    def legal(self, pp: int, vpp: int, m: int) -> str | None:
        """Why the schedule cannot run at these degrees, or None if it can."""
        ...

    def placement(self, pp: int, vpp: int) -> Placement:
        """Which rank runs which place along the pipeline."""
        ...

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        """Program order of every stage."""
        ...

    def arrays(self, pp: int, vpp: int, m: int) -> Sequence[IntArray]:
        """:meth:`orders` as one array [n, 3] for each stage."""
        ...

    def in_flight(self, pp: int, vpp: int, m: int) -> IntArray:
        """[P, V] micro-batches of every chunk whose activations are alive when a stage first holds the most."""
        ...

    def bound_s(
        self,
        forward_s: FloatArray,
        backward_s: FloatArray,
        send_s: FloatArray,
        m: int | IntArray,
        weight_s: FloatArray | None = None,
    ) -> FloatArray:
        """Provable lower bound [...] of the makespan; equal to it for equal stages without sends.

        ``m`` may be an array that broadcasts against [..., P]. ``weight_s`` as for :meth:`simulate`.
        """
        ...

    def simulate(
        self,
        forward_s: FloatArray,
        backward_s: FloatArray,
        send_s: FloatArray,
        m: int,
        keep_events: bool = False,
        weight_s: FloatArray | None = None,
    ) -> Timeline:
        """Event by event, from [P, V] seconds of one micro-batch and the seconds of the sends between stages.

        ``weight_s`` is the part of ``backward_s`` that weight gradients take (none if not given); only schedules that
        split the backward look at it.
        """
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


def alive(order: Sequence[Operation] | IntArray, vpp: int) -> IntArray:
    """[steps, V] activations of each chunk that are alive after every operation of one stage, until the backward or
    the input gradient has used them."""
    change = np.zeros((len(order), vpp), dtype=np.int64)
    kind, chunk, _ = np.asarray(order, dtype=np.int64).reshape(-1, 3).T
    change[np.arange(len(order)), chunk] = np.array([1, -1, -1, 0, 1])[kind]
    return np.cumsum(change, axis=0)


def stashed(order: Sequence[Operation] | IntArray, vpp: int) -> IntArray:
    """[steps, V] micro-batches of each chunk whose input gradient is done and whose weight gradient is not."""
    change = np.zeros((len(order), vpp), dtype=np.int64)
    kind, chunk, _ = np.asarray(order, dtype=np.int64).reshape(-1, 3).T
    change[np.arange(len(order)), chunk] = np.array([0, 0, 1, -1, 0])[kind]
    return np.cumsum(change, axis=0)


def in_flight_states(orders: Orders | Sequence[IntArray], vpp: int) -> list[IntArray]:
    """For every stage the distinct [K, V] mixes of live activations at which the total is largest.

    With virtual stages the total stays level while its mix over chunks changes: the memory peak is the largest
    ``mix @ chunk_bytes``, whichever mix that is.
    """
    out = []
    for order in orders:
        live = alive(order, vpp)
        total = live.sum(axis=1)
        out.append(_distinct(live[total == total.max()]))
    return out


def _distinct(rows: IntArray) -> IntArray:
    """The distinct rows [K, V] of counts, sorted: ``np.unique`` along an axis, but as whole numbers where they fit."""
    base = int(rows.max(initial=0)) + 1
    if base ** rows.shape[1] >= 2**63:
        return np.unique(rows, axis=0)
    places = np.array([base**power for power in reversed(range(rows.shape[1]))], dtype=np.int64)
    _, first = np.unique(rows @ places, return_index=True)
    found: IntArray = rows[first]
    return found


def memory_states(orders: Sequence[IntArray], vpp: int) -> list[IntArray]:
    """For every stage the distinct [K, 2 V] counts of live activations, then of stashed weight-gradient inputs, that
    are not below another state in every count."""
    out = []
    for order in orders:
        states = np.concatenate([alive(order, vpp), stashed(order, vpp)], axis=1)
        kinds = np.append(order[1:, 0], WEIGHT_GRADIENT)
        # A forward only adds, so a state before one is below the state after it.
        states = states[(kinds != FORWARD) & (kinds != JOINED_FORWARD)]
        moving = states[:, states.min(axis=0) < states.max(axis=0)].astype(np.int32)
        _, first = np.unique(moving, axis=0, return_index=True) if moving.size else (None, np.zeros(1, dtype=np.int64))
        counts = moving[first].T
        below = np.ones((len(first), len(first)), dtype=bool)
        for count in counts:  # one at a time: far faster than along a short axis
            below &= count[:, None] <= count[None]
        out.append(states[first[below.sum(axis=1) == 1]])  # each is below itself
    return out


def replayed_micro_batches(pp: int, m: int) -> int:
    """Micro-batches to replay out of ``m``: all, or as many whole groups of P as ``MAX_REPLAYED`` allows."""
    return m if m <= MAX_REPLAYED else max(MAX_REPLAYED // pp, 1) * pp


def stretched(timeline: Timeline, replayed: int, m: int, pace_s: float) -> Timeline:
    """The timeline of ``m`` micro-batches from that of the first ``replayed``, each further one taking ``pace_s``."""
    busy, send = timeline.busy_s * (m / replayed), timeline.send_s * (m / replayed)
    finish = timeline.finish_s + (m - replayed) * pace_s
    return Timeline(timeline.start_s, finish, busy, send, finish - busy - send, float(finish.max()), timeline.events)
