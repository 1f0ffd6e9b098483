"""Stages whose replicas sit on several pools: their gradients meet over the network between the pools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.cluster import ClusterSpec, Pool
from meshwright.specs.plan import Plan

from .cells import CostModel
from .protocol import CellCosts, Tail
from .stage_sums import pool_members


def joint_pools(cluster: ClusterSpec) -> tuple[Pool, ...]:
    """The pools with what lies beyond a node replaced by the network between pools, no faster than a pool's own; where
    pairs of pools have their own, by the slowest."""
    every = [*(link.level for link in cluster.links), *((cluster.inter_pool,) if cluster.inter_pool else ())]
    if not every:
        return cluster.pools
    between = min(every, key=lambda level: level.bandwidth_bytes_per_s / level.oversubscription)
    out = []
    for pool in cluster.pools:
        inside = tuple(level for level in pool.levels if level.span <= pool.gpus_per_node and level.span > 1)
        own = [level.bandwidth_bytes_per_s / level.oversubscription for level in pool.levels[len(inside) :]]
        rate = min([between.bandwidth_bytes_per_s / between.oversubscription, *own])
        span = max(cluster.num_gpus, between.span)
        joint = between.model_copy(update={"span": span, "bandwidth_bytes_per_s": rate, "oversubscription": 1.0})
        out.append(pool.model_copy(update={"levels": (*inside, joint)}))
    return tuple(out)


def joint_tail(
    costs: CostModel,
    plan: Plan,
    cells: CellCosts,
    rows: IntArray,
    dense: FloatArray,
    expert: FloatArray,
    last_backward_s: FloatArray,
    tail: Tail,
) -> Tail:
    """``tail`` [P] with the stages on several pools priced anew: a collective ends with its slowest member."""
    members = [sorted(set(pools)) for pools in pool_members(costs, plan)]
    mixed = [p for p, pools in enumerate(members) if len(pools) > 1]
    if not mixed:
        return tail
    reduce_s, optimizer_s, gather_s = tail.grad_reduce_s.copy(), tail.optimizer_s.copy(), tail.param_gather_s.copy()
    pools = joint_pools(costs.cluster)
    for p in mixed:
        on = np.array(members[p], dtype=np.int64)
        at = np.full(len(on), p)
        joint = costs.tail(cells, rows[at], on, dense[at], expert[at], last_backward_s[at], pools)
        reduce_s[p], optimizer_s[p] = joint.grad_reduce_s.max(), joint.optimizer_s.max()
        gather_s[p] = joint.param_gather_s.max()
    return replace(tail, grad_reduce_s=reduce_s, optimizer_s=optimizer_s, param_gather_s=gather_s)
