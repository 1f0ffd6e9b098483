"""ZB-H1 (arXiv 2401.10241): 1F1B whose weight gradients wait, the later the stage the longer.

Stage p runs the weight gradient of a micro-batch p micro-batches after its input gradient, so that every stage has P
micro-batches unfinished, as the first of 1F1B has. For equal stages and M >= P: M (F + B + W) + (P - 1)(F + B - W)
with B the input gradient and W <= F, B.
"""

from __future__ import annotations

from functools import lru_cache

from .base import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Operation, Orders
from .listed import ListedSchedule


class ZeroBubbleH1(ListedSchedule):
    name = "zb-h1"
    splits_backward = True

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return h1_orders(pp, m)


@lru_cache(maxsize=16)
def h1_orders(pp: int, m: int) -> Orders:
    """Program order of every stage."""
    out = []
    for stage in range(pp):
        warm_up = min(m, pp - 1 - stage)
        order: list[Operation] = [(FORWARD, 0, k) for k in range(warm_up)]
        for k in range(m):
            if warm_up + k < m:
                order.append((FORWARD, 0, warm_up + k))
            order.append((INPUT_GRADIENT, 0, k))
            if k >= stage:
                order.append((WEIGHT_GRADIENT, 0, k - stage))
        order += [(WEIGHT_GRADIENT, 0, k) for k in range(max(m - stage, 0), m)]
        out.append(tuple(order))
    return tuple(out)
