"""Changes that a what-if names: ``gpus=2x``, ``network=2x``, ``gpu=H200``, ``memory=2x``, ``batch=1024``."""

from __future__ import annotations

import re
from collections.abc import Callable

from meshwright.specs.catalog import gpu as catalog_gpu
from meshwright.specs.cluster import MAX_GPUS, ClusterSpec, NetworkLevel, Pool
from meshwright.specs.errors import Fault, SpecError

from .. import rules
from ..answer.no_fit import resized
from ..request import PlanRequest

FORMS = (
    *("gpus=2x", "gpus=512", "network=2x", "nvlink=2x", "gpu=H200", "gpu=A100-80GB:H100"),
    *("memory=2x", "batch=2x", "without=P9"),
)
#: Factors beyond these are typing errors.
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
_FACTOR = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)x")


def changed(request: PlanRequest, change: str, pointer: str = "") -> PlanRequest:
    """The request after a change such as ``gpus=2x``; :class:`SpecError` at ``pointer`` where it cannot be made.

    ``gpus``: nodes of every pool, by a factor or, with one pool, to a number of GPUs. ``network``: bandwidth beyond the
    node; ``nvlink``: inside it. ``gpu``: all pools, or those of type OLD in ``OLD:NEW``, get another type in the same
    nodes and fabric. ``memory``: usable memory of every GPU. ``batch``: sequences a step. ``without``: a rule of the
    target, or a family of rules (``P9``, ``P``), as if it did not hold; such a plan may not run.
    """
    name, equals, value = (part.strip() for part in change.partition("="))
    make = _CHANGES.get(name)
    if make is None or not equals or not value:
        raise SpecError(Fault(pointer, f"{change[:60]!r} is no change", FORMS))
    try:
        return make(request, value)
    except ValueError as error:
        faults = error.faults if isinstance(error, SpecError) else (Fault("", str(error)),)
        raise SpecError(Fault(pointer, f"{change[:60]!r}: {f.message}", f.alternatives) for f in faults) from None


def _factor(value: str) -> float | None:
    """2.0 for ``2x``; None for what is no factor."""
    match = _FACTOR.fullmatch(value.lower())
    if match is None:
        return None
    factor = float(match[1])
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        raise ValueError(f"the factor must be from {LEAST_FACTOR:g} to {MOST_FACTOR:g}")
    return factor


def _require_factor(value: str) -> float:
    factor = _factor(value)
    if factor is None:
        raise ValueError("must be a factor such as 2x or 0.5x")
    return factor


def _with_pools(request: PlanRequest, pools: tuple[Pool, ...], name: str | None = None) -> PlanRequest:
    name = name or "+".join(f"{pool.nodes}x{pool.gpus_per_node}x{pool.gpu}" for pool in pools)
    return _with_cluster(request, request.cluster.model_copy(update={"pools": pools, "name": name}))


def _with_cluster(request: PlanRequest, cluster: ClusterSpec) -> PlanRequest:
    return request.model_copy(update={"cluster": cluster})


def _gpus(request: PlanRequest, value: str) -> PlanRequest:
    factor, pools = _factor(value), request.cluster.pools
    if factor is None:
        if not value.isdecimal() or len(value) > 7 or not int(value):
            raise ValueError("must be a factor such as 2x, or a number of GPUs")
        if len(pools) > 1:
            raise ValueError("takes a factor where the cluster has several pools")
        factor = int(value) / pools[0].num_gpus
    out = []
    for pool in pools:
        nodes = pool.nodes * factor
        per_node = pool.gpus_per_node
        if nodes < 1 and pool.nodes == 1 and (per_node * factor).is_integer():
            pool, nodes = pool.model_copy(update={"gpus_per_node": int(per_node * factor)}), 1.0
        if abs(nodes - round(nodes)) > 1e-9 or round(nodes) < 1:
            raise ValueError(f"pool {pool.name} would have {nodes:g} nodes of {per_node} GPUs; whole nodes only")
        out.append(resized(pool, round(nodes)))
    if sum(pool.num_gpus for pool in out) > MAX_GPUS:
        raise ValueError(f"would be more than {MAX_GPUS} GPUs")
    return _with_pools(request, tuple(out))


def _faster(level: NetworkLevel, factor: float) -> NetworkLevel:
    port = level.port_bytes_per_s
    return level.model_copy(
        update={
            "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * factor,
            "port_bytes_per_s": None if port is None else port * factor,
        }
    )


