"""Which pools run which stages, and in which order along the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.workload import Workload


@dataclass(frozen=True)
class Arrangement:
    """Pools in pipeline order with the stages each runs; every stage has ``stage_ranks`` GPUs of one pool.

    ``pools`` are indices into the cluster's pools, ``stages`` the stage count of each.
    """

    stage_ranks: int
    pools: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def pp(self) -> int:
        return sum(self.stages)

    @property
    def world_size(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def stage_pools(self) -> tuple[int, ...]:
        """Pool index of every stage."""
        return tuple(pool for pool, count in zip(self.pools, self.stages, strict=True) for _ in range(count))

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Position of every stage's first rank inside its pool."""
        return tuple(index * self.stage_ranks for count in self.stages for index in range(count))


def refused_pools(cluster: ClusterSpec, workload: Workload) -> dict[int, str]:
    """Pools that cannot run the workload's precision, with the reason and the precision that would work."""
    refused: dict[int, str] = {}
    for index, pool in enumerate(cluster.pools):
        gpu = cluster.gpu_of(pool)
        if not gpu.supports(workload.precision):
            trainable = [name for name in ("bf16", "fp16", "fp32") if gpu.supports(name)]
            refused[index] = (
                f"pool {pool.name} ({pool.num_gpus} {gpu.name}) has no {workload.precision} matrix units and is left "
                f"out; --precision {trainable[0] if trainable else 'fp32'} would let it take part"
            )
    return refused


def arrangements(
    cluster: ClusterSpec, eligible: tuple[int, ...], max_stages: int, world_size: int | None = None
) -> Iterator[Arrangement]:
    """Every way to give whole pools to the stages of a pipeline of at most ``max_stages`` stages.

    A pool is used whole or left out; the GPUs of a stage sit in one pool, and a pool's stages are neighbours.
    With ``world_size`` only arrangements of that many ranks are given.
    """
    for count in range(1, len(eligible) + 1):
        for order in permutations(eligible, count):
            sizes = [cluster.pools[index].num_gpus for index in order]
            for stage_ranks in range(1, min(sizes) + 1):
                if any(size % stage_ranks for size in sizes):
                    continue
                found = Arrangement(stage_ranks, order, tuple(size // stage_ranks for size in sizes))
                if found.pp <= max_stages and (world_size is None or found.world_size == world_size):
                    yield found
