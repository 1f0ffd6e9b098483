"""A cluster as a search sees it that knows no topology: every level like every other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from meshwright.specs.cluster import ClusterSpec, NetworkLevel


def pairs_by_level(cluster: ClusterSpec) -> Iterator[tuple[NetworkLevel, float]]:
    """Every network level with the number of GPU pairs that meet at it first."""
    for pool in cluster.pools:
        inner = 1
        for level in pool.levels:
            span = min(level.span, pool.num_gpus)
            yield level, pool.num_gpus * (span - inner) / 2
            inner = span
    for one, other in combinations(range(len(cluster.pools)), 2):
        between = cluster.between(one, other)
        if between is not None:
            yield between, float(cluster.pools[one].num_gpus * cluster.pools[other].num_gpus)


def levels_of(cluster: ClusterSpec) -> int:
    """Network levels at which some pair of GPUs meets."""
    return sum(pairs > 0 for _, pairs in pairs_by_level(cluster))


def flattened(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with every level as fast as the mean that a pair of GPUs sees, nodes and spans as they are.

    The mean is that of bandwidth after oversubscription, and of latency, over all pairs of GPUs. The kind of link is
    that at which most pairs meet, for links of a kind reach a share of their bandwidth of their own.
    """
    met = [(level, pairs) for level, pairs in pairs_by_level(cluster) if pairs]
    total = sum(pairs for _, pairs in met)
    bandwidth = sum(level.bandwidth_bytes_per_s / level.oversubscription * pairs for level, pairs in met) / total
    same = {
        "bandwidth_bytes_per_s": bandwidth,
        "latency_s": sum(level.latency_s * pairs for level, pairs in met) / total,
        "kind": max(met, key=lambda each: each[1])[0].kind,
        "oversubscription": 1.0,
        "in_network_reduction": False,
        "peer_to_peer": True,
        "port_bytes_per_s": None,
    }

    def flat(level: NetworkLevel) -> NetworkLevel:
        return level.model_copy(update=same)

    pools = [pool.model_copy(update={"levels": tuple(map(flat, pool.levels))}) for pool in cluster.pools]
    links = [link.model_copy(update={"level": flat(link.level)}) for link in cluster.links]
    between = None if cluster.inter_pool is None else flat(cluster.inter_pool)
    return cluster.model_copy(update={"pools": tuple(pools), "links": tuple(links), "inter_pool": between})
