"""Host names that a user gives: in plan order, or by pool or GPU type, which are then put in plan order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.files import parse_yaml
from meshwright.specs.plan import Plan

from .nodes import nodes_of_plan

#: Names in plan order, or the pool or GPU type of each host.
Hosts = Sequence[str] | Mapping[str, str]


def read_hosts(text: str) -> Hosts:
    """The hosts of a file: a YAML or JSON list or mapping, or lines whose first word is a name (``#`` comments)."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise SpecError(Fault("", "names no host"))
    if lines[0][0] in "[{" or lines[0].startswith("- ") or ": " in lines[0].split(" #")[0]:
        return hosts_of(parse_yaml(text), "")
    return [line.split()[0] for line in lines]


def hosts_of(data: object, pointer: str = "/hosts") -> Hosts:
    """Hosts from plain data; :class:`SpecError` where it is neither a list of names nor a mapping of names."""
    if isinstance(data, Mapping):
        wrong = [name for name, value in data.items() if not isinstance(name, str) or not isinstance(value, str)]
        if not wrong:
            return data
        raise SpecError(Fault(f"{pointer}/{name}", "must name the pool or GPU type of a host") for name in wrong)
    if isinstance(data, Sequence) and not isinstance(data, str) and all(isinstance(name, str) for name in data):
        return data
    raise SpecError(Fault(pointer, "must list host names in plan order, or map them to their pool or GPU type"))


def in_plan_order(hosts: Hosts, plan: Plan, cluster: ClusterSpec) -> list[str]:
    """A name for every node of the plan, in rank order. Of a mapping, each node takes the next host of its pool, or
    else of its GPU type; hosts that are left over are not used. A list is taken as it is."""
    if not isinstance(hosts, Mapping):
        return list(hosts)
    pools = {pool.name: pool.gpu for pool in cluster.pools}
    known = {**{gpu.lower(): gpu for gpu in pools.values()}, **{name.lower(): name for name in pools}}
    free: dict[str, list[str]] = {}
    faults = []
    for host, value in hosts.items():
        name = known.get(value.lower())
        if name is None:
            options = tuple(dict.fromkeys([*pools, *pools.values()]))
            faults.append(Fault(f"/hosts/{host}", f"{value[:60]!r} is no pool or GPU type of the cluster", options))
        else:
            free.setdefault(name, []).append(host)
    if faults:
        raise SpecError(faults)
    out, lacking = [], dict[str, int]()
    nodes = nodes_of_plan(plan, cluster)
    for node in nodes:
        found = free.get(node.pool) or free.get(node.gpu)
        if found:
            out.append(found.pop(0))
        else:
            lacking[node.pool] = lacking.get(node.pool, 0) + 1
    if lacking:
        raise SpecError(
            Fault("/hosts", f"names {count} too few hosts of pool {pool} ({pools[pool]})")
            for pool, count in lacking.items()
        )
    return out
