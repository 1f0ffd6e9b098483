"""``ClusterSpec``: GPU pools joined by nested network levels. Mixed GPU types are normal."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from .base import Document
from .fields import Count, NonNegative, Positive, Ratio

LinkKind = Literal["nvlink", "xgmi", "pcie", "infiniband", "roce", "efa", "ethernet", "wan"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
#: More GPUs than any cluster has; a larger count is a typing error, and its plans would not fit in memory.
MAX_GPUS = 1_000_000


class GpuType(Document):
    """A GPU type. ``peak_flops`` are dense FLOP/s by precision; a precision that is absent is not supported.

    ``usable_memory_bytes`` is what torch reports as the device's total memory (less than the label says).
    ``clock_share`` is the share of the usual clock under load that a lower power limit leaves. ``sources`` maps a field
    to where its value comes from.
    """

    name: str
    vendor: Literal["nvidia", "amd"]
    memory_bytes: Count
    usable_memory_bytes: Count
    memory_bandwidth_bytes_per_s: Positive
    peak_flops: dict[Precision, Positive]
    num_sms: Count
    compute_capability: float | None = None
    clock_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    sources: dict[str, str] = Field(default_factory=dict)

    def supports(self, precision: str) -> bool:
        """Whether the type has matrix units for ``precision``."""
        return precision in self.peak_flops


class LevelInstance(Document):
    """One leaf, rack or island of a level whose instances are unequal, with its nodes by their index in the pool."""

    name: str
    nodes: tuple[NonNegativeInt, ...] = Field(min_length=1)


class NetworkLevel(Document):
    """One level of the network, innermost first.

    ``span`` is how many GPUs one instance of the level joins (8 for NVLink in a DGX node); the outermost level of a
    pool spans all of it. ``bandwidth_bytes_per_s`` is per GPU and direction, before ``oversubscription`` (1 = full
    bisection). ``latency_s`` is one hop's. ``port_bytes_per_s`` is what one GPU reaches while those that share its port
    are silent; None: no more than ``bandwidth_bytes_per_s``. ``in_network_reduction``: the switches add up all-reduces
    (SHARP). ``peer_to_peer``: GPUs reach each other without passing through host memory (PCIe boards of consumer cards
    mostly do not). ``ring``: what the level joins stands in a ring, one dimension of a torus; the bandwidth is that of
    both directions together. ``instances`` says which nodes each instance joins where they are unequal or not in order;
    empty: equal instances of ``span`` GPUs, in order. ``span`` then is that of the largest.
    """

    name: str
    kind: LinkKind
    span: Count
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative
    oversubscription: Ratio = 1.0
    in_network_reduction: bool = False
    peer_to_peer: bool = True
    ring: bool = False
    port_bytes_per_s: Positive | None = None
    instances: tuple[LevelInstance, ...] = ()
    source: str = ""


class Pool(Document):
    """Equal nodes of one GPU type with the levels that join them, innermost first, spans growing to the whole pool.

    ``host_memory_bytes`` is the RAM of one node, which offload plans need.
    """

    name: str
    gpu: str
    nodes: Count
    gpus_per_node: Count
    levels: tuple[NetworkLevel, ...] = Field(min_length=1)
    hosts: tuple[str, ...] | None = None
    host_memory_bytes: Count | None = None

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        spans = [level.span for level in self.levels]
        if any(inner >= outer for inner, outer in pairwise(spans)):
            raise ValueError(f"levels must grow from inner to outer, got spans {spans}")
        if spans[-1] < self.num_gpus:
            raise ValueError(f"the outermost level joins {spans[-1]} of {self.num_gpus} GPUs; add the level beyond")
        if self.hosts is not None and len(self.hosts) != self.nodes:
            raise ValueError(f"hosts lists {len(self.hosts)} names for {self.nodes} nodes")
        if self.hosts is not None and len(set(self.hosts)) != len(self.hosts):
            raise ValueError("hosts lists a name twice")
        for index, level in enumerate(self.levels):
            wrong = instance_faults(self.levels, index, self.nodes, self.gpus_per_node) if level.instances else []
            if wrong:
                raise ValueError(f"levels/{index}/instances {wrong[0]}")
        return self

    @property
    def uneven_level(self) -> int | None:
        """Index of the level whose instances are listed; None where all levels have equal ones."""
        return next((index for index, level in enumerate(self.levels) if level.instances), None)


def instance_faults(levels: tuple[NetworkLevel, ...], index: int, nodes: int, gpus_per_node: int) -> list[str]:
    """What is wrong with the instances of ``levels[index]`` in a pool of ``nodes`` nodes; empty if nothing is."""
    level = levels[index]
    held = [node for instance in level.instances for node in instance.nodes]
    names = [instance.name for instance in level.instances]
    out = []
    if beyond := sorted({node for node in held if node >= nodes}):
        out.append(f"name node {beyond[0]}; the pool has nodes 0 to {nodes - 1}")
    elif missing := sorted(set(range(nodes)) - set(held)):
        out.append(f"leave out node {missing[0]}")
    if len(set(held)) < len(held):
        out.append(f"hold node {next(one for one, other in pairwise(sorted(held)) if one == other)} twice")
    if len(set(names)) < len(names):
        out.append("have a name twice")
    if index != len(levels) - 2:
        out.append("need exactly one level beyond theirs, which joins them")
    else:
        outer = levels[-1]
        rates = [each.bandwidth_bytes_per_s / each.oversubscription for each in (level, outer)]
        if rates[1] > rates[0] or outer.latency_s < level.latency_s:
            out.append(f"are joined by {outer.name}, which must not be faster or nearer than {level.name}")
        if level.ring or outer.ring:
            out.append("cannot be those of a ring")
    if index and levels[index - 1].span > gpus_per_node:
        out.append(f"join nodes, but {levels[index - 1].name} below spans more than a node")
    largest = max(len(instance.nodes) for instance in level.instances) * gpus_per_node
    if level.span != largest:
        out.append(f"hold up to {largest} GPUs, but span is {level.span}")
    return out


class PoolLink(Document):
    """The network between two pools where it differs from ``inter_pool``, by the pools' names."""

    between: tuple[str, str]
    level: NetworkLevel


