"""Parts of a cluster that could run a job alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from meshwright.cost_models.flops import model_flops
from meshwright.specs.cluster import ClusterSpec

from ..answer.no_fit import resized, scaled
from ..engine.space import divisors
from ..request import PlanRequest

#: Every node count of a pool is tried up to this many nodes, else halvings.
FEW_NODES = 8
#: Parts tried at most; where node counts of the pools can be combined in more ways, they are halved, then in step.
MOST_PARTS = 96


def parts(cluster: ClusterSpec) -> list[ClusterSpec]:
    """Subsets of the pools with some of their nodes each, fewest GPUs first; the whole cluster is the last.

    One node alone is also cut into equal parts. :func:`space_of_parts` says in words which node counts there are.
    """
    counts = [node_counts(pool.nodes) for pool in cluster.pools]
    if _ways(counts) > MOST_PARTS:
        counts = [halvings(pool.nodes) for pool in cluster.pools]
    if _ways(counts) <= MOST_PARTS:
        chosen = list(product(*([0, *each] for each in counts)))
    else:
        longest = max(len(each) for each in counts)
        chosen = [tuple(each[min(k, len(each) - 1)] for each in counts) for k in range(longest)]
        chosen += [
            tuple(each[-1] if i == k else 0 for i, each in enumerate(counts)) for k in range(len(counts))
        ]  # each pool alone, whole
    found = {nodes: part_of(cluster, nodes) for nodes in chosen if any(nodes)}
    out = sorted(found.values(), key=lambda part: (part.num_gpus, part.name))
    if len(cluster.pools) == 1 and cluster.pools[0].nodes >= 1:
        node = cluster.pools[0].gpus_per_node
        if cluster.pools[0].num_gpus == node or len(out) < MOST_PARTS:
            out = [*(scaled(cluster, size) for size in divisors(node)[:-1]), *out]
    return out


def node_counts(nodes: int) -> list[int]:
    """Node counts of a pool that are tried, rising."""
    return list(range(1, nodes + 1)) if nodes <= FEW_NODES else halvings(nodes)


def halvings(nodes: int) -> list[int]:
    """``nodes``, half of it, and so on down to 1, rising."""
    return sorted({max(1, nodes >> k) for k in range(nodes.bit_length())})


def _ways(counts: list[list[int]]) -> int:
    return prod(len(each) + 1 for each in counts) - 1


def part_of(cluster: ClusterSpec, nodes: tuple[int, ...]) -> ClusterSpec:
    """The cluster with ``nodes`` nodes of each pool; a pool with none is left out."""
    if nodes == tuple(pool.nodes for pool in cluster.pools):
        return cluster
    pools = tuple(
        pool if count == pool.nodes else resized(pool, count)
        for pool, count in zip(cluster.pools, nodes, strict=True)
        if count
    )
    name = "+".join(f"{pool.nodes}x{pool.gpus_per_node}x{pool.gpu}" for pool in pools)
    return cluster.model_copy(update={"pools": pools, "name": name})


def space_of_parts(cluster: ClusterSpec) -> str:
    """Which parts :func:`parts` gives, in words."""
    few = all(pool.nodes <= FEW_NODES for pool in cluster.pools)
    return "cluster: every subset of pools, " + ("every node count" if few else "node counts by halving")


def least_step_s(request: PlanRequest, cluster: ClusterSpec) -> float:
    """Seconds that the model's FLOPs take at the full dense peak of all GPUs: no plan is faster."""
    precision = request.workload.precision
    peak = sum(pool.num_gpus * cluster.gpu_of(pool).peak_flops.get(precision, 0.0) for pool in cluster.pools)
    return model_flops(request.model, request.workload) / peak if peak else float("inf")


def growing(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster at rising sizes with its pools in proportion, up to itself: parts of one node, then whole nodes."""
    if len(cluster.pools) == 1:
        pool = cluster.pools[0]
        for size in divisors(pool.gpus_per_node)[:-1]:
            yield scaled(cluster, size)
        for nodes in range(1, pool.nodes):
            yield part_of(cluster, (nodes,))
    else:
        least = min(pool.nodes for pool in cluster.pools)
        for size in range(1, least):
            yield part_of(cluster, tuple(max(1, round(pool.nodes * size / least)) for pool in cluster.pools))
    yield cluster
