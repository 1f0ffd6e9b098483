"""Sailor's profile as look-ups: seconds and sizes of its layers, bandwidth between its machines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.hardware_profile import BandwidthCurve, HardwareProfile, LayerPoint

#: Bytes of weights, gradients, Adam's state and DeepSpeed's copies for a 32-bit parameter (Sailor's memory model).
STATIC_BYTES_PER_PARAMETER = 24.0
#: What a GPU holds beside the model: the upper of the 2 to 3 GB that Sailor reserves.
RESERVED_BYTES = 3e9
#: Memory of the GPU types, bytes.
MEMORY_BYTES = {"A100-40": 40 * 2**30, "V100-16": 16 * 2**30, "GH-96": 96 * 2**30}
_PARAMETER_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """What runs a replica of a stage: one machine with ``tp`` GPUs of a type."""

    gpu: str
    tp: int
    zone: str


class SailorTables:
    """A profile of one model, indexed."""

    def __init__(self, profile: HardwareProfile):
        self._points: dict[tuple[str, int, int], list[LayerPoint]] = {}
        for point in profile.layers:
            self._points.setdefault((point.gpu or "", point.tp, point.micro_batch_size), []).append(point)
        for points in self._points.values():
            points.sort(key=lambda point: point.index or 0)
        self.num_layers = max(len(points) for points in self._points.values())
        self._curves: dict[tuple[Machine, Machine], BandwidthCurve] = {}
        for curve in profile.bandwidths:
            ends = [Machine(end.gpu, end.gpus, end.zone or "") for end in (curve.source, curve.peer)]
            self._curves[ends[0], ends[1]] = curve
        self.row = cache(self._row)

    def profiled(self, gpu: str, tp: int, micro_batch_size: int) -> bool:
        """Whether there are times for it."""
        return (gpu, tp, micro_batch_size) in self._points

    def _row(self, gpu: str, tp: int, micro_batch_size: int, field: str) -> FloatArray:
        values = [float(getattr(point, field)) for point in self._points[gpu, tp, micro_batch_size]]
        return np.array(values)

    def forward_s(self, gpu: str, tp: int, micro_batch_size: int) -> FloatArray:
        """[I] seconds of every layer for a micro-batch."""
        return self.row(gpu, tp, micro_batch_size, "forward_s")

    def backward_s(self, gpu: str, tp: int, micro_batch_size: int) -> FloatArray:
        """[I]."""
        return self.row(gpu, tp, micro_batch_size, "backward_s")

    def update_s(self, gpu: str, tp: int, micro_batch_size: int) -> FloatArray:
        """[I] seconds of the optimizer."""
        return self.row(gpu, tp, micro_batch_size, "update_s")

    def params(self, gpu: str, tp: int, micro_batch_size: int) -> FloatArray:
        """[I] parameters on a rank."""
        return self.row(gpu, tp, micro_batch_size, "params")

    def activation_bytes(self, gpu: str, tp: int, micro_batch_size: int) -> FloatArray:
        """[I] bytes kept for a micro-batch."""
        return self.row(gpu, tp, micro_batch_size, "activation_bytes")

    def output_bytes(self, gpu: str, tp: int, micro_batch_size: int) -> FloatArray:
        """[I] bytes that a layer gives to the next one."""
        return self.row(gpu, tp, micro_batch_size, "output_bytes")

    def bandwidth(self, source: Machine, peer: Machine, size_bytes: float) -> float:
        """Bytes/s of a message between two machines; KeyError where the profile has no such pair."""
        return self._curves[source, peer].bandwidth_bytes_per_s(size_bytes)

    def send_s(self, source: Machine, peer: Machine, size_bytes: float) -> float:
        """Seconds of a message between two machines."""
        return size_bytes / self.bandwidth(source, peer, size_bytes)

    def reduce_s(self, machines: tuple[Machine, ...], params: float) -> float:
        """Seconds of a ring all-reduce of 32-bit gradients, at the slowest pair's rate for a ring's chunk."""
        ranks, size = len(machines), params * _PARAMETER_BYTES
        if ranks == 1 or not size:
            return 0.0
        pairs = {(a, b) for a in set(machines) for b in set(machines) if a != b or machines.count(a) > 1}
        slowest = min(self.bandwidth(a, b, size / ranks) for a, b in pairs)
        return 2 * (ranks - 1) / ranks * size / slowest
