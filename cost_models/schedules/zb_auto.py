"""A zero-bubble schedule found by search under a limit on unfinished micro-batches (after arXiv 2401.10241, section 3).

Tried are warm-ups from 1F1B's up to ZB-H2's, which runs one forward more for every stage that follows, with weight
gradients put where a stage would wait, and ZB-H1 where the limit allows it. The shortest run of equal stages at the
nominal seconds wins; so it is never slower than ZB-H1 there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .base import FORWARD, INPUT_GRADIENT, Operation, Orders
from .engine import compile_orders, run, seconds_by_kind
from .listed import ListedSchedule
from .placement import looped
from .weight_fill import with_weights
from .zb_h1 import h1_orders

#: Forward, input gradient, weight gradient: FLOPs of a transformer layer over s b h^2 where the sequence is as long as
#: the hidden size, 24 h + 4 s, 24 h + 8 s and 24 h (arXiv 2401.10241, table 1).
NOMINAL = (28.0, 32.0, 24.0)


class ZeroBubbleAuto(ListedSchedule):
    """``limit``: most micro-batches without a weight gradient on a stage, 2 P - 1 (that of ZB-H2) if not given."""

    name = "zb-auto"
    splits_backward = True

    def __init__(self, limit: int | None = None):
        self.limit = limit

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return auto_orders(pp, m, 2 * pp - 1 if self.limit is None else self.limit)


@lru_cache(maxsize=16)
def auto_orders(pp: int, m: int, limit: int) -> Orders:
    """Program order of every stage; of equally quick ones the first, which holds least. ValueError below 1."""
    if limit < 1:
        raise ValueError(f"a stage must hold at least one micro-batch, the limit is {limit}")
    found = [h1_orders(pp, m)] if limit >= pp else []
    for more in range(max(limit - pp, 0) + 1):
        most = min(limit, pp + more)
        found.append(with_weights(_passes(pp, m, more, most), looped(pp, 1), most)[0])
    return found[int(np.argmin([_nominal_s(orders) for orders in found]))]


def _passes(pp: int, m: int, more: int, limit: int) -> Orders:
    """Forwards and input gradients; stage p runs up to P - p forwards and ``more`` before its first input gradient."""
    out = []
    for stage in range(pp):
        beyond = pp - 1 - stage
        warm_up = min(m, limit - 1, beyond + min(more, beyond))
        order: list[Operation] = [(FORWARD, 0, k) for k in range(warm_up)]
        for k in range(m):
            if warm_up + k < m:
                order.append((FORWARD, 0, warm_up + k))
            order.append((INPUT_GRADIENT, 0, k))
        out.append(tuple(order))
    return tuple(out)


def _nominal_s(orders: Orders) -> float:
    """Makespan of equal stages at the nominal seconds, to nine digits so that rounding decides nothing."""
    pp = len(orders)
    forward, inputs, weight = (np.full((pp, 1), seconds) for seconds in NOMINAL)
    seconds = seconds_by_kind(forward, inputs + weight, weight)
    return round(run(compile_orders(orders, looped(pp, 1)), seconds, np.zeros(pp), blocking=False).makespan_s, 9)
