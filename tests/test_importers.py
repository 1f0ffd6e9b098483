"""Importers of other planners' files, on small files written here in their formats."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.api.cli import run
from meshwright.profiler.importers import FORMATS, ImportOptions, read
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.hardware_profile import BandwidthCurve, End, HardwareProfile, LayerPoint, Provenance
from meshwright.specs.imported import Imported

MEGABYTE = 2**20


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def layers_of(found: Imported, **fields: Any) -> list[LayerPoint]:
    assert found.profile is not None
    return [p for p in found.profile.layers if all(getattr(p, name) == value for name, value in fields.items())]


def fault(name: str, path: Path, **options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read(name, path, ImportOptions(**options))
    return str(caught.value)


# Sailor


def sailor(folder: Path) -> Path:
    times = {"1": {"1": {"0": [0.001, 0.0, 0.01], "1": [0.002, 0.004, 0.02], "2": [0.003, 0.005, 0.03]}}}
    write(folder / "profiles/OPT/A100-40/profile.json", times | {"2": times["1"]})
    size = {"params_floats": 10, "act_mem_floats": 100, "act_output_floats": 7}
    write(folder / "llm_info.json", {"OPT": {"1": {str(layer): size for layer in range(3)}}})
    curve = [[1.0, 2.0], 5e9]
    ends = {"zone": {gpu: {"4": curve} for gpu in ("A100-40", "V100-16")}}
    write(folder / "multizone_bandwidths_het.json", {"zone": {gpu: {"4": ends} for gpu in ("A100-40", "V100-16")}})
    write(folder / "trace.csv", "Timestamp,A100-40_zone,V100-16_zone\n0,8,4\n")
    return folder


def test_sailor_profile_and_cluster(tmp_path: Path) -> None:
    found = read("sailor", sailor(tmp_path))
    (middle,) = layers_of(found, index=1, micro_batch_size=2)
    assert (middle.kind, middle.gpu, middle.tp) == ("decoder", "A100-40", 1)
    assert (middle.forward_s, middle.backward_s, middle.update_s) == (0.002, 0.004, 0.02)
    assert (middle.params, middle.activation_bytes, middle.output_bytes) == (10, 100 * 4 * 2, 7 * 4 * 2)
    assert [p.kind for p in layers_of(found, micro_batch_size=1)] == ["embedding", "decoder", "head"]
    assert found.profile is not None
    assert len(found.profile.bandwidths) == 4
    cluster = found.cluster
    assert cluster is not None
    assert [(pool.gpu, pool.nodes, pool.gpus_per_node) for pool in cluster.pools] == [
        ("A100-SXM-40GB", 2, 4),
        ("V100-SXM2-16GB", 1, 4),
    ]
    assert cluster.pools[0].levels[1].bandwidth_bytes_per_s == 5e9 / 4
    assert cluster.inter_pool is not None
    assert cluster.inter_pool.bandwidth_bytes_per_s == 5e9 / 4


def test_a_bandwidth_curve_is_a_polynomial_in_the_log_of_megabytes() -> None:
    end = End(gpu="A", zone="z")
    curve = BandwidthCurve(source=end, peer=end, log2_megabytes_to_gigabytes_per_s=(1.0, 2.0, 3.0))
    assert curve.bandwidth_bytes_per_s(8e6) == pytest.approx((9 + 2 * 3 + 3) * 1e9)  # log2(8) = 3
    capped = curve.model_copy(update={"max_bytes_per_s": 4e9})
    assert capped.bandwidth_bytes_per_s(8e6) == 4e9
    with pytest.raises(ValueError, match="not above 0"):
        BandwidthCurve(source=end, peer=end, log2_megabytes_to_gigabytes_per_s=(1.0, 0.0)).bandwidth_bytes_per_s(0.5e6)


def test_sailor_faults_name_file_and_key(tmp_path: Path) -> None:
    sailor(tmp_path)
    profile = tmp_path / "profiles/OPT/A100-40/profile.json"
    write(profile, {"1": {"1": {"0": [0.001, -1, 0.01]}}})
    assert "profiles/OPT/A100-40/profile.json: 1.1.0.1 must be at least 0, is -1" in fault("sailor", tmp_path)
    write(profile, {"1": {"one": {"0": [0.001, 0, 0.01]}}})
    assert "profile.json: 1.one must have a key that is a whole number" in fault("sailor", tmp_path)
    write(profile, "{")
    assert "profiles/OPT/A100-40/profile.json is not valid JSON" in fault("sailor", tmp_path)
    sailor(tmp_path)
    write(tmp_path / "llm_info.json", [])
    assert "llm_info.json must be an object, is a list" in fault("sailor", tmp_path)
    write(tmp_path / "llm_info.json", {"OPT": {"1": 3}})
    assert "llm_info.json: OPT.1 must be an object" in fault("sailor", tmp_path)
    sailor(tmp_path)
    write(tmp_path / "trace.csv", "Timestamp,A100-40_zone\n0,lots\n")
    assert "trace.csv: A100-40_zone must be a whole number, is 'lots'" in fault("sailor", tmp_path)
    write(tmp_path / "trace.csv", "Timestamp,K80_zone\n0,4\n")
    assert "trace.csv: K80_zone: unknown GPU type 'K80'" in fault("sailor", tmp_path)


def test_sailor_takes_the_trace_that_is_named(tmp_path: Path) -> None:
    sailor(tmp_path)
    other = write(tmp_path / "other.csv", "Timestamp,A100-40_zone\n0,2\n")
    cluster = read("sailor", other).cluster
    assert cluster is not None
    assert cluster.num_gpus == 2


# Galvatron


def galvatron(folder: Path) -> Path:
    write(
        folder / "computation_profiling_bf16_llama_all.json",
        {"layernum[2]_bsz2_seq2048": 20.0, "layertype_0_bsz2_seq2048": 4.0, "layertype_other_bsz2_seq2048": 3.0},
    )
    write(
        folder / "memory_profiling_bf16_llama_all.json",
        {
            "1_1_8_sp": {"layernum[1]_bsz8_seq2048_rank0_ms": 904.0},
            "layertype_0_sp": {
                "2048": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 5.0, "2": 3.0, "checkpoint": 1.0}}
            },
            "other_memory_pp_off_sp": {"2048": {"model_states": {"1": 40.0}, "activation": {"1": 9.0}}},
        },
    )
    write(
        folder / "allreduce_bandwidth_2nodes_8gpus_per_node.json",
        {"allreduce_size_8_consec_1": 160.0, "allreduce_size_2_consec_0": 8.0, "allreduce_size_16_consec_1": 44.0},
    )
    write(folder / "p2p_bandwidth_2nodes_8gpus_per_node.json", {"pp_size_2": 16.0})
    write(folder / "sp_time_2nodes_8gpus_per_node.json", {"all2all_size_8_4MB_time": 0.25})
    write(folder / "overlap_coefficient.json", {"overlap_coe": 1.125})
    return folder


def test_galvatron_times_memory_and_wires(tmp_path: Path) -> None:
    found = read("galvatron", galvatron(tmp_path))
    (timed,) = [p for p in layers_of(found, kind="decoder") if p.forward_s]
    assert timed.forward_s == pytest.approx(2 * 4.0e-3)  # milliseconds a sample, two samples
    assert (timed.model, timed.precision, timed.seq_length) == ("llama", "bf16", 2048)
    (halved,) = layers_of(found, kind="decoder", tp=2)
    assert halved.params == 8 * MEGABYTE / 4 / 2
    assert halved.activation_bytes == 3 * MEGABYTE
    (redone,) = layers_of(found, recompute=True)
    assert redone.activation_bytes == MEGABYTE
    (rest,) = [p for p in layers_of(found, kind="rest") if p.static_bytes]
    assert (rest.position, rest.static_bytes, rest.activation_bytes) == ("only", 40 * MEGABYTE, 9 * MEGABYTE)
    assert found.profile is not None
    wires = {(p.op, p.ranks, p.placement): p for p in found.profile.collectives}
    ring = wires["all_reduce", 8, "consecutive"]
    assert ring.seconds == pytest.approx(2 * 7 / 8 * 32 / 160 / 1e3)  # 32 MB at 160 MB/ms of the bus
    send = wires["send", 2, None]
    assert send.bytes / send.seconds == pytest.approx(16 * MEGABYTE * 1e3)
    assert wires["all_to_all", 8, None].seconds == pytest.approx(0.25e-3)
    assert found.profile.overlaps[0].compute_slowdown == 1.125
    assert found.cluster is None
    assert "--gpu" in found.notes[0]


def test_older_galvatron_files_name_neither_batch_nor_length(tmp_path: Path) -> None:
    write(tmp_path / "computation_profiling_fp32_bert.json", {"layertype_0": 4.0, "layertype_other": 2.0})
    sizes = {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 5.0}}
    write(tmp_path / "memory_profiling_fp32_bert.json", {"layertype_0": sizes})
    timed, other, held = layers_of(read("galvatron", tmp_path))
    assert (timed.forward_s, timed.micro_batch_size, timed.seq_length) == (0.004, 1, None)
    assert other.kind == "rest"
    assert (held.params, held.seq_length, held.sequence_parallel) == (2 * MEGABYTE, None, False)


def test_sailor_models_without_sizes_keep_their_times(tmp_path: Path) -> None:
    sailor(tmp_path)
    write(tmp_path / "llm_info.json", {"GPT": {}})
    found = read("sailor", tmp_path)
    assert {p.params for p in layers_of(found)} == {None}
    assert found.notes[0] == "llm_info.json has no sizes for some layers of OPT"


def test_galvatron_cluster_of_a_named_gpu(tmp_path: Path) -> None:
    cluster = read("galvatron", galvatron(tmp_path), ImportOptions(gpu="A100-80GB", gpus=16)).cluster
    assert cluster is not None
    node, network = cluster.pools[0].levels
    assert (node.span, network.span) == (8, 16)
    assert node.bandwidth_bytes_per_s == pytest.approx(160 * MEGABYTE * 1e3)
    assert network.bandwidth_bytes_per_s == pytest.approx(8 * MEGABYTE * 1e3)
    assert "gpus: there are no bandwidths for 64 GPUs" in fault("galvatron", tmp_path, gpu="A100-80GB", gpus=64)
    assert fault("galvatron", tmp_path, gpu="K80").startswith("gpu: unknown GPU type")


def test_galvatron_faults_name_file_and_key(tmp_path: Path) -> None:
    galvatron(tmp_path)
    write(tmp_path / "p2p_bandwidth_2nodes_8gpus_per_node.json", {"pp_size_two": 16.0})
    assert "p2p_bandwidth_2nodes_8gpus_per_node.json: pp_size_two is not a known key" in fault("galvatron", tmp_path)
    write(tmp_path / "p2p_bandwidth_2nodes_8gpus_per_node.json", {"pp_size_2": 0})
    assert "pp_size_2 must be above 0, is 0" in fault("galvatron", tmp_path)
    galvatron(tmp_path)
    write(tmp_path / "memory_profiling_bf16_llama_all.json", {"layertype_0": {"2048": {}}})
    assert "layertype_0.2048.parameter_size is missing" in fault("galvatron", tmp_path)


# NEST


def nest(**changes: Any) -> dict[str, Any]:
    layer = {"parameterSize": 100, "activationSize": 400, "optimalLatencyFw": 4.0, "optimalLatencyBw": 8.0}
    chain = [layer | {"id": index} for index in (1, -1, 0)]
    edges = [{"sourceId": index, "destId": index + 1, "communicationCost": 64} for index in (-1, 0)]
    plain = {
        "ep_degree": 1,
        "sp_enabled": False,
        "cp_degree": 1,
        "maxMemoryPerDevice": 2_000_000_000,
        "bws": [9e11, 1e11, 4e11],
        "latency_per_level": [1e-4, 2e-4, 3e-4],
        "devices_per_level": [2, 2, 2],
        "mbsInBatch": 2048.0,
        "nodes": {"2": chain},
        "edges": {"2": edges},
    }
    return plain | changes


def test_nest_layers_are_sorted_and_in_seconds(tmp_path: Path) -> None:
    found = read("nest", write(tmp_path / "in.json", nest()))
    assert [p.index for p in layers_of(found)] == [0, 1, 2]
    first, second, last = layers_of(found)
    assert (first.kind, second.kind) == ("embedding", "decoder")
    assert (second.forward_s, second.backward_s) == (0.004, 0.008)
    assert (second.params, second.output_bytes, last.output_bytes) == (50, 64, None)
    assert (second.tp, second.micro_batch_size) == (2, 2)  # 4096 / 2048


def test_nest_cluster_has_the_levels_of_the_file(tmp_path: Path) -> None:
    cluster = read("nest", write(tmp_path / "in.json", nest()), ImportOptions(gpu="H100")).cluster
    assert cluster is not None
    assert [(level.span, level.bandwidth_bytes_per_s) for level in cluster.pools[0].levels] == [
        (2, 9e11),
        (4, 1e11),
        (8, 4e11),
    ]
    assert cluster.gpus["H100-SXM"].usable_memory_bytes == 2_000_000_000
    bare = nest()
    del bare["devices_per_level"]
    path = write(tmp_path / "bare.json", bare)
    assert read("nest", path, ImportOptions(gpu="H100")).cluster is None
    grown = read("nest", path, ImportOptions(gpu="H100", gpus=64)).cluster
    assert grown is not None
    assert [level.span for level in grown.pools[0].levels] == [8, 32, 64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": {}}, "nodes holds no tensor-parallel degree"),
        ({"nodes": {"2": nest()["nodes"]["2"][:1]}}, "nodes.2 must have layers -1 or 0, 1, 2"),
        ({"edges": {"2": []}}, "edges.2 has no edge from layer 0 to the next"),
        (
            {"edges": {"2": [{"sourceId": 0, "destId": 2, "communicationCost": 1}]}},
            "edges.2.0 leads from layer 0 to 2: the layers must be a chain",
        ),
        ({"bws": [1.0]}, "latency_per_level must have as many entries as bws"),
    ],
)
def test_nest_faults_name_file_and_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "in.json", nest(**changes))
    assert f"in.json: {message}" in fault("nest", path)


# Metis, AMP, FlashFlex


def metis(folder: Path) -> Path:
    model = {"model_name": "gpt", "parameters": {"parameters_per_layer_bytes": [50, 100, 60]}}
    time = {"optimizer_time_ms": 30.0, "layer_compute_total_ms": [1.0, 6.0, 2.0]}
    memory = {"layer_memory_total_mb": [10.0, 20.0, 30.0]}
    write(
        folder / "profiles/DeviceType.A100_tp2_bs4.json",
        {"model": model, "execution_time": time, "execution_memory": memory},
    )
    write(folder / "hostfile", "10.0.0.1 slots=8\n10.0.0.2 slots=8\n10.0.0.3 slots=4\n")
    fast = {"instance_type": "A100", "inter_bandwidth": 10, "intra_bandwidth": 46, "memory": 80}
    slow = {"instance_type": "T4", "inter_bandwidth": 5, "intra_bandwidth": 20, "memory": 16}
    write(folder / "clusterfile.json", {"10.0.0.1": fast, "10.0.0.2": fast, "10.0.0.3": slow})
    return folder


def test_metis_profile_and_cluster(tmp_path: Path) -> None:
    found = read("metis", metis(tmp_path))
    (middle,) = layers_of(found, index=1)
    assert (middle.model, middle.gpu, middle.tp, middle.micro_batch_size) == ("gpt", "A100", 2, 4)
    assert (middle.forward_backward_s, middle.forward_s) == (0.006, None)
    assert middle.update_s == pytest.approx(0.01)
    assert (middle.params, middle.peak_bytes) == (50, 20 * MEGABYTE)
    cluster = found.cluster
    assert cluster is not None
    assert [(pool.nodes, pool.gpus_per_node, pool.hosts) for pool in cluster.pools] == [
        (2, 8, ("10.0.0.1", "10.0.0.2")),
        (1, 4, ("10.0.0.3",)),
    ]
    assert [level.bandwidth_bytes_per_s for level in cluster.pools[0].levels] == [46e9, 10e9 / 8]
    node = {"instance_type": "V100", "inter_bandwidth": 312500000, "intra_bandwidth": 5312500000, "memory": 16}
    write(tmp_path / "hostfile", "a slots=4\nb slots=4\n")
    write(tmp_path / "clusterfile.json", {"a": node, "b": node})  # bytes a second
    other = read("metis", tmp_path).cluster
    assert other is not None
    assert [level.bandwidth_bytes_per_s for level in other.pools[0].levels] == [5312500000, 312500000 / 4]


def test_metis_faults_name_file_and_key(tmp_path: Path) -> None:
    metis(tmp_path)
    write(tmp_path / "hostfile", "10.0.0.1 8\n")
    assert "hostfile line 1 must be like 10.0.0.1 slots=4" in fault("metis", tmp_path)
    write(tmp_path / "hostfile", "10.0.0.9 slots=8\n")
    assert "clusterfile.json: 10.0.0.9 is missing" in fault("metis", tmp_path)
    metis(tmp_path)
    write(tmp_path / "profiles/DeviceType.A100_tp2_bs4.json", {"layer_compute_total_ms": [1, 2]})
    assert "layer_compute_total_ms must have at least 3 entries, has 2" in fault("metis", tmp_path)


def test_amp_rows_are_layers(tmp_path: Path) -> None:
    np.save(tmp_path / "gpt2_P3_2.npy", np.array([0.001, 0.005, 0.002]))
    found = read("amp", tmp_path)
    assert [(p.kind, p.gpu, p.tp, p.forward_s) for p in layers_of(found)] == [
        ("embedding", "V100-16", 2, 0.001),
        ("decoder", "V100-16", 2, 0.005),
        ("head", "V100-16", 2, 0.002),
    ]
    np.save(tmp_path / "gpt2_G4_1.npy", np.array([1.0, 5.0, 2.0]))  # milliseconds
    assert [p.forward_s for p in layers_of(read("amp", tmp_path), gpu="T4")] == [0.001, 0.005, 0.002]
    np.save(tmp_path / "gpt2_P3_4.npy", np.array([0.001, np.nan]))
    assert "gpt2_P3_4.npy: 1 must be a time" in fault("amp", tmp_path)
    np.save(tmp_path / "gpt2_P3_4.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "gpt2_P3_4.npy is no NumPy array file" in fault("amp", tmp_path)


def test_flashflex_machines_are_pools(tmp_path: Path) -> None:
    data = {"machine_specs": {"A100-40": [312, 40, 300]}, "machine_amounts": {"A100-40": {"4": 2, "8": 1}}}
    path = write(tmp_path / "machine_amounts.json", data)
    found = read("flashflex", path)
    assert read("flashflex", tmp_path) == found
    cluster = found.cluster
    assert cluster is not None
    assert [(pool.nodes, pool.gpus_per_node) for pool in cluster.pools] == [(2, 4), (1, 8)]
    assert cluster.pools[0].levels[0].bandwidth_bytes_per_s == 300e9
    write(path, data | {"machine_amounts": {"H100": {"4": 2}}})
    assert "machine_amounts.json: machine_specs.H100 is missing" in fault("flashflex", path)


# All of them


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_wrong_paths_are_faults(tmp_path: Path, name: str) -> None:
    assert "does not exist" in fault(name, tmp_path / "none")
    if name not in ("nest", "flashflex"):
        assert "none of the expected files" in fault(name, tmp_path)
    else:
        write(tmp_path / "machine_amounts.json", [])
        path = tmp_path / "machine_amounts.json"
        assert "must be an object, is a list" in fault(name, path)


def test_import_writes_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert run(["import", "sailor", str(sailor(tmp_path / "in")), "-o", str(out)]) == 0
    told = capsys.readouterr().err
    assert "profile of Sailor: 6 layers, 4 bandwidths" in told
    assert "cluster of 12 GPUs" in told
    found = Imported.parse(json.loads(out.read_text(encoding="utf-8")))
    assert found == read("sailor", tmp_path / "in")
    assert load_cluster(str(out)) == found.cluster


def test_import_tells_faults_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "vhs", str(tmp_path), "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["pointer"] == "/format"
    assert error["alternatives"] == sorted(FORMATS)
    assert run(["import", "nest", str(tmp_path), "--gpus", "some", "--json"]) == 2
    assert "/gpus" in capsys.readouterr().out
    assert run(["import", "--json"]) == 2
    assert {e["pointer"] for e in json.loads(capsys.readouterr().out)["errors"]} == {"/format", "/path"}


def test_a_file_with_a_profile_alone_is_no_cluster(tmp_path: Path) -> None:
    found = read("nest", write(tmp_path / "in.json", nest()))
    path = write(tmp_path / "profile.json", found.to_json())
    with pytest.raises(SpecError, match="holds an imported profile and no cluster"):
        load_cluster(str(path))


def test_a_profile_without_points_is_refused() -> None:
    with pytest.raises(SpecError, match="holds no point"):
        HardwareProfile.parse({"provenance": {"tool": "x"}})
    assert HardwareProfile(provenance=Provenance(tool="x"), layers=(LayerPoint(model="m"),)).counts["layers"] == 1


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in leaves(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    out = dict(value) if isinstance(value, dict) else list(value)
    out[path[0]] = replaced(value[path[0]], path[1:], by)
    return out


def nest_folder(folder: Path) -> Path:
    return write(folder / "in.json", nest())


def flashflex(folder: Path) -> Path:
    data = {"machine_specs": {"A100-40": [312, 40, 300]}, "machine_amounts": {"A100-40": {"4": 2, "8": 1}}}
    return write(folder / "machine_amounts.json", data)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("sailor", sailor), ("galvatron", galvatron), ("nest", nest_folder), ("metis", metis), ("flashflex", flashflex)],
)
def test_a_wrong_value_anywhere_is_a_fault_or_harmless(tmp_path: Path, name: str, folder: Any) -> None:
    """Every value of every file is replaced in turn: the import works or raises SpecError, never anything else."""
    path = folder(tmp_path)
    options = ImportOptions(gpu="H100", gpus=16)
    for file in sorted(tmp_path.glob("**/*.json")):
        good = json.loads(file.read_text(encoding="utf-8"))
        for place in leaves(good):
            for wrong in (None, -1, 1e30, 10**400, [1]):
                write(file, replaced(good, place, wrong))
                with suppress(SpecError):
                    read(name, path, options)
        write(file, good)
    assert read(name, path, options).format == name
