"""Collectives: hand calculations, properties, and measured runs that no fit has seen."""

from __future__ import annotations

import csv
import gzip
import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models.collectives import (
    collective_s,
    contention,
    expert_exchange_s,
    exposed_s,
    p2p_s,
    usable_bandwidth,
)
from meshwright.cost_models.links import curve_of
from meshwright.specs.catalog import links as catalog_links
from meshwright.specs.cluster import NetworkLevel

from .cost_cases import pool

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
DATA = Path(__file__).parents[1] / "benchmarks" / "data" / "collectives"


def constants(kind: str) -> dict[str, float]:
    text = files("meshwright.cost_models.data").joinpath("collectives.json").read_text()
    return dict(json.loads(text)["links"][kind])


def measured(name: str) -> list[dict[str, str]]:
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def level(name: str, span: int = 8, **changes: object) -> NetworkLevel:
    link = catalog_links()[name]
    data = {"name": name, "kind": link.kind, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "span": span}
    return NetworkLevel.model_validate({**data, "latency_s": link.latency_s, **changes})


def seconds(op: str, levels: object, volume: float, size: int, stride: int = 1, copies: float = 1.0) -> float:
    return float(collective_s(op, levels, volume, size, stride, copies))  # type: ignore[arg-type]


# -- inside a node -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "size", "megabytes", "busbw"),
    [("all_gather", 8, 16, 213), ("all_gather", 8, 64, 282), ("all_gather", 8, 512, 335),
     ("reduce_scatter", 8, 64, 292), ("all_to_all", 8, 64, 265), ("all_to_all", 8, 512, 315),
     ("all_reduce", 8, 64, 362), ("all_reduce", 8, 512, 445), ("all_gather", 2, 64, 211)],
)  # fmt: skip
def test_h100_node_meets_measured_bus_bandwidth(op: str, size: int, megabytes: int, busbw: float) -> None:
    """GB/s of NCCL 2.29 on H100 (aiconfigurator). The curve is the mean of H100 and H200: within 4%."""
    volume = megabytes * 2**20
    passes = 2 if op == "all_reduce" else 1
    rate = passes * volume * (size - 1) / size / seconds(op, pool(1).levels, volume, size) / 1e9
    assert rate == pytest.approx(busbw, rel=0.04)


def test_unseen_a100_all_reduces_of_any_group_size() -> None:
    """vTrain's A100 node, groups of 2 to 8, 1 MB to 1 GB: another NCCL, other people; nothing was fitted to it."""
    rows = [row for row in measured("vtrain") if row["gpu"] == "A100" and float(row["bytes"]) >= 2**24]
    levels = [level("nvlink3")]
    error = [
        abs(seconds("all_reduce", levels, float(row["bytes"]), int(row["gpus"])) / float(row["us"]) * 1e6 - 1)
        for row in rows
    ]
    assert len(error) > 100
    assert np.median(error) < 0.02
    assert np.quantile(error, 0.95) < 0.08


def test_a_slower_link_of_the_family_stretches_the_large_and_keeps_the_small() -> None:
    """H800: Hopper's start-up, 200 of 450 GB/s."""
    fast, slow = [level("nvlink4")], [level("nvlink4-h800")]
    assert seconds("all_gather", slow, 512, 8) == pytest.approx(seconds("all_gather", fast, 512, 8), rel=0.02)
    ratio = seconds("all_gather", slow, 1e9, 8) / seconds("all_gather", fast, 1e9, 8)
    assert ratio == pytest.approx(450 / 200, rel=0.02)


def test_without_peer_access_pcie_goes_through_the_host() -> None:
    direct, host = level("pcie4"), level("pcie4", peer_to_peer=False)
    assert seconds("all_reduce", [host], 1e8, 8) > 5 * seconds("all_reduce", [direct], 1e8, 8)


