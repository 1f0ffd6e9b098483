"""Arrays of few cells, as single plans have them: short enough to be the key of what is remembered."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray

#: Cells up to which results are remembered: the stages of a plan, not the candidates of a search.
FEW = 32
#: Results that each remembering function keeps.
KEPT = 1 << 15

Columns = tuple[tuple[float, ...], ...]


def few_columns(*arrays: npt.ArrayLike) -> tuple[tuple[int, ...], Columns] | None:
    """The broadcast shape of ``arrays`` and their cells in order, one tuple an array; None of more than few cells."""
    given = [np.asarray(array) for array in arrays]
    if {array.size for array in given} == {1}:
        return max([array.shape for array in given], key=len), tuple([(array.item(),) for array in given])
    shape = np.broadcast_shapes(*(array.shape for array in given))
    if math.prod(shape) > FEW:
        return None
    return shape, tuple(
        tuple(array.ravel().tolist() if array.shape == shape else np.broadcast_to(array, shape).ravel().tolist())
        for array in given
    )


def distinct(numbers: IntArray) -> IntArray:
    """``numpy.unique`` that costs nothing for one number."""
    return numbers if len(numbers) == 1 else np.unique(numbers)


def of_shape(values: tuple[float, ...], shape: tuple[int, ...]) -> FloatArray:
    """``values`` as an array of ``shape``."""
    return np.array(values, dtype=float).reshape(shape)
