"""Options beyond those that every candidate is priced with: searched after them, for what they could still win.

Each :class:`~.waves.Wave` prices the candidates of the search under one more setting: another way of sharding, another
exchange of context parallelism, a share of the optimizer in host memory. A wave leaves out every candidate whose passes
alone, without the terms that the setting may shorten and without regard to memory, take as long as the best plan found:
no split of it can win. So the bound holds over all waves, and where the best plan is near it a wave prices little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.overlap import default_overlap
from meshwright.cost_models.rank_order import DATA_INSIDE, PIPELINE_INSIDE
from meshwright.cost_models.uneven import at_worst, uneven_pools
from meshwright.specs.batch import BoolArray, FloatArray

from ..request import PlanRequest
from .explore import Progress, Search
from .finalists import SearchResult
from .host_memory import (
    OffloadedOptimizer,
    may_offload_activations,
    may_offload_optimizer,
    offloaded_layers,
    within_host_memory,
)
from .pinned import costs_like, costs_with, pinned_search, without_forbidden
from .pricing import PricedBatch
from .waves import LEAST_SENDS, Context, Instances, OptimizerOffload, Order, Sharding, Wave, spans

#: Shares of the optimizer state that are tried in host memory.
OFFLOAD_FRACTIONS = (0.25, 0.5, 1.0)

#: Waves over larger spaces than this run only where nothing fits without them, or where the request allows them.
MOST_CANDIDATES = 8_000

#: What the waves add to the space, in words, for ``bound.space``.
SHARDING_SPACE = (
    "zero2; full sharding with pipeline stages; shards of the optimizer or of everything inside each instance of a "
    "network level, replicated over the instances"
)
CONTEXT_SPACE = (
    "context parallelism by all-to-all, all-gather, or all-to-all inside a network level and a ring over its instances"
)
BOTH_SPACE = "these shardings together with these exchanges"
OPTIMIZER_SPACE = (
    f"{', '.join(f'{fraction:.0%}' for fraction in OFFLOAD_FRACTIONS)} of the optimizer in host memory under zero1"
)
ORDER_SPACE = (
    f"rank orders {DATA_INSIDE} and, under zero1 where sends take at least {LEAST_SENDS:.0%} of a chunk's passes, "
    f"{PIPELINE_INSIDE}"
)
LAYERS_SPACE = (
    "activations of the fewest first layers that make a plan of one stage without recompute fit in host memory, under "
    "any of these options"
)


#: Candidates of the search, and which of them a wave may run.
_Promising = tuple[PricedBatch, BoolArray]


def searched(request: PlanRequest, progress: Progress | None = None, first_fit: bool = False) -> Search:
    """The search of a request with the results of all waves; with ``first_fit`` up to the first plan that fits.
    Leaves of unequal size are taken at their worst (:func:`.at_worst`)."""
    if uneven_pools(request.cluster):
        request = request.model_copy(update={"cluster": at_worst(request.cluster)})
    search = pinned_search(without_forbidden(request), progress)
    layers = int(search.request.fix.get("activation_offload_layers", 0))
    if layers:
        search.price_whole_pools()
        search.result.finalists += offloaded_layers(search, search.result.priced, np.inf, layers)
        return search
    search.run(first_fit)
    _drop_beyond_host(search)
    if not (first_fit and search.result.best) and isinstance(search.costs, CostModel):
        _widen(search, search.costs, first_fit)
    return search


def _drop_beyond_host(search: Search) -> None:
    """Leave out what nodes cannot hold of a pinned share of the optimizer; the bound stays open for it."""
    result = search.result
    kept = [each for each in result.finalists if within_host_memory(search.request, each)]
    dropped = [each.bound_s for each in result.finalists if not within_host_memory(search.request, each)]
    result.untried_bound_s, result.finalists = min([result.untried_bound_s, *dropped]), kept


def _widen(search: Search, costs: CostModel, first_fit: bool) -> None:
    """Add what the waves find to the result of ``search``."""
    result, base = search.result, list(search.result.priced)
    limit = search.request.deadline_s
    deadline = None if limit is None else search.started + limit
    if may_offload_activations(search.request):
        limit_s = result.best.step_time_s if result.best else np.inf
        result.finalists += offloaded_layers(search, base, limit_s)
        search.wider = (LAYERS_SPACE,)
    for wave in _waves(search, costs, base):
        limit_s = result.best.step_time_s if result.best else np.inf
        if may_offload_activations(search.request):
            _offload(search, wave, base, limit_s)
            limit_s = result.best.step_time_s if result.best else np.inf
        found = _promising(wave, base, limit_s, result)
        if not found:
            continue
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            result.untried_bound_s, result.complete, result.deadline_hit = 0.0, False, True
            break
        update = {"deadline_s": left, "work_limit": _left_to_split(search)}
        inner = Search(wave.request.model_copy(update=update), wave.costs(), search.progress)
        inner.chosen = wave.chosen
        for priced, which in found:
            wave.price(inner, priced, which)
        _merge(result, inner.run_on(limit_s, first_fit), wave)
        if first_fit and result.best:
            break


def _offload(search: Search, wave: Wave, base: list[PricedBatch], limit_s: float) -> None:
    """Plans of a wave whose first layers' activations wait in host memory."""
    inner: Search | None = None
    for priced in base:
        which = wave.without_memory(priced, limit_s)
        if not which.any():
            continue
        inner = inner or Search(wave.request, wave.costs())
        inner.chosen = wave.chosen
        wave.price(inner, priced, which)
    if inner is not None:
        search.result.finalists += offloaded_layers(inner, inner.result.priced, limit_s)
        search.result.candidates += inner.result.candidates


