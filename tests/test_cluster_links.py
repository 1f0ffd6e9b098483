"""Networks between pairs of pools: what a file may say, what a transfer costs, which order of pools is chosen."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import link_constants, pair_bandwidth
from meshwright.cost_models.multipliers import Multipliers
from meshwright.planner.mixed.partition import layouts
from meshwright.planner.mixed.search import MixedSearch
from meshwright.specs.batch import CellKeys
from meshwright.specs.cluster_io import cluster_from_data
from meshwright.specs.errors import SpecError

from .planner_cases import request, small_model, workload

SLOW = {"kind": "wan", "bandwidth": "1 Gbit/s", "latency": "10 ms"}


def islands(**more):
    """Two sites; ``a`` and ``c`` in one, ``b`` in the other."""
    pools = [{"name": name, "gpu": gpu, "nodes": 1, "gpus_per_node": 2} for name, gpu in
             (("a", "A100-80GB"), ("b", "H100-SXM"), ("c", "A100-40GB"))]  # fmt: skip
    form = {"pools": pools, "inter_pool": {"kind": "infiniband", "bandwidth": "200 Gbit/s", "latency": "5 us"}}
    return cluster_from_data({**form, **more})


def apart():
    return islands(links=[{"between": ["a", "b"], **SLOW}, {"between": ["b", "c"], **SLOW}])


def test_a_pair_has_its_own_network_and_the_rest_the_common_one():
    cluster = apart()
    assert cluster.between(0, 1).bandwidth_bytes_per_s == pytest.approx(1e9 / 8)
    assert cluster.between(2, 1) == cluster.links[1].level
    assert cluster.between(0, 2) == cluster.inter_pool
    assert cluster.between(1, 1) is None


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([{"between": ["a", "x"], **SLOW}], "x is no pool"),
        ([{"between": ["a", "a"], **SLOW}], "joins two pools"),
        ([{"between": ["a", "b"], **SLOW}, {"between": ["b", "a"], **SLOW}], "more than one link"),
    ],
)
def test_wrong_pairs_are_named(links, words):
    with pytest.raises(SpecError, match=words):
        islands(links=links)


def test_every_pair_with_a_link_needs_no_common_network():
    every = [{"between": list(pair), **SLOW} for pair in ("ab", "bc", "ac")]
    document = islands(links=every).model_copy(update={"inter_pool": None})
    assert cluster_from_data(document.model_dump(mode="json")).between(0, 2).name == "a-c"


def test_a_transfer_takes_the_network_of_its_pair():
    """Volume over the pair's bandwidth, latency and start, by hand."""
    cluster = apart()
    asked = request(small_model(), cluster)
    plain = (Multipliers(),) * 3
    costs = CostModel(asked.model, cluster, asked.workload, asked.target, multipliers=plain)
    one = {name: np.array([1]) for name in ("tp", "cp", "ep", "etp", "stage_ranks", "micro_batch_size")}
    cells = costs.cells(CellKeys(**one, recompute=np.array([0]), sharding=np.array([0]), one_stage=np.array([0])))
    row, zero = np.array([0]), np.array([0])
    volume = 2 * asked.model.hidden_size * asked.workload.seq_length
    for ends in ((0, 1), (1, 2), (0, 2)):
        level = cluster.between(*ends)
        taken = costs.boundary_s(cells, row, np.array([ends[0]]), np.array([ends[1]]), zero)[0]
        fixed = link_constants(level)["start_s"] + level.latency_s
        assert taken >= fixed + volume / (level.bandwidth_bytes_per_s * 2)
        if ends != (0, 2):
            assert taken == pytest.approx(fixed + volume / pair_bandwidth(level), rel=1e-9)
    slow = costs.boundary_s(cells, row, np.array([0]), np.array([1]), zero)[0]
    fast = costs.boundary_s(cells, row, np.array([0]), np.array([2]), zero)[0]
    assert slow > 5 * fast


def test_the_slow_link_is_crossed_once():
    """Two islands, one pool in the middle of three: pipelines over all of them put the far pool at an end."""
    cluster = apart()
    asked = request(small_model(layers=8, hidden=4096, heads=32), cluster, workload(batch=64, seq=2048))
    costs = CostModel(asked.model, cluster, asked.workload, asked.target)
    search = MixedSearch(asked, costs, (0, 1, 2), lambda batch: batch.tp > 0)
    found = search.run()
    group = next(g for g in search.groups if g.max_stages > 1)
    tables = group.tables(0, 0)
    value = {part.order: part.value_s.min() for part in layouts(tables, (1, 1, 1), np.inf, np.ones((2, 2, 2), bool))}
    ends = min(value[order] for order in ((1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)))
    assert ends < min(value[0, 1, 2], value[2, 1, 0])
    for plan in found.plans[:3]:
        pools = plan.batch.arrangement.pools
        assert sum(1 in pair for pair in pairwise(pools)) <= 1
