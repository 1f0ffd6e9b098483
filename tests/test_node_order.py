"""Unequal leaves: what each order of nodes costs, by hand; the quickest order against all of them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from meshwright.cost_models.uneven import INSIDE, WORST, Spans, leaf_of_nodes, spans_of, spans_on
from meshwright.megatron_export.launch.nodes import nodes_of_plan
from meshwright.planner.answer.leaves import ordered
from meshwright.planner.answer.no_fit import resized
from meshwright.planner.corrections import estimate_of
from meshwright.planner.engine.node_order import node_order, with_order
from meshwright.planner.search import plan
from meshwright.planner.single import estimate_degrees
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import cluster_from_data
from meshwright.specs.errors import SpecError

from .planner_cases import request, small_model, workload
from .test_project_imports import attempts


def cluster(nodes: int, instances: dict[str, object], over: float = 16.0, hosts: bool = False) -> ClusterSpec:
    """Nodes of 2 GPUs, leaves as given, a spine oversubscribed ``over`` times."""
    fabric = {"kind": "roce", "bandwidth": "10 GB/s"}
    levels = [
        {"kind": "nvlink", "bandwidth": "400 GB/s", "latency": "2 us", "span": 2},
        {**fabric, "name": "leaf", "latency": "5 us", "instances": instances},
        {**fabric, "name": "spine", "latency": "8 us", "span": "all", "oversubscription": over},
    ]
    pool = {"gpu": "H100-SXM", "nodes": nodes, "gpus_per_node": 2, "levels": levels}
    return cluster_from_data({"pools": [{**pool, **({"hosts": [f"h{n}" for n in range(nodes)]} if hosts else {})}]})


def laid_out(where: ClusterSpec, experts: int = 0, **degrees: int):
    """A plan with the degrees over all of the cluster, nodes as declared, and its request."""
    asked = request(small_model(8, experts=experts), where, workload(240))
    return asked, estimate_degrees(asked, {"micro_batch_size": 1, "tp": 1, "etp": 1, **degrees}).plan


@pytest.mark.parametrize(
    ("degrees", "leaves", "expected"),
    [
        # One stage of 12 ranks on 6 nodes, 4 and 2 nodes: the smaller part of the gradients' groups is 4 ranks.
        ({}, [0, 0, 0, 0, 1, 1], Spans(INSIDE, 4, False)),
        # Three stages of 4 ranks, each in one leaf, but not in the same.
        ({"pp": 3}, [0, 0, 0, 0, 1, 1], Spans(INSIDE, INSIDE, True)),
        ({"pp": 3}, [0, 1, 0, 1, 0, 1], Spans(INSIDE, 2, False)),
        # Context groups of ranks (0, 2, .., 10) and (1, 3, .., 11) in pairs under tp 2: parts of 1 node are 2 ranks.
        ({"tp": 2, "cp": 2}, [0, 1, 1, 0, 0, 0], Spans(2, 4, False)),
        ({"tp": 2, "cp": 2}, [0, 0, 1, 1, 0, 0], Spans(INSIDE, 4, False)),
    ],
)
def test_the_smallest_part_of_a_group_speaks(degrees, leaves, expected):
    _, laid = laid_out(cluster(6, {"a": "0-3", "b": "4-5"}), **degrees)
    assert spans_on(laid, np.repeat(leaves, 2)) == expected


def test_equal_leaves_in_order_cost_what_they_do_without_names():
    named = cluster(4, {"a": "0-1", "b": "2-3"})
    plain = named.to_json()
    plain["pools"][0]["levels"][1]["instances"] = []
    asked, laid = laid_out(named)
    without = request(asked.model, ClusterSpec.parse(plain), asked.workload)
    assert estimate_of(asked, laid).step_time_s == estimate_of(without, laid).step_time_s
    mixed_up = cluster(4, {"a": "0,2", "b": "1,3"})
    _, staged = laid_out(mixed_up, pp=2)
    assert spans_of(staged, mixed_up) == Spans(INSIDE, 2, False)
    assert spans_of(staged.model_copy(update={"rank_order": "tp-cp-ep-pp-dp"}), mixed_up) == WORST


CASES = [
    (6, {"a": "0,2,4", "b": "1,3,5"}, {"pp": 2}, 0),
    (6, {"a": "0,3", "b": "1-2,4-5"}, {"pp": 3}, 0),
    (8, {"a": "0-2", "b": "3-7"}, {"pp": 4}, 0),
    (8, {"a": "0,2-3", "b": "1,4-5,6-7"}, {"pp": 2, "cp": 2}, 0),
    (8, {"a": "0,4,6-7", "b": "1,5", "c": "2,3"}, {"ep": 4}, 8),
    (8, {"a": "0,5", "b": "1,4,6", "c": "2,3,7"}, {"pp": 2, "ep": 4}, 8),
    (8, {"a": "0,5,6,7", "b": "1-4"}, {"ep": 8}, 8),
    (5, {"a": "0,2", "b": "1,3,4"}, {}, 0),
]


@pytest.mark.parametrize(("nodes", "instances", "degrees", "experts"), CASES)
def test_no_order_is_quicker(nodes, instances, degrees, experts):
    """Against every way to put leaves on places, each priced as a plan of its own."""
    where = cluster(nodes, instances)
    asked, laid = laid_out(where, experts, **degrees)
    pool, leaves = where.pools[0], leaf_of_nodes(where.pools[0])
    prices: dict[Spans, float] = {}
    for labels in set(permutations(leaves.tolist())) if nodes < 8 else _labels(leaves):
        spans = spans_on(laid, np.repeat(labels, 2))
        if spans not in prices:
            prices[spans] = estimate_of(asked, laid, spans).step_time_s
    found = node_order(laid, pool, lambda spans: estimate_of(asked, laid, spans).step_time_s)
    assert sorted(found.nodes) == list(range(nodes))
    assert found.step_time_s == pytest.approx(min(prices.values()), rel=1e-9)
    assert estimate_of(asked, with_order(laid, pool, found.nodes)).step_time_s == found.step_time_s
    assert found.proven
    assert min(prices.values()) >= estimate_of(asked, laid, Spans()).step_time_s
    again = node_order(laid, pool, lambda spans: estimate_of(asked, laid, spans).step_time_s)
    assert again == found


def _labels(leaves):
    """Every distinct order of the labels."""

    def grow(prefix, left):
        if not any(left):
            yield tuple(prefix)
        for label, count in enumerate(left):
            if count:
                yield from grow([*prefix, label], [c - (n == label) for n, c in enumerate(left)])

    return grow([], np.bincount(leaves).tolist())


def test_the_solver_finds_what_no_plain_order_has():
    """Stages of 6 nodes over leaves of 5, 5 and 2: leaf by leaf one node of a stage is alone, in pairs none is."""
    where = cluster(12, {"a": "0-4", "b": "5-9", "c": "10-11"}, over=64.0)
    asked, laid = laid_out(where, pp=2)
    found = node_order(laid, where.pools[0], lambda spans: estimate_of(asked, laid, spans).step_time_s)
    assert spans_of(laid, where).gradients == 2
    assert spans_of(with_order(laid, where.pools[0], found.nodes), where).gradients == 4
    assert (found.method, found.proven) == ("cp-sat", True)


def test_or_tools_is_loaded_only_to_order_nodes():
    code = (
        "from meshwright.planner.request import PlanRequest\nfrom meshwright.planner.search import plan\n"
        "from tests.planner_cases import request, small_model, workload\n"
        "from tests.test_node_order import cluster\n"
        "asked = request(small_model(2), {cluster}, workload(24), top=1, fix={{'pp': 1, 'tp': 1}})\nplan(asked)\n"
    )
    assert attempts(code.format(cluster="'1x2xH100-SXM+1x2xH100-SXM'"), ("ortools",)) == []
    apart = "cluster(4, {'a': [0, 1, 2], 'b': [3]}, over=64.0)"
    assert "ortools" in attempts(code.format(cluster=apart), ("ortools",))


def test_a_plan_names_its_nodes_and_what_their_order_gains():
    where = cluster(6, {"a": "0,2,4", "b": "1,3,5"}, hosts=True)
    fixed = {"pp": 2, "tp": 1, "cp": 1, "vpp": 1, "micro_batch_size": 1, "rank_order": "tp-cp-ep-dp-pp"}
    asked = request(small_model(2), where, workload(24), fix=fixed)
    document = plan(asked)
    laid, reason = document.plan, next(e for e in document.explanation if e.kind == "placement")
    hosts = [node.host for node in nodes_of_plan(laid, where)]
    assert [{host in ("h0", "h2", "h4") for host in hosts[part]} for part in (slice(3), slice(3, 6))] in (
        [{True}, {False}],
        [{False}, {True}],
    )
    assert document.estimate.step_time_s == estimate_of(asked, laid).step_time_s
    plain = with_order(laid, where.pools[0], tuple(range(6)))
    assert reason.data["plain_s"] == estimate_of(asked, plain).step_time_s > document.estimate.step_time_s
    assert document.bound.step_time_s <= document.estimate.step_time_s
    assert document.model_copy(update={"run": None}) == plan(asked).model_copy(update={"run": None})
    assert ordered(asked, laid)[0].devices == laid.devices


def test_a_pool_of_another_size_has_the_leaves_that_divide_all():
    pool = cluster(6, {"a": "0,2", "b": [1, "3-5"]}).pools[0]
    spans = {nodes: [level.span for level in resized(pool, nodes).levels] for nodes in (1, 2, 5, 12)}
    assert spans == {1: [2], 2: [2, 4], 5: [2, 4, 10], 12: [2, 4, 24]}
    assert resized(pool, 5).uneven_level is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": "0-1", "b": "3"}, "leave out node 2"),
        ({"a": "0-2", "b": "2-3"}, "hold node 2 twice"),
        ({"a": "0-2", "b": "3-4"}, "name node 4"),
    ],
)
def test_faults_name_the_instances(change, message):
    with pytest.raises(SpecError) as caught:
        cluster(4, change)
    assert [fault.pointer for fault in caught.value.faults] == ["/pools/0/levels/1/instances"]
    assert message in caught.value.faults[0].message


def test_a_range_that_is_none_and_a_faster_spine_are_faults():
    with pytest.raises(SpecError, match="not a range of nodes"):
        cluster(4, {"a": "0-x", "b": "2-3"})
    given = cluster(4, {"a": "0-1", "b": "2-3"}).to_json()
    given["pools"][0]["levels"][2]["latency_s"] = 1e-6
    with pytest.raises(SpecError, match="levels/1/instances are joined by spine, which must not be faster or nearer"):
        ClusterSpec.parse(given)
