"""1F1B of many candidates at once: the same events as the replay, level by level instead of one by one.

Operations of one level depend on earlier levels only, so that a level is a handful of array operations over all stages
and candidates. With w_i = P - 1 - i warm-up forwards and unit times, stage i runs the forward of micro-batch n at level
``i + n`` in the warm-up and ``P + 2n - w_i - 1`` after it, and its backward at ``P + 2n + w_i``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .base import replayed_micro_batches

#: Operations times candidates held at once; bounds memory to some ten MB.
MAX_CELLS = 4_000_000


@dataclass(frozen=True)
class _Graph:
    """Operations sorted by level. ``first`` are the level boundaries. For each operation: its stage, whether it is a
    backward, the operation before it on the stage and the one whose result it needs (the number of operations = none),
    and ``last`` the last operation of every stage."""

    first: list[int]
    stage: IntArray
    backward: IntArray
    before: IntArray
    needs: IntArray
    last: IntArray


@lru_cache(maxsize=32)
def _graph(pp: int, m: int) -> _Graph:
    stage, micro_batch = np.meshgrid(np.arange(pp), np.arange(m), indexing="ij")
    warm_up = pp - 1 - stage
    forward = np.where(micro_batch < warm_up, stage + micro_batch, pp + 2 * micro_batch - warm_up - 1)
    level = np.stack([forward, pp + 2 * micro_batch + warm_up]).reshape(-1)
    order = np.argsort(level, kind="stable")
    count = len(order)
    rank = np.empty(count, dtype=np.int64)
    rank[order] = np.arange(count)
    place = rank.reshape(2, pp, m)  # where (backward, stage, micro-batch) stands in the sorted list
    before, needs = np.full((2, pp, m), count), np.full((2, pp, m), count)
    needs[0, 1:] = place[0, :-1]
    needs[1, :-1] = place[1, 1:]
    for i in range(pp):
        own = np.sort(place[:, i].reshape(-1))
        by_place = np.full(count + 1, count)
        by_place[own[1:]] = own[:-1]
        before[:, i] = by_place[place[:, i]]
    flat_stage = np.broadcast_to(stage, (2, pp, m)).reshape(-1)
    backward = np.repeat([0, 1], pp * m)
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    return _Graph(
        first=[*starts.tolist(), count],
        stage=flat_stage[order],
        backward=backward[order],
        before=before.reshape(-1)[order],
        needs=needs.reshape(-1)[order],
        last=place.reshape(2, pp, m).max(axis=(0, 2)),
    )


def finish_times_s(forward_s: FloatArray, backward_s: FloatArray, send_s: FloatArray, m: int) -> FloatArray:
    """[N, P] end of every stage's last backward for stage seconds [N, P] and blocking sends [N, P - 1].

    Equal to ``OneFOneB.simulate(...).finish_s`` of every candidate.
    """
    number, pp = forward_s.shape
    few = replayed_micro_batches(pp, m)
    graph = _graph(pp, few)
    none = np.zeros((number, 1))
    hold = np.stack([np.concatenate([send_s, none], axis=1), np.concatenate([none, send_s], axis=1)], axis=1)
    spans = np.stack([forward_s, backward_s], axis=1)
    count = len(graph.stage)
    out = np.empty((number, pp))
    step = max(1, MAX_CELLS // count)
    for low in range(0, number, step):
        rows = slice(low, min(low + step, number))
        span = spans[rows][:, graph.backward, graph.stage].T.copy()
        held = hold[rows][:, graph.backward, graph.stage].T.copy()
        end = np.zeros((count + 1, span.shape[1]))  # the extra row is "no operation": free and there at time 0
        for a, b in zip(graph.first, graph.first[1:], strict=False):
            start = np.maximum(end[graph.before[a:b]], end[graph.needs[a:b]])
            end[a:b] = start + span[a:b] + held[a:b]
        out[rows] = end[graph.last].T
    pace = (spans + hold).sum(axis=1).max(axis=1, keepdims=True)
    finish: FloatArray = out + (m - few) * pace
    return finish