def _network(request: PlanRequest, value: str) -> PlanRequest:
    factor, cluster = _require_factor(value), request.cluster
    pools = _faster_pools(cluster, factor, lambda pool, level: level.span > pool.gpus_per_node)
    between = cluster.inter_pool and _faster(cluster.inter_pool, factor)
    return _with_cluster(
        request,
        cluster.model_copy(
            update={"pools": pools, "inter_pool": between, "name": f"{cluster.name} with {value} network"}
        ),
    )


def _nvlink(request: PlanRequest, value: str) -> PlanRequest:
    factor, cluster = _require_factor(value), request.cluster
    pools = _faster_pools(cluster, factor, lambda pool, level: level.span <= pool.gpus_per_node)
    name = f"{cluster.name} with {value} links inside a node"
    return _with_cluster(request, cluster.model_copy(update={"pools": pools, "name": name}))


def _faster_pools(cluster: ClusterSpec, factor: float, which: Callable[[Pool, NetworkLevel], bool]) -> tuple[Pool, ...]:
    return tuple(
        pool.model_copy(
            update={"levels": tuple(_faster(level, factor) if which(pool, level) else level for level in pool.levels)}
        )
        for pool in cluster.pools
    )


def _gpu(request: PlanRequest, value: str) -> PlanRequest:
    old, colon, new = value.rpartition(":")
    entry = catalog_gpu(new)
    replaced = catalog_gpu(old).gpu.name if colon and old not in request.cluster.gpus else old
    cluster = request.cluster
    if colon and replaced not in {pool.gpu for pool in cluster.pools}:
        raise ValueError(f"no pool has GPUs of type {replaced}")
    pools = tuple(
        pool.model_copy(update={"gpu": entry.gpu.name}) if not colon or pool.gpu == replaced else pool
        for pool in cluster.pools
    )
    used = {pool.gpu for pool in pools}
    gpus = {name: gpu for name, gpu in (cluster.gpus | {entry.gpu.name: entry.gpu}).items() if name in used}
    name = "+".join(f"{pool.nodes}x{pool.gpus_per_node}x{pool.gpu}" for pool in pools)
    return _with_cluster(request, cluster.model_copy(update={"pools": pools, "gpus": gpus, "name": name}))


def _memory(request: PlanRequest, value: str) -> PlanRequest:
    factor, cluster = _require_factor(value), request.cluster
    gpus = {
        name: gpu.model_copy(
            update={
                "memory_bytes": round(gpu.memory_bytes * factor),
                "usable_memory_bytes": round(gpu.usable_memory_bytes * factor),
            }
        )
        for name, gpu in cluster.gpus.items()
    }
    return _with_cluster(
        request, cluster.model_copy(update={"gpus": gpus, "name": f"{cluster.name} with {value} memory"})
    )


def _batch(request: PlanRequest, value: str) -> PlanRequest:
    factor, batch = _factor(value), request.workload.global_batch_size
    if factor is None and (not value.isdecimal() or len(value) > 9):
        raise ValueError("must be a factor such as 2x, or a number of sequences")
    size = batch * factor if factor is not None else float(value)
    if size < 1 or not size.is_integer():
        raise ValueError(f"gives {size:g} sequences a step, which is no whole number")
    workload = request.workload.model_copy(update={"global_batch_size": int(size)})
    return request.model_copy(update={"workload": workload})


def _without(request: PlanRequest, value: str) -> PlanRequest:
    ids = {rule.id for rule in rules.RULE_SETS[request.target.rules]}
    prefix = f"{request.target.rules}."
    name = value if "." in value else prefix + value
    known = ids | {rules.family(each) for each in ids}
    if name not in known:
        families = sorted({rules.family(each).removeprefix(prefix) for each in ids})
        raise ValueError(f"is no rule of {request.target.name}; families are {', '.join(families)}")
    target = request.target.model_copy(update={"waived_rules": (*request.target.waived_rules, name)})
    return request.model_copy(update={"target": target})


_CHANGES: dict[str, Callable[[PlanRequest, str], PlanRequest]] = {
    "gpus": _gpus,
    "network": _network,
    "nvlink": _nvlink,
    "gpu": _gpu,
    "memory": _memory,
    "batch": _batch,
    "without": _without,
}
