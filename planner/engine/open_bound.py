"""A lower bound of the step time of interleaved candidates whose splits were not all looked at."""

from __future__ import annotations

import numpy as np

from .bounds import SplitBounds, Test
from .row_bounds import RowBounds

#: Pairs of a candidate and its recomputed layers that the sharper test takes at once, first and at most.
FIRST_PORTION, LARGEST_PORTION = 16, 128
#: Table entries that the sharper test may look at; then the bound stays where it is.
MOST_WORK = 130_000_000
#: Halvings of the interval in which the bound lies, and the share of the step at which they end.
HALVINGS, CLOSE = 10, 5e-4


class OpenBound:
    """Step times, from above, that no split of the open candidates is below.

    The quick test narrows the interval first. The sharper one then stops at the first pair that passes; the refuted
    ones are left out of tests of shorter times.
    """

    def __init__(self, open_pairs: list[tuple[SplitBounds, Test]], best_s: float, near_even: bool = False):
        self.best_s, self.left_work, self.near_even = best_s, MOST_WORK, near_even
        self.left = [(bounds, bounds.within(pairs, best_s)) for bounds, pairs in open_pairs]

    def may_win(self) -> bool:
        """Whether an open candidate may be below the best step time."""
        return any(len(pairs.index) for _, pairs in self.left) and self._sharp(self.best_s) is not False

    def bound_s(self) -> float:
        """The bound; infinite where no open candidate can be below the best step time."""
        if not any(len(pairs.index) for _, pairs in self.left):
            return np.inf
        low = self._quick()
        high, middle = self.best_s, (low + self.best_s) / 2
        for _ in range(HALVINGS):
            passes = self._sharp(middle)
            if passes is None:
                break
            low, high = (low, middle) if passes else (middle, high)
            if high - low < CLOSE * self.best_s:
                break
            middle = (low + high) / 2
        if high == self.best_s and self._sharp(high) is False:
            return np.inf
        return low

    def _quick(self) -> float:
        """A step time that the quick test refutes for all."""
        low, high, left = 0.0, self.best_s, self.left
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            passed = [(bounds, bounds.within(pairs, middle)) for bounds, pairs in left]
            passed = [(bounds, pairs) for bounds, pairs in passed if len(pairs.index)]
            if passed:
                left, high = passed, middle
            else:
                low = middle
        return low

    def _sharp(self, step_s: float) -> bool | None:
        """Whether some pair passes the sharper test; None where the work allowed does not suffice to tell."""
        portions = [
            (bounds, pairs, virtual)
            for bounds, all_pairs in self.left
            for pairs in (bounds.within(all_pairs, step_s),)
            for virtual in np.unique(bounds.priced.batch.vpp[pairs.index]).tolist()
        ]
        kept: list[tuple[SplitBounds, Test]] = []
        for position, (bounds, pairs, virtual) in enumerate(portions):
            same = np.flatnonzero(bounds.priced.batch.vpp[pairs.index] == virtual)
            start, size = 0, FIRST_PORTION
            while start < len(same):
                rows = RowBounds(bounds.priced, pairs.take(same[start : start + size]), step_s, self.near_even)
                passed = rows.passes(step_s)
                self.left_work -= rows.work
                start += size
                if passed.any():
                    kept = [(bounds, rows.pairs.take(np.flatnonzero(passed)))]
                    kept.append((bounds, pairs.take(same[start:])))
                    self.left = kept + [
                        (b, p.take(np.flatnonzero(b.priced.batch.vpp[p.index] == v)))
                        for b, p, v in portions[position + 1 :]
                    ]
                    return True
                if self.left_work < 0:
                    return None
                size = min(2 * size, LARGEST_PORTION)
        return False
