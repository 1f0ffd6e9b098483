"""Simpler ways to plan, each priced by the cost model that the planner has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import log2
from typing import Any

import numpy as np

from benchmarks.published_recipes import published as published_runs
from meshwright.cost_models.backtest.plans import Case, case_of
from meshwright.cost_models.backtest.rows import UnsupportedError, run_of
from meshwright.planner.answer.document import plan_of
from meshwright.planner.answer.explain import describe
from meshwright.planner.corrections import estimate_of
from meshwright.planner.engine.arrangements import Arrangement
from meshwright.planner.engine.explore import Search
from meshwright.planner.engine.finalists import Finalist, fitting
from meshwright.planner.engine.pinned import without_forbidden
from meshwright.planner.engine.space import block_mode, candidates
from meshwright.planner.errors import IllegalPlan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan as searched_plan
from meshwright.planner.single import document_for_plan, estimate_degrees
from meshwright.specs.batch import IntArray
from meshwright.specs.errors import SpecError
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Plan, collapse_blocks, expand_blocks
from meshwright.specs.target import RecomputeMode

from .blind import flattened, levels_of

#: Candidates looked at together, lowest bound first.
TOGETHER = 256
#: Quickest even plans that are tried until one is legal with its layers where they lie.
LEGAL_TRIES = 8


@dataclass(frozen=True)
class Baseline:
    """A plan of another way to plan: its step time, or None and why there is none."""

    step_time_s: float | None = None
    plan: str = ""
    why: str = ""


def even_sizes(layers: int, chunks: int) -> list[int]:
    """Layers of each chunk, as equal as they can be, the first ones one more."""
    return [layers // chunks + (k < layers % chunks) for k in range(chunks)]


def evenly_split(plan: Plan, recompute: RecomputeMode) -> Plan:
    """The plan with equal decoder layers in every chunk and another recompute mode."""
    chunks = sorted((chunk for stage in plan.stages for chunk in stage.chunks), key=lambda chunk: chunk.order)
    blocks = [block for chunk in chunks for block in expand_blocks(chunk.blocks)]
    decoders = [place for place, (kind, _) in enumerate(blocks) if kind == "decoder"]
    starts = np.cumsum([0, *even_sizes(len(decoders), len(chunks))])[1:-1]
    cuts = [0, *(decoders[start] for start in starts), len(blocks)]
    held = {chunk.order: collapse_blocks(blocks[cuts[q] : cuts[q + 1]]) for q, chunk in enumerate(chunks)}
    stages = []
    for stage in plan.stages:
        own = tuple(chunk.model_copy(update={"blocks": held[chunk.order]}) for chunk in stage.chunks)
        stages.append(stage.model_copy(update={"chunks": own, "recompute": recompute}))
    return plan.model_copy(update={"stages": tuple(stages), "recompute": recompute})


def even_on_our_grid(request: PlanRequest, plan: Plan) -> Baseline:
    """Our plan with equal layers in every chunk and, where it may recompute any number of a chunk's first layers, the
    fewest that then fit."""
    mode = plan.recompute
    open_mode = block_mode(request.target) is not None and mode.granularity in ("none", "full")
    layers, chunks = request.model.num_layers, sum(len(stage.chunks) for stage in plan.stages)
    modes = [mode]
    if open_mode:
        modes = [_first_layers(count) for count in range(max(even_sizes(layers, chunks)) + 1)]
    low, high = -1, len(modes) - 1
    figures = _priced(request, evenly_split(plan, modes[high]))
    if figures is None:
        return Baseline(why="does not fit")
    while high - low > 1:
        middle = (low + high) // 2
        found = _priced(request, evenly_split(plan, modes[middle]))
        low, high, figures = (middle, high, figures) if found is None else (low, middle, found)
    return Baseline(figures.step_time_s, describe(evenly_split(plan, modes[high])))


def _first_layers(count: int) -> RecomputeMode:
    return RecomputeMode(granularity="full", method="block", num_layers=count) if count else RecomputeMode()


def _priced(request: PlanRequest, plan: Plan) -> Estimate | None:
    """What a plan costs; None where it does not fit."""
    found = estimate_of(request, plan)
    return found if found.fits else None


def best_even(request: PlanRequest, plans: Iterable[Plan]) -> Baseline:
    """The best plan with equal layers in every chunk, over all degrees of the space.

    Pools are used whole, in any order or left out, or as any of ``plans`` uses them.
    """
    search = Search(without_forbidden(request))
    search.price_whole_pools()
    known = {priced.arrangement for priced in search.result.priced}
    for place in dict.fromkeys(arrangement_of(request, plan) for plan in plans):
        if place not in known:
            search.add(place, candidates(search.request, place))
    quickest: list[Finalist] = []
    for finalist in _even_finalists(search):
        quickest = sorted([*quickest, finalist], key=lambda each: each.order)[:LEGAL_TRIES]
    for finalist in quickest:
        plan = plan_of(search.request, search, finalist)
        found = _document(request, plan)
        if found.step_time_s is not None:
            return found
    return Baseline(why="none fits")


def arrangement_of(request: PlanRequest, plan: Plan) -> Arrangement:
    """Which pools run how many stages of a plan."""
    index = {pool.name: k for k, pool in enumerate(request.cluster.pools)}
    runs = [(pool, len(list(run))) for pool, run in groupby(index[stage.groups[0].pool] for stage in plan.stages)]
    degrees = plan.stages[0].degrees
    return Arrangement(degrees.tp * degrees.cp * degrees.dp, tuple(p for p, _ in runs), tuple(n for _, n in runs))


def _even_finalists(search: Search) -> Iterable[Finalist]:
    """Even plans of all candidates that fit, each quicker than those before it; lowest bound first."""
    every = search.result.priced
    least = [np.where(priced.least_fill() <= 1.0, priced.least_step_s(), np.inf) for priced in every]
    bound = np.concatenate([*least, np.empty(0)])
    owner = np.concatenate([*(np.full(len(part), k) for k, part in enumerate(least)), np.empty(0, dtype=np.int64)])
    member = np.concatenate([*(np.arange(len(part)) for part in least), np.empty(0, dtype=np.int64)])
    order = np.argsort(bound, kind="stable")
    best_s = np.inf
    for start in range(0, len(order), TOGETHER):
        rows = order[start : start + TOGETHER]
        rows = rows[bound[rows] < best_s]
        if not len(rows):
            return
        split = [
            finalist
            for k in np.unique(owner[rows]).tolist()
            for finalist in _evenly(every[k], member[rows[owner[rows] == k]])
        ]
        for each in sorted(split, key=lambda each: each.bound_s):
            if each.bound_s >= best_s:
                break
            step_s = float(each.batch.step_s(each.candidate, each.cuts[None], each.leading)[0])
            if step_s < best_s:
                best_s = step_s
                yield Finalist(each.batch, each.candidate, each.cuts, step_s, each.bound_s, each.leading)


def _evenly(priced: Any, index: IntArray) -> Iterable[Finalist]:
    """Candidates split evenly with the fewest layers recomputed that then fit."""
    decoders = np.flatnonzero(priced.counted > 0)
    for virtual in np.unique(priced.batch.vpp[index]).tolist():
        same = index[priced.batch.vpp[index] == virtual]
        sizes = even_sizes(len(decoders), priced.arrangement.pp * virtual)
        starts = np.cumsum([0, *sizes])[1:-1]
        one = np.array([0, *decoders[starts], len(priced.counted)], dtype=np.int64)
        cuts = np.broadcast_to(one, (len(same), len(one)))
        yield from fitting(priced, same, cuts)


def topology_blind(request: PlanRequest) -> Baseline:
    """The plan of a search that takes every level for equally fast (:func:`.blind.flattened`), on the true cluster."""
    if levels_of(request.cluster) < 2:
        return Baseline(why="one level")
    found = searched_plan(request.model_copy(update={"cluster": flattened(request.cluster)}))
    if found.plan is None:
        return Baseline(why=found.reason or found.status)
    return _document(request, found.plan)


def best_single_pool(request: PlanRequest) -> Baseline:
    """The best plan on any one pool alone."""
    found = []
    for pool in request.cluster.pools:
        alone = request.cluster.model_copy(update={"pools": (pool,), "links": ()})
        single = searched_plan(request.model_copy(update={"cluster": alone}))
        if single.estimate is not None and single.plan is not None:
            found.append((single.estimate.step_time_s, f"{pool.name}: {describe(single.plan)}"))
    return Baseline(*min(found)) if found else Baseline(why="none fits")


def published(request: PlanRequest, names: tuple[str, ...]) -> Baseline:
    """The fastest of the published recipes that are legal and fit, of those the ones nearest to the request.

    Their degrees, virtual stages, micro-batch, recompute and sharding are taken to the request's batch and sequence
    length, their layers split best. Recipes are for the same model, GPU type, count and precision; near is the
    sequence length first, then the batch.
    """
    if not names:
        return Baseline(why="none published")
    work = request.workload

    def distance(case: Case) -> tuple[float, float]:
        found = case.workload
        return (
            abs(log2(found.seq_length / work.seq_length)),
            abs(log2(found.global_batch_size / work.global_batch_size)),
        )

    recipes = sorted(_recipes(request, names), key=distance)
    for _, near in groupby(recipes, key=distance):
        fitting = []
        for case in near:
            found = _attempt(lambda case=case: estimate_degrees(request, _degrees(case.plan)))  # type: ignore[misc]
            if found.step_time_s is not None:
                shape = f"{case.workload.global_batch_size} x {case.workload.seq_length}"
                fitting.append((found.step_time_s, f"{case.run.id} ({shape}): {found.plan}"))
        if fitting:
            return Baseline(*min(fitting))
    return Baseline(why="none fits" if recipes else "none published")


def _recipes(request: PlanRequest, names: tuple[str, ...]) -> list[Case]:
    pool = request.cluster.pools[0]
    out: list[Case] = []
    rows, models = _runs()
    for row in rows:
        if row["model"] not in names:
            continue
        try:
            case = case_of(run_of(row), models)
        except UnsupportedError:
            continue
        same = case.cluster.pools[0].gpu == pool.gpu and case.cluster.num_gpus == request.cluster.num_gpus
        if same and case.workload.precision == request.workload.precision:
            out.append(case)
    return out


@lru_cache(maxsize=1)
def _runs() -> tuple[list[dict[str, str]], dict[str, Any]]:
    return published_runs()


def _degrees(plan: Plan) -> dict[str, Any]:
    names = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size", "recompute")
    sharding = {"sharding": plan.sharding} if isinstance(plan.sharding, str) else {"sharding": "fsdp"}
    return {name: getattr(plan, name) for name in names} | sharding


def _document(request: PlanRequest, plan: Plan) -> Baseline:
    """A whole plan, priced where it is legal and fits."""
    return _attempt(lambda: document_for_plan(request, plan))


def _attempt(price: Callable[[], Any]) -> Baseline:
    try:
        found = price()
    except IllegalPlan as error:
        return Baseline(why=f"illegal: {error}")
    except SpecError as error:
        return Baseline(why=f"impossible: {error}")
    if not found.estimate.fits:
        return Baseline(why="does not fit")
    return Baseline(found.estimate.step_time_s, describe(found.plan))
