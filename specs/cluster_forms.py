"""The fields of a cluster as people write it; :mod:`meshwright.specs.cluster_file` says what they mean."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .base import Document
from .cluster import MAX_GPUS, LinkKind, Precision
from .fields import Count, Ratio
from .units import bandwidth_bytes_per_s, duration_s, rate_flops, size_bytes

Bytes = Annotated[float, BeforeValidator(size_bytes)]
Bandwidth = Annotated[float, BeforeValidator(bandwidth_bytes_per_s)]
Rate = Annotated[float, BeforeValidator(rate_flops)]
Duration = Annotated[float, BeforeValidator(duration_s)]
Span = Annotated[Count | None, BeforeValidator(lambda value: None if value == "all" else value)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


def _nodes(value: Any) -> tuple[int, ...]:
    """Node indices from ``0-3``, ``0-3,7``, 7, or a list of such."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    out: list[int] = []
    for part in parts:
        match = re.fullmatch(r"\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", str(part))
        if not match or int(match[2] or match[1]) < int(match[1]) or int(match[2] or 0) >= MAX_GPUS:
            raise ValueError(f"{str(part)[:40]!r} is not a range of nodes such as 0-3")
        out += range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(out) > MAX_GPUS:
            raise ValueError(f"holds more than {MAX_GPUS} nodes")
    return tuple(out)


Nodes = Annotated[tuple[int, ...], BeforeValidator(_nodes)]
MAX_POOLS = 1000


class GpuForm(Document):
    """A GPU type in full, or changes to the catalog type ``base``."""

    base: Name | None = None
    vendor: Literal["nvidia", "amd"] | None = None
    memory: Bytes | None = None
    usable_memory: Bytes | None = None
    memory_bandwidth: Bandwidth | None = None
    peak_flops: dict[Precision, Rate] = Field(default_factory=dict)
    num_sms: Count | None = None
    compute_capability: float | None = None


class LinkForm(Document):
    """A catalog link by name, a link in full, or a catalog link with changes."""

    link: Name | None = None
    kind: LinkKind | None = None
    bandwidth: Bandwidth | None = None
    latency: Duration | None = None
    peer_to_peer: bool | None = None


Nic = Annotated[LinkForm, BeforeValidator(lambda value: {"link": value} if isinstance(value, str) else value)]


class JoinForm(LinkForm):
    """The network between pools."""

    name: Name | None = None
    oversubscription: Ratio = 1.0
    in_network_reduction: bool = False
    ring: bool = False


class PoolLinkForm(JoinForm):
    """The network between two pools, by name."""

    between: tuple[Name, Name]


class LevelForm(JoinForm):
    """One level of a pool's network; ``span`` in GPUs; ``all`` (None) joins the whole pool. ``instances`` in place of
    ``span``: the nodes of each."""

    span: Span = None
    instances: dict[Name, Nodes] = Field(default_factory=dict)


class PoolForm(Document):
    """A pool; see :mod:`meshwright.specs.cluster_file`."""

    name: Name | None = None
    gpu: Name
    nodes: Count | None = None
    gpus_per_node: Count | None = None
    hosts: tuple[Name, ...] | None = None
    nvlink_domain: Count | None = None
    nic: Nic | None = None
    nics_per_node: Count | None = None
    oversubscription: Ratio | None = None
    host_memory: Bytes | None = None
    levels: tuple[LevelForm, ...] | None = Field(default=None, min_length=1)


class ClusterForm(Document):
    """A cluster as a user writes it."""

    name: Name = "cluster"
    pools: tuple[PoolForm, ...] = Field(min_length=1, max_length=MAX_POOLS)
    inter_pool: JoinForm | None = None
    links: tuple[PoolLinkForm, ...] = ()
    gpus: dict[Name, GpuForm] = Field(default_factory=dict)
