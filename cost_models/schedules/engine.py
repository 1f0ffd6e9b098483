"""The event simulator of all schedules: program orders compiled once, then run for one or for many sets of seconds.

An operation starts when its stage is free and its input has arrived. A forward needs the forward before it on its
route, a backward or an input gradient the one after it; a weight gradient follows its input gradient in the order of
its stage. A blocking send holds the sending stage until the data has arrived; otherwise it only delays the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray

from .base import FORWARD, JOINED_FORWARD, WEIGHT_GRADIENT, Event, Schedule, Timeline
from .placement import SAME, Placement

#: Operations times candidates held at once; bounds memory to some ten MB.
MAX_CELLS = 4_000_000


@dataclass(frozen=True)
class Graph:
    """Operations 1..N in an order in which each follows what it waits for; 0 is "nothing", done at time 0.

    Lists hold one entry an operation: ``stage``; ``span``, its index into the [4, P, V] seconds by kind; ``before``,
    the operation before it on its stage; ``needs``, the one whose result it waits for. ``inward`` and ``outward`` by
    span: the boundaries that input and result cross (P: none). ``first`` and ``last`` operation of every stage.
    """

    pp: int
    vpp: int
    stage: list[int]
    span: list[int]
    micro_batch: list[int]
    before: list[int]
    needs: list[int]
    inward: IntArray
    outward: IntArray
    first: list[int]
    last: list[int]

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def spans(self) -> IntArray:
        return np.array(self.span, dtype=np.int64)

    @cached_property
    def span_counts(self) -> FloatArray:
        """[4, P, V] how often each operation runs."""
        counts = np.bincount(self.spans, minlength=4 * self.pp * self.vpp)
        return counts.reshape(4, self.pp, self.vpp).astype(float)

    @cached_property
    def send_counts(self) -> FloatArray:
        """[P, P + 1] how often each stage sends over each boundary."""
        counts = np.zeros((self.pp, self.pp + 1))
        np.add.at(counts, (np.array(self.stage), self.outward[self.spans]), 1.0)
        counts[:, self.pp] = 0.0
        return counts

    @cached_property
    def level(self) -> list[int]:
        """One more than the largest level of what an operation follows."""
        levels = [0]
        append = levels.append
        for before, needed in zip(self.before, self.needs, strict=True):
            one, two = levels[before], levels[needed]
            append((one if one > two else two) + 1)
        return levels[1:]

    @cached_property
    def by_level(self) -> tuple[list[int], IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]:
        """Level boundaries, then span, before, needs, inward and outward in the order of levels, and the place there
        of every stage's last operation. "Nothing" is number N."""
        count = len(self)
        level = np.array(self.level)
        order = np.argsort(level, kind="stable")
        place = np.empty(count + 1, dtype=np.int64)
        place[0], place[order + 1] = count, np.arange(count)
        starts = np.flatnonzero(np.diff(level[order], prepend=-1))
        return (
            [*starts.tolist(), count],
            self.spans[order],
            place[np.array(self.before)][order],
            place[np.array(self.needs)][order],
            self.inward[self.spans[order]],
            self.outward[self.spans[order]],
            place[np.array(self.last)],
        )


def compile_orders(orders: Sequence[npt.ArrayLike], placement: Placement) -> Graph:
    """The graph of program orders [n, 3] of every stage; ValueError where they wait for each other."""
    pp = len(orders)
    rows = [np.asarray(order, dtype=np.int64).reshape(-1, 3) for order in orders]
    stops = np.cumsum([len(row) for row in rows])
    kind, chunk, micro_batch = np.concatenate(rows).T
    count = len(kind)
    vpp = max(chunk for route in placement.routes for _, chunk in route) + 1
    stage = np.repeat(np.arange(pp), [len(row) for row in rows])
    place, nowhere = stage * vpp + chunk, pp * vpp
    # The place before and after each on its route and the boundaries between.
    previous, following = np.full(nowhere, nowhere), np.full(nowhere, nowhere)
    hop_in, hop_out, nothing = (np.full(nowhere, pp) for _ in range(3))
    for route, hops in zip(placement.routes, placement.hops, strict=True):
        where = [stage_of * vpp + chunk_of for stage_of, chunk_of in route]
        crossed = [pp if hop == SAME else hop for hop in hops]
        following[where[:-1]], previous[where[1:]] = where[1:], where[:-1]
        hop_out[where[:-1]] = hop_in[where[1:]] = crossed
    number = np.arange(1, count + 1)
    ahead = (kind == FORWARD) | (kind == JOINED_FORWARD)
    back = ~ahead & (kind != WEIGHT_GRADIENT)
    # Who gives each result; nobody is count + 1, which is never done, and nothing needed is 0.
    made = np.full((2, nowhere + 1, int(micro_batch.max(initial=0)) + 1), count + 1)
    made[:, nowhere] = 0
    made[0, place[ahead], micro_batch[ahead]] = (number + (kind == JOINED_FORWARD))[ahead]
    made[1, place[back], micro_batch[back]] = number[back]
    needs = np.where(ahead, made[0, previous[place], micro_batch], 0)
    needs = np.where(back, made[1, following[place], micro_batch], needs)
    before = number - 1
    firsts = np.concatenate([[0], stops[:-1]])
    before[firsts[firsts < count]] = 0
    order = _in_turn(needs.tolist(), [0, *stops.tolist()])
    at = np.array(order, dtype=np.int64) - 1
    rank = np.zeros(count + 1, dtype=np.int64)
    rank[at + 1] = number
    return Graph(
        pp=pp,
        vpp=vpp,
        stage=stage[at].tolist(),
        span=(np.where(ahead, FORWARD, kind) * nowhere + place)[at].tolist(),
        micro_batch=micro_batch[at].tolist(),
        before=rank[before[at]].tolist(),
        needs=rank[needs[at]].tolist(),
        inward=np.concatenate([hop_in, hop_out, hop_out, nothing]),
        outward=np.concatenate([hop_out, hop_in, hop_in, nothing]),
        first=rank[firsts + 1].tolist(),
        last=rank[stops].tolist(),
    )


