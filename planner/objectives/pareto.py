"""Of the plans that a search found, those that none beats in step time, free memory and cost at once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshwright.cost_models.memory import ALLOCATED_OVER_RESERVED
from meshwright.cost_models.rank_order import DATA_INSIDE
from meshwright.specs.batch import FloatArray
from meshwright.specs.goals import ParetoPoint

from ..answer.document import recompute_of, sharding_of
from ..engine.finalists import Finalist, SearchResult
from ..request import PlanRequest
from .costs import price_per_s

#: Points shown at most, the fastest plan first.
MOST_POINTS = 12
#: Differences below this share do not make a plan better.
TOLERANCE = 1e-6


def pareto(request: PlanRequest, result: SearchResult) -> tuple[ParetoPoint, ...]:
    """The front of the finalists, fastest first."""
    found = sorted(result.finalists, key=lambda item: item.order)
    if not found:
        return ()
    free, used = free_share(request, found), np.array([item.batch.arrangement.world_size for item in found])
    spent = np.array([item.step_time_s * _rate(request, item) for item in found])
    out: list[ParetoPoint] = []
    kept: list[int] = []
    for k, item in enumerate(found):  # in rising order of time: a plan is out if an earlier one is as good in the rest
        if any(free[j] >= free[k] - TOLERANCE and spent[j] <= spent[k] * (1 + TOLERANCE) for j in kept):
            continue
        kept.append(k)
        choices = choices_of(request, item)
        out.append(
            ParetoPoint(
                summary=", ".join(f"{name} {value}" for name, value in choices.items()),
                choices=choices,
                gpus_used=int(used[k]),
                step_time_s=item.step_time_s,
                memory_headroom=round(float(free[k]), 6),
                gpu_seconds=item.step_time_s * int(used[k]),
                cost=float(spent[k]) if request.price else None,
            )
        )
        if len(out) == MOST_POINTS:
            break
    return tuple(out)


def _rate(request: PlanRequest, item: Finalist) -> float:
    """Money a second of the GPUs of a finalist; GPUs where nothing has a price."""
    arrangement = item.batch.arrangement
    if not request.price:
        return float(arrangement.world_size)
    pools = request.cluster.pools
    return sum(
        stages * arrangement.stage_ranks * price_per_s(request.price, pools[pool].gpu)
        for pool, stages in zip(arrangement.pools, arrangement.stages, strict=True)
    )


def free_share(request: PlanRequest, found: list[Finalist]) -> FloatArray:
    """[n] free share of usable memory of the fullest stage of finalists."""
    out = np.zeros(len(found))
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for position, item in enumerate(found):
        groups[(id(item.batch), item.column("vpp"))].append(position)
    for members in groups.values():
        batch = found[members[0]].batch
        index = np.array([found[k].candidate for k in members])
        leading = np.array([found[k].leading for k in members])
        sums = batch.sums(index, np.stack([found[k].cuts for k in members]), leading)
        limits = [
            request.cluster.gpu_of(request.cluster.pools[pool]).usable_memory_bytes
            for pool in batch.arrangement.stage_pools
        ]
        spare = (sums.capacity_bytes - sums.memory_bytes) / ALLOCATED_OVER_RESERVED / np.array(limits, dtype=float)
        out[members] = spare.min(axis=1) + request.memory_headroom
    return out


def choices_of(request: PlanRequest, item: Finalist) -> dict[str, int | str]:
    """The choices of a finalist by the names that ``fix`` takes."""
    names = ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch_size")
    sharding = sharding_of(request, item)
    out: dict[str, int | str] = {name: item.column(name) for name in names}
    out |= {"recompute": recompute_of(request, item).label, "sharding": sharding}
    order = getattr(item.batch.costs, "rank_order", DATA_INSIDE)
    return out if order == DATA_INSIDE else out | {"rank_order": order}
