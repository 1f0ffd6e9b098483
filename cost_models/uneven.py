"""Levels whose instances are unequal (leaves, racks, islands): what a plan pays that puts its nodes in some order.

The other formulas know equal instances of ``span`` GPUs in rank order. A plan on unequal ones is priced as if they were
equal with the largest span that holds for each of its groups: a group inside one leaf never meets the level beyond, any
other meets it with as many members a leaf as the leaf with the fewest of them has. The worst group of a kind speaks for
all, and no plan is quicker than it would be in one leaf, so that :func:`in_one` gives lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from meshwright.specs.batch import IntArray
from meshwright.specs.cluster import ClusterSpec, Pool
from meshwright.specs.plan import Hsdp, Plan, parse_range

from .rank_order import DATA_INSIDE

#: No group crosses leaves.
INSIDE = -1


@dataclass(frozen=True)
class Spans:
    """Ranks of a stage that share a leaf, as the groups of a kind meet it; :data:`INSIDE` where none crosses.

    ``layers``: groups of tensor, context and expert parallelism. ``gradients``: those that share parameters.
    ``sends_cross``: some stage sends to another leaf.
    """

    layers: int = INSIDE
    gradients: int = INSIDE
    sends_cross: bool = False


#: Every node a leaf of its own: what no order of nodes exceeds.
WORST = Spans(0, 0, True)


def uneven_pools(cluster: ClusterSpec) -> list[int]:
    """Indices of the pools that have a level of unequal instances."""
    return [index for index, pool in enumerate(cluster.pools) if pool.uneven_level is not None]


def leaf_of_nodes(pool: Pool) -> IntArray:
    """[nodes] the instance of the uneven level that each node of ``pool`` is in."""
    out = np.zeros(pool.nodes, dtype=np.int64)
    if pool.uneven_level is not None:
        for number, instance in enumerate(pool.levels[pool.uneven_level].instances):
            out[list(instance.nodes)] = number
    return out


def with_span(pool: Pool, span: int) -> Pool:
    """``pool`` with equal instances of ``span`` ranks, at least a node each; :data:`INSIDE`: with one of all nodes."""
    at = pool.uneven_level
    if at is None:
        return pool
    level, outer = pool.levels[at].model_copy(update={"instances": ()}), pool.levels[at + 1]
    inner = pool.levels[at - 1].span if at else 1
    if span != INSIDE:
        span = max(span, pool.gpus_per_node, inner)
    if span != INSIDE and span < outer.span:
        levels = (*pool.levels[:at], level.model_copy(update={"span": span}), outer)
    else:
        levels = (*pool.levels[:at], level.model_copy(update={"span": outer.span}))
    return pool.model_copy(update={"levels": levels})


def in_one(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster as if the nodes of each pool were in one leaf."""
    return cluster.model_copy(update={"pools": _pools(cluster, INSIDE)})


def at_worst(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with the leaves of :func:`equal_leaves`."""
    return cluster.model_copy(update={"pools": tuple(equal_leaves(pool) for pool in cluster.pools)})


def equal_leaves(pool: Pool) -> Pool:
    """The pool with leaves of as many nodes as divide every leaf: what nodes side by side can always share."""
    at = pool.uneven_level
    if at is None:
        return pool
    return with_span(pool, gcd(*(len(instance.nodes) for instance in pool.levels[at].instances)) * pool.gpus_per_node)


@dataclass(frozen=True)
class Views:
    """The cluster as the groups of a plan meet it: those of :class:`Spans`."""

    layers: ClusterSpec
    gradients: tuple[Pool, ...]
    sends: tuple[Pool, ...]


def views(cluster: ClusterSpec, plan: Plan, spans: Spans | None = None) -> Views:
    """``cluster`` with equal instances, as ``plan`` meets its unequal ones; with ``spans`` in place of the plan's."""
    spans = spans or spans_of(plan, cluster)
    layers = cluster.model_copy(update={"pools": _pools(cluster, spans.layers)})
    sends = _pools(cluster, WORST.layers if spans.sends_cross else INSIDE)
    return Views(layers, _pools(cluster, spans.gradients), sends)


def _pools(cluster: ClusterSpec, span: int) -> tuple[Pool, ...]:
    return tuple(with_span(pool, span) for pool in cluster.pools)


def placeable(plan: Plan, cluster: ClusterSpec) -> bool:
    """Whether the plan lies in one pool, which has unequal leaves, and has the rank order that is known here; others
    are priced as :data:`WORST`."""
    used = set(plan.pools)
    alike = len({stage.degrees for stage in plan.stages}) == 1 and all(len(stage.groups) == 1 for stage in plan.stages)
    if len(used) > 1 or not alike or plan.rank_order != DATA_INSIDE or not plan.devices:
        return False
    return cluster.pool(plan.devices[0].pool).uneven_level is not None


def spans_of(plan: Plan, cluster: ClusterSpec) -> Spans:
    """What the plan's groups share, its ranks on the nodes that ``devices`` names."""
    if not placeable(plan, cluster):
        return WORST
    pool = cluster.pool(plan.devices[0].pool)
    nodes = nodes_of_ranks(plan, pool)
    return spans_on(plan, leaf_of_nodes(pool)[nodes]) if (nodes >= 0).all() else WORST


def nodes_of_ranks(plan: Plan, pool: Pool) -> IntArray:
    """[ranks] the node of ``pool`` that each rank is on; -1 where ``devices`` does not say."""
    out = np.full(plan.num_ranks, -1, dtype=np.int64)
    for run in plan.devices:
        ranks, nodes = parse_range(run.ranks), parse_range(run.nodes)
        each = np.repeat(np.arange(nodes.start, nodes.stop), pool.gpus_per_node)[: len(ranks)]
        out[ranks.start : ranks.start + len(each)] = each
    return out


def group_kinds(plan: Plan) -> Iterator[tuple[str, int, int]]:
    """(``layers`` or ``gradients``, size, stride) of the groups of the first stage that communicate, as
    :mod:`.collectives` numbers them."""
    degrees = plan.stages[0].degrees
    tp, cp, ep, etp = degrees.tp, degrees.cp, degrees.ep, degrees.etp
    inner = plan.options.cp_a2a_size or 1
    kinds = [("layers", tp, 1), ("layers", cp, tp), ("layers", inner, tp), ("layers", etp, 1), ("layers", ep, etp)]
    sharding = plan.stages[0].sharding
    copies = sharding.hsdp.replicate if isinstance(sharding, Hsdp) else plan.options.dist_opt_instances
    for size, stride in ((degrees.dp * cp, tp), (degrees.edp, ep * etp)):
        kinds.append(("gradients", size, stride))
        if 1 < copies < size:
            kinds += [("gradients", size // copies, stride), ("gradients", copies, stride * (size // copies))]
    yield from dict.fromkeys(kind for kind in kinds if kind[1] > 1)


def spans_on(plan: Plan, leaves: IntArray) -> Spans:
    """:func:`spans_of` with the leaf of every rank given."""
    of = leaves.reshape(plan.pp, -1)
    found = {"layers": INSIDE, "gradients": INSIDE}
    for view, size, stride in group_kinds(plan):
        groups = of.reshape(-1, size, stride)
        counts = np.stack([(groups == leaf).sum(axis=1) for leaf in np.unique(leaves)])
        fewest = int(np.where(counts > 0, counts, size).min())
        if fewest < size:
            span = fewest * stride
            found[view] = span if found[view] == INSIDE else min(found[view], span)
    return Spans(found["layers"], found["gradients"], bool((of[1:] != of[:-1]).any()))