def test_a_rack_of_nvlink_keeps_groups_of_64_off_the_fabric() -> None:
    rack = [level("nvlink5", 72), level("ib-ndr", 1152)]
    node = [level("nvlink5", 8), level("ib-ndr", 1152)]
    for op in OPS:
        assert seconds(op, rack, 1e9, 64) < seconds(op, node, 1e9, 64) / 1.5
        # More members move (n-1)/n more at the same rate: 63/64 against 7/8 of the volume, and start later.
        eight, many = seconds(op, rack, 1e9, 8), seconds(op, rack, 1e9, 64)
        assert eight < many < 1.4 * eight


# -- across nodes ------------------------------------------------------------------------------------------------------


def test_ring_over_nodes_uses_as_many_ports_as_members() -> None:
    """Two or four nodes: k members a node leave on k ports, never beyond NVLink's rate; 3.4 us a hop inside."""
    inner, outer, levels = constants("nvlink"), constants("infiniband"), pool(4).levels
    volume = 1e9
    nic, nvlink = 50e9 * outer["busbw_eff"], 450e9 * inner["busbw_eff"]
    for size, stride, inside, nodes in ((2, 8, 1, 2), (4, 4, 2, 2), (16, 1, 8, 2), (32, 1, 8, 4)):
        rate = min(inside * nic, nvlink) if inside > 1 else nic
        alpha = outer["start_s"] + (nodes - 1) * (5e-6 + outer["step_s"])
        if inside > 1:
            alpha += inner["start_s"] + (inside - 1) * nodes * inner["relay_s"]
        root = outer["root_s_per_sqrt_byte"] * (volume / inside) ** 0.5
        expected = alpha + volume * (size - 1) / size / rate + root
        assert seconds("reduce_scatter", levels, volume, size, stride) == pytest.approx(expected)


def test_rings_meet_published_ratios_of_2_to_128_nodes() -> None:
    """SimAI's ratio tables: share of the ports' bandwidth by buffer size and nodes, at 50 GB/s a GPU."""
    levels = [level("nvlink4"), level("ib-ndr", 1024)]
    error = []
    for row in measured("simai"):
        nodes = int(float(row["nodes"]))
        if row["op"] == "all_reduce" and nodes > 1:
            volume = float(row["bytes"])
            bus = volume * (1 - 1 / (8 * nodes)) / (8 * 50e9 * float(row["ratio"]))
            error.append(abs(seconds("all_gather", levels, volume, 8 * nodes) / bus - 1))
    assert len(error) == 77
    assert np.median(error) < 0.10
    assert np.quantile(error, 0.95) < 0.30


@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_a_large_all_reduce_moves_the_volume_twice(size: int) -> None:
    """Marginal seconds a byte of one GPU a node: a ring's 2 (n-1)/n, or a tree's 2 at 0.92 of its rate."""
    levels = pool(64).levels
    slope = (seconds("all_reduce", levels, 2e12, size, 8) - seconds("all_reduce", levels, 1e12, size, 8)) / 1e12
    rate = usable_bandwidth(levels[-1])
    assert slope == pytest.approx(2 * (size - 1) / size / rate, rel=0.01)


def test_trees_serve_small_all_reduces_of_many_nodes() -> None:
    """128 nodes, 1 MB: 2 x 7 levels of a tree against 2 x 127 hops of a ring of 14 us."""
    levels = pool(128).levels
    assert seconds("all_reduce", levels, 1e6, 128, 8) < 0.3e-3
    assert 2 * seconds("all_gather", levels, 1e6, 128, 8) > 3e-3


groups = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 64, 128]), st.sampled_from([1, 2, 4, 8, 16]))


@settings(max_examples=60)
@given(groups, st.floats(1, 1e11), st.floats(1.0, 100.0), st.sampled_from(OPS))
def test_more_bytes_never_take_less_time(group: tuple[int, int], volume: float, factor: float, op: str) -> None:
    size, stride = group
    levels = [level("nvlink4"), level("ib-ndr", 64), level("roce-400", 4096, oversubscription=2.0)]
    less, more = (seconds(op, levels, v, size, stride) for v in (volume, volume * factor))
    assert 0 <= less <= more * (1 + 1e-9)
    assert (less == 0) == (size == 1)


