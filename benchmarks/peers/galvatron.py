"""Galvatron's Llama2-7B cases under Galvatron's own cost model.

    python -m benchmarks.peers.galvatron [--write]

All layers are alike and share one memory limit, so a stage needs at most a mix of two strategies; all pairs, all counts
and all strategies of the rest are tried for every number of micro-batches (``mix``). ``planner`` is the planner's own
search and its splitter with these costs (:class:`~benchmarks.peers.galvatron_costs.GalvatronCosts`), which finds how
many layers take which strategy of every pair without Ulysses. ``--write`` stores the mixes in Galvatron's format.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.megatron_export.peers.galvatron import LayerChoice, strategy_json
from meshwright.planner.engine.explore import Search
from meshwright.planner.request import PlanRequest
from meshwright.profiler.importers import ImportOptions, read
from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.model_io import load_model
from meshwright.specs.targets import load_target
from meshwright.specs.workload import workload_from_options

from .data import GALVATRON, HERE
from .galvatron_costs import MIXES, GalvatronCosts
from .galvatron_model import CONTEXT_MB, RESERVED_ABOVE_GB, RESERVED_SHARE, Cost, GalvatronModel, Strategy

LAYERS, HIDDEN = 32, 4096
WIDTHS = (1, 2, 4, 8)
#: Steps that near are equal: the model is far less exact, and the leaner plan is safer.
TOLERANCE = 5e-4


@dataclass(frozen=True)
class Case:
    """A batch on a cluster; ``published`` samples/s and megabytes of the plan that Galvatron's search returns."""

    name: str
    nodes: int
    batch: int
    memory_gb: float
    published_per_s: float
    published_mb: float
    published_cpu_s: float


CASES = (
    Case("A", 1, 16, 36, 14.73, 36757, 98.6),
    Case("B", 1, 64, 38, 15.31, 38581, 182.4),
    Case("D", 2, 64, 38, 30.35, 38871, 285.6),
    Case("E", 8, 128, 38, 121.6, 38865, 390.8),
)


@dataclass(frozen=True)
class Outcome:
    """Layers by strategy, the rest's, seconds a step and megabytes, reserve included."""

    chunks: int
    layers: tuple[tuple[Strategy, int], ...]
    rest: Strategy
    step_s: float
    memory_mb: float
    cpu_s: float = 0.0


def step_ms(compute_ms: FloatArray, synced_ms: FloatArray, rest_ms: FloatArray, chunks: int) -> FloatArray:
    """One stage: micro-batches one after the other, then what is left of the reduction, which the rest hides."""
    micro_batch = compute_ms + rest_ms
    out: FloatArray = chunks * micro_batch + np.maximum(synced_ms - micro_batch, 0.0)
    return out


def reserve_mb(memory_gb: float) -> float:
    """What its search keeps free."""
    return RESERVED_SHARE * memory_gb * 1024 if memory_gb > RESERVED_ABOVE_GB else 0.0


