"""``CandidateBatch``: thousands of plan skeletons as a structure of arrays, and the cell keys they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


def row_codes(columns: Iterable[IntArray]) -> IntArray:
    """One number a row, equal where all (non-negative) columns are: sorts far faster than the columns would."""
    code = np.zeros(1, dtype=np.int64)
    for column in columns:
        code = code * (int(column.max(initial=0)) + 1) + column
    return code


@dataclass(frozen=True)
class _Arrays:
    """Equal-length integer columns."""

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, index: npt.NDArray[np.intp] | BoolArray) -> Self:
        """Rows by integer index or mask."""
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def joined(self, other: Self) -> Self:
        """The rows of ``other`` after one's own."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return type(self)(**{name: np.concatenate(pair) for name, pair in pairs.items()})


@dataclass(frozen=True)
class CellKeys(_Arrays):
    """What the cost of a layer depends on, apart from the layer and the GPU type. Columns of length C.

    ``stage_ranks`` = tp*cp*dp ranks of one stage; ``recompute`` and ``sharding`` are indices into the target's lists;
    ``one_stage`` is 1 where the stage is the whole pipeline, so that it holds both embedding and head.
    """

    tp: IntArray
    cp: IntArray
    ep: IntArray
    etp: IntArray
    stage_ranks: IntArray
    micro_batch_size: IntArray
    recompute: IntArray
    sharding: IntArray
    one_stage: IntArray

    @property
    def dp(self) -> IntArray:
        return self.stage_ranks // (self.tp * self.cp)

    @property
    def edp(self) -> IntArray:
        return self.stage_ranks // (self.etp * self.ep)


@dataclass(frozen=True)
class CandidateBatch(_Arrays):
    """Plan skeletons: all degrees and choices but the layer split and the placement. Columns of length N."""

    tp: IntArray
    pp: IntArray
    cp: IntArray
    ep: IntArray
    etp: IntArray
    dp: IntArray
    vpp: IntArray
    micro_batch_size: IntArray
    num_microbatches: IntArray
    recompute: IntArray
    sharding: IntArray

    @property
    def stage_ranks(self) -> IntArray:
        return self.tp * self.cp * self.dp

    @property
    def one_stage(self) -> IntArray:
        return np.asarray(self.pp == 1, dtype=np.int64)

    @property
    def world_size(self) -> IntArray:
        return self.stage_ranks * self.pp

    @property
    def edp(self) -> IntArray:
        return self.stage_ranks // (self.etp * self.ep)

    def cells(self) -> tuple[CellKeys, IntArray]:
        """The distinct cell keys, and for every candidate the row of its key."""
        columns = {field.name: getattr(self, field.name) for field in fields(CellKeys)}
        _, first, inverse = np.unique(row_codes(columns.values()), return_index=True, return_inverse=True)
        return CellKeys(**{name: column[first] for name, column in columns.items()}), inverse.reshape(-1)
