"""Galvatron: a folder of its profiler's JSON files.

``computation_profiling_{precision}_{model}_{tag}.json``: forward milliseconds a sample of a layer (``layertype_0_...``)
and of all the rest (``layertype_other_...``). ``memory_profiling_...``: megabytes (2^20) of a layer and of the rest by
tensor-parallel degree, with the suffix ``_sp`` where sequence parallelism was on. ``{allreduce,p2p}_bandwidth_{N}nodes_
{G}gpus_per_node.json``: megabytes a millisecond, of the bus for all-reduces. ``sp_time_...``: milliseconds by size.
``overlap_coefficient.json``: how much slower compute and all-reduce run together.
"""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.specs.cluster import ClusterSpec, Precision
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.hardware_profile import (
    CollectiveOp,
    CollectivePoint,
    HardwareProfile,
    LayerPoint,
    OverlapPoint,
    Provenance,
)
from meshwright.specs.imported import Imported

from .clusters import PoolForm, catalog_gpu, cluster_of
from .options import ImportOptions
from .reading import Entry, load, nothing_found, require_folder

MEGABYTE = 2**20
#: The one message that its profiler measures bandwidths with.
MESSAGE_BYTES = 32 * MEGABYTE
_PARAMETER_BYTES = 4
_PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_MODEL_FILE = re.compile(r"(computation|memory)_profiling_([a-z0-9]+)_(.+)\.json")
_WIRE_FILE = re.compile(r"(allreduce_bandwidth|p2p_bandwidth|sp_time)_(\d{1,6})nodes_(\d{1,4})gpus_per_node\.json")
_TIME = re.compile(r"layertype_(\d{1,4}|other)(?:_bsz(\d{1,6}))?(?:_seq(\d{1,8}))?")
_TYPE = re.compile(r"layertype_(\d{1,4})(_sp)?")
_REST = re.compile(r"other_memory_pp_(off|on_first|on_last)(_sp)?")
_POSITION = {"off": "only", "on_first": "first", "on_last": "last"}
_TOLD = (
    "times are of the forward pass alone and of one GPU",
    "bandwidths stand for one message of 32 MiB; of a send that of a chain in which all stages send at once",
    "static_bytes of the rest are 16 bytes a parameter",
    "collectives without a placement are of neighbouring ranks, at a size of their own",
)
_EXPECTED = "computation_profiling_*.json, memory_profiling_*.json, allreduce_bandwidth_*.json"


def read(path: Path, options: ImportOptions) -> Imported:
    """The folder as a profile, and as a cluster where ``options`` name the GPU type."""
    require_folder(path, f"a folder with {_EXPECTED}")
    layers: list[LayerPoint] = []
    wires: list[CollectivePoint] = []
    overlaps: list[OverlapPoint] = []
    used: list[str] = []
    for file in sorted(path.glob("*.json")):
        model, wire = _MODEL_FILE.fullmatch(file.name), _WIRE_FILE.fullmatch(file.name)
        if model:
            entry = load(file, path)
            about = (_model(model[3]), _PRECISIONS.get(model[2]))
            layers += _times(entry, *about) if model[1] == "computation" else _memory(entry, *about)
        elif wire:
            nodes, gpus = int(wire[2]), int(wire[3])
            wires += _wires(load(file, path), wire[1], nodes, gpus)
        elif file.name == "overlap_coefficient.json":
            slowdown = max(1.0, load(file, path)["overlap_coe"].positive())
            overlaps.append(OverlapPoint(op="all_reduce", compute_slowdown=slowdown, communication_slowdown=slowdown))
        else:
            continue
        used.append(file.name)
    if not used:
        raise nothing_found(path, _EXPECTED)
    device = catalog_gpu(options.gpu, "/gpu")[0].gpu.name if options.gpu else None
    profile = HardwareProfile(
        provenance=Provenance(tool="Galvatron", device=device, sources=tuple(used), notes=_TOLD),
        layers=tuple(layers),
        collectives=tuple(wires),
        overlaps=tuple(overlaps),
    )
    cluster, notes = _cluster(wires, options)
    return Imported(format="galvatron", profile=profile, cluster=cluster, notes=tuple(notes))


def _model(text: str) -> str:
    return text.removesuffix("_all")


def _named(model: str, kind: str) -> str:
    """The model of a layer type; the first one has the model's own name."""
    return model if kind in ("0", "other") else f"{model}/layertype_{kind}"


def _times(entry: Entry, model: str, precision: Precision | None) -> list[LayerPoint]:
    out = []
    for key, value in entry.fields():
        match = _TIME.fullmatch(key)
        if match is None:
            if not key.startswith("layernum"):  # raw totals that the layer times were made from
                raise value.fault("is not a known key; expected layertype_0_bsz1_seq2048")
            continue
        batch, kind = int(match[2] or 1), match[1]
        if not batch:
            raise value.fault("must have a batch of at least 1")
        out.append(
            LayerPoint(
                model=_named(model, kind),
                kind="rest" if kind == "other" else "decoder",
                position="only" if kind == "other" else None,
                micro_batch_size=batch,
                seq_length=int(match[3] or 0) or None,
                precision=precision,
                forward_s=value.positive() * batch / 1e3,
            )
        )
    return out


