"""The hardware catalog against spellings in the wild, independent facts and physics."""

from __future__ import annotations

import pytest

from meshwright.cost_models.collectives import collective_s
from meshwright.specs import catalog
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError

GIB = 2**30

#: Spellings of published runs, failure reports, operator databases and peers' inputs, and what each must resolve to.
SPELLINGS = {
    "A100-SXM-80GB": "A100 A100-80GB A100-SXM-80GB a100_sxm A100-80 a100-80g a100-80gb A100_SXM4_80GB",
    "A100-SXM-40GB": "A100-40GB A100-SXM-40GB A100-40",
    "A100-PCIe-80GB": "A100-80GB-PCIe a100_pcie A100-PCIe",
    "A100-PCIe-40GB": "A100-PCIe-40GB A100-PCIE-40GB",
    "A30": "a30",
    "A10": "A10",
    "A40": "A40",
    "RTX-A6000": "A6000",
    "V100-SXM2-16GB": "V100-16GB V100-16 Tesla-V100-SXM2-16GB",
    "V100-SXM2-32GB": "V100-32GB V100 V100-SXM2-32GB",
    "V100-PCIe-16GB": "V100-PCIe-16GB",
    "T4": "T4 T4-16 tesla-t4",
    "RTX-2080": "RTX-2080 2080",
    "RTX-3080-Ti": "3080Ti-12 RTX-3080Ti",
    "RTX-3090": "RTX-3090 3090-24 3090",
    "RTX-4090": "4090-24 rtx4090",
    "Titan-RTX": "Titan-RTX titan_rtx",
    "L4": "l4",
    "L40S": "l40s",
    "RTX-PRO-6000-Server": "rtx_pro_6000_server",
    "GH200-96GB": "GH200-96GB GH-96 GH200",
    "H100-SXM": "H100 H100-80GB H100-SXM H100-SXM-80GB h100_sxm H100_SXM5 h100-80gb h100-80g",
    "H100-SXM-96GB-HBM2e": "H100-95GB H100-96GB-HBM2e-500W H100-95GB-HBM2e H100-SXM-96GB-HBM2e",
    "H100-PCIe": "h100_pcie H100-PCIe",
    "H100-NVL": "H100-NVL h100nvl",
    "H200-SXM": "H200 H200-141GB h200_sxm",
    "H800-SXM": "H800 h800_sxm",
    "A800-SXM-80GB": "A800",
    "H20-SXM": "h20_sxm",
    "B200": "B200 B200-180GB b200_sxm",
    "B300": "b300_sxm",
    "GB200-NVL72": "GB200 GB200-186GB gb200",
    "GB300-NVL72": "GB300 GB300-279GB gb300",
    "MI250X": "MI250X mi250x",
    "MI300X": "MI300X mi300x",
    "MI325X": "MI325X",
    "MI355X": "MI355X",
}
#: Names as ``nvidia-smi`` and ``torch.cuda.get_device_name`` print them.
DEVICE_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-SXM4-40GB": "A100-SXM-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA H200": "H200-SXM",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
    "AMD Instinct MI300X": "MI300X",
    "NVIDIA GH200 480GB": "GH200-96GB",
}
#: Seen in the same places and unknown on purpose: a family, no GPU of these vendors, or facts that contradict.
UNKNOWN = ("Blackwell", "MI200", "b60", "gb10", "h20e_sxm", "rtx_5090", "TPUv4", "8/node, type not given", "A10B", "")


@pytest.mark.parametrize(
    ("spelling", "name"), [(s, n) for n, text in SPELLINGS.items() for s in text.split()] + list(DEVICE_NAMES.items())
)
def test_spellings_resolve(spelling: str, name: str) -> None:
    assert catalog.gpu(spelling).gpu.name == name
    assert catalog.gpu(f" {spelling.upper()} ").gpu.name == name


@pytest.mark.parametrize("spelling", UNKNOWN)
def test_unknown_names_are_faults_with_alternatives(spelling: str) -> None:
    with pytest.raises(SpecError) as caught:
        catalog.gpu(spelling, "/pools/0/gpu")
    (fault,) = caught.value.faults
    assert fault.pointer == "/pools/0/gpu"
    assert "unknown GPU type" in fault.message
    assert set(fault.alternatives) <= set(catalog.gpu_names())


@pytest.mark.parametrize(
    ("typed", "meant"), [("H1000", "H100-SXM"), ("A100-SXM-80", "A100-SXM-80GB"), ("mi300", "MI300X"), ("GB20", "B200")]
)
def test_near_names_are_offered(typed: str, meant: str) -> None:
    assert meant in catalog.near_gpus(typed)