def _left_to_split(search: Search) -> int | None:
    """What a request's work limit leaves for a wave."""
    limit = search.request.work_limit
    return None if limit is None else max(limit - search.result.split, 1)


def _promising(wave: Wave, base: list[PricedBatch], limit_s: float, result: SearchResult) -> list[_Promising]:
    """The candidates of a wave that may be quicker than ``limit_s``."""
    out = []
    for priced in base:
        able = wave.rows(priced)
        if not able.any():
            continue
        if id(priced) not in wave.known:
            wave.known[id(priced)] = wave.least_s(priced)
        left = able & (wave.known[id(priced)] < limit_s)
        result.pruned["options"] += int((able & ~left).sum())
        if left.any():
            out.append((priced, left))
    return out


def _merge(result: SearchResult, more: SearchResult, wave: Wave) -> None:
    """Add what a wave found. What it could not settle below the best keeps the bound open."""
    kept = [each for each in more.finalists if within_host_memory(wave.request, each)]
    dropped = [each for each in more.finalists if not within_host_memory(wave.request, each)]
    bounds = [more.untried_bound_s, *(min(each.bound_s, each.step_time_s) for each in dropped)]
    result.untried_bound_s = min(result.untried_bound_s, *bounds)
    result.finalists += kept
    result.candidates += more.candidates
    result.pruned.update(more.pruned)
    result.complete &= more.complete
    result.deadline_hit |= more.deadline_hit
    result.split += more.split


def _waves(search: Search, costs: CostModel, base: list[PricedBatch]) -> Iterator[Wave]:
    """Those that gain most first, since what they find prunes the others. Notes in ``search`` what they add."""
    request, everything = search.request, search.result.best is None or "all_options" in search.request.allow
    if may_offload_optimizer(request):
        search.wider += (OPTIMIZER_SPACE,)
        for fraction in OFFLOAD_FRACTIONS:
            yield OptimizerOffload(request, partial(OffloadedOptimizer, costs, fraction), fraction=fraction)
    orders = request.target.rank_orders
    if (
        orders[0] == DATA_INSIDE
        and PIPELINE_INSIDE in orders
        and "zero1" in request.target.sharding
        and search.result.best
    ):
        search.wider += (ORDER_SPACE,)
        yield Order(request, lambda: costs.ordered(PIPELINE_INSIDE), {**search.chosen, "rank_order": PIPELINE_INSIDE})
    if not everything and search.result.candidates > MOST_CANDIDATES:
        return
    names, instances = _shardings(request, base)
    search.wider += (SHARDING_SPACE,) if names or instances else ()
    every = dict.fromkeys((*request.target.sharding, *names, *instances))
    wide = request.model_copy(update={"target": request.target.model_copy(update={"sharding": tuple(every)})})
    if names:
        # What starts from full sharding is rid of its gathers between nodes, beside compute or not.
        shorter = ("dp_comm", "host") if request.target.shards_fully_on_one_stage_only else ()
        yield Sharding(wide, partial(costs_like, costs, wide), search.chosen, shorter, names=names)
    if instances:
        yield Instances(wide, partial(costs_like, costs, wide), search.chosen, names=instances)
    open_ = not {"cp_comm_type", "cp"} & set(request.forbid) and "cp_comm_type" not in request.fix
    if open_ and set(request.target.context_exchanges) - {"allgather"}:
        search.wider += (CONTEXT_SPACE,)
        yield from _exchanges(search, wide, base, (*names, *instances), everything)


