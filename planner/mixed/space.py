"""Skeletons of plans over several pools: everything but how many stages of which pool, their order and their layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from meshwright.specs.batch import BoolArray, CandidateBatch, IntArray
from meshwright.specs.cluster import ClusterSpec

from ..engine.arrangements import Arrangement
from ..engine.space import (
    MAX_MICRO_BATCH_SIZE,
    MAX_MICRO_BATCH_TOKENS,
    MIN_TOKENS_PER_CP_RANK,
    SPACE,
    VIRTUAL_STAGES,
    candidates,
    divisors,
)
from ..request import PlanRequest

#: What the space over several pools holds beside or instead of what :data:`~..engine.space.SPACE` says.
SPACE_OVER_POOLS = (
    "any number of stages of any pool, pools left out or in any order along the pipeline, a pool's stages together",
    "the GPUs of a stage in one pool, on whole nodes or inside one; a pool gives whole nodes",
    "tp a divisor of the innermost network level, cp, ep, etp, dp any that the target's rules allow",
    f"cp with at least {MIN_TOKENS_PER_CP_RANK} tokens a rank",
    f"micro-batches of up to {MAX_MICRO_BATCH_SIZE} sequences or {MAX_MICRO_BATCH_TOKENS} tokens",
    f"virtual stages {', '.join(map(str, VIRTUAL_STAGES))}",
    "contiguous layer splits with at least one decoder layer a stage; with virtual stages those whose chunks of a "
    "stage differ by at most a layer (the best plans are then improved layer by layer, beyond this space)",
    "the target's recompute modes; full recompute of any number of first layers of a chunk",
    "the target's sharding levels, full sharding without pipeline stages only",
)


def space_words(request: PlanRequest) -> tuple[str, ...]:
    """The declared space of a request, for ``bound.space``."""
    able = [pool for pool in request.cluster.pools if request.cluster.gpu_of(pool).supports(request.workload.precision)]
    return SPACE_OVER_POOLS if len(able) > 1 else SPACE


@dataclass(frozen=True)
class Skeletons:
    """Plain skeletons whose stages have ``stage_ranks`` GPUs: ``batch`` [N] (its ``pp`` is 1 or 2, meaning one stage or
    several), ``most`` [N, G] stages that each pool can give, and ``step`` [G]: a pool gives whole nodes, so a multiple
    of this many stages."""

    stage_ranks: int
    batch: CandidateBatch
    most: IntArray
    step: tuple[int, ...]


def on_whole_nodes(stage_ranks: int, gpus_per_node: int) -> bool:
    """Whether stages of this size can sit on whole nodes or inside one."""
    return stage_ranks % gpus_per_node == 0 or gpus_per_node % stage_ranks == 0


def inner_span(cluster: ClusterSpec, pool: int) -> int:
    """GPUs that a tensor-parallel group of a pool may span."""
    return gcd(cluster.pools[pool].levels[0].span, cluster.pools[pool].num_gpus)


def stage_sizes(request: PlanRequest, eligible: tuple[int, ...]) -> list[int]:
    """Stage sizes for which some pool has room and some degrees exist."""
    pools = [request.cluster.pools[g] for g in eligible]
    batch, longest = request.workload.global_batch_size, max(1, request.workload.seq_length // MIN_TOKENS_PER_CP_RANK)
    spans = {span for g in eligible for span in divisors(inner_span(request.cluster, g))}
    largest = max(pool.num_gpus for pool in pools)
    sizes = {
        tp * cp * dp
        for tp in spans
        for cp in range(1, longest + 1)
        for dp in divisors(batch)
        if tp * cp * dp <= largest
    }
    return sorted(
        size
        for size in sizes
        if any(size <= pool.num_gpus and on_whole_nodes(size, pool.gpus_per_node) for pool in pools)
    )


def skeletons(
    request: PlanRequest, eligible: tuple[int, ...], several: bool, lean: bool = False
) -> Iterator[Skeletons]:
    """All plain skeletons, stage size by stage size; of one stage or of ``several``. Rules are not applied."""
    cluster = request.cluster
    plain = _without(request, "pp", "vpp")
    for size in stage_sizes(request, eligible):
        fits = [g for g in eligible if on_whole_nodes(size, cluster.pools[g].gpus_per_node)]
        room = np.array([cluster.pools[g].num_gpus // size if g in fits else 0 for g in range(len(cluster.pools))])
        if room.sum() < (2 if several else 1):
            continue
        by_span: dict[int, list[int]] = {}
        for g in fits:
            by_span.setdefault(inner_span(cluster, g), []).append(g)
        widest = max(by_span)
        place = Arrangement(size, (by_span[widest][0],), (2 if several else 1,))
        batch = candidates(plain, place, lean)
        if not len(batch):
            continue
        span = np.array([inner_span(cluster, g) for g in range(len(cluster.pools))])
        inside = (span[None, :] % batch.tp[:, None] == 0) & (span[None, :] % batch.etp[:, None] == 0)
        most = np.where(inside, room[None, :], 0)
        step = tuple(max(1, pool.gpus_per_node // size) for pool in cluster.pools)
        enough = most.sum(axis=1) >= (2 if several else 1)
        if enough.any():
            yield Skeletons(size, batch.take(enough), most[enough], step)


def _without(request: PlanRequest, *degrees: str) -> PlanRequest:
    """The request without what it says about some degrees, and without virtual stages."""
    return request.model_copy(
        update={
            "fix": {name: value for name, value in request.fix.items() if name not in degrees} | {"vpp": 1},
            "max": {name: value for name, value in request.max.items() if name not in degrees},
            "forbid": tuple(name for name in request.forbid if name not in degrees),
        }
    )


def allowed_counts(most: tuple[int, ...], step: tuple[int, ...], fewest: int, largest: int) -> BoolArray:
    """[most_0 + 1, ..., most_{G-1} + 1] numbers of stages of each pool whose sum is in a range, in whole nodes."""
    grids = np.meshgrid(*(np.arange(count + 1) for count in most), indexing="ij")
    total = sum(grids)
    out: BoolArray = np.asarray((total >= fewest) & (total <= largest))
    for grid, every in zip(grids, step, strict=True):
        out &= grid % every == 0
    return out
