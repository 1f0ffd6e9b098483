"""Galvatron's cost model as published, on its own profile: seconds and megabytes of layers, of the rest, and of a plan.

Layers are alike. A layer runs ``tp``-way tensor parallel (Megatron's, with sequence parallelism) or ``sp``-way Ulysses,
keeps its states sharded over all data-parallel ranks (ZeRO-2 or -3) and may recompute its activations. The rest
(embedding and head) has a width of its own. Milliseconds and megabytes (2^20) inside, as its formulas are written.

One stage only: the plans of its Llama2-7B cases have one. ``tests/test_peers_galvatron.py`` holds the published steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.specs.hardware_profile import HardwareProfile, LayerPoint

_MEGABYTE = 2**20
#: What the optimum of a step needs beside layers and rest, megabytes a device (its context), and the share of memory
#: that it keeps free on cards of more than 20 GB.
CONTEXT_MB, RESERVED_SHARE, RESERVED_ABOVE_GB = 1024.0, 0.2, 20.0
#: Backward takes twice the forward pass; it is never profiled.
BACKWARD_OVER_FORWARD = 2.0
#: All-gathers of a layer under tensor parallelism, all-to-alls of one under Ulysses; half as many more of the former
#: where the layer is recomputed.
TP_GATHERS, SP_EXCHANGES = 6, 4
#: States of a parameter over its 32-bit bytes (16 bytes), and what sharding never removes.
STATES_OVER_FP32, SHARDING_FLOOR = 4.0, 0.003


@dataclass(frozen=True, order=True)
class Strategy:
    """How layers (or the rest) run. ``ulysses``: ``width`` ranks share the sequence, not the weights."""

    width: int
    ulysses: bool
    zero3: bool
    recompute: bool = False

    @property
    def tp(self) -> int:
        return 1 if self.ulysses else self.width


@dataclass(frozen=True)
class Cost:
    """Milliseconds of the forward pass, of both without and with the gradients' reduction, and megabytes."""

    forward_ms: float
    compute_ms: float
    synced_ms: float
    memory_mb: float


