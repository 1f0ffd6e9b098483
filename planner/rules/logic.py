"""Logic that works alike on Python scalars and on numpy arrays, and helpers that list near legal values."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import gcd, isqrt
from typing import Any

import numpy as np

#: A bool or a bool array; an int or an int array.
Truth = Any
Number = Any


def no(value: Truth) -> Truth:
    """Elementwise not (``~True`` is -2 in Python)."""
    return np.logical_not(value)


def implies(condition: Truth, consequence: Truth) -> Truth:
    """Elementwise ``condition`` => ``consequence``."""
    return np.logical_or(np.logical_not(condition), consequence)


def every(values: Iterable[Truth]) -> Truth:
    """Elementwise and; True for none."""
    return reduce(np.logical_and, values, np.True_)


def both(*values: Truth) -> Truth:
    """Elementwise and of the arguments."""
    return every(values)


def either(*values: Truth) -> Truth:
    """Elementwise or of the arguments."""
    return reduce(np.logical_or, values, np.False_)


def divides(divisor: Number, *numbers: Number) -> Truth:
    """Whether ``divisor`` divides every number, elementwise."""
    return every(number % divisor == 0 for number in numbers)


def divisors(*numbers: int) -> list[int]:
    """Common divisors, ascending; of numbers beyond 10**12 only those up to 10**6 and their partners."""
    common = reduce(gcd, numbers)
    small = [value for value in range(1, min(isqrt(common), 10**6) + 1) if common % value == 0]
    return sorted({*small, *(common // value for value in small)})


def nearest(values: Iterable[int], wanted: int, count: int = 4) -> list[int]:
    """The ``count`` values nearest to ``wanted``, ascending."""
    return sorted(sorted(set(values), key=lambda value: (abs(value - wanted), value))[:count])


def multiples_around(step: int, wanted: int) -> list[int]:
    """The multiples of ``step`` just below and above ``wanted``."""
    below = wanted // step * step
    return [value for value in (below, below + step) if value > 0]


def options(name: str, values: Iterable[int]) -> tuple[str, ...]:
    """``("tp=2", "tp=4")``."""
    return tuple(f"{name}={value}" for value in values)
