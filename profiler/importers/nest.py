"""NEST: the JSON that its solver reads.

``nodes`` by tensor-parallel degree: the layers of a chain (-1 is the embedding) with milliseconds forward and backward
of a micro-batch and bytes of parameters (16 bits) and activations on a device. ``edges``: bytes between layers.
``bws`` [bytes/s], ``latency_per_level`` [s] and ``devices_per_level`` describe the network, innermost level first.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.specs.cluster import ClusterSpec, NetworkLevel, Pool
from meshwright.specs.hardware_profile import HardwareProfile, LayerPoint, Provenance
from meshwright.specs.imported import Imported

from .clusters import catalog_gpu
from .options import ImportOptions
from .reading import Entry, load

_PARAMETER_BYTES = 2
#: Sequences a step, fixed in NEST; ``mbsInBatch`` is this over the micro-batch and the expert-parallel degree.
GLOBAL_BATCH = 4096
_TOLD = (
    "compute is in milliseconds in the source and in seconds here",
    "output_bytes are those of the edge to the next layer",
    "layer times include tensor and expert communication",
)


def read(path: Path, options: ImportOptions) -> Imported:
    """The file as a profile, and as a cluster where the GPU type and the levels are known."""
    top = load(path)
    chains = {entry.key_count(): entry for _, entry in top["nodes"].fields()}
    if not chains:
        raise top["nodes"].fault("holds no tensor-parallel degree")
    layers = [point for tp, entry in chains.items() for point in _layers(top, tp, entry)]
    profile = HardwareProfile(
        provenance=Provenance(tool="NEST", device=options.gpu, sources=(path.name,), notes=_TOLD),
        layers=tuple(layers),
    )
    cluster, notes = _cluster(top, path, options)
    return Imported(format="nest", profile=profile, cluster=cluster, notes=tuple(notes))


def ordered_ids(nodes: Entry) -> list[tuple[int, Entry]]:
    """The layers of a chain by id; a fault where ids are not -1 or 0 and on, without a gap."""
    found: dict[int, Entry] = {}
    for entry in nodes.items():
        value = entry["id"].any_number()
        if value != int(value) or int(value) in found:
            raise entry["id"].fault("must be a whole number that no other layer has")
        found[int(value)] = entry
    ids = sorted(found)
    if not ids or ids[0] not in (-1, 0) or ids != list(range(ids[0], ids[0] + len(ids))):
        raise nodes.fault("must have layers -1 or 0, 1, 2, ... without a gap")
    return [(index, found[index]) for index in ids]


def sent_bytes(edges: Entry, last: int) -> dict[int, float]:
    """Bytes from each layer to the next; other edges must start at the embedding (an attention mask)."""
    out: dict[int, float] = {}
    for entry in edges.items():
        source, target = entry["sourceId"].any_number(), entry["destId"].any_number()
        size = entry["communicationCost"].number()
        if target == source + 1:
            out[int(source)] = max(size, out.get(int(source), 0.0))
        elif source != -1:
            raise entry.fault(f"leads from layer {source:g} to {target:g}: the layers must be a chain")
    missing = [index for index in range(0, last) if index not in out]
    if missing:
        raise edges.fault(f"has no edge from layer {missing[0]} to the next")
    return out


def _layers(top: Entry, tp: int, nodes: Entry) -> list[LayerPoint]:
    ordered = ordered_ids(nodes)
    out_bytes = sent_bytes(top["edges"][str(tp)], ordered[-1][0])
    ep, cp = top["ep_degree"].count(), top["cp_degree"].count()
    batch = top["mbs"].count() if "mbs" in top else max(1, round(GLOBAL_BATCH / (top["mbsInBatch"].positive() * ep)))
    model = top["model"].text() if "model" in top else "model"
    return [
        LayerPoint(
            model=model,
            kind="embedding" if index == -1 else "decoder",
            index=index + 1,
            tp=tp,
            cp=cp,
            ep=ep,
            micro_batch_size=batch,
            seq_length=top["seq"].count() if "seq" in top else None,
            sequence_parallel=bool(top["sp_enabled"].value),
            forward_s=entry["optimalLatencyFw"].number() / 1e3,
            backward_s=entry["optimalLatencyBw"].number() / 1e3,
            params=entry["parameterSize"].number() / _PARAMETER_BYTES,
            activation_bytes=entry["activationSize"].number(),
            output_bytes=out_bytes.get(index),
        )
        for index, entry in ordered
    ]


def _cluster(top: Entry, path: Path, options: ImportOptions) -> tuple[ClusterSpec | None, list[str]]:
    rates, latencies = top["bws"], top["latency_per_level"]
    if len(rates.items()) != len(latencies.items()):
        raise latencies.fault("must have as many entries as bws")
    if options.gpu is None:
        return None, ["no cluster: the format names no GPU type; give it with --gpu"]
    if "devices_per_level" in top:
        fanouts = [entry.count() for entry in top["devices_per_level"].items()]
    elif options.gpus is not None and len(rates.items()) == 3:
        nodes, inner = options.whole_nodes(8)
        fanouts = [inner, min(nodes, 4), -(-nodes // 4)]
    else:
        return None, ["no cluster: devices_per_level is missing; give the number of GPUs with --gpus"]
    if len(fanouts) != len(rates.items()):
        raise top["devices_per_level"].fault("must have as many entries as bws")
    entry, note = catalog_gpu(options.gpu, "/gpu")
    memory = int(top["maxMemoryPerDevice"].positive())
    gpu = entry.gpu.model_copy(update={"usable_memory_bytes": min(memory, entry.gpu.memory_bytes)})
    levels: list[NetworkLevel] = []
    span = 1
    for index, (fanout, rate, latency) in enumerate(zip(fanouts, rates.items(), latencies.items(), strict=True)):
        span *= fanout
        if levels and span <= levels[-1].span:
            continue
        levels.append(
            NetworkLevel(
                name=f"level {index}",
                kind="nvlink" if index == 0 else "infiniband",
                span=span,
                bandwidth_bytes_per_s=rate.positive(),
                latency_s=latency.number(),
                source=path.name,
            )
        )
    pool = Pool(name=gpu.name, gpu=gpu.name, nodes=span // fanouts[0], gpus_per_node=fanouts[0], levels=tuple(levels))
    notes = ["level 0 is taken as NVLink, the others as InfiniBand", *([note] if note else [])]
    return ClusterSpec(name=path.stem, gpus={gpu.name: gpu}, pools=(pool,), assumptions=tuple(notes)), notes
