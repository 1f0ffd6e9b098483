"""What waits in the search over several pools: skeletons by bound, and tasks that go on with one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.specs.batch import FloatArray

from .partition import TypeTables


@dataclass(frozen=True)
class Task:
    """What waits: ``kind`` names the method that goes on with it."""

    kind: str
    owner: int
    skeleton: int
    leading: int = 0
    reach: int = 0
    items: tuple[tuple[float, tuple[int, ...], tuple[int, ...]], ...] = ()
    position: int = 0
    tables: TypeTables | None = None


class Waiting:
    """Skeletons of all groups in rising order of a bound."""

    def __init__(self, found: list[tuple[FloatArray, int]]):
        nothing = np.empty(0)
        bounds = np.concatenate([nothing, *(bound for bound, _ in found)])
        owners = np.repeat([owner for _, owner in found], [len(bound) for bound, _ in found]).astype(np.int64)
        rows = np.concatenate([nothing, *(np.arange(len(bound)) for bound, _ in found)]).astype(np.int64)
        order = np.argsort(bounds, kind="stable")
        self._bounds, self._owners, self._rows = bounds[order], owners[order], rows[order]
        self.position = 0

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def bound_s(self) -> float:
        """The bound of the next one, inf if none is left."""
        return float(self._bounds[self.position]) if self.position < len(self._bounds) else np.inf

    def take(self) -> tuple[int, int]:
        """Group and row of the next one."""
        self.position += 1
        return int(self._owners[self.position - 1]), int(self._rows[self.position - 1])
