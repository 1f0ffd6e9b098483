"""Where the places along a pipeline lie: which rank and which of its chunks, and which boundary lies between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

#: A rank of the pipeline and a chunk it holds.
Place = tuple[int, int]
#: No boundary: both places are on one rank.
SAME = -1


@dataclass(frozen=True)
class Placement:
    """Routes of micro-batches through (stage, chunk) places, in forward order; no place is on two routes.

    ``hops[r][q]`` is the boundary between places q and q + 1 of route r: b between stages b and b + 1, P - 1 from the
    last stage back to the first, ``SAME`` within a stage.
    """

    routes: tuple[tuple[Place, ...], ...]
    hops: tuple[tuple[int, ...], ...]

    def orders(self) -> dict[Place, int]:
        """Place along its route of every (stage, chunk)."""
        return {place: q for route in self.routes for q, place in enumerate(route)}


@lru_cache(maxsize=64)
def looped(pp: int, vpp: int) -> Placement:
    """Chunk v of stage p at v P + p: each chunk runs down all stages, the next begins at the first again."""
    route = tuple((q % pp, q // pp) for q in range(pp * vpp))
    return Placement((route,), (tuple(q % pp for q in range(pp * vpp - 1)),))


@lru_cache(maxsize=64)
def vee(pp: int) -> Placement:
    """Chunk 0 down stages 0 to P - 1, chunk 1 back up: the first and the last places share stage 0."""
    down, up = [(stage, 0) for stage in range(pp)], [(stage, 1) for stage in reversed(range(pp))]
    hops = (*range(pp - 1), SAME, *reversed(range(pp - 1)))
    return Placement((tuple(down + up),), (hops,))


@lru_cache(maxsize=64)
def mirrored(pp: int) -> Placement:
    """Two copies of the model: chunk 0 runs down the stages, chunk 1 up from the last stage to the first."""
    down, up = [(stage, 0) for stage in range(pp)], [(stage, 1) for stage in reversed(range(pp))]
    return Placement((tuple(down), tuple(up)), (tuple(range(pp - 1)), tuple(reversed(range(pp - 1)))))