def _memory(entry: Entry, model: str, precision: Precision | None) -> list[LayerPoint]:
    out = []
    for key, by_length in entry.fields():
        layer, rest = _TYPE.fullmatch(key), _REST.fullmatch(key)
        if layer is None and rest is None:
            continue  # raw totals that the other entries were made from
        whole = "parameter_size" in by_length or "model_states" in by_length  # older files name no length
        for value in [by_length] if whole else [value for _, value in by_length.fields()]:
            seq = None if whole else value.key_count()
            if layer is not None:
                of = _named(model, layer[1])
                out += _layer_memory(value, of, precision, seq, layer[2] is not None)
            elif rest is not None:
                out += _rest_memory(value, model, precision, seq, rest[2] is not None, _POSITION[rest[1]])
    return out


def _layer_memory(entry: Entry, model: str, precision: Precision | None, seq: int | None, sp: bool) -> list[LayerPoint]:
    params = entry["parameter_size"].positive() * MEGABYTE / _PARAMETER_BYTES
    out = []
    for key, value in entry["tp_activation_per_bsz_dict"].fields():
        tp = 1 if key == "checkpoint" else value.key_count()
        out.append(
            LayerPoint(
                model=model,
                tp=tp,
                seq_length=seq,
                precision=precision,
                sequence_parallel=sp,
                recompute=key == "checkpoint",
                params=params / tp,
                activation_bytes=value.number() * MEGABYTE,
            )
        )
    return out


def _rest_memory(
    entry: Entry, model: str, precision: Precision | None, seq: int | None, sp: bool, position: str
) -> list[LayerPoint]:
    out = []
    for key, value in entry["model_states"].fields():
        activation = entry["activation"][key]
        out.append(
            LayerPoint.model_validate(
                {
                    "model": model,
                    "kind": "rest",
                    "position": position,
                    "tp": value.key_count(),
                    "seq_length": seq,
                    "precision": precision,
                    "sequence_parallel": sp,
                    "static_bytes": value.number() * MEGABYTE,
                    "activation_bytes": activation.number() * MEGABYTE,
                }
            )
        )
    return out


_RING = re.compile(r"allreduce_size_(\d{1,6})_consec_([01])")
_CHAIN = re.compile(r"pp_size_(\d{1,6})")
_SIZED = re.compile(r"(allreduce|all2all)_size_(\d{1,6})_(\d{1,7})MB_time")


def _wires(entry: Entry, kind: str, nodes: int, gpus: int) -> list[CollectivePoint]:
    out = []
    pattern = {"allreduce_bandwidth": _RING, "p2p_bandwidth": _CHAIN, "sp_time": _SIZED}[kind]
    for key, value in entry.fields():
        match = pattern.fullmatch(key)
        if match is None:
            raise value.fault(f"is not a known key of {kind}")
        op: CollectiveOp = "all_reduce"
        size, placement = float(MESSAGE_BYTES), None
        if kind == "allreduce_bandwidth":
            ranks, placement = int(match[1]), "consecutive" if match[2] == "1" else "strided"
            seconds = 2 * (ranks - 1) / ranks * (size / MEGABYTE) / value.positive() / 1e3 if ranks > 1 else 0.0
        elif kind == "p2p_bandwidth":
            op, ranks = "send", int(match[1])
            seconds = (size / MEGABYTE) / value.positive() / 1e3
        else:
            op = "all_reduce" if match[1] == "allreduce" else "all_to_all"
            ranks, size = int(match[2]), float(match[3]) * MEGABYTE
            seconds = value.positive() / 1e3
        if ranks < 2 or not size:
            raise value.fault("needs at least 2 ranks and a size above 0")
        out.append(
            CollectivePoint.model_validate(
                {
                    "op": op,
                    "ranks": ranks,
                    "bytes": size,
                    "seconds": seconds,
                    "placement": placement,
                    "nodes": nodes,
                    "gpus_per_node": gpus,
                }
            )
        )
    return out


def _cluster(wires: list[CollectivePoint], options: ImportOptions) -> tuple[ClusterSpec | None, list[str]]:
    rings = [point for point in wires if point.op == "all_reduce" and point.placement]
    sizes = sorted({(point.nodes or 1, point.gpus_per_node or 1) for point in rings})
    if options.gpu is None or not sizes:
        return None, ["no cluster: the format names no GPU type; give it with --gpu"]
    wanted = [(n, g) for n, g in sizes if options.gpus is None or n * g == options.gpus]
    if not wanted:
        near = tuple(str(n * g) for n, g in sizes)
        raise SpecError(Fault("/gpus", f"there are no bandwidths for {options.gpus} GPUs", near))
    nodes, gpus = wanted[-1]
    rate: dict[tuple[str, int], float] = {}
    for point in rings:
        if (point.nodes, point.gpus_per_node) == (nodes, gpus):
            bus = 2 * (point.ranks - 1) / point.ranks * point.bytes / point.seconds
            rate.setdefault((point.placement or "", point.ranks), bus)
    entry, note = catalog_gpu(options.gpu, "/gpu")
    inner = rate.get(("consecutive", gpus))
    outer = rate.get(("strided", nodes), rate.get(("consecutive", nodes * gpus)))
    if nodes > 1 and outer is None:
        message = f"no all-reduce over {nodes} nodes in allreduce_bandwidth_{nodes}nodes_{gpus}gpus_per_node.json"
        raise SpecError(Fault("/path", message))
    form = PoolForm(
        name=f"{nodes}x{gpus}",
        gpu=entry,
        nodes=nodes,
        gpus_per_node=gpus,
        intra_bytes_per_s=inner,
        inter_bytes_per_s=outer or 1.0,
        inter_kind="infiniband",
        source="Galvatron's measured all-reduce bus bandwidth",
    )
    notes = ["the network between nodes is taken as InfiniBand", *([note] if note else [])]
    return cluster_of(f"galvatron-{nodes}x{gpus}", [form], None, notes), notes
