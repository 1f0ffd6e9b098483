"""Clusters as people write them in YAML or JSON.

    name: my-cluster
    pools:
      - gpu: H100-SXM              # any catalog name or alias, or a key of gpus below
        nodes: 8                   # default: as many as hosts, else 1
        gpus_per_node: 8           # this and all that follows defaults to the GPU type's reference node
        hosts: [h1, h2, ...]
        nvlink_domain: 8           # GPUs that share NVLink or xGMI; beyond a node on rack-scale systems
        nic: ib-ndr                # one network port: a catalog link, or {kind, bandwidth, latency}
        nics_per_node: 8
        oversubscription: 2        # of the fabric beyond the node
        host_memory: 2 TB
      - gpu: A100-80GB
        nodes: 4
        levels:                    # in place of nvlink_domain, nic, nics_per_node and oversubscription
          - {link: nvlink3, span: 8}
          - {name: leaf, kind: roce, bandwidth: 200 Gbit/s, latency: 5 us, span: 16}
          - {name: spine, link: roce-200, span: all, oversubscription: 4}
                                   # instances: {a: "0-1", b: "2-3"} in place of span: the nodes of each leaf
    inter_pool: {link: ethernet-100}       # default: the slower pool's fabric
    links:                                 # pairs of pools that another network joins
      - {between: [H100-SXM, A100-80GB], kind: wan, bandwidth: 1 Gbit/s, latency: 10 ms}
    gpus:                          # own types, or changes to a catalog type
      H100-SXM: {usable_memory: 78 GiB}
      MyGPU: {base: A100-SXM-80GB, memory_bandwidth: 1.8 TB/s, peak_flops: {bf16: 300 TFLOP/s}}

Level bandwidths are per GPU and direction. A type without ``base`` gives all of vendor, memory, usable_memory,
memory_bandwidth, peak_flops and num_sms, and its pools give gpus_per_node and levels.
"""

from __future__ import annotations

from typing import Any

from .catalog import CatalogEntry, Link, links, resolve_gpu
from .cluster import MAX_GPUS, ClusterSpec, GpuType, LevelInstance, NetworkLevel, Pool, instance_faults
from .cluster_build import Wiring, fabric_level, reference_pool, slower_fabric, speed
from .cluster_forms import ClusterForm, GpuForm, JoinForm, LevelForm, LinkForm, PoolForm
from .errors import Fault, SpecError

#: Levels inside a node or rack, which cannot join pools.
_SCALE_UP = ("nvlink", "xgmi", "pcie")


class _Type:
    """A GPU type of the file: catalog type, changed type or own type (which has no reference node)."""

    def __init__(self, gpu: GpuType, entry: CatalogEntry | None, note: str | None):
        self.gpu = gpu
        self.entry = entry.model_copy(update={"gpu": gpu}) if entry else None
        self.note = note


def cluster_from_form(data: Any) -> ClusterSpec:
    """Validate the friendly form and build the cluster; :class:`SpecError` with one fault per wrong field."""
    form = ClusterForm.parse(data)
    faults: list[Fault] = []
    own = _own_types(form.gpus, faults)
    notes: list[str] = []
    built: list[tuple[Pool, _Type, PoolForm]] = []
    names: dict[str, int] = {}
    for index, pool in enumerate(form.pools):
        pointer = f"/pools/{index}"
        try:
            kind = _type_of(pool.gpu, own, f"{pointer}/gpu")
            if kind is None:
                continue
            names[kind.gpu.name] = names.get(kind.gpu.name, 0) + 1
            count = names[kind.gpu.name]
            name = pool.name or (kind.gpu.name if count == 1 else f"{kind.gpu.name}-{count}")
            made, more = _pool(pool, name, kind, pointer)
        except SpecError as error:
            faults += error.faults
            continue
        if name in (other.name for other, _, _ in built):
            faults.append(Fault(f"{pointer}/name", f"pool names must differ, {name!r} is taken"))
        built.append((made, kind, pool))
        notes += ([kind.note] if kind.note else []) + more
    if faults:
        raise SpecError(faults)
    pools = [pool for pool, _, _ in built]
    total = sum(pool.num_gpus for pool in pools)
    inter_pool = _inter_pool(form.inter_pool, built, total, notes)
    links = [
        {"between": link.between, "level": _level(link, total, "-".join(link.between), f"/links/{index}")}
        for index, link in enumerate(form.links)
    ]
    return ClusterSpec.parse(
        {
            "name": form.name,
            "gpus": {kind.gpu.name: kind.gpu for _, kind, _ in built},
            "pools": pools,
            "inter_pool": inter_pool,
            "links": links,
            "assumptions": tuple(dict.fromkeys(notes)),
        }
    )


