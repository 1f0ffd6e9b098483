"""A lower bound over the interleaved layouts of a mixed search that may be quicker than the best plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from ..engine.bounds import SplitBounds
from ..engine.open_bound import OpenBound
from ..engine.pricing import PricedBatch
from .virtual import VirtualCounts

#: Layouts that are looked at closely at most; then the bound stays where it is.
MOST_TIGHTENED = 240


@dataclass(frozen=True)
class Layout:
    """One interleaved layout of a skeleton: pools in pipeline order and how many stages each runs."""

    owner: int
    skeleton: int
    virtual: int
    order: tuple[int, ...]
    counts: tuple[int, ...]


class OpenLayouts:
    """Layouts with their lower bounds, and the least of the bounds as it is tightened.

    The first bound of a layout knows numbers of layers on stages. The sharper one, :class:`.OpenBound` restricted to
    chunks of a stage that differ by at most a layer, also knows that whole layers make chunks unequal and that stages
    wait between chunks. It holds for every split of the declared space, so the least of the tightened bounds and the
    first bounds of all other layouts is a bound of all.
    """

    def __init__(self) -> None:
        self._bounds: list[FloatArray] = []
        self._of: list[tuple[int, int, int]] = []
        self._layouts: list[tuple[IntArray, IntArray]] = []

    def add(self, owner: int, skeleton: int, virtual: int, found: VirtualCounts, limit_s: float) -> None:
        """Layouts of a skeleton whose bound is below ``limit_s``."""
        rows = np.flatnonzero(found.least_s < limit_s)
        if len(rows):
            self._bounds.append(found.least_s[rows])
            self._of.append((owner, skeleton, virtual))
            self._layouts.append((found.counts[rows], found.order[rows]))

    def bound_s(self, best_s: float, priced: Callable[[Layout], PricedBatch], late: Callable[[], bool]) -> float:
        """No layout is quicker than this; ``best_s`` where none is quicker than that. Lowest first bound first, so that
        the bound of those left is known at any time."""
        bounds = np.concatenate([np.empty(0), *self._bounds])
        part = np.repeat(np.arange(len(self._bounds)), [len(each) for each in self._bounds])
        start = np.cumsum([0, *(len(each) for each in self._bounds)])
        if not np.isfinite(best_s):
            return float(bounds.min(initial=best_s))
        least_s = best_s
        for done, row in enumerate(np.argsort(bounds, kind="stable").tolist()):
            if bounds[row] >= least_s:
                break
            if done >= MOST_TIGHTENED or late():
                return float(bounds[row])
            layout = self._layout(int(part[row]), row - int(start[part[row]]))
            least_s = min(least_s, max(float(bounds[row]), _tight_s(priced(layout), least_s)))
        return float(least_s)

    def _layout(self, part: int, row: int) -> Layout:
        counts, order = (each[row].tolist() for each in self._layouts[part])
        used = tuple(pool for pool in order if counts[pool])
        return Layout(*self._of[part], used, tuple(counts[pool] for pool in used))


def _tight_s(priced: PricedBatch, limit_s: float) -> float:
    """Lower bound of the near-even splits of the one candidate of a batch; infinite where none is below ``limit_s``."""
    if not priced.least_fill()[0] <= 1.0:
        return float(np.inf)
    bounds = SplitBounds(priced)
    pairs = bounds.pairs(np.array([0]), np.array([limit_s]))
    open_bound = OpenBound([(bounds, pairs)], limit_s, near_even=True)
    return open_bound.bound_s() if open_bound.may_win() else float(np.inf)