def _in_turn(needs: list[int], starts: list[int]) -> list[int]:
    """Numbers of the operations in an order in which each follows its stage's one before and the one it needs.

    Stage p has operations ``starts[p]`` + 1 to ``starts[p + 1]``; each stage runs until it waits.
    """
    order: list[int] = []
    done = bytearray(len(needs) + 2)
    done[0] = 1
    at = starts[:-1]
    while len(order) < len(needs):
        before = len(order)
        for stage, position in enumerate(at):
            first, stop = position, starts[stage + 1]
            while position < stop and done[needs[position]]:
                position += 1
                done[position] = 1
            order += range(first + 1, position + 1)
            at[stage] = position
        if len(order) == before:
            raise ValueError("the program orders wait for each other")
    return order


@lru_cache(maxsize=16)
def graph(schedule: Schedule, pp: int, vpp: int, m: int) -> Graph:
    """The compiled orders of a schedule."""
    return compile_orders(schedule.arrays(pp, vpp, m), schedule.placement(pp, vpp))


def seconds_by_kind(forward_s: FloatArray, backward_s: FloatArray, weight_s: FloatArray | None) -> FloatArray:
    """[..., 4, P, V] seconds of forward, backward, input gradient and weight gradient."""
    weight = np.zeros_like(backward_s) if weight_s is None else weight_s
    return np.stack([forward_s, backward_s, backward_s - weight, weight], axis=-3)


def run(of: Graph, seconds: FloatArray, send_s: FloatArray, *, blocking: bool, keep_events: bool = False) -> Timeline:
    """One timeline, from [4, P, V] seconds by kind and [P] sends."""
    crossing = np.append(send_s, 0.0)
    at_once = np.zeros(len(of.inward))
    held = crossing[of.outward] if blocking else at_once
    takes, lag = (seconds.reshape(-1) + held).tolist(), (at_once if blocking else crossing[of.inward]).tolist()
    end = ends_of(of, takes, lag)
    start = [max(end[of.needs[i - 1]] + lag[of.span[i - 1]], 0.0) for i in of.first]
    finish, begin = np.array([end[i] for i in of.last]), np.array(start)
    busy = (of.span_counts * seconds).sum(axis=(0, 2))
    sends = of.send_counts @ crossing if blocking else np.zeros(of.pp)
    events = _events(of, end, takes, held.tolist()) if keep_events else ()
    return Timeline(begin, finish, busy, sends, finish - busy - sends, float(finish.max()), events)


def ends_of(of: Graph, takes: list[float], lag: list[float]) -> list[float]:
    """[N + 1] end of every operation, which takes ``takes`` of its span once its input is there, ``lag`` of its span
    later than it was sent."""
    end = [0.0]
    for before, needed, span in zip(of.before, of.needs, of.span, strict=True):
        free, arrived = end[before], end[needed] + lag[span]
        end.append((arrived if arrived > free else free) + takes[span])
    return end


def _events(of: Graph, end: list[float], takes: list[float], held: list[float]) -> tuple[Event, ...]:
    out = []
    size = of.pp * of.vpp
    for i, (stage, code, micro_batch) in enumerate(zip(of.stage, of.span, of.micro_batch, strict=True)):
        kind, done = code // size, end[i + 1]
        start = done - takes[code]
        out.append(Event(stage, code % of.vpp, micro_batch, kind != FORWARD, start, done, held[code], kind))
    return tuple(out)


def run_many(of: Graph, seconds: FloatArray, send_s: FloatArray, *, blocking: bool) -> FloatArray:
    """[N, P] end of every stage's last operation for seconds [N, 4, P, V] and sends [N, P], level by level."""
    number = len(seconds)
    first, spans, before, needs, inward, outward, last = of.by_level
    count = len(of)
    out = np.empty((number, of.pp))
    step = max(1, MAX_CELLS // count)
    for low in range(0, number, step):
        rows = slice(low, min(low + step, number))
        table = np.ascontiguousarray(seconds[rows].reshape(-1, 4 * of.pp * of.vpp).T)
        crossing = np.concatenate([send_s[rows].T, np.zeros((1, len(table.T)))])
        end = np.zeros((count + 1, table.shape[1]))
        for a, b in pairwise(first):
            arrived = end[needs[a:b]]
            takes = table[spans[a:b]]
            if blocking:
                takes = takes + crossing[outward[a:b]]
            else:
                arrived = arrived + crossing[inward[a:b]]
            end[a:b] = np.maximum(end[before[a:b]], arrived) + takes
        out[rows] = end[last].T
    return out