def _own_types(forms: dict[str, GpuForm], faults: list[Fault]) -> dict[str, _Type | None]:
    """Types under ``gpus``, by the name they are given and, for a changed catalog type, its canonical name.

    None stands for a type whose own faults were added to ``faults``.
    """
    out: dict[str, _Type | None] = {}
    for name, form in forms.items():
        pointer = f"/gpus/{name.replace('~', '~0').replace('/', '~1')}"
        try:
            kind = _own_type(name, form, pointer)
        except SpecError as error:
            faults += error.faults
            out[name] = None
            continue
        out[name] = out[kind.gpu.name] = kind
    return out


def _own_type(name: str, form: GpuForm, pointer: str) -> _Type:
    given: dict[str, Any] = {
        "vendor": form.vendor,
        "memory_bytes": _whole(form.memory),
        "usable_memory_bytes": _whole(form.usable_memory),
        "memory_bandwidth_bytes_per_s": form.memory_bandwidth,
        "num_sms": form.num_sms,
        "compute_capability": form.compute_capability,
    }
    given = {key: value for key, value in given.items() if value is not None}
    base = _base(name, form, pointer)
    if base is None:
        needed = ("vendor", "memory", "usable_memory", "memory_bandwidth", "peak_flops", "num_sms")
        missing = [field for field in needed if not getattr(form, field)]
        if missing:
            hint = "is required for a GPU type that is not in the catalog, or give base"
            raise SpecError([Fault(f"{pointer}/{field}", hint) for field in missing])
        fields = {
            "name": name,
            "peak_flops": form.peak_flops,
            **given,
            "sources": dict.fromkeys(given, "given by the user"),
        }
    else:
        entry, _ = base
        fields = entry.gpu.model_dump()
        fields.update(given)
        fields["name"] = name if form.base else entry.gpu.name
        fields["peak_flops"] = {**entry.gpu.peak_flops, **form.peak_flops}
        changed = [*given, *(["peak_flops"] if form.peak_flops else [])]
        fields["sources"] = {**entry.gpu.sources, **dict.fromkeys(changed, "given by the user")}
    gpu = GpuType.parse(fields, pointer)
    if gpu.usable_memory_bytes > gpu.memory_bytes:
        raise SpecError(Fault(f"{pointer}/usable_memory", f"is more than the memory of {gpu.memory_bytes} bytes"))
    return _Type(gpu, base[0] if base else None, base[1] if base else None)


def _base(name: str, form: GpuForm, pointer: str) -> tuple[CatalogEntry, str | None] | None:
    if form.base:
        return resolve_gpu(form.base, f"{pointer}/base")
    try:
        return resolve_gpu(name)
    except SpecError:
        return None


def _type_of(name: str, own: dict[str, _Type | None], pointer: str) -> _Type | None:
    if name in own:
        return own[name]
    entry, note = resolve_gpu(name, pointer)
    return own.get(entry.gpu.name) or _Type(entry.gpu, entry, note)


def _pool(form: PoolForm, name: str, kind: _Type, pointer: str) -> tuple[Pool, list[str]]:
    nodes = form.nodes or len(form.hosts or ()) or 1
    if nodes * (form.gpus_per_node or 1) > MAX_GPUS:
        raise SpecError(Fault(f"{pointer}/nodes", f"is too many; at most {MAX_GPUS} GPUs are planned for"))
    if form.levels is not None:
        pool, notes = _given_levels(form, form.levels, name, nodes, kind, pointer)
    elif kind.entry is None:
        message = f"is required: GPU type {kind.gpu.name} has no reference node to take it from"
        raise SpecError(
            [Fault(f"{pointer}/{field}", message) for field in ("gpus_per_node", "levels") if not getattr(form, field)]
        )
    else:
        pool, notes = reference_pool(kind.entry, name, nodes, form.gpus_per_node, _wiring(form, pointer), pointer)
    update: dict[str, Any] = {"hosts": form.hosts}
    if form.host_memory is not None:
        update["host_memory_bytes"] = _whole(form.host_memory)
    return Pool.parse({**pool.model_dump(), **update}, pointer), notes


