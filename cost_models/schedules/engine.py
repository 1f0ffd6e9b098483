"""The event simulator of all schedules: program orders compiled once, then run for one or for many sets of seconds.

An operation starts when its stage is free and its input has arrived. A forward needs the forward before it on its
route, a backward or an input gradient the one after it; a weight gradient follows its input gradient in the order of
its stage. A blocking send holds the sending stage until the data has arrived; otherwise it only delays the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .base import FORWARD, JOINED_FORWARD, WEIGHT_GRADIENT, Event, Orders, Schedule, Timeline
from .placement import SAME, Placement

#: Operations times candidates held at once; bounds memory to some ten MB.
MAX_CELLS = 4_000_000


@dataclass(frozen=True)
class Graph:
    """Operations 1..N in an order in which each follows what it waits for; 0 is "nothing", done at time 0.

    Lists hold one entry an operation: ``stage``; ``span``, its index into the [4, P, V] seconds by kind; ``before``,
    the operation before it on its stage; ``needs``, the one whose result it waits for; ``inward`` and ``outward``, the
    boundaries its input and its result cross (P: none); ``level``, one more than the largest of what it follows.
    ``first`` and ``last`` operation of every stage.
    """

    pp: int
    vpp: int
    stage: list[int]
    span: list[int]
    micro_batch: list[int]
    before: list[int]
    needs: list[int]
    inward: list[int]
    outward: list[int]
    level: list[int]
    first: list[int]
    last: list[int]

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def spans(self) -> IntArray:
        return np.array(self.span, dtype=np.int64)

    @cached_property
    def inwards(self) -> IntArray:
        return np.array(self.inward, dtype=np.int64)

    @cached_property
    def outwards(self) -> IntArray:
        return np.array(self.outward, dtype=np.int64)

    @cached_property
    def span_counts(self) -> FloatArray:
        """[4, P, V] how often each operation runs."""
        counts = np.bincount(self.spans, minlength=4 * self.pp * self.vpp)
        return counts.reshape(4, self.pp, self.vpp).astype(float)

    @cached_property
    def send_counts(self) -> FloatArray:
        """[P, P + 1] how often each stage sends over each boundary."""
        counts = np.zeros((self.pp, self.pp + 1))
        np.add.at(counts, (np.array(self.stage), self.outwards), 1.0)
        counts[:, self.pp] = 0.0
        return counts

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
            self.inwards[order],
            self.outwards[order],
            place[np.array(self.last)],
        )


def compile_orders(orders: Orders, placement: Placement) -> Graph:
    """The graph of program orders; ValueError where they wait for each other."""
    pp = len(orders)
    places = [place for route in placement.routes for place in route]
    vpp = max(chunk for _, chunk in places) + 1
    m = 1 + max((micro_batch for order in orders for _, _, micro_batch in order), default=0)
    # Index of the place before and after on the route and the boundaries between; one row of results more for "none".
    here = {place: stage * vpp + chunk for place in places for stage, chunk in [place]}
    end = pp * vpp
    previous, following = [end] * end, [end] * end
    hop_in, hop_out = [pp] * end, [pp] * end
    for route, hops in zip(placement.routes, placement.hops, strict=True):
        for q, hop in enumerate(hops):
            one, two = here[route[q]], here[route[q + 1]]
            following[one], previous[two] = two, one
            hop_out[one] = hop_in[two] = pp if hop == SAME else hop
    forwards: list[list[int]] = [[-1] * m for _ in range(end)] + [[0] * m]
    backwards: list[list[int]] = [[-1] * m for _ in range(end)] + [[0] * m]
    levels = [0]
    out: tuple[list[int], ...] = tuple([] for _ in range(8))
    stages, spans, micro_batches, before, needs, inward, outward, level = out
    at, latest, first = [0] * pp, [0] * pp, [0] * pp
    joined: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    left, number = sum(len(order) for order in orders), 0
    while left:
        stuck = left
        for stage in range(pp):
            order, position, last = orders[stage], at[stage], latest[stage]
            while position < len(order):
                kind, chunk, micro_batch = order[position]
                place = stage * vpp + chunk
                enters, leaves, needed = pp, pp, 0
                forward = kind in (FORWARD, JOINED_FORWARD)
                if forward:
                    needed, enters, leaves = forwards[previous[place]][micro_batch], hop_in[place], hop_out[place]
                elif kind != WEIGHT_GRADIENT:
                    needed, enters, leaves = backwards[following[place]][micro_batch], hop_out[place], hop_in[place]
                if needed < 0:
                    break
                number += 1
                if joined[stage]:
                    before_it = joined[stage].pop()
                    forwards[before_it[0]][before_it[1]] = number
                if kind == JOINED_FORWARD:
                    joined[stage].append((place, micro_batch))
                elif forward:
                    forwards[place][micro_batch] = number
                elif kind != WEIGHT_GRADIENT:
                    backwards[place][micro_batch] = number
                if not position:
                    first[stage] = number
                after = max(levels[last], levels[needed]) + 1
                levels.append(after)
                stages.append(stage)
                spans.append((FORWARD if forward else kind) * end + place)
                micro_batches.append(micro_batch)
                before.append(last)
                needs.append(needed)
                inward.append(enters)
                outward.append(leaves)
                level.append(after)
                last = number
                position += 1
            left -= position - at[stage]
            at[stage], latest[stage] = position, last
        if left == stuck:
            raise ValueError("the program orders wait for each other")
    return Graph(pp, vpp, stages, spans, micro_batches, before, needs, inward, outward, level, first, latest)


@lru_cache(maxsize=64)
def graph(schedule: Schedule, pp: int, vpp: int, m: int) -> Graph:
    """The compiled orders of a schedule."""
    return compile_orders(schedule.orders(pp, vpp, m), schedule.placement(pp, vpp))


def seconds_by_kind(forward_s: FloatArray, backward_s: FloatArray, weight_s: FloatArray | None) -> FloatArray:
    """[..., 4, P, V] seconds of forward, backward, input gradient and weight gradient."""
    weight = np.zeros_like(backward_s) if weight_s is None else weight_s
    return np.stack([forward_s, backward_s, backward_s - weight, weight], axis=-3)


def run(of: Graph, seconds: FloatArray, send_s: FloatArray, *, blocking: bool, keep_events: bool = False) -> Timeline:
    """One timeline, from [4, P, V] seconds by kind and [P] sends."""
    crossing = np.append(send_s, 0.0)
    span = seconds.reshape(-1)[of.spans]
    lag, held = crossing[of.inwards], crossing[of.outwards]
    if blocking:
        span, lag = span + held, np.zeros_like(lag)
    end = ends_of(of, span.tolist(), lag.tolist())
    start = [max(end[of.needs[i - 1]] + float(lag[i - 1]), 0.0) for i in of.first]
    finish, begin = np.array([end[i] for i in of.last]), np.array(start)
    busy = (of.span_counts * seconds).sum(axis=(0, 2))
    sends = of.send_counts @ crossing if blocking else np.zeros(of.pp)
    events = _events(of, end, span, held if blocking else np.zeros_like(held)) if keep_events else ()
    return Timeline(begin, finish, busy, sends, finish - busy - sends, float(finish.max()), events)


def ends_of(of: Graph, span: list[float], lag: list[float]) -> list[float]:
    """[N + 1] end of every operation that takes ``span`` once its input, ``lag`` later than it was sent, is there."""
    end = [0.0]
    append = end.append
    for before, needed, takes, later in zip(of.before, of.needs, span, lag, strict=True):
        free, arrived = end[before], end[needed] + later
        append((arrived if arrived > free else free) + takes)
    return end


def _events(of: Graph, end: list[float], span: FloatArray, held: FloatArray) -> tuple[Event, ...]:
    out = []
    size = of.pp * of.vpp
    for i, (stage, code, micro_batch) in enumerate(zip(of.stage, of.span, of.micro_batch, strict=True)):
        kind, done = code // size, end[i + 1]
        start = done - float(span[i])
        out.append(Event(stage, code % of.vpp, micro_batch, kind != FORWARD, start, done, float(held[i]), kind))
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
