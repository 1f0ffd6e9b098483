"""Breadth-first pipeline parallelism (arXiv 2211.05953): all micro-batches of a chunk before the next chunk.

Each chunk's parameters are then gathered once for all micro-batches of a pass, and its gradients reduced once, which
is what makes it go with fully sharded parameters. For equal stages and M >= P: M (F + B) + (P - 1)(F + B) / V.
"""

from __future__ import annotations

from .base import BACKWARD, FORWARD, Orders
from .listed import ListedSchedule


class LoopedBreadthFirst(ListedSchedule):
    """Every stage holds all micro-batches of all its chunks."""

    name = "looped-bfs"
    ends_at_first = True
    gathers_once = True
    holds_all = True

    def refusal(self, pp: int, vpp: int, m: int) -> str | None:
        return None if pp > 1 else "looped-bfs needs at least 2 pipeline stages"

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        order = [(FORWARD, chunk, k) for chunk in range(vpp) for k in range(m)]
        order += [(BACKWARD, chunk, k) for chunk in reversed(range(vpp)) for k in range(m)]
        return (tuple(order),) * pp