@settings(max_examples=60)
@given(groups, st.floats(1, 1e11))
def test_the_chosen_all_reduce_is_never_slower_than_the_flat_ring(group: tuple[int, int], volume: float) -> None:
    """A flat ring all-reduce is a ring reduce-scatter and a ring all-gather, with one start saved at most a level."""
    size, stride = group
    levels = [level("nvlink4"), level("ib-ndr", 64), level("roce-400", 4096)]
    if size * stride <= 8:
        return
    ring = seconds("reduce_scatter", levels, volume, size, stride) + seconds("all_gather", levels, volume, size, stride)
    assert seconds("all_reduce", levels, volume, size, stride) <= ring * (1 + 1e-9)


def test_summing_switches_halve_the_bytes_of_an_all_reduce() -> None:
    plain, sums = ([level("nvlink4"), level("ib-ndr", 128, in_network_reduction=reduces)] for reduces in (False, True))
    volume, ports = 8e9, usable_bandwidth(plain[1])
    # One GPU a node, 16 nodes: a ring moves 2 * 15/16 of the volume through the port, the switches' sum 1.
    assert seconds("all_reduce", plain, volume, 16, 8) == pytest.approx(2 * 15 / 16 * volume / ports, rel=0.02)
    assert seconds("all_reduce", sums, volume, 16, 8) == pytest.approx(volume / ports, rel=0.02)
    assert seconds("all_gather", sums, volume, 16, 8) == seconds("all_gather", plain, volume, 16, 8)


def test_oversubscription_divides_the_outer_rate() -> None:
    thin = [lv.model_copy(update={"oversubscription": 4.0 if lv.kind == "infiniband" else 1.0})
            for lv in pool(4).levels]  # fmt: skip
    wide = seconds("all_gather", pool(4).levels, 8e9, 4, 8)
    assert seconds("all_gather", thin, 8e9, 4, 8) == pytest.approx(4 * wide, rel=0.02)


def test_three_levels_nest() -> None:
    """Node, leaf, spine: a group of one rank a node over 4 nodes of which 2 share a leaf is limited by the spine."""
    levels = [level("nvlink4"), level("ib-ndr", 16), level("ib-ndr", 64, oversubscription=8.0)]
    # Two members under a leaf share two uplinks of 50/8 GB/s.
    expected = 4e9 * 3 / 4 / (2 * 50e9 / 8 * constants("infiniband")["busbw_eff"])
    assert seconds("all_gather", levels, 4e9, 4, 8) == pytest.approx(expected, rel=0.01)


# -- all-to-all and sends ----------------------------------------------------------------------------------------------


def test_all_to_all_takes_the_slower_level() -> None:
    """16 ranks on two nodes: half of the bytes leave on the rank's own port; node-limited dispatch sends less."""
    outer, levels, volume = constants("infiniband"), pool(2).levels, 1e9
    leaving = volume / 2
    expected = leaving / (50e9 * outer["busbw_eff"]) + outer["root_s_per_sqrt_byte"] * leaving**0.5
    expected += outer["start_s"] + 5e-6 + outer["exchange_step_s"]
    assert seconds("all_to_all", levels, volume, 16) == pytest.approx(expected)
    # The other 7/16 of the bytes stay inside: a node alone would send 8/16 of them with 7/8 to others.
    inside = seconds("all_to_all", levels, volume / 2, 8)
    assert seconds("all_to_all", levels, volume, 16, 1, 0.01) == pytest.approx(inside)


@pytest.mark.parametrize(
    ("tokens", "dispatch_us", "combine_us"), [(1024, 158, 307), (8192, 967, 1838), (65536, 7841, 13605)]
)
def test_expert_exchange_of_an_h100_node(tokens: int, dispatch_us: float, combine_us: float) -> None:
    """DeepEP with 20 SMs on 8 H100, DeepSeek-V3's layer (hidden 7168, top 8): aiconfigurator's medians, within 12%."""
    copies = 8 * (1 - (7 / 8) ** 8) / 8  # distinct ranks of 8 draws over 8
    for width, us in ((7168 * (1 + 4 / 128), dispatch_us), (2 * 7168, combine_us)):
        got = float(expert_exchange_s(pool(1).levels, tokens * 8 * width, 8, 1, 1 / 8, copies))
        assert got * 1e6 == pytest.approx(us, rel=0.12)


