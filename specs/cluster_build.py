"""Turn a GPU type's reference node into the network levels of a pool, and name what was filled in."""

from __future__ import annotations

from dataclasses import dataclass

from .catalog import CatalogEntry, Link, links
from .cluster import NetworkLevel, Pool
from .errors import Fault, SpecError

#: How many more racks than necessary an even spread over racks may take before racks are filled one after the other.
RACK_SLACK = 1.25


@dataclass(frozen=True)
class Wiring:
    """What a user says about the wires of a pool; None takes the reference node's value.

    ``domain``: GPUs in one NVLink or xGMI domain. ``nic``: one network port. ``nics_per_node``: ports of a node.
    """

    domain: int | None = None
    nic: Link | None = None
    nics_per_node: int | None = None
    oversubscription: float = 1.0


def reference_pool(
    entry: CatalogEntry, name: str, nodes: int, gpus_per_node: int | None, wiring: Wiring, pointer: str = ""
) -> tuple[Pool, list[str]]:
    """A pool of ``nodes`` reference nodes of ``entry``, and the assumptions made for it.

    A node may have fewer GPUs than the reference node: its links then join those, and shared network ports are shared
    by fewer. More GPUs than the reference node are only taken behind PCIe. :class:`SpecError` at ``pointer`` otherwise.
    """
    node = entry.node
    per_node = gpus_per_node or node.gpus_per_node
    if per_node > node.gpus_per_node and any(links()[level.link].kind != "pcie" for level in node.levels):
        message = f"{entry.gpu.name} nodes ({node.name}) have {node.gpus_per_node} GPUs, got {per_node}"
        fix = "; describe other nodes in a YAML file with their levels"
        raise SpecError(Fault(pointer, message + fix, tuple(str(n) for n in range(1, node.gpus_per_node + 1))))
    inner, notes = _inner_levels(entry, nodes, per_node, wiring.domain, pointer)
    levels: list[NetworkLevel] = []
    total = nodes * per_node
    for level in inner:
        levels.append(level.model_copy(update={"span": min(level.span, total)}))
        if level.span >= total:
            break
    else:
        levels.append(fabric_level(entry, per_node, total, wiring))
    pool = Pool(
        name=name,
        gpu=entry.gpu.name,
        nodes=nodes,
        gpus_per_node=per_node,
        levels=tuple(levels),
        host_memory_bytes=node.host_memory_bytes,
    )
    wires = ", ".join(f"{level.name} joins {level.span} GPUs at {speed(level)}" for level in levels if level.span > 1)
    memory = f"{node.host_memory_bytes / 1e9:.4g} GB of host memory"
    shape = f"{nodes} x {per_node} {entry.gpu.name}, nodes as {node.name} with {memory}"
    notes.insert(0, f"pool {name}: {shape}: {wires}" if wires else f"pool {name}: {shape}")
    return pool, notes


def fabric_level(entry: CatalogEntry, gpus_per_node: int, span: int, wiring: Wiring) -> NetworkLevel:
    """The network beyond the node (or rack) as one level; bandwidth is a GPU's share of the node's ports."""
    nic = wiring.nic or links()[entry.node.nic]
    node = entry.node
    if wiring.nics_per_node is not None:
        node = node.model_copy(update={"nics_per_node": wiring.nics_per_node, "gpus_per_node": gpus_per_node})
    ports = node.ports_per_gpu(gpus_per_node)
    return NetworkLevel(
        name=nic.name,
        kind=nic.kind,
        span=span,
        bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s * ports,
        latency_s=nic.latency_s,
        oversubscription=wiring.oversubscription,
        source=f"{ports:g} ports a GPU. {nic.source}",
    )


def slower_fabric(fabrics: list[NetworkLevel], span: int) -> NetworkLevel:
    """The level that joins pools: every transfer runs at the slowest pool's bandwidth and the longest latency."""
    slowest = min(fabrics, key=lambda level: level.bandwidth_bytes_per_s / level.oversubscription)
    latency_s = max(level.latency_s for level in fabrics)
    return slowest.model_copy(update={"span": span, "latency_s": latency_s, "source": f"slowest pool's {slowest.name}"})


def _inner_levels(
    entry: CatalogEntry, nodes: int, per_node: int, domain: int | None, pointer: str
) -> tuple[list[NetworkLevel], list[str]]:
    """Levels inside the node or rack at full size, not yet cut to the pool, spans strictly growing."""
    node, notes = entry.node, []
    out: list[NetworkLevel] = []
    for index, given in enumerate(node.levels):
        outermost = index == len(node.levels) - 1
        span = given.span
        if outermost and domain is not None:
            span = domain
            if domain > per_node and domain % per_node:
                message = f"must be a multiple of the {per_node} GPUs of a node, or at most that, got {domain}"
                raise SpecError(Fault(f"{pointer}/nvlink_domain", message))
        elif span > node.gpus_per_node:
            rack = span // node.gpus_per_node
            together = _nodes_per_rack(nodes, rack)
            span = together * per_node
            if nodes > rack:
                notes.append(
                    f"{nodes} nodes spread over racks of {rack} nodes, {together} in a rack: {span} GPUs share NVLink"
                )
        elif span == node.gpus_per_node:
            span = per_node
        else:
            span = min(span, per_node)
        if out and span <= out[-1].span:
            continue
        link = links()[given.link]
        out.append(
            NetworkLevel(
                name=link.name,
                kind=link.kind,
                span=span,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
                latency_s=link.latency_s,
                peer_to_peer=link.peer_to_peer,
                source=link.source,
            )
        )
    return out, notes


def _nodes_per_rack(nodes: int, rack: int) -> int:
    """Nodes of the cluster in one rack of ``rack`` nodes.

    As schedulers place jobs on NVL72 racks: evenly over the fewest racks, so that 64 nodes sit as 4 x 16 and groups
    of 64 GPUs never straddle racks; full racks where an even spread needs over ``RACK_SLACK`` times as many.
    """
    fewest = -(-nodes // rack)
    for racks in range(fewest, int(fewest * RACK_SLACK) + 1):
        if nodes % racks == 0:
            return nodes // racks
    return rack


def speed(level: NetworkLevel) -> str:
    """Bandwidth of a level as people say it."""
    text = f"{level.bandwidth_bytes_per_s / 1e9:.4g} GB/s a GPU and direction"
    return text if level.oversubscription == 1 else f"{text}, oversubscribed {level.oversubscription:g}"
