"""V-shaped schedules from one repeated building block (arXiv 2405.15362).

Two chunks a stage lie in a V. A building block says when one micro-batch passes each stage: forward down at
``d0 p``, forward up, backward down and backward up likewise with steps ``d1``, ``d2``, ``d3``, in slots of one chunk
pass (forward, input gradient and weight gradient counted alike). It repeats every six slots, so a stage can keep the
pace if its four passes fall into different slots modulo six; weight gradients take the other two. How long a pass is
alive follows from the steps: with ``d0 + d3 = d1 + d2 = s`` every stage holds about ``s P / 3`` chunk passes, that is
``s P / 6`` micro-batches: 1/3 of 1F1B's first stage for s = 2, 1/2 for s = 3, as much for s = 6.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

from meshwright.specs.batch import IntArray

from .base import FORWARD, INPUT_GRADIENT, Orders
from .listed import ListedSchedule
from .placement import Placement, vee
from .weight_fill import with_weights

#: Slots after which the block repeats: three operations of two chunks.
PERIOD = 6
#: Passes of a block in the order of its rows: (kind, chunk).
PASSES = ((FORWARD, 0), (FORWARD, 1), (INPUT_GRADIENT, 1), (INPUT_GRADIENT, 0))
#: Shortest blocks that are tried out; all of them gave no shorter run for 2 to 8 stages.
TRIED = 24


class BuildingBlockSchedule(ListedSchedule):
    """A V-shaped schedule whose steps add up to ``steps``."""

    splits_backward = True
    steps: int

    def most_held(self, pp: int) -> int:
        """Chunk passes a stage may hold before it must run a weight gradient."""
        raise NotImplementedError

    def refusal(self, pp: int, vpp: int, m: int) -> str | None:
        return None if pp > 1 else f"{self.name} needs at least 2 pipeline stages"

    def placement(self, pp: int, vpp: int) -> Placement:
        return vee(pp)

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return _orders(pp, m, self.steps, self.most_held(pp))


@lru_cache(maxsize=16)
def _orders(pp: int, m: int, steps: int, most: int) -> Orders:
    return with_weights(_repeated(best_block(pp, steps, most), m), vee(pp), most)[0]


@lru_cache(maxsize=64)
def best_block(pp: int, steps: int, most: int) -> IntArray:
    """[4, P] slots of the block that takes the fewest slots for 2 P micro-batches; the shortest of equals."""
    shortest = sorted(blocks(pp, steps), key=lambda block: (block[3, 0], block.tolist()))[:TRIED]
    # Nothing ends sooner than the work of the last stage, which begins P - 1 slots late.
    least, count = PERIOD * 2 * pp + pp - 1, []
    for block in shortest:
        count.append(with_weights(_repeated(block, 2 * pp), vee(pp), most)[1])
        if count[-1] <= least:
            break
    return shortest[int(np.argmin(count))]


def blocks(pp: int, steps: int) -> list[IntArray]:
    """All blocks [4, P] whose passes never fall on one stage in the same slot modulo the period, d0 = 1.

    Each turn of the route waits at most one period more than it must.
    """
    stage = np.arange(pp)
    out = []
    for d1, wait1, wait2, wait3 in product(range(1, steps), *(range(PERIOD),) * 3):
        d2, d3 = steps - d1, steps - 1
        up = pp + d1 * (pp - 1) + wait1  # forward of chunk 1 on stage 0
        down = up + 1 + wait2
        back = down + d2 * (pp - 1) + 1 + d3 * (pp - 1) + wait3
        block = np.stack([stage, up - d1 * stage, down + d2 * stage, back - d3 * stage])
        if (np.diff(np.sort(block % PERIOD, axis=0), axis=0) > 0).all():
            out.append(block)
    return out


def _repeated(block: IntArray, m: int) -> Orders:
    """Forwards and input gradients of every stage in the order of their slots."""
    out = []
    for slots in block.T.tolist():
        passes = [
            (slots[row] + PERIOD * k, kind, chunk, k) for row, (kind, chunk) in enumerate(PASSES) for k in range(m)
        ]
        out.append(tuple((kind, chunk, k) for _, kind, chunk, k in sorted(passes)))
    return tuple(out)
