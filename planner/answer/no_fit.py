"""When nothing fits: why, what binds, and the nearest change that would work."""

from __future__ import annotations

import time

import numpy as np

from meshwright.cost_models.protocol import STATIC
from meshwright.cost_models.uneven import equal_leaves
from meshwright.specs.batch import CellKeys
from meshwright.specs.catalog import gpu as catalog_gpu
from meshwright.specs.cluster import ClusterSpec, Pool
from meshwright.specs.cluster_io import cluster_from_data
from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.errors import SpecError

from ..corrections import cost_model, estimate_of
from ..engine.explore import Search
from ..engine.finalists import Finalist, SearchResult
from ..engine.host_memory import may_offload_optimizer
from ..engine.space import divisors
from ..engine.splits import split_plain, split_virtual
from ..engine.widen import searched
from ..errors import DeadlineExceeded
from ..request import PlanRequest
from .document import inputs_of, plan_of, provenance
from .explain import GIB, left_out

#: The smallest fitting cluster is looked for up to this many GPUs.
MAX_GPUS = 131_072
#: Sizes tried one by one before the look goes on in doublings.
SIZES_TRIED = 64
#: Candidates split at most to see whether any fits.
MAX_SPLITS = 4096


def infeasible(request: PlanRequest, result: SearchResult, deadline: float | None = None) -> PlanDocument:
    """The answer to a request without a legal plan that fits. ``deadline`` in ``time.monotonic()`` ends the look for
    a cluster that would do."""
    explanation = left_out(result, None, request.cluster)
    if len(result.refused_pools) == len(request.cluster.pools):
        reason = "no pool of the cluster can run this precision: " + "; ".join(result.refused_pools.values())
    elif not result.priced:
        reason, more = _illegal(result)
        explanation += more
    else:
        reason, why = _overflow(request, result)
        nearest, change = _would_fit(request, deadline)
        reason += nearest
        explanation += [why, change]
    return PlanDocument(
        status="infeasible",
        reason=reason,
        complete=result.complete,
        inputs=inputs_of(request),
        explanation=tuple(explanation),
        provenance=provenance(request),
    )


def undecided(request: PlanRequest) -> PlanDocument:
    """The answer where the work limit was reached before any plan that fits was found."""
    return PlanDocument(
        status="unknown",
        reason="the work limit was reached before a plan that fits was found; raise it to learn whether there is one",
        complete=False,
        inputs=inputs_of(request),
        provenance=provenance(request),
    )


def _would_fit(request: PlanRequest, deadline: float | None) -> tuple[str, Explanation]:
    """The smallest cluster that would do, as the end of the reason and as an explanation."""
    try:
        bigger = smallest_fitting(request, deadline)
    except DeadlineExceeded as error:
        return "", Explanation(kind="would-fit", message=str(error))
    if bigger is None:
        message = f"no cluster of this kind up to {MAX_GPUS} GPUs fits; use a shorter sequence or a smaller batch"
        return f"; {message}", Explanation(kind="would-fit", message=message)
    size = f"{bigger.num_gpus} GPUs ({bigger.name})"
    data = {"num_gpus": bigger.num_gpus, "cluster": bigger.name}
    reason = f"; the smallest cluster of this kind that fits is {size}"
    return reason, Explanation(kind="would-fit", message=f"{size} would be enough", data=data)


def _illegal(result: SearchResult) -> tuple[str, list[Explanation]]:
    if not result.candidates:
        reason = (
            "no candidate is left: the fixed, capped and forbidden choices exclude every plan of this cluster and batch"
        )
        return reason, []
    words = "; ".join(f"{rule}: {message}" for rule, message in sorted(result.refusals.items()))
    reason = f"the target's rules refuse all {result.candidates} candidates: {words}"
    return reason, [
        Explanation(kind="illegal", message=reason, data={"rejected": dict(sorted(result.rejected.items()))})
    ]


def closest(result: SearchResult) -> Finalist:
    """The legal candidate that overflows least, split by time without regard to memory, as lean as it may be."""
    fills = [priced.mean_fill() for priced in result.priced]
    owner = int(np.argmin([fill.min() for fill in fills]))
    priced, candidate = result.priced[owner], int(fills[owner].argmin())
    one = np.array([candidate])
    leading = np.array([int(priced.counted.sum()) if priced.is_block[candidate] else 0])
    if priced.batch.vpp[candidate] > 1:
        cuts = split_virtual(priced, one)[0]
    else:
        cuts = split_plain(priced, one, leading=leading, ignore_memory=True)[0][0]
    longest = max(int(np.diff(np.cumsum(np.append(0, priced.counted))[cuts]).max()), 1)
    return Finalist(priced, candidate, cuts, np.inf, np.inf, min(int(leading[0]), longest))


