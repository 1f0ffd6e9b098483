"""DualPipe (DeepSeek-V3, arXiv 2412.19437): two copies of the model, micro-batches from both ends at once.

Rank p holds stage p of the one copy and stage P - 1 - p of the other; each copy runs half of the micro-batches. For
equal stages, with B the whole backward, W its weight-gradient part and F = B - W: M (F + B) + (P / 2 - 1)(F + 2 B
- 3 W).
"""

from __future__ import annotations

from functools import lru_cache

from .base import Orders
from .dual import dual_order
from .listed import ListedSchedule
from .placement import Placement, mirrored


class DualPipe(ListedSchedule):
    """Chunk 0 of a rank is its stage, chunk 1 the mirrored one, which runs the second half of the micro-batches."""

    name = "dualpipe"
    splits_backward = True
    copies = 2

    def refusal(self, pp: int, vpp: int, m: int) -> str | None:
        if pp % 2:
            return f"dualpipe needs an even number of pipeline stages, got {pp}"
        if m % 2 or m < 2 * pp:
            return f"dualpipe needs an even number of at least {2 * pp} micro-batches, got {m}"
        return None

    def placement(self, pp: int, vpp: int) -> Placement:
        return mirrored(pp)

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return _orders(pp, m)


@lru_cache(maxsize=16)
def _orders(pp: int, m: int) -> Orders:
    down, up = range(m // 2), range(m // 2, m)
    half = pp // 2
    first = [dual_order(p, half, (down, up), (0, 1)) for p in range(half)]
    second = [dual_order(p, half, (up, down), (1, 0)) for p in reversed(range(half))]
    return tuple(first + second)