class GalvatronModel:
    """Costs on ``nodes`` x ``gpus_per_node`` GPUs, from an imported profile."""

    def __init__(self, profile: HardwareProfile, nodes: int, gpus_per_node: int, hidden_size: int):
        self.world, self.nodes, self.gpus_per_node = nodes * gpus_per_node, nodes, gpus_per_node
        layers = [point for point in profile.layers if point.kind == "decoder"]
        rest = [point for point in profile.layers if point.kind == "rest" and point.position == "only"]
        self.slope, self.intercept = _line(layers)
        self.rest_slope, self.rest_intercept = _line(rest)
        measured = [point for point in layers if point.activation_bytes is not None and point.sequence_parallel]
        self.parameter_mb = max(float(point.params or 0) * point.tp for point in measured) * 4 / _MEGABYTE
        self.activation_mb = {p.tp: _mb(p.activation_bytes) for p in measured if not p.recompute}
        self.checkpoint_mb = next(_mb(p.activation_bytes) for p in measured if p.recompute)
        self.sample_mb = 2 * (measured[0].seq_length or 0) * hidden_size / _MEGABYTE  # 16-bit activations of a boundary
        held = [point for point in rest if point.static_bytes is not None and point.sequence_parallel]
        self.rest_states_mb = {point.tp: _mb(point.static_bytes) for point in held}
        self.rest_activation_mb = {point.tp: _mb(point.activation_bytes) for point in held}
        (overlap,) = profile.overlaps
        self.slowdown = overlap.compute_slowdown
        here = [p for p in profile.collectives if (p.nodes, p.gpus_per_node) == (nodes, gpus_per_node)]
        self._bus: dict[tuple[int, str], float] = {}
        self._sized: dict[tuple[str, int], dict[float, float]] = {}
        for point in here:
            megabytes, milliseconds = point.bytes / _MEGABYTE, point.seconds * 1e3
            if point.placement:
                bus = 2 * (point.ranks - 1) / point.ranks * megabytes / milliseconds
                if point.op == "all_reduce":
                    self._bus[point.ranks, point.placement] = bus
            else:
                self._sized.setdefault((point.op, point.ranks), {})[megabytes] = milliseconds

    def layer(self, how: Strategy, batch: int, chunks: int) -> Cost:
        """One layer, for the micro-batches of a global batch; a strategy whose replicas do not divide it is refused."""
        local = self.local_batch(how, batch, chunks)
        forward = self.slope * local / how.width + self.intercept
        backward = BACKWARD_OVER_FORWARD * forward + (forward if how.recompute else 0.0)
        reduce = self._reduce_ms(self.parameter_mb / how.tp / 2, self.world // how.tp, strided=how.tp > 1)
        shared = self._shared_ms(how, local) + (reduce / 2 if how.zero3 else 0.0)
        states = STATES_OVER_FP32 * self.parameter_mb / how.tp * self.sharded(how, chunks)
        return Cost(
            forward_ms=forward,
            compute_ms=forward + backward + shared,
            synced_ms=forward + self.overlapped(reduce, backward) + shared,
            memory_mb=float(np.ceil(states + self.kept_mb(how, batch, chunks))),
        )

    def kept_mb(self, how: Strategy, batch: int, chunks: int) -> float:
        """What a layer keeps of a micro-batch."""
        kept = self.checkpoint_mb / how.width if how.recompute else self.activation_mb[how.width]
        return kept * self.local_batch(how, batch, chunks)

    def rest(self, how: Strategy, batch: int, chunks: int) -> Cost:
        """Embedding and head, whose gradients' reduction is never waited for."""
        local = self.local_batch(how, batch, chunks)
        forward = self.rest_slope * local / how.width + self.rest_intercept
        backward = BACKWARD_OVER_FORWARD * forward
        gather = 0.0
        if how.zero3:  # the parameters of both passes
            megabytes = self.rest_states_mb[how.tp] / STATES_OVER_FP32 / 2
            gather = self._reduce_ms(megabytes, self.world // how.tp, strided=how.tp > 1) / 4
        shared = self._table_ms("all_reduce", how.tp, self._message_mb(local)) if how.tp > 1 else 0.0
        compute = self._hidden(gather, forward) + self._hidden(gather, backward) + shared
        states = self.rest_states_mb[how.tp] * self.sharded(how, chunks)
        return Cost(forward, compute, compute, states + self.rest_activation_mb[how.width] * local)

    def local_batch(self, how: Strategy, batch: int, chunks: int) -> int:
        """Samples of a micro-batch on the ranks that share one."""
        replicas = self.world // how.width
        if batch % (chunks * replicas):
            raise ValueError(f"{batch} samples are no multiple of {chunks} micro-batches on {replicas} replicas")
        return batch // chunks // replicas

    def sharded(self, how: Strategy, chunks: int) -> float:
        """What is left of the states on a rank; gradients that are added up over micro-batches stay whole longer."""
        ranks = self.world // how.tp
        left = 1 / ranks + SHARDING_FLOOR
        if how.zero3:
            return left if chunks == 1 else 7 / 8 * left + 1 / 8
        return 7 / 8 * left + 1 / 8 if chunks == 1 else 6 / 8 * left + 2 / 8

    def buffer_mb(self, how: Strategy, batch: int, chunks: int) -> float:
        """The buffer that tensor-parallel ranks gather a sequence into, one for all layers."""
        return self._message_mb(self.local_batch(how, batch, chunks)) if how.tp > 1 else 0.0

    def overlapped(self, reduce_ms: float, backward_ms: float) -> float:
        """Both at once, each slower by the overlap's factor, then the rest of the longer one alone."""
        slow = self.slowdown
        reduce, backward = reduce_ms * slow, backward_ms * slow
        if reduce > backward:
            return backward + (reduce - backward) / slow
        return reduce + (backward - reduce) / slow

    def _hidden(self, communication_ms: float, compute_ms: float) -> float:
        """Communication under compute, which it slows."""
        slowed = compute_ms * self.slowdown
        if communication_ms >= slowed:
            return communication_ms
        return communication_ms + (slowed - communication_ms) / self.slowdown

    def _shared_ms(self, how: Strategy, local: int) -> float:
        if how.width == 1:
            return 0.0
        if how.ulysses:
            return SP_EXCHANGES * self._table_ms("all_to_all", how.width, self._message_mb(local))
        gather = self._table_ms("all_reduce", how.width, self._message_mb(local)) / 2
        return TP_GATHERS * (1.5 if how.recompute else 1.0) * gather

    def _message_mb(self, local: int) -> float:
        return self.sample_mb * local

    def _reduce_ms(self, megabytes: float, ranks: int, *, strided: bool) -> float:
        if ranks == 1:
            return 0.0
        wanted = "strided" if strided else "consecutive"
        bus = self._bus.get((ranks, wanted)) or self._bus.get((ranks, "consecutive")) or self._bus[ranks, "strided"]
        return 2 * (ranks - 1) / ranks * megabytes / bus

    def _table_ms(self, op: str, ranks: int, megabytes: float) -> float:
        known = self._sized[op, ranks]
        if megabytes in known:
            return known[megabytes]
        slope, intercept = self._sized_line[op, ranks]
        return slope * megabytes + intercept

    @cached_property
    def _sized_line(self) -> dict[tuple[str, int], tuple[float, float]]:
        out = {}
        for key, known in self._sized.items():
            slope, intercept = np.polyfit(list(known), list(known.values()), 1)
            out[key] = (float(slope), float(intercept))
        return out


def _line(points: list[LayerPoint]) -> tuple[float, float]:
    """Milliseconds of a micro-batch as a line in its samples, by least squares."""
    timed = [(point.micro_batch_size, (point.forward_s or 0.0) * 1e3) for point in points if point.forward_s]
    slope, intercept = np.polyfit([x for x, _ in timed], [y for _, y in timed], 1)
    return float(slope), float(intercept)


def _mb(size_bytes: float | None) -> float:
    return float(size_bytes or 0.0) / _MEGABYTE