def _given_levels(
    form: PoolForm, levels: tuple[LevelForm, ...], name: str, nodes: int, kind: _Type, pointer: str
) -> tuple[Pool, list[str]]:
    clash = [field for field in ("nvlink_domain", "nic", "nics_per_node", "oversubscription") if getattr(form, field)]
    if clash:
        raise SpecError([Fault(f"{pointer}/{field}", "is already said by levels; give one of them") for field in clash])
    notes = []
    per_node = form.gpus_per_node
    if per_node is None:
        if kind.entry is None:
            raise SpecError(Fault(f"{pointer}/gpus_per_node", f"is required: {kind.gpu.name} has no reference node"))
        per_node = kind.entry.node.gpus_per_node
        notes.append(f"pool {name}: {per_node} GPUs a node, as {kind.entry.node.name}")
    faults: list[Fault] = []
    made: list[NetworkLevel] = []
    for index, level in enumerate(levels):
        span = nodes * per_node if level.span is None else level.span
        if level.instances and level.span is None:
            span = per_node * max(len(held) for held in level.instances.values())
        try:
            one = _level(level, span, f"level-{index}", f"{pointer}/levels/{index}")
            listed = tuple(LevelInstance(name=name, nodes=held) for name, held in level.instances.items())
            made.append(one.model_copy(update={"instances": listed}))
        except SpecError as error:
            faults += error.faults
    if not faults:
        faults = [
            Fault(f"{pointer}/levels/{index}/instances", message)
            for index, level in enumerate(made)
            for message in (instance_faults(tuple(made), index, nodes, per_node) if level.instances else ())
        ]
    if faults:
        raise SpecError(faults)
    host_memory_bytes = kind.entry.node.host_memory_bytes if kind.entry else None
    if kind.entry and form.host_memory is None:
        node = kind.entry.node
        notes.append(f"pool {name}: {node.host_memory_bytes / 1e9:.4g} GB of host memory a node, as {node.name}")
    pool = {"name": name, "gpu": kind.gpu.name, "nodes": nodes, "gpus_per_node": per_node, "levels": made}
    return Pool.parse({**pool, "host_memory_bytes": host_memory_bytes}, pointer), notes


def _wiring(form: PoolForm, pointer: str) -> Wiring:
    nic = _link(form.nic, "nic", f"{pointer}/nic") if form.nic else None
    return Wiring(form.nvlink_domain, nic, form.nics_per_node, form.oversubscription or 1.0)


def _link(form: LinkForm, name: str, pointer: str) -> Link:
    """The link a form describes, as a catalog link or in full."""
    known: dict[str, Any] = {"name": name, "source": "given by the user"}
    if form.link is not None:
        if form.link not in links():
            raise SpecError(Fault(f"{pointer}/link", f"unknown link {form.link[:60]!r}", tuple(links())))
        known = links()[form.link].model_dump()
    given = {
        "kind": form.kind,
        "bandwidth_bytes_per_s": form.bandwidth,
        "latency_s": form.latency,
        "peer_to_peer": form.peer_to_peer,
    }
    known.update({key: value for key, value in given.items() if value is not None})
    fields = {"kind": "kind", "bandwidth_bytes_per_s": "bandwidth", "latency_s": "latency"}
    missing = [written for field, written in fields.items() if field not in known]
    if missing:
        raise SpecError([Fault(f"{pointer}/{field}", "is required, or give link") for field in missing])
    return Link.parse(known, pointer)


def _level(form: JoinForm, span: int, name: str, pointer: str) -> NetworkLevel:
    link = _link(form, name, pointer)
    fields = {**link.model_dump(), "name": form.name or link.name, "span": span}
    fields |= {name: getattr(form, name) for name in ("oversubscription", "in_network_reduction", "ring")}
    return NetworkLevel.parse(fields, pointer)


def _inter_pool(
    form: JoinForm | None, built: list[tuple[Pool, _Type, PoolForm]], total: int, notes: list[str]
) -> NetworkLevel | None:
    if form is not None:
        return _level(form, total, "inter-pool", "/inter_pool")
    if len(built) < 2:
        return None
    fabrics: list[NetworkLevel] = []
    for pool, kind, given in built:
        outermost = pool.levels[-1]
        if outermost.kind not in _SCALE_UP:
            fabrics.append(outermost)
        elif kind.entry is not None:
            fabrics.append(fabric_level(kind.entry, pool.gpus_per_node, total, _wiring(given, "")))
        else:
            raise SpecError(Fault("/inter_pool", f"is required: pool {pool.name} names no network beyond its nodes"))
    slower = slower_fabric(fabrics, total)
    notes.append(f"pools joined by the slower fabric: {slower.name} at {speed(slower)}")
    return slower


def _whole(value: float | None) -> int | None:
    return None if value is None else max(1, round(value))
