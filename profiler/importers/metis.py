"""Metis: ``DeviceType.GPU_tpT_bsB.json`` profiles, ``hostfile`` and ``clusterfile.json``.

Profile: ``layer_compute_total_ms`` (forward and backward together) and ``layer_memory_total_mb`` (2^20) by layer, the
embedding first and the head last, ``optimizer_time_ms`` of all layers, ``parameters_per_layer_bytes``. These keys may
stand at any depth. Cluster: ``IP slots=4`` lines, and by IP the instance type, GB/s between and inside nodes, memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.specs.cluster import ClusterSpec, NetworkLevel
from meshwright.specs.hardware_profile import HardwareProfile, LayerPoint, Provenance
from meshwright.specs.imported import Imported

from .clusters import PoolForm, catalog_gpu, cluster_of, level
from .options import ImportOptions
from .reading import Entry, lines, load, nothing_found, require_folder

MEGABYTE = 2**20
#: Bandwidths from here on cannot be GB/s.
BYTES_FROM = 1e6
_FILE = re.compile(r"DeviceType\.(.+)_tp(\d{1,5})_bs(\d{1,6})\.json")
_HOST = re.compile(r"(\S+)\s+slots=(\d{1,4})")
_TOLD = (
    "forward_backward_s is the sum of both passes; the optimizer's time is shared evenly by the layers",
    "params are the source's parameters_per_layer_bytes over tp: shipped files hold counts under that key",
)
_EXPECTED = "DeviceType.GPU_tp1_bs1.json, hostfile, clusterfile.json"


def read(path: Path, options: ImportOptions) -> Imported:
    """The folder as a profile where it has profiles, and as a cluster where it has a host file."""
    require_folder(path, f"a folder with {_EXPECTED}")
    layers: list[LayerPoint] = []
    used = []
    for file in sorted(path.glob("**/DeviceType.*.json")):
        match = _FILE.fullmatch(file.name)
        if match and int(match[2]) and int(match[3]):
            layers += _layers(load(file, path), match[1], int(match[2]), int(match[3]))
            used.append(str(file.relative_to(path)))
    profile = None
    if layers:
        provenance = Provenance(tool="Metis", sources=tuple(used), notes=_TOLD)
        profile = HardwareProfile(provenance=provenance, layers=tuple(layers))
    hosts, about = path / "hostfile", path / "clusterfile.json"
    cluster, notes = None, ["no cluster: hostfile and clusterfile.json are not both there"]
    if hosts.is_file() and about.is_file():
        cluster, notes = _cluster(hosts, load(about, path), path)
    if profile is None and cluster is None:
        raise nothing_found(path, _EXPECTED)
    return Imported(format="metis", profile=profile, cluster=cluster, notes=tuple(notes))


def _find(entry: Entry, key: str) -> Entry | None:
    """The first value under ``key`` at any depth."""
    if key in entry:
        return entry[key]
    if isinstance(entry.value, dict):
        for _, inner in entry.fields():
            found = _find(inner, key)
            if found is not None:
                return found
    return None


def _require(entry: Entry, key: str) -> Entry:
    found = _find(entry, key)
    if found is None:
        raise entry.fault(f"has no {key}")
    return found


def _layers(top: Entry, gpu: str, tp: int, batch: int) -> list[LayerPoint]:
    times = _require(top, "layer_compute_total_ms").numbers(3)
    memory_of = _require(top, "layer_memory_total_mb")
    memory = memory_of.numbers()
    update_s = _require(top, "optimizer_time_ms").number() / 1e3 / len(times)
    params_of = _find(top, "parameters_per_layer_bytes")
    params = params_of.numbers() if params_of else [None] * len(times)
    if len(memory) != len(times):
        raise memory_of.fault(f"must have {len(times)} entries like layer_compute_total_ms, has {len(memory)}")
    if params_of and len(params) != len(times):
        raise params_of.fault(f"must have {len(times)} entries like layer_compute_total_ms, has {len(params)}")
    name = _find(top, "model_name")
    return [
        LayerPoint(
            model=name.text() if name and name.value is not None else "model",
            kind="embedding" if index == 0 else "head" if index == len(times) - 1 else "decoder",
            index=index,
            gpu=gpu,
            tp=tp,
            micro_batch_size=batch,
            forward_backward_s=times[index] / 1e3,
            update_s=update_s,
            params=None if params[index] is None else params[index] / tp,  # type: ignore[operator]
            peak_bytes=memory[index] * MEGABYTE,
        )
        for index in range(len(times))
    ]


def _rate(entry: Entry) -> float:
    """Bytes/s: the code counts gigabytes, the examples in its README bytes."""
    value = entry.positive()
    return value if value >= BYTES_FROM else value * 1e9


def _cluster(hosts: Path, about: Entry, root: Path) -> tuple[ClusterSpec, list[str]]:
    """Hosts of one type, size and rates are a pool."""
    kinds: dict[tuple[str, int, float, float], list[str]] = {}
    for number, line in enumerate(lines(hosts, root), 1):
        match = _HOST.fullmatch(line)
        if match is None or not int(match[2]):
            raise Entry(None, f"{hosts.name} line {number}").fault("must be like 10.0.0.1 slots=4")
        entry = about[match[1]]
        key = (
            entry["instance_type"].text(),
            int(match[2]),
            _rate(entry["intra_bandwidth"]),
            _rate(entry["inter_bandwidth"]),
        )
        kinds.setdefault(key, []).append(match[1])
    if not kinds:
        raise Entry(None, hosts.name).fault("names no host")
    notes: list[str] = [
        f"bandwidths are taken as GB/s (1e9), from {BYTES_FROM:g} on as bytes/s; a node's is shared by its GPUs"
    ]
    forms = []
    for index, ((gpu, slots, intra, inter), names) in enumerate(kinds.items()):
        found, note = catalog_gpu(gpu, f"{about.file}: {names[0]}.instance_type")
        notes += [note] if note else []
        forms.append(
            PoolForm(
                name=f"{gpu}-{index}",
                gpu=found,
                nodes=len(names),
                gpus_per_node=slots,
                intra_bytes_per_s=intra,
                inter_bytes_per_s=inter / slots,
                hosts=tuple(names),
                source="clusterfile.json",
            )
        )
    between: NetworkLevel | None = None
    if len(forms) > 1:
        rate = min(form.inter_bytes_per_s for form in forms)
        span = sum(form.nodes * form.gpus_per_node for form in forms)
        between = level("between pools", "ethernet", span, rate, "slowest inter_bandwidth of clusterfile.json")
    return cluster_of("metis", forms, between, notes), notes