@pytest.mark.parametrize(
    ("name", "open_ended"), [("A100", True), ("H100", True), ("A100-SXM-80GB", False), ("H200", False), ("V100", True)]
)
def test_names_that_leave_something_open_say_so(name: str, open_ended: bool) -> None:
    entry, note = catalog.resolve_gpu(name)
    assert (note is not None) == open_ended
    if note:
        assert name in note
        assert entry.gpu.name in note


# name, memory GB, bandwidth GB/s, fp16 TFLOP/s dense, fp8, fp32, link GB/s both ways: common datasheet values,
# collected independently of the catalog; MI250X is one of the two dies of a module
DATASHEET = [
    ("V100-SXM2-16GB", 16, 900, 125, None, 15.7, 300),
    ("V100-SXM2-32GB", 32, 900, 125, None, 15.7, 300),
    ("T4", 16, 320, 65, None, 8.1, 32),
    ("A10", 24, 600, 125, None, 31.2, 64),
    ("A40", 48, 696, 149.7, None, 37.4, 64),
    ("A100-SXM-40GB", 40, 1555, 312, None, 19.5, 600),
    ("A100-SXM-80GB", 80, 2039, 312, None, 19.5, 600),
    ("A100-PCIe-80GB", 80, 1935, 312, None, 19.5, 64),
    ("RTX-2080", 8, 448, 40, None, 10.1, 32),
    ("Titan-RTX", 24, 672, 130, None, 16.3, 32),
    ("RTX-3090", 24, 936, 71, None, 35.6, 64),
    ("RTX-4090", 24, 1008, 165, 330, 82.6, 64),
    ("L40S", 48, 864, 362, 733, 91.6, 64),
    ("H100-PCIe", 80, 2039, 756, 1513, 51, 128),
    ("H100-NVL", 94, 3938, 835, 1671, 60, 128),
    ("H100-SXM", 80, 3352, 989, 1979, 67, 900),
    ("H200-SXM", 141, 4800, 989, 1979, 67, 900),
    ("GH200-96GB", 96, 4000, 989, 1979, 67, 900),
    ("B200", 180, 7700, 2250, 4500, None, 1800),
    ("B300", 270, 7700, 2250, 4500, None, 1800),
    ("GB200-NVL72", 186, 8000, 2450, 4900, None, 1800),
    ("GB300-NVL72", 279, 8000, 2450, 4900, None, 1800),
    ("MI250X", 64, 3277 / 2, 383 / 2, None, 95.7 / 2, None),
    ("MI300X", 192, 5300, 1307, 2615, 163, 896),
    ("MI325X", 256, 6000, 1307, 2615, 163, 896),
    ("MI355X", 288, 8000, 2516, 5033, 157, 1075),
]


@pytest.mark.parametrize("row", DATASHEET, ids=lambda row: row[0])
def test_facts_agree_with_datasheets(row: tuple[str, float, float, float, float | None, float | None, float]) -> None:
    name, memory, bandwidth, fp16, fp8, fp32, link = row
    entry = catalog.gpu(name)
    gpu = entry.gpu
    assert gpu.memory_bytes == pytest.approx(memory * GIB, rel=1e-6)
    assert gpu.memory_bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9, rel=5e-3)
    assert gpu.peak_flops["fp16"] == pytest.approx(fp16 * 1e12, rel=1e-2)
    assert gpu.peak_flops.get("fp8") == (None if fp8 is None else pytest.approx(fp8 * 1e12, rel=1e-2))
    if fp32 is not None:
        assert gpu.peak_flops["fp32"] == pytest.approx(fp32 * 1e12, rel=1e-2)
    if link is not None:
        outermost = catalog.links()[entry.node.levels[-1].link.partition("-staged")[0]]
        assert outermost.bandwidth_bytes_per_s == pytest.approx(link * 1e9 / 2, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "measured"), [("T4", 2.45), ("RTX-2080", 5.28), ("Titan-RTX", 5.27), ("RTX-3090", 4.94)]
)
def test_cards_without_peer_access_reduce_at_their_measured_rate(name: str, measured: float) -> None:
    """GB/s of bus bandwidth in a large all-reduce over a node (four of the RTX-3090), as the sources print it."""
    entry = catalog.gpu(name)
    link = catalog.links()[entry.node.levels[-1].link]
    pool = load_cluster(f"{4 if name in ('T4', 'RTX-3090') else 8}x{name}").pools[0]
    volume, number = 256 * 2**20, pool.num_gpus
    seconds = float(collective_s("all_reduce", pool.levels, volume, number, 1))
    assert link.bandwidth_bytes_per_s < 16e9
    assert 2 * (number - 1) / number * volume / seconds / 1e9 == pytest.approx(measured, rel=0.03)


