"""DualPipe-V: DualPipe cut in half and folded, one copy of the model with two chunks a stage in a V.

For equal stages, with F, B and W of one chunk and F = B - W: 2 M (F + B) + (P - 1)(F + 2 B - 3 W), as DualPipe of 2 P
ranks.
"""

from __future__ import annotations

from functools import lru_cache

from .base import Orders
from .dual import dual_order
from .listed import ListedSchedule
from .placement import Placement, vee


class DualPipeV(ListedSchedule):
    name = "dualpipe-v"
    splits_backward = True

    def refusal(self, pp: int, vpp: int, m: int) -> str | None:
        return None if m >= 2 * pp else f"dualpipe-v needs at least {2 * pp} micro-batches, got {m}"

    def placement(self, pp: int, vpp: int) -> Placement:
        return vee(pp)

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return _orders(pp, m)


@lru_cache(maxsize=16)
def _orders(pp: int, m: int) -> Orders:
    return tuple(dual_order(p, pp, (range(m), range(m)), (0, 1)) for p in range(pp))
