"""Parameters of a block as a list of :class:`Weight`: one mechanism for parameter counts, memory and GEMM shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Split = Literal["column", "row", "replicated"]


class Weight(NamedTuple):
    """One parameter tensor (or ``copies`` equal ones).

    ``inputs`` x ``outputs`` elements; a vector has ``inputs == 0``. A matrix with ``matmul`` is applied to every
    token that reaches the block as a GEMM of (tokens, inputs) x (inputs, outputs).

    ``split`` says how tensor parallelism divides it: ``column`` over outputs, ``row`` over inputs. ``units`` is the
    number of indivisible pieces along the split axis (heads, KV heads); where TP exceeds it, the pieces are
    replicated and every rank holds one. ``expert`` weights follow the expert grid (EP over ``copies``, ETP inside).
    Weights of one ``fuse`` group run as a single GEMM. A named tuple, because weights are keys wherever their sizes on
    a rank are remembered.
    """

    name: str
    inputs: int
    outputs: int
    split: Split = "replicated"
    units: int = 0
    copies: int = 1
    expert: bool = False
    matmul: bool = True
    fuse: str = ""

    @property
    def numel(self) -> int:
        """Elements of all copies."""
        return self.copies * self.outputs * max(self.inputs, 1)


def vector(name: str, size: int, *, split: Split = "replicated", copies: int = 1, expert: bool = False) -> Weight:
    """A bias, norm or gate vector of ``size`` elements."""
    return Weight(name, 0, size, split=split, copies=copies, expert=expert, matmul=False)


def count(weights: Iterable[Weight]) -> int:
    """Total elements."""
    return sum(weight.numel for weight in weights)