# dense fp16 FLOPs a clock and SM (or CU): tensor units by architecture whitepapers; GeForce halves fp32 accumulation
FLOPS_A_CLOCK = {7.0: 1024, 7.5: 1024, 8.0: 2048, 8.6: 1024, 8.9: 1024, 9.0: 4096, 10.0: 8192, 10.3: 8192}
CU_FLOPS_A_CLOCK = {"MI250X": 1024, "MI300X": 2048, "MI325X": 2048, "MI355X": 4096}
HALF_RATE = ("RTX-2080", "RTX-2080-Ti", "RTX-3080-Ti", "RTX-3090", "RTX-4090")


@pytest.mark.parametrize("entry", catalog.gpus(), ids=lambda entry: entry.gpu.name)
def test_peaks_are_dense(entry: catalog.CatalogEntry) -> None:
    """A sparse peak would need twice a possible clock."""
    gpu = entry.gpu
    per_clock = CU_FLOPS_A_CLOCK.get(gpu.name) or FLOPS_A_CLOCK.get(gpu.compute_capability or 0)
    if per_clock is None or gpu.name == "H20-SXM":  # H20 is capped far below its units' rate
        pytest.skip("no independent rate of the matrix units")
    clock_hz = gpu.peak_flops["fp16"] / gpu.num_sms / (per_clock / (2 if gpu.name in HALF_RATE else 1))
    assert 1.3e9 < clock_hz < 2.6e9


@pytest.mark.parametrize("entry", catalog.gpus(), ids=lambda entry: entry.gpu.name)
def test_entries_are_complete(entry: catalog.CatalogEntry) -> None:
    gpu, links = entry.gpu, catalog.links()
    valued = {
        name for name in type(gpu).model_fields if name not in ("name", "vendor", "sources", "compute_capability")
    }
    if gpu.clock_share == 1.0:
        valued.remove("clock_share")
    assert valued <= set(gpu.sources)
    assert all(len(text) > 10 for text in gpu.sources.values())
    assert 0.9 < gpu.usable_memory_bytes / gpu.memory_bytes < 1
    spans = [level.span for level in entry.node.levels]
    assert spans == sorted(set(spans))
    assert spans[-1] >= entry.node.gpus_per_node
    assert {entry.node.nic, *(level.link for level in entry.node.levels)} <= set(links)
    assert links[entry.node.nic].kind in ("infiniband", "roce", "ethernet")


def test_precisions_follow_the_hardware() -> None:
    by_name = {entry.gpu.name: entry.gpu for entry in catalog.gpus()}
    for name, gpu in by_name.items():
        capability = gpu.compute_capability
        if capability is not None:
            assert gpu.supports("bf16") == (capability >= 8.0), name
            assert gpu.supports("tf32") == (capability >= 8.0), name
            assert gpu.supports("fp8") == (capability >= 8.9), name
            assert gpu.supports("mxfp8") == gpu.supports("nvfp4") == (capability >= 10.0), name
        else:
            assert not gpu.supports("nvfp4"), name
        assert gpu.supports("fp16"), name
        assert gpu.supports("fp32"), name
    assert by_name["MI355X"].supports("mxfp8")
    assert not by_name["MI300X"].supports("mxfp8")
    assert by_name["GB300-NVL72"].peak_flops["nvfp4"] == 14.7e15
    assert by_name["B300"].peak_flops["nvfp4"] == 13.5e15


@pytest.mark.parametrize(
    ("name", "reported_gib"),
    # what torch reports for the device, from public logs
    [
        ("H100-SXM", 79.1),
        ("A100-SXM-40GB", 39.4),
        ("V100-SXM2-32GB", 31.7),
        ("T4", 14.6),
        ("B200", 178.4),
        ("H200", 139.8),
    ],
)
def test_usable_memory_is_what_torch_reports(name: str, reported_gib: float) -> None:
    assert catalog.gpu(name).gpu.usable_memory_bytes == pytest.approx(reported_gib * GIB, rel=5e-3)


def test_network_ports_are_shared_only_when_scarce() -> None:
    t4, h100, v100 = (catalog.gpu(name).node for name in ("T4", "H100-SXM", "V100"))
    assert [t4.ports_per_gpu(n) for n in (1, 2, 4)] == [1, 0.5, 0.25]
    assert [h100.ports_per_gpu(n) for n in (1, 4, 8)] == [1, 1, 1]
    assert [v100.ports_per_gpu(n) for n in (2, 4, 8)] == [1, 1, 0.5]
