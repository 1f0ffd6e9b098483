"""Pieces of a :class:`ClusterSpec` from what other tools say of theirs."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.catalog import resolve_gpu
from meshwright.specs.catalog.entries import CatalogEntry
from meshwright.specs.cluster import ClusterSpec, LinkKind, NetworkLevel, Pool
from meshwright.specs.errors import Fault, SpecError

from .reading import POINTER

#: GPU names of other tools that the catalog knows under another one.
_OTHER_NAMES = {
    "A100-40": "A100-SXM-40GB",
    "A100-80": "A100-SXM-80GB",
    "V100-16": "V100-SXM2-16GB",
    "V100-32": "V100-SXM2-32GB",
    "GH-96": "GH200-96GB",
    "GH200-96": "GH200-96GB",
}
#: Latency of a hop where a source gives bandwidth alone, and where it is from.
_LATENCY = {
    "nvlink": (1.25e-6, "latency of nvlink3 in the catalog"),
    "pcie": (1.64e-6, "latency of pcie5 in the catalog"),
    "infiniband": (5e-6, "latency of InfiniBand in the catalog"),
    "ethernet": (2.5e-5, "latency of Ethernet in the catalog"),
    "wan": (1e-3, "latency of a wide-area link: 1 ms assumed"),
}


@dataclass(frozen=True)
class PoolForm:
    """Equal nodes with the measured rates of the wires inside and between them, bytes/s of a GPU and direction."""

    name: str
    gpu: CatalogEntry
    nodes: int
    gpus_per_node: int
    intra_bytes_per_s: float | None
    inter_bytes_per_s: float
    inter_kind: LinkKind = "ethernet"
    hosts: tuple[str, ...] | None = None
    source: str = ""


def catalog_gpu(name: str, place: str) -> tuple[CatalogEntry, str | None]:
    """The catalog's GPU type for another tool's name, and what was assumed.

    :class:`SpecError` that names ``place``, a file and key or (``/gpu``) an option.
    """
    known = _OTHER_NAMES.get(name)
    try:
        entry, assumed = resolve_gpu(known or name)
    except SpecError as error:
        at, before = (place, "") if place.startswith("/") else (POINTER, f"{place}: ")
        raise SpecError(Fault(at, before + f.message, f.alternatives) for f in error.faults) from None
    note = f"GPU {name} taken as {entry.gpu.name}" if entry.gpu.name != name else None
    return entry, assumed or note


def level(name: str, kind: LinkKind, span: int, bytes_per_s: float, source: str) -> NetworkLevel:
    """A network level at a measured rate, with the catalog's latency of its kind."""
    latency_s, why = _LATENCY[kind]
    text = f"{source}; {why}"
    return NetworkLevel(
        name=name, kind=kind, span=span, bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s, source=text
    )


def pool_of(form: PoolForm) -> Pool:
    """The pool of a form; levels of one GPU are left out."""
    total = form.nodes * form.gpus_per_node
    levels = []
    if form.gpus_per_node > 1:
        kind = _inner_kind(form.gpu)
        rate = form.intra_bytes_per_s or _nominal(form.gpu)
        levels.append(level("node", kind, form.gpus_per_node, rate, form.source))
    if form.nodes > 1 or not levels:
        levels.append(level("network", form.inter_kind, total, form.inter_bytes_per_s, form.source))
    return Pool(
        name=form.name,
        gpu=form.gpu.gpu.name,
        nodes=form.nodes,
        gpus_per_node=form.gpus_per_node,
        levels=tuple(levels),
        hosts=form.hosts,
    )


def cluster_of(name: str, forms: list[PoolForm], between: NetworkLevel | None, notes: list[str]) -> ClusterSpec:
    """The cluster of several pools."""
    return ClusterSpec(
        name=name,
        gpus={form.gpu.gpu.name: form.gpu.gpu for form in forms},
        pools=tuple(pool_of(form) for form in forms),
        inter_pool=between if len(forms) > 1 else None,
        assumptions=tuple(dict.fromkeys(notes)),
    )


def _inner_kind(entry: CatalogEntry) -> LinkKind:
    from meshwright.specs.catalog import links

    kind = links()[entry.node.levels[-1].link].kind
    return kind if kind in _LATENCY else "nvlink"


def _nominal(entry: CatalogEntry) -> float:
    from meshwright.specs.catalog import links

    return links()[entry.node.levels[-1].link].bandwidth_bytes_per_s
