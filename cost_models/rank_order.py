"""Where the ranks of a stage sit in their pool under the rank orders that frameworks have.

``tp-cp-ep-dp-pp`` gives a stage one run of ranks. ``tp-cp-ep-pp-dp`` (Megatron's ``--use-tp-pp-dp-mapping``) gives a
replica of the whole model one run: blocks of tp*cp ranks, one a stage, then the next replica. Collectives are priced in
the numbering of a stage's own ranks, so there the second order is the first over levels that hold fewer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.cluster import NetworkLevel, Pool

from .collectives import link_constants, sending_bandwidth

#: The usual order, and the one in which the pipeline runs inside data parallelism.
DATA_INSIDE, PIPELINE_INSIDE = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"


def stages_inside(rank_order: str, stages: int) -> int:
    """Blocks of tp*cp ranks from one data-parallel neighbour to the next: all stages of a replica, or one."""
    return stages if rank_order.endswith("-dp") else 1


@lru_cache(maxsize=1024)
def stage_levels(levels: tuple[NetworkLevel, ...], block: int, stages: int) -> tuple[NetworkLevel, ...]:
    """The levels as one stage's ranks meet them, where ``stages`` blocks of ``block`` ranks make a replica.

    A level that holds k whole replicas joins k blocks of a stage, a smaller one a block or a part of it.
    """
    if stages == 1:
        return levels
    spans = [level.span if level.span < block else block * max(1, level.span // (block * stages)) for level in levels]
    return tuple(level.model_copy(update={"span": span}) for level, span in zip(levels, spans, strict=True))


def stage_pools(pools: Sequence[Pool], block: int, stages: int) -> tuple[Pool, ...]:
    """The pools with :func:`stage_levels`."""
    return tuple(pool.model_copy(update={"levels": stage_levels(pool.levels, block, stages)}) for pool in pools)


def replica_send_s(
    levels: Sequence[NetworkLevel],
    volume: FloatArray,
    first: IntArray,
    distance: IntArray,
    block: IntArray,
    stages: int,
    copies: IntArray,
) -> FloatArray:
    """Seconds in which every rank of a block sends ``volume`` bytes to the rank ``distance`` further on in its replica.

    ``first`` is the block's position in the replica of ``stages`` blocks; ``copies`` replicas, one after the other, do
    so at once. The slowest replica counts: where they do not fill an instance of a level, some lie across two.
    """
    out = np.zeros(volume.shape)
    replica = block * stages
    for number, level in enumerate(levels):
        inside = levels[number - 1].span if number else 1
        together = np.where(inside < block, inside, block * np.minimum(np.maximum(inside // replica, 1), copies))
        rate = sending_bandwidth(level, inside, together)
        seconds = link_constants(level)["send_start_s"] + level.latency_s + volume / rate
        # Replicas start at multiples of this in the instances of the level inside; the last start ends furthest out.
        starts = np.gcd(replica, inside)
        crosses = first % starts + distance + block > starts
        out = np.where(crosses, np.maximum(out, seconds), out)
    return np.where(volume > 0, out, 0.0)
