"""Cluster shorthand: every form, what is filled in, and what is refused."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.specs.catalog import gpu, gpu_names
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import cluster_from_data, load_cluster
from meshwright.specs.errors import SpecError


def levels(cluster: ClusterSpec, pool: int = 0) -> list[tuple[str, int, float]]:
    """Kind, span and GB/s of a pool's levels."""
    return [(level.kind, level.span, level.bandwidth_bytes_per_s / 1e9) for level in cluster.pools[pool].levels]


# text, nodes, GPUs a node, levels; bandwidths by hand from the machines' datasheets
FORMS = [
    ("64xH100", 8, 8, [("nvlink", 8, 450), ("infiniband", 64, 50)]),
    ("8x8xH100-SXM", 8, 8, [("nvlink", 8, 450), ("infiniband", 64, 50)]),
    (" 8 x 8 X h100_sxm5 ", 8, 8, [("nvlink", 8, 450), ("infiniband", 64, 50)]),
    ("8xH100", 1, 8, [("nvlink", 8, 450)]),
    ("2xH100", 1, 2, [("nvlink", 2, 450)]),
    ("H100", 1, 1, [("nvlink", 1, 450)]),
    ("1x4xA100", 1, 4, [("nvlink", 4, 300)]),
    ("4x4xA100-40GB", 4, 4, [("nvlink", 4, 300), ("infiniband", 16, 25)]),
    ("32xA100-40GB", 4, 8, [("nvlink", 8, 300), ("infiniband", 32, 25)]),
    ("4x8xV100-32GB", 4, 8, [("nvlink", 8, 150), ("infiniband", 32, 6.25)]),
    ("16xT4", 4, 4, [("pcie", 4, 5.7), ("ethernet", 16, 6.25 / 4)]),
    ("4x2xT4", 4, 2, [("pcie", 2, 5.7), ("ethernet", 8, 6.25 / 2)]),
    ("16xMI250X", 2, 8, [("xgmi", 2, 200), ("xgmi", 8, 100), ("roce", 16, 12.5)]),
    ("16xMI300X", 2, 8, [("xgmi", 8, 448), ("roce", 16, 50)]),
    ("16xGH200", 4, 4, [("nvlink", 4, 450), ("roce", 16, 25)]),
    ("8x3090", 1, 8, [("pcie", 8, 11.5)]),
    ("2xGB200", 1, 2, [("nvlink", 2, 900)]),
    ("16xGB200", 4, 4, [("nvlink", 16, 900)]),
    ("72xGB200-NVL72", 18, 4, [("nvlink", 72, 900)]),
    ("144xGB300-NVL72", 36, 4, [("nvlink", 72, 900), ("infiniband", 144, 100)]),
    # 64 nodes fill 3.6 racks; schedulers spread them as 4 x 16 nodes
    ("256xGB200-NVL72", 64, 4, [("nvlink", 64, 900), ("infiniband", 256, 50)]),
    # 19 nodes cannot be spread evenly over few racks: 18 and 1
    ("76xGB200-NVL72", 19, 4, [("nvlink", 72, 900), ("infiniband", 76, 50)]),
    ("2x16xL40S", 2, 16, [("pcie", 16, 31.5), ("infiniband", 32, 25 * 4 / 16)]),
]


@pytest.mark.parametrize(("text", "nodes", "per_node", "expected"), FORMS, ids=[form[0] for form in FORMS])
def test_forms(text: str, nodes: int, per_node: int, expected: list[tuple[str, int, float]]) -> None:
    cluster = load_cluster(text)
    (pool,) = cluster.pools
    assert (pool.nodes, pool.gpus_per_node, cluster.num_gpus) == (nodes, per_node, nodes * per_node)
    assert levels(cluster) == [(kind, span, pytest.approx(speed)) for kind, span, speed in expected]
    assert cluster.inter_pool is None
    assert pool.host_memory_bytes
    assert pool.host_memory_bytes > 1e11
    assert cluster_from_data(text) == cluster


def test_pools_are_joined_by_the_slower_fabric() -> None:
    cluster = load_cluster("4x8xH100-SXM+4x8xA100-80GB")
    assert [pool.name for pool in cluster.pools] == ["H100-SXM", "A100-SXM-80GB"]
    assert cluster.inter_pool
    assert cluster.inter_pool.span == 64
    assert cluster.inter_pool.bandwidth_bytes_per_s == 25e9  # A100's 200 Gbit/s, not H100's 400
    assert cluster.inter_pool.latency_s == 5e-6
    text = " ".join(cluster.assumptions)
    for said in ("A100-80GB taken as A100-SXM-80GB", "DGX H100", "450 GB/s", "joined by the slower fabric", "25 GB/s"):
        assert said in text