def strategies(model: GalvatronModel, batch: int, chunks: int, recompute: bool) -> list[Strategy]:
    """All strategies of its space whose replicas divide a micro-batch; one replica alone is never ZeRO-3 there."""
    return [
        Strategy(width, ulysses, zero3, again)
        for width in WIDTHS
        if width <= model.world and batch % (chunks * (model.world // width)) == 0
        for ulysses in ((False, True) if width > 1 else (False,))
        for zero3 in ((False, True) if model.world > width else (False,))
        for again in ((False, True) if recompute else (False,))
    ]


def search(model: GalvatronModel, batch: int, memory_gb: float) -> Outcome:
    """The leanest plan of one stage within ``TOLERANCE`` of the best one; ValueError where nothing fits."""
    room = memory_gb * 1024 - reserve_mb(memory_gb) - CONTEXT_MB
    tables = [table for chunks in range(1, batch + 1) if batch % chunks == 0 for table in _tables(model, batch, chunks)]
    least = min((float(table.step_ms(room).min()) for table in tables), default=np.inf)
    if not np.isfinite(least):
        raise ValueError("nothing fits")
    near = [table.leanest(room, least * (1 + TOLERANCE)) for table in tables]
    best = min((found for found in near if found is not None), key=lambda found: (found.memory_mb, found.step_s))
    return replace(best, memory_mb=best.memory_mb + CONTEXT_MB + reserve_mb(memory_gb))


@dataclass(frozen=True)
class _Table:
    """Mixes of two strategies [pairs, L + 1] (``count`` layers of the first, the others of the second) at one number of
    micro-batches and one strategy of the rest: milliseconds without and with reduction, megabytes."""

    chunks: int
    ways: list[Strategy]
    first: IntArray
    second: IntArray
    compute_ms: FloatArray
    synced_ms: FloatArray
    memory_mb: FloatArray
    end: Strategy
    rest: Cost

    def step_ms(self, room_mb: float) -> FloatArray:
        """Steps of all mixes, inf where they do not fit."""
        step = step_ms(self.compute_ms, self.synced_ms, np.array(self.rest.compute_ms), self.chunks)
        out: FloatArray = np.where(self.memory_mb + self.rest.memory_mb <= room_mb, step, np.inf)
        return out

    def leanest(self, room_mb: float, at_most_ms: float) -> Outcome | None:
        """The mix with least memory whose step is short enough."""
        step = self.step_ms(room_mb)
        memory = np.where(step <= at_most_ms, self.memory_mb, np.inf)
        pair, count = (int(index) for index in np.unravel_index(int(memory.argmin()), memory.shape))
        if not np.isfinite(memory[pair, count]):
            return None
        mix = ((self.ways[self.first[pair]], count), (self.ways[self.second[pair]], LAYERS - count))
        layers = tuple((way, number) for way, number in mix if number)
        used = float(memory[pair, count]) + self.rest.memory_mb
        return Outcome(self.chunks, layers, self.end, float(step[pair, count]) / 1e3, used)


def _tables(model: GalvatronModel, batch: int, chunks: int) -> Iterator[_Table]:
    ways = strategies(model, batch, chunks, True)
    if not ways:
        return
    cost = [model.layer(way, batch, chunks) for way in ways]
    buffer = np.array([model.buffer_mb(way, batch, chunks) for way in ways])
    first, second = np.triu_indices(len(ways))
    count = np.arange(LAYERS + 1)

    def mixed(values: FloatArray) -> FloatArray:
        out: FloatArray = values[first, None] * count + values[second, None] * (LAYERS - count)
        return out

    compute = mixed(np.array([each.compute_ms for each in cost]))
    synced = mixed(np.array([each.synced_ms for each in cost]))
    memory = mixed(np.array([each.memory_mb for each in cost]))
    gathered = np.maximum(buffer[first], buffer[second])[:, None]
    for end in strategies(model, batch, chunks, False):
        used = memory + np.maximum(gathered, model.buffer_mb(end, batch, chunks))
        rest = model.rest(end, batch, chunks)
        yield _Table(chunks, ways, first, second, compute, synced, used, end, rest)


def solve(case: Case) -> Outcome:
    """A case, reading included."""
    started = time.process_time()
    profile = read("galvatron", GALVATRON).profile
    assert profile is not None
    found = search(GalvatronModel(profile, case.nodes, 8, HIDDEN), case.batch, case.memory_gb)
    cpu_s = time.process_time() - started
    return replace(found, cpu_s=cpu_s)


def solve_by_planner(case: Case) -> tuple[float, float]:
    """Seconds a step of the best plan of the planner's own search, over all pairs of strategies of the layers and all
    strategies of the rest, and CPU seconds, reading included."""
    started = time.process_time()
    found = read("galvatron", GALVATRON, ImportOptions(gpu="A100-SXM-80GB", gpus=8 * case.nodes))
    assert found.profile is not None
    assert found.cluster is not None
    model = GalvatronModel(found.profile, case.nodes, 8, HIDDEN)
    return plan(model, found.cluster, case.batch, case.memory_gb), time.process_time() - started


def plan(model: GalvatronModel, cluster: ClusterSpec, batch: int, memory_gb: float) -> float:
    """Seconds a step of the best plan of the planner's own search, inf where nothing fits."""
    target = load_target("megatron@0.19")
    modes = tuple(mode for mode in target.recompute if mode.granularity != "selective")
    target = target.model_copy(update={"recompute": modes})
    request = PlanRequest(
        model=load_model("llama-2-7b"),
        cluster=cluster,
        workload=workload_from_options({"global_batch_size": batch, "seq_length": 2048}),
        target=target,
        top=1,
        forbid=("vpp", "cp", "pp"),
        memory_headroom=0.0,
    )
    room = memory_gb * 1024 - reserve_mb(memory_gb) - CONTEXT_MB
    best = np.inf
    for end in worth_trying(model, batch):
        for mix in MIXES:
            searching = Search(request, costs=GalvatronCosts(model, end, mix, batch, room, LAYERS, target))
            searching.limit_s = best
            found = searching.run().best
            best = min(best, found.step_time_s if found else np.inf)
    return float(best)


def worth_trying(model: GalvatronModel, batch: int) -> list[Strategy]:
    """Strategies of the rest of which none is slower and larger than another one at every number of micro-batches."""
    kept: set[Strategy] = set()
    for chunks in (count for count in range(1, batch + 1) if batch % count == 0):
        costs = {}
        for end in sorted(strategies(model, batch, chunks, False)):
            cost = model.rest(end, batch, chunks)
            costs[end] = np.array([cost.compute_ms, cost.memory_mb, model.buffer_mb(end, batch, chunks)])
        for end, cost in costs.items():
            better = [(other <= cost).all() and (other < cost).any() for other in costs.values()]
            if not any(better):
                kept.add(end)
    return sorted(kept)


def describe(found: Outcome) -> str:
    """A plan in words."""

    def one(way: Strategy) -> str:
        kind = f"ulysses {way.width}" if way.ulysses else f"tp {way.width}"
        return f"{kind} {'zero3' if way.zero3 else 'zero2'}{' recomputed' if way.recompute else ''}"

    layers = ", ".join(f"{count} x {one(way)}" for way, count in found.layers)
    return f"chunks {found.chunks}; {layers}; rest {one(found.rest)}"


def main(arguments: list[str]) -> None:
    print(f"{'':24s} {'samples/s':>26s}   {'':8s} {'CPU s':>26s}")
    print(f"{'case':4s} {'GPUs':>4s} {'batch':>5s} {'GB':>3s} {'mix':>12s} {'planner':>8s} {'Galvatron':>9s}", end="")
    print(f" {'MB':>8s} {'mix':>8s} {'planner':>8s} {'Galvatron':>9s}")
    for case in CASES:
        found = solve(case)
        planner_s, planner_cpu_s = solve_by_planner(case)
        print(
            f"{case.name:4s} {8 * case.nodes:4d} {case.batch:5d} {case.memory_gb:3.0f} "
            f"{case.batch / found.step_s:12.3f} {case.batch / planner_s:8.3f} {case.published_per_s:9.2f} "
            f"{found.memory_mb:8.0f} {found.cpu_s:8.2f} {planner_cpu_s:8.2f} {case.published_cpu_s:9.1f}  "
            f"{describe(found)}"
        )
        if "--write" in arguments:
            layers = [
                LayerChoice(way.width, way.ulysses, way.zero3, way.recompute)
                for way, count in found.layers
                for _ in range(count)
            ]
            rest = LayerChoice(found.rest.width, found.rest.ulysses, found.rest.zero3, False)
            plan = strategy_json([layers], rest, found.chunks, case.batch, 8 * case.nodes)
            path = HERE / f"galvatron_plan_{case.name.lower()}.json"
            path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
