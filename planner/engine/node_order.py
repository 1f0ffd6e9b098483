"""Which node of a pool runs which ranks, where leaves, racks or islands are unequal or nodes are listed out of order.

Nodes of a leaf are alike, so that an order is a leaf for every place. Its price is the step time of the plan with what
its groups then share (:mod:`meshwright.cost_models.uneven`): a number for each combination of the smallest parts of the
groups of layers, of those that share parameters, and of whether sends cross leaves. The best of a few plain orders is
the start of an integer programme (OR-Tools' CP-SAT, one worker, fixed seed, deterministic time), which picks the
quickest combination that some order has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from meshwright.cost_models.uneven import INSIDE, Spans, group_kinds, leaf_of_nodes, spans_on
from meshwright.specs.batch import IntArray
from meshwright.specs.cluster import Pool
from meshwright.specs.plan import Devices, Plan, format_range

#: Places of the largest integer programme, and the deterministic time that one gets.
MAX_PLACES, SOLVER_TIME = 64, 0.25
#: Smallest parts tried for each kind of group; between them the next smaller one speaks.
MAX_PARTS = 6
#: An order this near the plan in one leaf is left as it is.
NEAR = 1e-9
#: Resolution of step times in the integer programme.
TIME_UNITS = 10_000_000


@dataclass(frozen=True)
class NodeOrder:
    """Nodes [places] in rank order and the step time with them; ``method``: ``declared``, ``by leaf`` or ``cp-sat``.
    ``proven``: no order is
    quicker."""

    nodes: tuple[int, ...]
    step_time_s: float
    method: str
    proven: bool


def node_order(plan: Plan, pool: Pool, step_s: Callable[[Spans], float], limit_s: float = float("inf")) -> NodeOrder:
    """The order of the nodes of ``pool`` under which ``plan``, which lies in it alone, is quickest. ``step_s`` prices
    what its groups share. The order of the cluster stands where none gains. The programme seeks no order that takes
    more than ``limit_s``: ``proven`` then says that none is quicker than that."""
    price, leaves = cache(step_s), leaf_of_nodes(pool)
    places = -(-plan.num_ranks // pool.gpus_per_node)

    def of(order: IntArray) -> float:
        return price(spans_on(plan, np.repeat(leaves[order], pool.gpus_per_node)[: plan.num_ranks]))

    declared = np.arange(places)
    best, best_s, method = declared, of(declared), "declared"
    for order in _plain_orders(leaves, places):
        order_s = of(order)
        if order_s < best_s * (1 - NEAR):
            best, best_s, method = order, order_s, "by leaf"
    proven = best_s <= price(Spans()) * (1 + NEAR)
    if not proven and places <= MAX_PLACES:
        options = list(_options(plan, pool.gpus_per_node, price, min(best_s, limit_s)))
        solved, optimal = _solved(plan, pool, leaves, best, options) if options else (leaves[best], True)
        proven = optimal and not any(_thinned(plan, view, pool.gpus_per_node) for view in ("layers", "gradients"))
        order = _with_nodes(solved, leaves)
        order_s = of(order)
        if order_s < best_s * (1 - NEAR):
            best, best_s, method = order, order_s, "cp-sat"
    return NodeOrder(tuple(best.tolist()), best_s, method, proven)


def with_order(plan: Plan, pool: Pool, nodes: tuple[int, ...]) -> Plan:
    """``plan`` with its ranks on ``nodes``: a device entry for each run of nodes, or for each node of known name."""
    out, place = [], 0
    while place < len(nodes):
        end = place + 1
        while pool.hosts is None and end < len(nodes) and nodes[end] == nodes[end - 1] + 1:
            end += 1
        last = min(end * pool.gpus_per_node, plan.num_ranks) - 1
        out.append(
            Devices(
                ranks=format_range(place * pool.gpus_per_node, last),
                pool=pool.name,
                nodes=format_range(nodes[place], nodes[end - 1]),
                host=pool.hosts[nodes[place]] if pool.hosts else None,
            )
        )
        place = end
    return plan.model_copy(update={"devices": tuple(out)})


def _plain_orders(leaves: IntArray, places: int) -> Iterator[IntArray]:
    """Leaf by leaf: as declared, largest first, smallest first."""
    sizes = np.bincount(leaves)[leaves]
    for rank in (leaves, -sizes, sizes):
        yield np.lexsort((np.arange(len(leaves)), leaves, rank))[:places]


def _with_nodes(of_place: IntArray, leaves: IntArray) -> IntArray:
    """Nodes for the leaf of every place: those of a leaf in order."""
    out = np.zeros(len(of_place), dtype=np.int64)
    for leaf in np.unique(of_place):
        here = of_place == leaf
        out[here] = np.flatnonzero(leaves == leaf)[: here.sum()]
    return out


def _options(
    plan: Plan, gpus_per_node: int, price: Callable[[Spans], float], limit_s: float
) -> Iterator[tuple[Spans, float]]:
    """What groups may share at most ``limit_s`` a step, with the step time."""
    layers, gradients = (_parts(plan, view, gpus_per_node) for view in ("layers", "gradients"))
    layers = [span for span in layers if price(Spans(layers=span)) <= limit_s]
    gradients = [span for span in gradients if price(Spans(gradients=span)) <= limit_s]
    crossing = [False, True] if plan.pp > 1 else [False]
    for one, other, cross in product(layers, gradients, crossing):
        spans = Spans(one, other, cross)
        if price(spans) <= limit_s:
            yield spans, price(spans)


def _parts(plan: Plan, view: str, gpus_per_node: int) -> list[int]:
    """Ranks that groups of a view may share: all, or the smallest part of a group over several leaves, a node or more;
    the largest, the smallest and some between."""
    ordered = _every_part(plan, view, gpus_per_node)
    if len(ordered) > MAX_PARTS:
        kept = np.unique(np.rint(np.geomspace(1, len(ordered), MAX_PARTS)).astype(int) - 1)
        ordered = [ordered[index] for index in kept]
    return [INSIDE, *ordered]


def _every_part(plan: Plan, view: str, gpus_per_node: int) -> list[int]:
    """Ranks that the smallest part of a group over several leaves may hold."""
    spans = set()
    for kind, size, stride in group_kinds(plan):
        if kind == view and gpus_per_node % (size * stride):
            whole = size * stride % gpus_per_node == 0 and gpus_per_node % stride == 0
            least = gpus_per_node // stride if whole else 1  # members that share a node share its leaf
            spans |= {max(part * stride, gpus_per_node) for part in range(least, size // 2 + 1, least)}
    return sorted(spans)


def _thinned(plan: Plan, view: str, gpus_per_node: int) -> bool:
    """Whether not every part is tried."""
    return len(_every_part(plan, view, gpus_per_node)) > MAX_PARTS


def _groups(plan: Plan, gpus_per_node: int) -> Iterator[tuple[str, int, int, dict[int, int]]]:
    """(view, size, stride, members by place) of every group on more than one node, those on the same places once."""
    seen = set()
    for view, size, stride in group_kinds(plan):
        places = (np.arange(plan.num_ranks) // gpus_per_node).reshape(-1, size, stride)
        for group in places.transpose(0, 2, 1).reshape(-1, size):
            where, count = np.unique(group, return_counts=True)
            key = (view, size, stride, tuple(where.tolist()), tuple(count.tolist()))
            if len(where) > 1 and key not in seen:
                seen.add(key)
                yield view, size, stride, dict(zip(where.tolist(), count.tolist(), strict=True))


def _solved(
    plan: Plan, pool: Pool, leaves: IntArray, start: IntArray, options: list[tuple[Spans, float]]
) -> tuple[IntArray, bool]:
    """[places] the leaf of every place, and whether nothing is quicker; the start's where nothing better is found."""
    from ortools.sat.python import cp_model

    room, begun = np.bincount(leaves).tolist(), leaves[start]
    places, number = len(start), range(len(room))
    model = cp_model.CpModel()
    on = [[model.new_bool_var("") for _ in number] for _ in range(places)]
    for place in range(places):
        model.add_exactly_one(on[place])
        for leaf in number:
            model.add_hint(on[place][leaf], int(begun[place] == leaf))
    for leaf in number:
        model.add(sum(on[place][leaf] for place in range(places)) <= room[leaf])
    picked = [model.new_bool_var("") for _ in options]
    model.add_exactly_one(picked)
    views = {
        view: {span: model.new_bool_var("") for span in dict.fromkeys(getattr(spans, view) for spans, _ in options)}
        for view in ("layers", "gradients")
    }
    near = model.new_bool_var("")
    for (spans, _), one in zip(options, picked, strict=True):
        for view, of_span in views.items():
            model.add_implication(one, of_span[getattr(spans, view)])
        if not spans.sends_cross:
            model.add_implication(one, near)
    for view, size, stride, members in _groups(plan, pool.gpus_per_node):
        for leaf in number:
            count = sum(many * on[place][leaf] for place, many in members.items())
            present = model.new_bool_var("")
            model.add(count <= size * present)
            for span, chosen in views[view].items():
                least = size if span == INSIDE else 1 if span <= pool.gpus_per_node else -(-span // stride)
                model.add(count >= min(least, size) * present).only_enforce_if(chosen)
    at = (np.arange(plan.num_ranks) // pool.gpus_per_node).reshape(plan.pp, -1)
    for one_place, other in sorted(set(zip(at[:-1].ravel().tolist(), at[1:].ravel().tolist(), strict=True))):
        for leaf in number if one_place != other else ():
            model.add(on[one_place][leaf] == on[other][leaf]).only_enforce_if(near)
    least_s = min(step_s for _, step_s in options)
    cost = [round((step_s / least_s - 1) * TIME_UNITS) for _, step_s in options]
    model.minimize(sum(each * one for each, one in zip(cost, picked, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = SOLVER_TIME
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return begun, True
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return begun, False
    labels = [next(leaf for leaf in number if solver.boolean_value(row[leaf])) for row in on]
    return np.array(labels, dtype=np.int64), status == cp_model.OPTIMAL
