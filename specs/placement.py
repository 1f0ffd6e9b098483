"""Whether a plan's ranks sit on the GPUs of a cluster."""

from __future__ import annotations

from .cluster import ClusterSpec
from .errors import Fault
from .plan import Plan, parse_range


def placement_faults(plan: Plan, cluster: ClusterSpec, pointer: str = "") -> list[Fault]:
    """What is wrong with where a plan puts its ranks, below ``pointer``; empty if nothing is.

    Groups name pools of the cluster with their GPU type and hold no more ranks than those have GPUs; groups and devices
    each hold every rank once, on the same pool; devices name nodes of their pool that have room.
    """
    faults: list[Fault] = []
    pools = {pool.name: pool for pool in cluster.pools}
    pool_of: dict[int, str] = {}
    used: dict[str, int] = {}
    for s, stage in enumerate(plan.stages):
        for g, group in enumerate(stage.groups):
            where = f"{pointer}/stages/{s}/groups/{g}"
            if group.pool not in pools:
                faults.append(Fault(f"{where}/pool", f"{group.pool!r} is no pool of the cluster", tuple(pools)))
                continue
            if group.gpu != pools[group.pool].gpu:
                faults.append(Fault(f"{where}/gpu", f"pool {group.pool} has {pools[group.pool].gpu}, not {group.gpu}"))
            ranks = [rank for text in group.ranks for rank in parse_range(text)]
            if any(rank in pool_of for rank in ranks):
                faults.append(Fault(f"{where}/ranks", "holds ranks that another group holds too"))
            pool_of |= dict.fromkeys(ranks, group.pool)
            used[group.pool] = used.get(group.pool, 0) + len(ranks)
    faults += [
        Fault(f"{pointer}/stages", f"pool {name} has {pools[name].num_gpus} GPUs, the plan puts {count} ranks there")
        for name, count in used.items()
        if count > pools[name].num_gpus
    ]
    return faults or _device_faults(plan, cluster, pool_of, f"{pointer}/devices")


def _device_faults(plan: Plan, cluster: ClusterSpec, pool_of: dict[int, str], pointer: str) -> list[Fault]:
    faults: list[Fault] = []
    placed: set[int] = set()
    for d, run in enumerate(plan.devices):
        ranks, nodes = parse_range(run.ranks), parse_range(run.nodes)
        wrong = sorted({pool_of.get(rank, "no pool") for rank in ranks} - {run.pool})
        if wrong:
            where = ", ".join(wrong)
            faults.append(Fault(f"{pointer}/{d}/pool", f"ranks {run.ranks} are in {where}, not {run.pool!r}"))
            continue
        if placed.intersection(ranks):
            faults.append(Fault(f"{pointer}/{d}/ranks", "holds ranks that another run holds too"))
        placed.update(ranks)
        pool = cluster.pool(run.pool)
        if not nodes or nodes[-1] >= pool.nodes:
            faults.append(Fault(f"{pointer}/{d}/nodes", f"pool {pool.name} has nodes 0 to {pool.nodes - 1}"))
        elif len(ranks) > len(nodes) * pool.gpus_per_node:
            room = len(nodes) * pool.gpus_per_node
            faults.append(Fault(f"{pointer}/{d}/nodes", f"nodes {run.nodes} have {room} GPUs for {len(ranks)} ranks"))
    missing = sorted(set(pool_of) - placed)
    if missing and not faults:
        faults.append(Fault(pointer, f"rank {missing[0]} is on no device"))
    return faults