def _overflow(request: PlanRequest, result: SearchResult) -> tuple[str, Explanation]:
    search = Search(request)
    search.result = result
    plan = plan_of(request, search, closest(result))
    figures = estimate_of(request, plan)
    fill = [stage.reserved_bytes / stage.limit_bytes for stage in figures.stages]
    worst = int(np.argmax(fill))
    stage = figures.stages[worst]
    term, size = max(stage.breakdown_bytes.items(), key=lambda item: item[1])
    name = {"optimizer": "optimizer state"}.get(term, term)
    allowed = stage.limit_bytes * (1 - request.memory_headroom)
    reason = (
        f"does not fit: even the leanest plan needs {stage.reserved_bytes / GIB:.1f} GiB on a GPU of stage {worst}, "
        f"{allowed / GIB:.1f} GiB may be used; the binding term is {name} with {size / GIB:.1f} GiB"
    )
    data = {
        "stage": worst,
        "term": term,
        "needed_bytes": stage.reserved_bytes,
        "allowed_bytes": int(allowed),
        "breakdown_bytes": dict(stage.breakdown_bytes),
    }
    return reason, Explanation(kind="no-fit", message=reason, data=data)


def smallest_fitting(request: PlanRequest, deadline: float | None = None) -> ClusterSpec | None:
    """The smallest cluster of the same kind on which some legal plan fits; None up to ``MAX_GPUS``.

    Every size is tried, from where all states spread over all GPUs would have room, since neither legality nor fitting
    grows with size; after ``SIZES_TRIED`` sizes that do not do, only every doubling is. Raises
    :class:`DeadlineExceeded` when ``time.monotonic()`` passes ``deadline``.
    """
    needed = least_state_bytes(request)
    tried, last = 0, 0
    for size in sizes(request.cluster):
        cluster = scaled(request.cluster, size)
        usable = sum(pool.num_gpus * cluster.gpu_of(pool).usable_memory_bytes for pool in cluster.pools)
        if usable < needed or (tried >= SIZES_TRIED and size < 2 * last):
            continue
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineExceeded("the smallest cluster that fits was not found in time")
        changed = {"cluster": cluster, "objective": "time", "work_limit": MAX_SPLITS, "deadline_s": None}
        if searched(request.model_copy(update=changed), first_fit=True).result.best is not None:
            return cluster
        tried, last = tried + 1, size
    return None


def least_state_bytes(request: PlanRequest) -> float:
    """Weights, gradients and optimizer state of the whole model, each once: no cluster can hold less.

    Optimizer state does not count where it may live in host memory.
    """
    keys = CellKeys(*(np.array([value]) for value in (1, 1, 1, 1, 1, 1, 0, 0, 1)))
    costs = cost_model(request)
    each = costs.cells(keys).static_bytes_by[0, costs.blocks.kind_of].sum(axis=0)
    return float(each.sum() - (each[STATIC.index("optimizer")] if may_offload_optimizer(request) else 0.0))


def sizes(cluster: ClusterSpec) -> list[int]:
    """Cluster sizes to try, in units of :func:`scaled`: parts of a node of a single pool, then whole nodes."""
    if len(cluster.pools) > 1:
        unit = sum(pool.num_gpus for pool in cluster.pools)
        smallest = min(pool.nodes for pool in cluster.pools)
        return list(range(1, max(2, MAX_GPUS * smallest // unit)))
    node = node_size(cluster.pools[0])
    return [*divisors(node)[:-1], *range(node, MAX_GPUS + 1, node)]


def scaled(cluster: ClusterSpec, size: int) -> ClusterSpec:
    """The cluster at another size, same types and fabric.

    With one pool ``size`` is its GPU count: less than a node, or whole nodes. With several it is the node count of the
    smallest pool; the others keep their proportion.
    """
    if len(cluster.pools) == 1:
        pool = cluster.pools[0]
        node = node_size(pool)
        if node != pool.gpus_per_node:
            return cluster_from_data(f"{size}x{pool.gpu}")
        if size < node:
            part = pool.model_copy(update={"gpus_per_node": size})
            return cluster.model_copy(update={"pools": (resized(part, 1),), "name": f"1x{size}x{pool.gpu}"})
        pools: tuple[Pool, ...] = (resized(pool, size // node),)
    else:
        least = min(pool.nodes for pool in cluster.pools)
        pools = tuple(resized(pool, max(1, round(pool.nodes * size / least))) for pool in cluster.pools)
    name = "+".join(f"{pool.nodes}x{pool.gpus_per_node}x{pool.gpu}" for pool in pools)
    return cluster.model_copy(update={"pools": pools, "name": name})


def node_size(pool: Pool) -> int:
    """GPUs of a full node: the reference node where the pool is a part of one, else the pool's own."""
    try:
        return max(pool.gpus_per_node, catalog_gpu(pool.gpu).node.gpus_per_node)
    except SpecError:
        return pool.gpus_per_node


def resized(pool: Pool, nodes: int) -> Pool:
    """The pool with another number of nodes; its outermost level spans them. Host names are not kept, unequal
    leaves become equal ones."""
    pool = equal_leaves(pool)
    total = nodes * pool.gpus_per_node
    inner = [level for level in pool.levels[:-1] if level.span < total]
    outer = pool.levels[-1].model_copy(update={"span": max(total, (inner[-1].span + 1) if inner else total)})
    return pool.model_copy(update={"nodes": nodes, "levels": (*inner, outer), "hosts": None})
