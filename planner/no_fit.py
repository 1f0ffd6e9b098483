"""When nothing fits: why, what binds, and the nearest change that would work."""

from __future__ import annotations

import time

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.specs.batch import CellKeys
from meshwright.specs.catalog import gpu as catalog_gpu
from meshwright.specs.cluster import ClusterSpec, Pool
from meshwright.specs.cluster_io import cluster_from_data
from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.errors import SpecError

from .answer_parts import inputs_of, plan_of, provenance
from .errors import DeadlineExceeded
from .explain import GIB, left_out
from .explore import Finalist, Search, SearchResult
from .request import PlanRequest
from .space import divisors
from .splits import split_plain, split_virtual

#: The smallest fitting cluster is looked for up to this many GPUs.
MAX_GPUS = 131_072
#: Candidates with most room that are tried when only fitting matters.
FIRST_FIT_LIMIT = 256


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
        provenance=provenance(),
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


def _closest(result: SearchResult) -> Finalist:
    """The legal candidate that overflows least, split by time without regard to memory."""
    best: tuple[float, int, int] | None = None
    for owner, priced in enumerate(result.priced):
        fill = priced.least_fill()
        candidate = int(fill.argmin())
        if best is None or fill[candidate] < best[0]:
            best = (float(fill[candidate]), owner, candidate)
    assert best is not None  # noqa: S101  called only with priced candidates
    priced, candidate = result.priced[best[1]], best[2]
    if priced.batch.vpp[candidate] > 1:
        cuts = split_virtual(priced, np.array([candidate]))[0]
    else:
        cuts = split_plain(priced, np.array([candidate]), ignore_memory=True)[0][0]
    return Finalist(priced, candidate, cuts, np.inf, np.inf)


def _overflow(request: PlanRequest, result: SearchResult) -> tuple[str, Explanation]:
    search = Search(request)
    search.result = result
    plan = plan_of(request, search, _closest(result))
    parts = (request.model, request.cluster, request.workload, request.target)
    figures = estimate(*parts, plan, request.memory_headroom)
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

    Starts where all states could be spread over all GPUs, doubles until a plan fits, then bisects; assumes that more
    GPUs never stop a plan from fitting, and so may miss a smaller odd size. Raises :class:`DeadlineExceeded` when
    ``time.monotonic()`` passes ``deadline``.
    """
    known: dict[int, bool] = {}
    needed = least_state_bytes(request)

    def fits(size: int) -> bool:
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineExceeded("the smallest cluster that fits was not found in time")
        if size not in known:
            cluster = scaled(request.cluster, size)
            usable = sum(pool.num_gpus * cluster.gpu_of(pool).usable_memory_bytes for pool in cluster.pools)
            changed = {"cluster": cluster, "objective": "time", "work_limit": FIRST_FIT_LIMIT, "deadline_s": None}
            known[size] = usable >= needed and (
                Search(request.model_copy(update=changed)).run(first_fit=True).best is not None
            )
        return known[size]

    sizes = _sizes(request.cluster)
    high = 0
    while not fits(sizes[high]):
        high = 2 * high + 1
        if high >= len(sizes):
            return None
    low = (high - 1) // 2 if high else -1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            high = middle
        else:
            low = middle
    return scaled(request.cluster, sizes[high])


def least_state_bytes(request: PlanRequest) -> float:
    """Weights, gradients and optimizer state of the whole model, each once: no cluster can hold less."""
    keys = CellKeys(*(np.array([value]) for value in (1, 1, 1, 1, 1, 1, 0, 0, 1)))
    costs = CostModel(request.model, request.cluster, request.workload, request.target)
    return float(costs.cells(keys).static_bytes[0, costs.blocks.kind_of].sum())


def _sizes(cluster: ClusterSpec) -> list[int]:
    """Cluster sizes to try, in units of :func:`scaled`: parts of a node of a single pool, then whole nodes."""
    if len(cluster.pools) > 1:
        unit = sum(pool.num_gpus for pool in cluster.pools)
        smallest = min(pool.nodes for pool in cluster.pools)
        return list(range(1, max(2, MAX_GPUS * smallest // unit)))
    node = _node_size(cluster.pools[0])
    return [*divisors(node)[:-1], *range(node, MAX_GPUS + 1, node)]


def scaled(cluster: ClusterSpec, size: int) -> ClusterSpec:
    """The cluster at another size, same types and fabric.

    With one pool ``size`` is its GPU count: less than a node, or whole nodes. With several it is the node count of the
    smallest pool; the others keep their proportion.
    """
    if len(cluster.pools) == 1:
        pool = cluster.pools[0]
        node = _node_size(pool)
        if node != pool.gpus_per_node:
            return cluster_from_data(f"{size}x{pool.gpu}")
        if size < node:
            part = pool.model_copy(update={"gpus_per_node": size})
            return cluster.model_copy(update={"pools": (_resized(part, 1),), "name": f"1x{size}x{pool.gpu}"})
        pools: tuple[Pool, ...] = (_resized(pool, size // node),)
    else:
        least = min(pool.nodes for pool in cluster.pools)
        pools = tuple(_resized(pool, max(1, round(pool.nodes * size / least))) for pool in cluster.pools)
    name = "+".join(f"{pool.nodes}x{pool.gpus_per_node}x{pool.gpu}" for pool in pools)
    return cluster.model_copy(update={"pools": pools, "name": name})


def _node_size(pool: Pool) -> int:
    """GPUs of a full node: the reference node where the pool is a part of one, else the pool's own."""
    try:
        return max(pool.gpus_per_node, catalog_gpu(pool.gpu).node.gpus_per_node)
    except SpecError:
        return pool.gpus_per_node


def _resized(pool: Pool, nodes: int) -> Pool:
    total = nodes * pool.gpus_per_node
    inner = [level for level in pool.levels[:-1] if level.span < total]
    outer = pool.levels[-1].model_copy(update={"span": max(total, (inner[-1].span + 1) if inner else total)})
    return pool.model_copy(update={"nodes": nodes, "levels": (*inner, outer), "hosts": None})
