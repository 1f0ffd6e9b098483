"""Clusters from YAML and JSON: what the fields mean, and that every fault is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import cluster_from_data, load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.files import MAX_BYTES, parse_json, parse_yaml, read_document
from meshwright.specs.units import bandwidth_bytes_per_s, duration_s, rate_flops, size_bytes

EXAMPLE = """
name: lab
pools:
  - gpu: H100-SXM
    nodes: 8
    nic: {kind: roce, bandwidth: 200 Gbit/s, latency: 6 us}
    nics_per_node: 4
    oversubscription: 2
    host_memory: 1 TB
  - gpu: A100-80GB
    hosts: [a1, a2, a3, a4]
    levels:
      - {link: nvlink3, span: 8}
      - {name: leaf, kind: roce, bandwidth: 200 Gbit/s, latency: 5 us, span: 16}
      - {name: spine, link: roce-200, span: all, oversubscription: 4}
  - {name: custom, gpu: MyGPU, gpus_per_node: 2}
gpus:
  h100: {usable_memory: 78 GiB}
  MyGPU: {base: A100-SXM-80GB, memory_bandwidth: 1.8 TB/s, peak_flops: {bf16: 300 TFLOP/s}}
"""


def fault_list(data: Any) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        cluster_from_data(data)
    return [(fault.pointer, fault.message) for fault in caught.value.faults]


def test_every_field_lands_where_it_means() -> None:
    cluster = cluster_from_data(parse_yaml(EXAMPLE))
    h100, a100, custom = cluster.pools
    assert (cluster.name, cluster.num_gpus) == ("lab", 64 + 32 + 2)
    assert [level.span for level in h100.levels] == [8, 64]
    fabric = h100.levels[1]
    # four 25 GB/s ports shared by eight GPUs
    assert (fabric.kind, fabric.bandwidth_bytes_per_s, fabric.latency_s) == ("roce", 12.5e9, 6e-6)
    assert (fabric.oversubscription, h100.host_memory_bytes) == (2, 10**12)
    assert (a100.nodes, a100.hosts) == (4, ("a1", "a2", "a3", "a4"))
    assert [(level.name, level.span, level.oversubscription) for level in a100.levels] == [
        ("nvlink3", 8, 1),
        ("leaf", 16, 1),
        ("spine", 32, 4),
    ]
    assert [level.bandwidth_bytes_per_s for level in a100.levels] == [300e9, 25e9, 25e9]
    assert (custom.name, custom.gpu, custom.num_gpus) == ("custom", "MyGPU", 2)
    assert cluster.gpus["H100-SXM"].usable_memory_bytes == 78 * 2**30
    assert cluster.gpus["H100-SXM"].sources["usable_memory_bytes"] == "given by the user"
    mine = cluster.gpus["MyGPU"]
    assert (mine.peak_flops["bf16"], mine.peak_flops["fp16"]) == (300e12, 312e12)
    assert mine.memory_bandwidth_bytes_per_s == 1.8e12
    # slowest after oversubscription: H100 6.25, A100 25 / 4 = 6.25 (first wins), custom 25 GB/s
    assert cluster.inter_pool
    assert cluster.inter_pool.bandwidth_bytes_per_s / cluster.inter_pool.oversubscription == 6.25e9
    assert cluster.inter_pool.latency_s == 6e-6


def test_the_full_document_reads_back() -> None:
    cluster = cluster_from_data(parse_yaml(EXAMPLE))
    assert cluster_from_data(cluster.to_json()) == cluster
    assert cluster_from_data(json.loads(json.dumps(cluster.to_json()))).digest() == cluster.digest()


def test_a_minimal_file_equals_shorthand(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("pools:\n  - {gpu: H100-SXM, nodes: 8}\n")
    assert load_cluster(str(path)).pools == load_cluster("8x8xH100-SXM").pools
    path.with_suffix(".json").write_text('{"pools": [{"gpu": "H100-SXM", "nodes": 8}]}')
    assert load_cluster(str(path.with_suffix(".json"))).pools == load_cluster("8x8xH100-SXM").pools


def test_own_gpu_type_in_full() -> None:
    gpu = {
        "vendor": "nvidia",
        "memory": "32 GiB",
        "usable_memory": "31 GiB",
        "memory_bandwidth": "1 TB/s",
        "peak_flops": {"bf16": "100 TFLOPS"},
        "num_sms": 100,
    }
    links = [{"kind": "pcie", "bandwidth": "32 GB/s", "latency": "2 us"}]
    pool = {"gpu": "X1", "nodes": 1, "gpus_per_node": 4, "levels": links}
    cluster = cluster_from_data({"gpus": {"X1": gpu}, "pools": [pool]})
    assert cluster.gpus["X1"].peak_flops == {"bf16": 1e14}
    assert cluster.pools[0].levels[0].span == 4
    assert cluster.pools[0].host_memory_bytes is None
    two = {"gpus": {"X1": gpu}, "pools": [pool, {"gpu": "H100"}]}
    assert fault_list(two) == [("/inter_pool", "is required: pool X1 names no network beyond its nodes")]
    assert cluster_from_data({**two, "inter_pool": {"link": "roce-100"}}).inter_pool


def test_nvlink_domain_beyond_a_node() -> None:
    cluster = cluster_from_data({"pools": [{"gpu": "H200", "nodes": 64, "nvlink_domain": 256}]})
    assert [level.span for level in cluster.pools[0].levels] == [256, 512]
    rack = cluster_from_data({"pools": [{"gpu": "GB200", "nodes": 36, "nvlink_domain": 36}]})
    assert [level.span for level in rack.pools[0].levels] == [36, 144]
    assert fault_list({"pools": [{"gpu": "H200", "nodes": 2, "nvlink_domain": 12}]})[0][0] == "/pools/0/nvlink_domain"


BAD = [
    ({}, ["/pools"]),
    ({"pools": []}, ["/pools"]),
    ({"pools": 3}, ["/pools"]),
    ({"pools": [{}]}, ["/pools/0/gpu"]),
    ({"pools": [{"gpu": "H1000"}]}, ["/pools/0/gpu"]),
    ({"pools": [{"gpu": "H1000"}, {"gpu": "B2000"}]}, ["/pools/0/gpu", "/pools/1/gpu"]),
    ({"pools": [{"gpu": ["H100"]}]}, ["/pools/0/gpu"]),
    ({"pools": [{"gpu": "H100", "nodes": 0}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "nodes": -1}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "nodes": "8"}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "nodes": True}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "nodes": 2.0}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "nodes": 10**30}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "nodes": 200_000}]}, [""]),
    ({"pools": [{"gpu": "H100", "nodes": 2_000_000}]}, ["/pools/0/nodes"]),
    ({"pools": [{"gpu": "H100", "gpus_per_node": 9}]}, ["/pools/0"]),
    ({"pools": [{"gpu": "H100", "gpu_count": 9}]}, ["/pools/0/gpu_count"]),
    ({"pools": [{"gpu": "H100", "name": "a"}, {"gpu": "A100", "name": "a"}]}, ["/pools/1/name"]),
    ({"pools": [{"gpu": "H100", "nodes": 2, "hosts": ["a"]}]}, ["/pools/0"]),
    ({"pools": [{"gpu": "H100", "hosts": ["a", "a"]}]}, ["/pools/0"]),
    ({"pools": [{"gpu": "H100", "nic": "ib-xyz"}]}, ["/pools/0/nic/link"]),
    ({"pools": [{"gpu": "H100", "nic": {"kind": "roce"}}]}, ["/pools/0/nic/bandwidth", "/pools/0/nic/latency"]),
    ({"pools": [{"gpu": "H100", "oversubscription": 0.5}]}, ["/pools/0/oversubscription"]),
    ({"pools": [{"gpu": "H100", "host_memory": float("nan")}]}, ["/pools/0/host_memory"]),
    ({"pools": [{"gpu": "H100", "host_memory": "-5 GB"}]}, ["/pools/0/host_memory"]),
    ({"pools": [{"gpu": "H100", "levels": []}]}, ["/pools/0/levels"]),
    ({"pools": [{"gpu": "H100", "nodes": 8, "levels": [{"link": "nvlink4", "span": 8}]}]}, ["/pools/0"]),
    ({"pools": [{"gpu": "H100", "nic": "ib-ndr", "levels": [{"link": "nvlink4"}]}]}, ["/pools/0/nic"]),
    ({"pools": [{"gpu": "H100"}], "gpus": {"H100": {"usable_memory": "90 GiB"}}}, ["/gpus/H100/usable_memory"]),
    ({"pools": [{"gpu": "H100"}], "gpus": {"H100": {"memory": 0}}}, ["/gpus/H100/memory"]),
    (
        {"pools": [{"gpu": "H100"}], "gpus": {"H100": {"peak_flops": {"bf16": "400 gb/s"}}}},
        ["/gpus/H100/peak_flops/bf16"],
    ),
    ({"pools": [{"gpu": "a/b"}], "gpus": {"a/b": {"base": "nope"}}}, ["/gpus/a~1b/base"]),
    ({"pools": [{"gpu": "X"}], "gpus": {"X": {"base": "H100"}}, "inter_pool": {"link": "roce"}}, ["/inter_pool/link"]),
]


@pytest.mark.parametrize(("data", "pointers"), BAD, ids=[str(bad[0])[:50] for bad in BAD])
def test_each_fault_names_its_field_once(data: dict[str, Any], pointers: list[str]) -> None:
    assert [pointer for pointer, _ in fault_list(data)] == pointers


@pytest.mark.parametrize("value", [None, 5, 1.5, True, [1], ["8xH100"]])
def test_what_is_no_cluster_at_all(value: Any) -> None:
    assert "must be shorthand or an object" in fault_list(value)[0][1]


def test_full_documents_are_checked_as_strictly() -> None:
    document = load_cluster("2x8xH100").to_json()
    document["pools"][0]["nodes"] = True
    document["pools"][0]["levels"][0]["bandwidth_bytes_per_s"] = float("nan")
    assert [pointer for pointer, _ in fault_list(document)] == [
        "/pools/0/nodes",
        "/pools/0/levels/0/bandwidth_bytes_per_s",
    ]


FIELDS = [
    "pools",
    "gpus",
    "gpu",
    "nodes",
    "levels",
    "nic",
    "hosts",
    "span",
    "link",
    "inter_pool",
    "name",
    "base",
    "memory",
]
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["H100", "1 GB"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(JSONS)
@settings(max_examples=300, deadline=None)
def test_no_data_raises_anything_else(value: Any) -> None:
    wrapped = {"pools": [value, {"gpu": "H100"}]} if not isinstance(value, dict) else value
    for data in (value, wrapped, {"pools": [{"gpu": "H100", "levels": [value], "nodes": 1}]}):
        try:
            cluster = cluster_from_data(data)
        except SpecError:
            continue
        assert isinstance(cluster, ClusterSpec)


FILES = [
    ("a.yaml", "pools: [{gpu: H100}", "is not valid YAML"),
    ("a.json", '{"pools": [', "is not valid JSON"),
    ("a.json", '{"pools": NaN}', "NaN"),
    ("a.json", '{"name": "a", "name": "b"}', "'name' twice"),
    ("a.json", "[" * 100_000, "nested deeper"),
    ("a.json", '{"nodes": ' + "9" * 5000 + "}", "is not valid JSON"),
    ("a.yaml", "a: &x [1, 2]\nb: [*x, *x]", "alias at line 2"),
    ("a.yaml", "a: !!python/object/apply:os.system ['true']", "YAML tag"),
    ("a.yaml", "a: !secret x", "YAML tag"),
    ("a.yaml", "a: 1\na: 2", "'a' is given twice"),
    ("a.yaml", "a: 1\n---\na: 2", "one document"),
    ("a.yaml", "[" * 100, "50 levels"),
    ("a.yaml", "- 1\n" * 250_000, "200000 values"),
    ("a.yaml", "nodes: " + "9" * 5000, "is not valid YAML"),
    ("a.yaml", "just words", "holds text"),
    ("a.yaml", "", "must be shorthand or an object"),
    ("a.yaml", "a: \x07", "is not valid YAML"),
    ("a.yaml", b"\xff\xfe\xff", "not UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "fragment"), FILES, ids=[f"{f[0]}-{f[2][:20]}" for f in FILES])
def test_malformed_files(tmp_path: Path, name: str, content: str | bytes, fragment: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecError) as caught:
        load_cluster(str(path))
    (fault,) = caught.value.faults
    assert fragment in fault.message


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    for path, fragment in [
        (tmp_path, "is a directory"),
        (tmp_path / "none.yaml", "does not exist"),
        (big, f"has {MAX_BYTES + 1} bytes"),
        (fifo, "not a regular file"),
        (tmp_path / ("x" * 300 + ".yaml"), "cannot be read"),
    ]:
        with pytest.raises(SpecError, match=fragment):
            load_cluster(str(path))
    with pytest.raises(SpecError, match="cannot be read"):
        read_document("a\0b.yaml")


def test_yaml_and_json_give_the_same_data() -> None:
    text = '{"pools": [{"gpu": "H100", "nodes": 2, "hosts": ["a", "b"]}], "name": "é"}'
    assert parse_yaml(text) == parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (bandwidth_bytes_per_s, "400 Gbit/s", 50e9),
        (bandwidth_bytes_per_s, "400Gbps", 50e9),
        (bandwidth_bytes_per_s, "400 Gb/s", 50e9),
        (bandwidth_bytes_per_s, "450 GB/s", 450e9),
        (bandwidth_bytes_per_s, "1.8 TB/s", 1.8e12),
        (bandwidth_bytes_per_s, "1 GiB/s", 2.0**30),
        (bandwidth_bytes_per_s, 5, 5.0),
        (size_bytes, "80 GB", 80e9),
        (size_bytes, "80 GiB", 80 * 2.0**30),
        (size_bytes, "512B", 512.0),
        (rate_flops, "989 TFLOP/s", 989e12),
        (rate_flops, "2 PFLOPS", 2e15),
        (duration_s, "5 us", 5e-6),
        (duration_s, "5 µs", 5e-6),
        (duration_s, 0, 0.0),
    ],
)
def test_quantities(parse: Any, text: Any, value: float) -> None:
    assert parse(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["400 gb/s", "400", "-1 GB/s", "1e999 GB/s", "", None, True, [1], float("inf")])
def test_what_is_no_bandwidth(text: Any) -> None:
    with pytest.raises(ValueError, match="bandwidth such as"):
        bandwidth_bytes_per_s(text)
