"""Sailor: layer times and sizes by GPU type, bandwidth polynomials, and a trace of what is available.

A folder with some of::

    profiles/MODEL/GPU/profile.json        [micro-batch][tp][layer] = [forward, backward, update] seconds
    llm_info.json                          [MODEL][tp][layer] = {params_floats, act_mem_floats, act_output_floats, ...}
    *bandwidths_het*.json                  [zone][GPU][n][zone][GPU][n] = [[polynomial, highest power first], most B/s]
    *.csv                                  Timestamp,GPU_ZONE,... with the GPUs of each type and zone at a time

Layers count the embedding (0) and the head (the last one). Floats are of four bytes; sizes are for one sample.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.specs.cluster import LinkKind, NetworkLevel
from meshwright.specs.hardware_profile import BandwidthCurve, End, HardwareProfile, LayerPoint, Provenance
from meshwright.specs.imported import Imported

from .clusters import PoolForm, catalog_gpu, cluster_of, level
from .options import ImportOptions
from .reading import Entry, lines, load, nothing_found, require_folder

FLOAT_BYTES = 4
#: GPUs of the machines that Sailor's harness rents.
GPUS_PER_NODE = 4
_Pools = tuple[list[PoolForm], NetworkLevel | None, list[str]]
_EXPECTED = "profiles/MODEL/GPU/profile.json, multizone_bandwidths_het.json, a trace .csv"


def read(path: Path, options: ImportOptions) -> Imported:
    """The folder as a profile, and as a cluster where there is a trace; ``path`` may be the trace that is meant."""
    chosen = [path] if path.suffix == ".csv" and path.is_file() else None
    path = path.parent if chosen else path
    require_folder(path, f"a folder with {_EXPECTED}")
    profiles, tables = sorted(path.glob("**/profile.json")), sorted(path.glob("**/*bandwidths_het*.json"))
    sizes = next((load(file, path) for file in sorted(path.glob("**/llm_info.json"))), None)
    traces = chosen or sorted(path.glob("*.csv"))
    layers = [point for file in profiles for point in _layers(load(file, path), file, sizes)]
    curves = [curve for file in tables for curve in _curves(load(file, path))]
    if not layers and not curves and not traces:
        raise nothing_found(path, _EXPECTED)
    notes = []
    bare = sorted({point.model for point in layers if point.params is None})
    if bare:
        notes.append(f"llm_info.json has no sizes for some layers of {', '.join(bare)}")
    profile = None
    if layers or curves:
        names = tuple(str(file.relative_to(path)) for file in (*profiles, *tables))
        told = ("layers are profiled in 32 bits", "update_s is the optimizer's time of one layer")
        profile = HardwareProfile(
            provenance=Provenance(tool="Sailor", sources=names, notes=told),
            layers=tuple(layers),
            bandwidths=tuple(curves),
        )
    cluster = None
    if traces:
        forms, between, more = _pools(traces[0], path, curves)
        notes += more
        cluster = cluster_of(traces[0].stem, forms, between, more)
    else:
        notes.append("no cluster: there is no trace (.csv) that says how many GPUs there are")
    return Imported(format="sailor", profile=profile, cluster=cluster, notes=tuple(notes))


def _layers(table: Entry, file: Path, sizes: Entry | None) -> list[LayerPoint]:
    gpu, model = file.parent.name, file.parent.parent.name
    known = dict(sizes.fields()).get(model) if sizes is not None else None
    by_degree = dict(known.fields()) if known is not None else {}
    out = []
    for _, by_tp in table.fields():
        batch = by_tp.key_count()
        for tp, by_layer in by_tp.fields():
            number = len(list(by_layer.fields()))
            sized = dict(by_degree[tp].fields()) if tp in by_degree else {}
            for name, entry in by_layer.fields():
                if not name.isdecimal() or int(name) >= number:
                    raise entry.fault(f"is not one of the layers 0 to {number - 1}")
                times = entry.numbers(3)
                index = int(name)
                about = sized.get(name)
                out.append(
                    LayerPoint(
                        model=model,
                        kind="embedding" if index == 0 else "head" if index == number - 1 else "decoder",
                        index=index,
                        gpu=gpu,
                        tp=by_layer.key_count(),
                        micro_batch_size=batch,
                        precision="fp32",
                        forward_s=times[0],
                        backward_s=times[1],
                        update_s=times[2],
                        params=about["params_floats"].number() if about else None,
                        activation_bytes=_bytes(about, "act_mem_floats", batch),
                        output_bytes=_bytes(about, "act_output_floats", batch),
                    )
                )
    return out


def _bytes(about: Entry | None, key: str, batch: int) -> float | None:
    return about[key].number() * FLOAT_BYTES * batch if about else None


def _curves(table: Entry) -> list[BandwidthCurve]:
    out = []
    for zone, by_gpu in table.fields():
        for gpu, by_count in by_gpu.fields():
            for _, by_zone in by_count.fields():
                source = End(gpu=gpu, gpus=by_zone.key_count(), zone=zone)
                for peer_zone, by_peer in by_zone.fields():
                    for peer, by_peer_count in by_peer.fields():
                        for _, entry in by_peer_count.fields():
                            end = End(gpu=peer, gpus=entry.key_count(), zone=peer_zone)
                            out.append(_curve(entry, source, end))
    return out


def _curve(entry: Entry, source: End, peer: End) -> BandwidthCurve:
    parts = entry.items()
    if len(parts) != 2:
        raise entry.fault("must be [[coefficients], most bytes/s]")
    polynomial = tuple(item.any_number() for item in parts[0].items())
    if not 1 <= len(polynomial) <= 10:
        raise parts[0].fault(f"must have 1 to 10 coefficients, has {len(polynomial)}")
    return BandwidthCurve(
        source=source,
        peer=peer,
        log2_megabytes_to_gigabytes_per_s=polynomial,
        max_bytes_per_s=parts[1].positive(),
    )


def _pools(trace: Path, root: Path, curves: list[BandwidthCurve]) -> _Pools:
    rows = [line.split(",") for line in lines(trace, root)]
    name = str(trace.relative_to(root))
    if len(rows) < 2 or len(rows[0]) < 2 or len(rows[1]) != len(rows[0]):
        raise Entry(None, name).fault("must have a header Timestamp,GPU_ZONE,... and a row of counts as long")
    forms: list[PoolForm] = []
    notes = [f"counts are GPUs, in nodes of {GPUS_PER_NODE}, of the trace's first row"]
    for title, count in zip(rows[0][1:], rows[1][1:], strict=True):
        gpu, _, zone = title.strip().partition("_")
        place = Entry(None, name, (title.strip(),))
        if not count.strip().isdecimal() or len(count.strip()) > 7:
            raise place.fault(f"must be a whole number, is {count.strip()[:40]!r}")
        number = int(count)
        if not number:
            continue
        entry, note = catalog_gpu(gpu, place.place)
        notes += [note] if note else []
        if number > GPUS_PER_NODE and number % GPUS_PER_NODE:
            raise place.fault(f"has {number} GPUs, which are no whole number of nodes of {GPUS_PER_NODE}")
        per_node = min(number, GPUS_PER_NODE)
        within = _rate(curves, (gpu, per_node, zone), (gpu, per_node, zone))
        forms.append(
            PoolForm(
                name=title.strip(),
                gpu=entry,
                nodes=number // per_node,
                gpus_per_node=per_node,
                intra_bytes_per_s=None,
                inter_bytes_per_s=(within or _DEFAULT_NODE_BYTES_PER_S) / per_node,
                source="Sailor's measured bandwidth between nodes, shared by their GPUs" if within else _ASSUMED,
            )
        )
    if not forms:
        raise Entry(None, name).fault("offers no GPU in its first row")
    rates = [
        _rate(curves, _end(a.name, a.gpus_per_node), _end(b.name, b.gpus_per_node))
        for a in forms
        for b in forms
        if a is not b
    ]
    between = None
    if len(forms) > 1:
        known = [rate for rate in rates if rate]
        rate = min(known, default=_DEFAULT_NODE_BYTES_PER_S) / max(form.gpus_per_node for form in forms)
        zones = {form.name.partition("_")[2] for form in forms}
        kind: LinkKind = "ethernet" if len(zones) == 1 else "wan"
        text = "the slowest of Sailor's curves between two pools, shared by a node's GPUs" if known else _ASSUMED
        span = sum(form.nodes * form.gpus_per_node for form in forms)
        between = level("between pools", kind, span, rate, text)
    return forms, between, notes


#: What a node has where no curve covers it: the network of Google's A2 machines with four GPUs, 50 Gbit/s.
_DEFAULT_NODE_BYTES_PER_S = 6.25e9
_ASSUMED = "50 Gbit/s a node assumed: no curve of the source covers it"


def _end(title: str, gpus: int) -> tuple[str, int, str]:
    gpu, _, zone = title.partition("_")
    return gpu, gpus, zone


def _rate(curves: list[BandwidthCurve], source: tuple[str, int, str], peer: tuple[str, int, str]) -> float | None:
    for curve in curves:
        ends = [(end.gpu, end.gpus, end.zone) for end in (curve.source, curve.peer)]
        if ends == [source, peer]:
            return curve.max_bytes_per_s
    return None
