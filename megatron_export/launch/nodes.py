"""Which host runs which ranks: the node order that puts the right GPUs under the right stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan, parse_range

from .shell import label


@dataclass(frozen=True)
class Node:
    """One node of the plan in rank order. ``known`` says that ``host`` is a real name, not a placeholder."""

    host: str
    known: bool
    pool: str
    gpu: str
    first_rank: int
    ranks: int
    stages: tuple[int, ...]


def nodes_of_plan(plan: Plan, cluster: ClusterSpec, hosts: Sequence[str] | None = None) -> list[Node]:
    """Nodes in rank order. ``hosts`` names them all in that order and overrides the cluster's names.

    Raises :class:`SpecError` where the plan's devices do not cover its ranks once, in order, in equal shares a node
    (torchrun numbers ranks as node rank x processes a node), or ``hosts`` has the wrong length.
    """
    rows: list[tuple[str, bool, str, int, int]] = []
    for device in sorted(plan.devices, key=lambda device: parse_range(device.ranks).start):
        pool = cluster.pool(device.pool)
        ranks, places = parse_range(device.ranks), parse_range(device.nodes)
        first = ranks.start
        for place in places:
            count = min(pool.gpus_per_node, ranks.stop - first)
            if count <= 0 or place >= pool.nodes:
                raise SpecError(Fault("/plan/devices", f"ranks {device.ranks} do not fill nodes {device.nodes}"))
            name = device.host if len(places) == 1 and device.host else pool.hosts[place] if pool.hosts else None
            rows.append((name or f"{label(pool.name)}-node-{place}", name is not None, pool.name, first, count))
            first += count
        if first != ranks.stop:
            raise SpecError(Fault("/plan/devices", f"ranks {device.ranks} need more nodes than {device.nodes}"))
    _check_cover(rows, plan.num_ranks)
    if hosts is not None:
        if len(hosts) != len(rows):
            raise SpecError(Fault("/hosts", f"lists {len(hosts)} names for the {len(rows)} nodes of the plan"))
        rows = [(host, True, *row[2:]) for host, row in zip(hosts, rows, strict=True)]
    faults = [
        Fault("/hosts", f"{row[0]!r} is not a host name")
        for row in rows
        if not row[0] or row[0].startswith("-") or any(char.isspace() or char == "#" for char in row[0])
    ]
    if faults:
        raise SpecError(faults)
    return [
        Node(host, known, pool, cluster.pool(pool).gpu, first, count, _stages(plan, first, count))
        for host, known, pool, first, count in rows
    ]


def _check_cover(rows: list[tuple[str, bool, str, int, int]], num_ranks: int) -> None:
    expected = 0
    for _, _, _, first, count in rows:
        if first != expected:
            raise SpecError(Fault("/plan/devices", f"rank {expected} is missing or given twice"))
        expected = first + count
    if expected != num_ranks:
        raise SpecError(Fault("/plan/devices", f"covers {expected} of {num_ranks} ranks"))
    counts = sorted({count for *_, count in rows})
    if len(counts) > 1:
        message = f"nodes run {' and '.join(map(str, counts))} ranks; the launchers need the same number on every node"
        raise SpecError(Fault("/plan/devices", message))
    names = [host for host, *_ in rows]
    if len(set(names)) != len(names):
        raise SpecError(Fault("/plan/devices", "names a node twice"))


def _stages(plan: Plan, first: int, count: int) -> tuple[int, ...]:
    """Stages with a rank on the node."""
    per_stage = plan.num_ranks // plan.pp
    if not plan.rank_order.endswith("pp"):
        degrees = plan.stages[0].degrees
        block = min(degrees.tp * degrees.cp, per_stage)
        return tuple(sorted({rank // block % plan.pp for rank in range(first, first + count)}))
    return tuple(range(first // per_stage, (first + count - 1) // per_stage + 1))