def _exchanges(
    search: Search, wide: PlanRequest, base: list[PricedBatch], shardings: tuple[str, ...], everything: bool
) -> Iterator[Wave]:
    """Other exchanges of context parallelism; with ``shardings`` that of the best plan, or each for ``everything``."""
    known: dict[int, FloatArray] = {}
    contexts = list(_contexts(wide, base))
    yield from contexts
    if everything and shardings and contexts:
        search.wider += (BOTH_SPACE,)
    best = search.result.best
    options = getattr(best.batch.costs, "plan_options", {}) if best else {}
    for wave in contexts if shardings else ():
        if everything or wave.of(options):
            yield Sharding(wide, wave.costs, wave.chosen, wave.shorter, known, shardings, wave)


def _shardings(request: PlanRequest, base: list[PricedBatch]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the sharding levels beyond the search's, and of optimizers with instances; none where one is pinned."""
    target, forbid = request.target, set(request.forbid)
    if "sharding" in request.fix or "zero1" not in target.sharding:
        return (), ()
    names, instances = [], []
    if "zero2" in target.sharding and "zero2" not in forbid:
        names.append("zero2")
    fully = "fsdp" in target.sharding and "fsdp" not in forbid
    if fully and "fsdp" in target.sharding_with_stages:
        names.append("fsdp")
    ranks = {priced.arrangement.stage_ranks for priced in base}
    copies = sorted({r // int(span) for r in ranks for span in spans(request) if r % span == 0 and r > span})
    if "dist_opt_instances" in request.fix:  # one, or the search has it
        return tuple(names), ()
    if "zero1" in target.sharding_replicas and "dist_opt_instances" not in forbid:
        instances = [f"zero1:{count}" for count in copies]
    if fully and "fsdp" in target.sharding_replicas and "hsdp" not in forbid:
        names += [f"hsdp:{count}" for count in copies]
    return tuple(names), tuple(instances)


def _contexts(request: PlanRequest, base: list[PricedBatch]) -> Iterator[Context]:
    usual = default_overlap(request.model, request.target.switches, request.target.context_exchanges)
    if usual.context != "p2p":  # sparse attention must gather
        return
    degrees = sorted({int(cp) for priced in base for cp in np.unique(priced.batch.cp)})
    shorter, known = ("cp_comm", "host"), dict[int, FloatArray]()
    for kind in request.target.context_exchanges:
        if kind in ("a2a", "allgather"):
            costs = partial(costs_with, request, {"context": kind}, {"cp_comm_type": kind})
            yield Context(request, costs, {"cp_comm_type": (kind,)}, shorter, known)
        elif kind == "a2a+p2p":
            for cp in degrees:
                for inner in (size for size in range(2, cp) if cp % size == 0):
                    if not np.isin(spans(request) % inner, 0).any():
                        continue
                    overlap, options = {"context": kind, "context_a2a_size": inner}, {"cp_comm_type": kind}
                    costs = partial(costs_with, request, overlap, options | {"cp_a2a_size": inner})
                    chosen = {"cp_comm_type": (kind,), "hierarchical_cp_sizes": (inner, cp // inner)}
                    yield Context(request, costs, chosen, shorter, known, inner, cp)