@pytest.mark.parametrize(
    ("first", "distance", "inside"), [(0, 4, True), (4, 4, False), (0, 8, False), (8, 2, True), (5, 2, False)]
)
def test_sends_cross_the_level_that_their_slowest_pair_crosses(first: int, distance: int, inside: bool) -> None:
    """Pairs (first + r, first + distance + r), r < distance, listed by hand against nodes of 8."""
    crosses = any((first + r) // 8 != (first + distance + r) // 8 for r in range(distance))
    assert crosses is not inside
    ib = constants("infiniband")
    near = constants("nvlink")["send_start_s"] + 1e-6 + 1e8 / (450e9 * 0.79)
    far = ib["send_start_s"] + 5e-6 + 1e8 / (50e9 * ib["busbw_eff"])
    assert float(p2p_s(pool(4).levels, 1e8, distance, first)) == pytest.approx(near if inside else far)


def test_a_send_over_several_stages_stays_in_the_node_that_holds_both_ends() -> None:
    """Stages of two ranks at 0, 2, 4 and 6 of a node of 8: the last one is 6 further on, no pair leaves the node."""
    near = constants("nvlink")["send_start_s"] + 1e-6 + 1e8 / (450e9 * 0.79)
    assert float(p2p_s(pool(4).levels, 1e8, 6, 0, 2)) == pytest.approx(near)
    assert float(p2p_s(pool(4).levels, 1e8, 8, 0, 2)) > near


@pytest.mark.parametrize(("gpu", "link", "rel"), [("A100-40GB", "nvlink3", 0.05), ("V100-16GB", "nvlink2", 0.05)])
def test_large_sends_inside_a_node_meet_measured_ones(gpu: str, link: str, rel: float) -> None:
    """Sailor's curves from 128 MB on: a pair reaches 236 of an A100's 300 GB/s, 63 of a V100's 150."""
    rows = [r for r in measured("sailor_p2p") if r["gpu"] == gpu and r["link"] == "intra-node"]
    error = [
        abs(float(p2p_s([level(link)], float(r["bytes"]), 1)) * float(r["busbw_gbps"]) * 1e9 / float(r["bytes"]) - 1)
        for r in rows
        if float(r["bytes"]) >= 2**28
    ]
    assert len(error) >= 3
    assert max(error) < 2 * rel
    assert np.median(error) < rel


# -- overlap -----------------------------------------------------------------------------------------------------------


def test_contention_is_that_of_the_outermost_link() -> None:
    levels = pool(4).levels
    assert float(contention("all_gather", levels, 8, 1)) == 0.15
    assert float(contention("all_gather", levels, 32, 1)) == 0.02
    assert float(contention("all_gather", levels, 4, 8)) == 0.02
    assert float(contention("all_gather", levels, 1, 1)) == 0.0
    assert float(contention("all_reduce", levels, 8, 1)) == 0.0  # NVLink's switches add up on Hopper
    assert float(contention("all_reduce", [level("nvlink3")], 8, 1)) == 0.15


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 0.5))
def test_overlap_hides_but_never_pays(busy: float, window: float, share: float) -> None:
    out = float(exposed_s(np.array(busy), np.array(window), share))
    assert 0.0 <= out <= busy + 1e-12
    assert out >= max(busy - window, 0.0)


@pytest.mark.parametrize(
    ("name", "bandwidth"), [("nvlink2", 150e9), ("nvlink3", 300e9), ("nvlink4", 450e9), ("nvlink5", 900e9)]
)
def test_a_level_without_a_catalog_name_reads_the_curve_of_its_bandwidth(name: str, bandwidth: float) -> None:
    anonymous = NetworkLevel(name="inner", kind="nvlink", span=8, bandwidth_bytes_per_s=bandwidth, latency_s=1e-6)
    assert curve_of(anonymous) is curve_of(level(name))