class ClusterSpec(Document):
    """Pools, the GPU types they use (in full, so that the document stands alone), and the fabric between pools.

    ``inter_pool`` joins every two pools for which ``links`` does not say otherwise (islands joined by a WAN).
    ``assumptions`` names what was filled in from the reference node of a type.
    """

    name: str
    gpus: dict[str, GpuType]
    pools: tuple[Pool, ...] = Field(min_length=1)
    inter_pool: NetworkLevel | None = None
    links: tuple[PoolLink, ...] = ()
    assumptions: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, got {names}")
        for pool in self.pools:
            if pool.gpu not in self.gpus:
                raise ValueError(f"pool {pool.name} uses GPU type {pool.gpu}, which gpus does not define")
        pairs = [frozenset(link.between) for link in self.links]
        for link, pair in zip(self.links, pairs, strict=True):
            if not pair <= set(names):
                raise ValueError(f"links: {', '.join(sorted(pair - set(names)))} is no pool; there are {names}")
            if len(pair) < 2:
                raise ValueError(f"links: a link joins two pools, got {list(link.between)}")
        if len(set(pairs)) < len(pairs):
            raise ValueError("links: two pools have more than one link")
        if self.inter_pool is None and len(pairs) < len(names) * (len(names) - 1) // 2:
            raise ValueError("inter_pool is required when there is more than one pool, or a link for every two pools")
        if self.num_gpus > MAX_GPUS:
            raise ValueError(f"the cluster has {self.num_gpus} GPUs; at most {MAX_GPUS} are planned for")
        return self

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    def pool(self, name: str) -> Pool:
        """The pool called ``name``; KeyError if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def between(self, one: int, other: int) -> NetworkLevel | None:
        """The network between two pools, by index; None within a pool."""
        if one == other:
            return None
        ends = {self.pools[one].name, self.pools[other].name}
        return next((link.level for link in self.links if set(link.between) == ends), self.inter_pool)

    def gpu_of(self, pool: Pool) -> GpuType:
        return self.gpus[pool.gpu]
