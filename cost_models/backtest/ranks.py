"""Whether predictions order runs as the measurements do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import FloatArray


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation of two sequences of one length, ties at their mean rank; NaN for fewer than three values or
    where one sequence is constant."""
    first, second = _ranks(one), _ranks(other)
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> FloatArray:
    _, inverse, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    mean: FloatArray = np.cumsum(counts) - (counts - 1) / 2
    out: FloatArray = mean[inverse]
    return out
