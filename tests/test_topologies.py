"""Which level each group crosses on fat trees, rails, tori and WAN islands, by hand; and what planning makes of it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from meshwright.cost_models.collectives import collective_s, expert_exchange_s, link_constants, p2p_s
from meshwright.cost_models.rank_order import PIPELINE_INSIDE
from meshwright.planner.search import plan
from meshwright.specs.cluster import ClusterSpec, NetworkLevel, Pool
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.plan import parse_range

from .cost_cases import H100
from .planner_cases import request, small_model, workload

NODE = NetworkLevel(name="nvlink4", kind="nvlink", span=4, bandwidth_bytes_per_s=450e9, latency_s=1e-6)


def fabric(span, bandwidth=50e9, **changes):
    return NetworkLevel(
        name="fabric", kind="roce", span=span, bandwidth_bytes_per_s=bandwidth, latency_s=5e-6, **changes
    )


def cluster_of(*levels):
    span = levels[-1].span
    pool = Pool(name="pool", gpu=H100.name, nodes=span // 4, gpus_per_node=4, levels=levels)
    return ClusterSpec(name="test", gpus={H100.name: H100}, pools=(pool,))


def seconds(op, levels, size, stride=1, volume=1e9):
    return float(collective_s(op, levels, volume, size, stride))


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "all_to_all"])
def test_a_group_under_a_leaf_does_not_pay_the_spine(op):
    """Nodes of 4, leaves of 16, a spine of 64 oversubscribed 1 or 8 times."""
    even, thin = ((NODE, fabric(16), fabric(64, oversubscription=over)) for over in (1.0, 8.0))
    assert seconds(op, even, 16) == seconds(op, thin, 16)
    assert seconds(op, even, 4, 4) == seconds(op, thin, 4, 4)
    # 32 ranks leave a leaf on 16 / 8 ports, a node on 4.
    assert seconds(op, thin, 32) > 1.8 * seconds(op, even, 32)


def test_ranks_of_one_rail_share_no_port():
    """GPUs of the same index in 4 nodes: each has its own port, so a group of one a node moves 3/4 of its bytes at the
    port's rate, as fast as all 16 together move 15/16 with four ports a node."""
    levels = (NODE, fabric(16))
    rate = 50e9 * link_constants(levels[1])["busbw_eff"]
    assert seconds("all_gather", levels, 4, 4, 16e9) == pytest.approx(16e9 * 3 / 4 / rate, rel=0.02)
    assert seconds("all_gather", levels, 16, 1, 16e9) == pytest.approx(16e9 * 15 / 16 / (4 * rate), rel=0.02)


@pytest.mark.parametrize("ways", [2, 3, 4, 5, 8])
def test_an_all_to_all_goes_round_a_ring(ways):
    """Against counting the links from a node to each other node on the shorter way."""
    links = sum(min(distance, ways - distance) for distance in range(1, ways)) / (ways - 1)
    constants = link_constants(fabric(4))
    switch, ring = (fabric(ways, 1e6, ring=ring) for ring in (False, True))
    alpha = constants["start_s"] + (5e-6 + constants["exchange_step_s"]) * (ways - 1)
    found = [seconds("all_to_all", (each,), ways, volume=1e12) - alpha for each in (switch, ring)]
    assert found[1] == pytest.approx(links * found[0], rel=1e-4)
    exchanged = [float(expert_exchange_s((each,), 1e12, ways, 1, 1.0, 1.0)) for each in (switch, ring)]
    assert exchanged[1] == pytest.approx(links * exchanged[0], rel=1e-3)


def test_rings_gather_both_ways_and_send_one_way():
    switch, ring = ((NODE, fabric(16, ring=ring)) for ring in (False, True))
    assert seconds("all_gather", ring, 4, 4) == seconds("all_gather", switch, 4, 4)
    sends = [float(p2p_s(levels, 1e9, 4, senders=4)) for levels in (switch, ring)]
    assert sends[1] == pytest.approx(2 * sends[0], rel=1e-3)


def test_a_torus_is_one_ring_a_dimension():
    """4 x 4 nodes: a group in one row meets one ring; the whole torus is no faster than its slower dimension."""
    x, y = fabric(16, ring=True), fabric(64, 25e9, ring=True)
    assert seconds("all_to_all", (NODE, x, y), 4, 4) == seconds("all_to_all", (NODE, x), 4, 4)
    column = seconds("all_to_all", (NODE, x, y), 4, 16)
    assert column > 1.9 * seconds("all_to_all", (NODE, x, y), 4, 4)


def test_a_cluster_file_says_ring(tmp_path):
    path = tmp_path / "torus.yaml"
    path.write_text(
        "pools:\n  - gpu: H100-SXM\n    nodes: 4\n    levels:\n      - {link: nvlink4, span: 8}\n"
        "      - {kind: roce, bandwidth: 50 GB/s, latency: 5 us, span: all, ring: true}\n"
    )
    assert [level.ring for level in load_cluster(str(path)).pools[0].levels] == [False, True]


@pytest.mark.parametrize(("batch", "crosses"), [(16, True), (4096, False)])
def test_experts_stay_under_a_leaf_where_their_exchange_costs_more_than_it_saves(batch, crosses):
    """16 experts on 16 GPUs, leaves of 8 under a thin spine: EP 16 saves reducing gradients of experts over the spine
    once a step, and exchanges tokens over it in every micro-batch."""
    cluster = cluster_of(NODE, fabric(8), fabric(16, oversubscription=64.0))
    model = small_model(2, hidden=512, experts=16, vocab=2000)
    fixed = {"pp": 1, "tp": 1, "etp": 1, "micro_batch_size": 1}
    found = plan(request(model, cluster, workload(batch, 1024), fix=fixed, top=1))
    assert (found.plan.ep > 8) == crosses


def test_tensor_groups_stay_inside_a_node_and_data_groups_cross_the_slowest_level():
    """Ranks of a plan on nodes of 4, leaves of 8, 16 in all."""
    cluster = cluster_of(NODE, fabric(8), fabric(16, oversubscription=8.0))
    found = plan(request(small_model(4), cluster, workload(16, 1024), fix={"tp": 2, "pp": 2}, top=1)).plan
    assert found.dp == 4
    inner = found.tp * found.cp
    groups = defaultdict(set)
    for stage, members in enumerate(found.stages):
        ranks = [rank for text in members.groups[0].ranks for rank in parse_range(text)]
        for rank in ranks:
            groups["tp", stage, rank // found.tp].add(rank // 4)
            groups["dp", stage, rank % inner].add(rank // 8)
    assert all(len(nodes) == 1 for (kind, *_), nodes in groups.items() if kind == "tp")
    across = {len(leaves) for (kind, *_), leaves in groups.items() if kind == "dp"}
    assert across == ({2} if found.rank_order == PIPELINE_INSIDE else {1})
