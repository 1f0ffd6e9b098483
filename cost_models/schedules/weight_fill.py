"""Weight gradients put where a stage would wait: the greedy part of the zero-bubble schedules (arXiv 2401.10241)."""

from __future__ import annotations

from itertools import pairwise

from .base import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Operation, Orders
from .placement import Placement


def with_weights(orders: Orders, placement: Placement, limit: int) -> tuple[Orders, int]:
    """The orders of forwards and input gradients with weight gradients put in, and the slots that they then take.

    All operations take one slot. A stage runs its next operation as soon as the input is there; meanwhile, and before
    a forward that would hold more than ``limit`` unfinished chunk passes, it runs the oldest weight gradient.
    """
    pp = len(orders)
    needs = _needs(placement)
    done: dict[tuple[int, int, int, int], int] = {}
    out: list[list[Operation]] = [[] for _ in range(pp)]
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    at, held, oldest = [0] * pp, [0] * pp, [0] * pp
    left = sum(len(order) + sum(kind == INPUT_GRADIENT for kind, _, _ in order) for order in orders)
    slot = 0
    while left:
        before = left
        for stage in range(pp):
            order = orders[stage]
            if at[stage] < len(order):
                kind, chunk, micro_batch = order[at[stage]]
                needed = needs[kind].get((stage, chunk))
                ready = 0 if needed is None else done.get((kind, *needed, micro_batch), slot + 1)
                full = kind == FORWARD and held[stage] >= limit and oldest[stage] < len(waiting[stage])
                if ready <= slot and not full:
                    out[stage].append((kind, chunk, micro_batch))
                    done[kind, stage, chunk, micro_batch] = slot + 1
                    at[stage] += 1
                    left -= 1
                    if kind == FORWARD:
                        held[stage] += 1
                    else:
                        waiting[stage].append((chunk, micro_batch))
                    continue
            if oldest[stage] < len(waiting[stage]):
                out[stage].append((WEIGHT_GRADIENT, *waiting[stage][oldest[stage]]))
                oldest[stage] += 1
                held[stage] -= 1
                left -= 1
        if left == before:
            raise ValueError("the program orders wait for each other")
        slot += 1
    return tuple(tuple(order) for order in out), slot


def _needs(placement: Placement) -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
    """For forwards and input gradients the place whose result each place waits for."""
    forward, gradient = {}, {}
    for route in placement.routes:
        for one, two in pairwise(route):
            forward[two], gradient[one] = one, two
    return {FORWARD: forward, INPUT_GRADIENT: gradient}
