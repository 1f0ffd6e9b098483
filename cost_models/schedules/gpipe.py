"""GPipe (arXiv 1811.06965): all forwards, then all backwards. For equal stages (M + P - 1)(F + B)."""

from __future__ import annotations

from .base import BACKWARD, FORWARD, Orders
from .listed import ListedSchedule


class GPipe(ListedSchedule):
    """Every stage holds all micro-batches."""

    name = "gpipe"
    ends_at_first = True
    holds_all = True

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        order = tuple((kind, 0, k) for kind in (FORWARD, BACKWARD) for k in range(m))
        return (order,) * pp
