"""NEST's cost model as published, as its code has it or with its unit errors put right.

A plan is a chain of layers cut into stages of ``t * ep * cp`` devices, repeated ``d`` times, under 1F1B. A step takes
the longest stage times (micro-batches a replica + stages - 1), plus the all-reduce of the first stage's parameters. A
stage takes its forward and backward seconds, its forward again where activations are recomputed (all stages but the
last; as its code has it, at the backward's price), and the message that it receives. Stages fill the devices from the
last one on, so that the network level of a message follows from its stage. See ``Mode`` for what is put right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.profiler.importers.nest import ordered_ids
from meshwright.profiler.importers.reading import Entry, load
from meshwright.specs.batch import FloatArray


@dataclass(frozen=True)
class Mode:
    """``seconds``: compute is read as milliseconds and added in seconds. ``recompute_forward``: a forward done again
    costs a forward. ``adam``: 16 bytes a parameter instead of 4."""

    seconds: bool = False
    recompute_forward: bool = False
    adam: bool = False


AS_PUBLISHED = Mode()
UNITS_FIXED = Mode(seconds=True, recompute_forward=True)
WITH_ADAM = Mode(seconds=True, recompute_forward=True, adam=True)


@dataclass(frozen=True)
class Plan:
    """``cuts``: stage i holds the layers ``cuts[i]`` to ``cuts[i+1] - 1``, counted from 0 (the embedding)."""

    tp: int
    dp: int
    cuts: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.cuts) - 1


@dataclass(frozen=True)
class Chain:
    """The layers at one tensor-parallel degree; every table is [V + 1, V + 1] over (first layer, layer after the last).

    Seconds forward and backward, parameter and activation bytes, and the bytes that arrive from outside.
    """

    forward: FloatArray
    backward: FloatArray
    parameter_bytes: FloatArray
    activation_bytes: FloatArray
    received_bytes: FloatArray

    @property
    def layers(self) -> int:
        return len(self.forward) - 1


class NestProblem:
    """One solver input on ``devices`` devices in nodes of 8, four to a switch (None: as the input says)."""

    def __init__(
        self, path: Path, devices: int | None = None, mode: Mode = AS_PUBLISHED, least_edge_bytes: float = 0.0
    ):
        top = load(path)
        self.mode = mode
        given = None if devices is None else [8, 4, devices // 32]
        self.levels = given or [entry.count() for entry in top["devices_per_level"].items()]
        self.devices = int(np.prod(self.levels))
        self.bandwidths = top["bws"].numbers(3)
        self.latencies = top["latency_per_level"].numbers(3)
        self.sending = [min(self.bandwidths[: level + 1]) for level in range(3)]
        self.width = top["ep_degree"].count() * top["cp_degree"].count()
        self.micro_batches = top["mbsInBatch"].positive()
        self.memory_bytes = top["maxMemoryPerDevice"].positive()
        self.recomputes = bool(top["activationRecomputation"].value)
        self.chains = {
            entry.key_count(): self._chain(entry, top["edges"][tp], least_edge_bytes)
            for tp, entry in top["nodes"].fields()
        }

    def _chain(self, nodes: Entry, edges: Entry, least_edge_bytes: float) -> Chain:
        ordered = [entry for _, entry in ordered_ids(nodes)]
        scale = 1e-3 if self.mode.seconds else 1.0
        names = ("optimalLatencyFw", "optimalLatencyBw", "parameterSize", "activationSize")
        forward, backward, parameters, activations = (
            _ranges(np.array([entry[name].number() for entry in ordered])) for name in names
        )
        received = np.zeros_like(forward)
        first = np.arange(len(forward))
        for edge in edges.items():
            source, target = int(edge["sourceId"].any_number()) + 1, int(edge["destId"].any_number()) + 1
            size = max(edge["communicationCost"].number(), least_edge_bytes)
            arrives = (source < first[:, None]) & (first[:, None] <= target) & (target < first[None, :])
            received += np.where(arrives, size, 0.0)
        return Chain(scale * forward, scale * backward, parameters, activations, received)

    def receive_s(self, size_bytes: FloatArray, after: int, width: int) -> FloatArray:
        """What the stage with ``after`` stages behind it waits for its input; nothing where none arrives."""
        level = self._level(after, width)
        seconds = size_bytes / self.sending[level] + self.latencies[level]
        return np.where(size_bytes > 0, seconds * (1 if level == 0 else 2), 0.0)

    def _level(self, after: int, width: int) -> int:
        """The innermost level that holds the stage and the one before it; the last stage has the first devices."""
        own, other = after * width + width - 1, (after + 1) * width
        span = 1
        for level, count in enumerate(self.levels):
            span *= count
            if own // span == other // span:
                return level
        return len(self.levels) - 1

    def stage_s(self, tp: int, after: int) -> FloatArray:
        """[V + 1, V + 1] seconds of the stage with ``after`` stages behind it; inf where empty or too full."""
        chain = self.chains[tp]
        again = chain.forward if self.mode.recompute_forward else chain.backward
        seconds = chain.forward + chain.backward + (again if self.recomputes and after else 0.0)
        seconds = seconds + self.receive_s(chain.received_bytes, after, tp * self.width)
        held = (8 if self.mode.adam else 2) * chain.parameter_bytes + chain.activation_bytes
        kept = chain.received_bytes if self.recomputes else chain.activation_bytes
        fits = held + after * kept <= self.memory_bytes
        some = np.triu(np.ones_like(seconds, dtype=bool), 1)
        return np.where(fits & some, seconds, np.inf)

    def reduce_s(self, parameter_bytes: FloatArray, dp: int) -> FloatArray:
        """Seconds of the all-reduce: halving steps at the inner level, then each outer one on top of all inside."""
        if dp == 1:
            return np.zeros_like(parameter_bytes)
        inside = np.zeros_like(parameter_bytes)
        for step in range(int(np.log2(dp))):
            inside = inside + self.latencies[0] + parameter_bytes / 2**step / self.bandwidths[0]
        total = np.zeros_like(parameter_bytes)
        for level in range(1, len(self.levels)):
            total = total + 2 * (self.latencies[level] + parameter_bytes / self.bandwidths[level]) + inside
            inside = total
        return total

    def step_s(self, plan: Plan) -> float:
        """What a plan takes; inf where it does not fit or has too many devices."""
        width = plan.tp * self.width
        if width * plan.stages * plan.dp > self.devices:
            return float("inf")
        pairs = list(zip(plan.cuts, plan.cuts[1:], strict=False))
        longest = max(float(self.stage_s(plan.tp, plan.stages - 1 - index)[pair]) for index, pair in enumerate(pairs))
        rounds = np.ceil(self.micro_batches / plan.dp) + plan.stages - 1
        first = self.chains[plan.tp].parameter_bytes[pairs[0]]
        return longest * float(rounds) + float(self.reduce_s(np.array([first]), plan.dp)[0])

    def solve(self) -> tuple[Plan, float]:
        """The best plan of all, by dynamic programming over stages from the last one, and its seconds."""
        best: tuple[float, Plan] | None = None
        for tp in self.chains:
            for plan, seconds in self._candidates(tp):
                if best is None or seconds < best[0]:
                    best = (seconds, plan)
        if best is None:
            raise ValueError("nothing fits")
        return best[1], best[0]

    def _candidates(self, tp: int) -> Iterator[tuple[Plan, float]]:
        """The best plan for every number of stages: of all first stages and numbers of replicas."""
        chain, width = self.chains[tp], tp * self.width
        layers = chain.layers
        rest = np.full(layers + 1, np.inf)  # longest stage of the best split of layers a.. into the stages so far
        rest[layers] = 0.0
        choices: list[np.ndarray] = []
        for after in range(min(layers, self.devices // width)):
            longest = np.maximum(self.stage_s(tp, after), rest[None, :])
            stages = after + 1
            replicas = np.arange(1, self.devices // (width * stages) + 1)
            # More replicas with as many micro-batches each only reduce more.
            _, fewest = np.unique(np.ceil(self.micro_batches / replicas), return_index=True)
            for dp in replicas[fewest].tolist():
                count = np.ceil(self.micro_batches / dp) + stages - 1
                seconds = longest[0] * count + self.reduce_s(chain.parameter_bytes[0], dp)
                end = int(seconds.argmin())
                if np.isfinite(seconds[end]):
                    yield Plan(tp, dp, self._trace(end, choices)), float(seconds[end])
            choices.append(longest.argmin(axis=1))
            rest = longest.min(axis=1)

    def best_replicas(self, tp: int, cuts: tuple[int, ...]) -> Plan | None:
        """The best number of replicas of a split; None where the devices are not enough for one."""
        most = self.devices // (tp * self.width * (len(cuts) - 1))
        if not most:
            return None
        _, fewest = np.unique(np.ceil(self.micro_batches / np.arange(1, most + 1)), return_index=True)
        return min((Plan(tp, int(index) + 1, cuts) for index in fewest), key=self.step_s)

    def _trace(self, end: int, choices: list[np.ndarray]) -> tuple[int, ...]:
        cuts = [0, end]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return tuple(cuts)


def _ranges(values: FloatArray) -> FloatArray:
    """[V] -> [V + 1, V + 1]: sum of values a..b-1."""
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    return prefix[None, :] - prefix[:, None]