def test_single_node_pools_are_joined_over_their_network_ports() -> None:
    cluster = load_cluster("8xH100-SXM+1x4xT4")
    assert levels(cluster) == [("nvlink", 8, 450)]
    assert cluster.inter_pool
    assert cluster.inter_pool.kind == "ethernet"
    assert cluster.inter_pool.bandwidth_bytes_per_s == pytest.approx(50e9 / 8 / 4)
    assert cluster.inter_pool.latency_s == 25e-6


def test_pools_of_one_type_get_different_names() -> None:
    cluster = load_cluster("8xH100+8xH100+8xA100")
    assert [pool.name for pool in cluster.pools] == ["H100-SXM", "H100-SXM-2", "A100-SXM-80GB"]
    assert list(cluster.gpus) == ["H100-SXM", "A100-SXM-80GB"]


def test_a_published_mixed_cluster_is_shorthand() -> None:
    cluster = load_cluster("8xRTX-3090+16xRTX-2080+8xTitan-RTX")
    assert [(pool.gpu, pool.num_gpus) for pool in cluster.pools] == [
        ("RTX-3090", 8),
        ("RTX-2080", 16),
        ("Titan-RTX", 8),
    ]


BAD = [
    ("", "names no GPU type"),
    ("+", "names no GPU type"),
    ("H100+", "names no GPU type"),
    ("8x", "names no GPU type"),
    ("0xH100", "at least 1"),
    ("0x8xH100", "at least 1"),
    ("-8xH100", "at least 1"),
    ("8.5xH100", "whole numbers"),
    ("1x2x3xH100", "3 counts"),
    ("64xH1000", "unknown GPU type 'H1000'"),
    ("nan", "unknown GPU type"),
    ("20xH100", "no whole number of H100-SXM nodes"),
    ("2x16xH100", "have 8 GPUs, got 16"),
    ("2x8xGB200", "have 4 GPUs, got 8"),
    ("8000000xH100", "at most 1000000"),
    ("1001x1000xL40S", "at most 1000000"),
    ("9" * 50 + "xH100", "absurd count"),
    ("9" * 5000 + "xH100", "characters long"),
    ("a/b", "does not exist"),
    ("cluster.yaml", "does not exist"),
]


@pytest.mark.parametrize(("text", "fragment"), BAD, ids=[repr(bad[0][:20]) for bad in BAD])
def test_bad_texts_are_one_clear_fault(text: str, fragment: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_cluster(text)
    (fault,) = caught.value.faults
    assert fragment in fault.message
    assert len(str(fault)) < 1500


def test_near_counts_are_offered() -> None:
    with pytest.raises(SpecError) as caught:
        load_cluster("20xH100")
    assert caught.value.faults[0].alternatives == ("16xH100-SXM", "24xH100-SXM")
    assert [load_cluster(text).num_gpus for text in caught.value.faults[0].alternatives] == [16, 24]


def test_every_wrong_pool_is_named() -> None:
    with pytest.raises(SpecError) as caught:
        load_cluster("0xH1000+20xH100+8xA100")
    assert len(caught.value.faults) == 3


def test_request_text_is_never_a_path(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "lab").write_text("pools: [{gpu: H100}]")
    monkeypatch.chdir(tmp_path)
    assert load_cluster("lab").num_gpus == 8
    with pytest.raises(SpecError, match="unknown GPU type"):
        cluster_from_data("lab")


@given(st.text(alphabet="0123456789xX+-. *H100A8GBxt\n\x00é", max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        cluster = cluster_from_data(text)
    except SpecError:
        return
    assert cluster.num_gpus >= 1


@given(name=st.sampled_from(gpu_names()), nodes=st.integers(1, 300), part=st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_levels_nest_and_cover_the_pool(name: str, nodes: int, part: int) -> None:
    node = gpu(name).node
    per_node = min(part, node.gpus_per_node)
    cluster = cluster_from_data(f"{nodes}x{per_node}x{name}")
    (pool,) = cluster.pools
    assert pool.num_gpus == nodes * per_node
    spans = [level.span for level in pool.levels]
    assert spans == sorted(set(spans))
    assert spans[-1] == pool.num_gpus
    for level in pool.levels:  # an instance of a level is whole nodes, or inside one
        assert level.span % per_node == 0 or per_node % level.span == 0 or level.span < per_node
    # A level that joins one GPU carries nothing: PCIe without peer access is slower than a port of its own.
    speeds = [level.bandwidth_bytes_per_s for level in pool.levels if level.span > 1]
    assert speeds == sorted(speeds, reverse=True)
    assert ClusterSpec.parse(cluster.to_json()) == cluster


def test_reading_is_fast() -> None:
    load_cluster("8xH100")
    start = time.perf_counter()
    load_cluster("1024xH100")
    assert time.perf_counter() - start < 0.06
