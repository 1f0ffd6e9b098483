"""What host memory takes off a device, and what the transfers cost."""

from __future__ import annotations

from meshwright.specs.cluster import GpuType
from meshwright.specs.workload import BYTES, Workload

from .memory import optimizer_bytes_per_param

#: Bytes/s that one GPU moves to or from pinned host memory, one direction: 0.8 of the link's rate (assumed, as no
#: measurement ships). PCIe 3, 4 and 5 x16 run at 15.75, 31.5 and 63 GB/s (PCI-SIG), NVLink-C2C at 450 GB/s (NVIDIA
#: Grace Hopper whitepaper).
PCIE3, PCIE4, PCIE5, C2C = 12.5e9, 25e9, 50e9, 360e9
#: First compute capability of NVIDIA GPUs on each PCIe generation (A100 8.0, H100 9.0).
GENERATIONS = ((9.0, PCIE5), (8.0, PCIE4))
#: Bytes/s of one GPU's share of the host's memory that a CPU optimizer streams: eight channels of DDR5-4800 (38.4 GB/s
#: each, JEDEC JESD79-5) for the four GPUs of a socket, at the same 0.8.
HOST_MEMORY_BANDWIDTH = 0.8 * 8 * 38.4e9 / 4
#: Layers whose activations are on the device although they are offloaded: the one that leaves, the one that runs.
OFFLOAD_BUFFERS = 2


def host_link_bandwidth(gpu: GpuType) -> float:
    """Bytes/s between a GPU and its host, one direction."""
    if gpu.name.startswith(("GH", "GB")):
        return C2C
    if gpu.vendor == "amd":
        return PCIE5 if gpu.name.startswith("MI3") else PCIE4
    return next((rate for least, rate in GENERATIONS if (gpu.compute_capability or 0.0) >= least), PCIE3)


def activation_offload_s(gpu: GpuType, m: float, moved_bytes: float, passes_s: tuple[float, float]) -> float:
    """Seconds that offload adds to a step of ``m`` micro-batches on one rank: ``moved_bytes`` of activations a
    micro-batch leave beside its forward pass and return beside its backward pass (``passes_s``)."""
    rate = host_link_bandwidth(gpu)
    return m * sum(max(moved_bytes / rate - seconds, 0.0) for seconds in passes_s)


def host_update_s(gpu: GpuType, workload: Workload, params: float, overlapped: bool) -> float:
    """Seconds in which the host updates ``params`` parameters of one rank.

    Gradients come down as they were added up; the host reads them and reads and writes the optimizer's state, and its
    copy of parameters that are their own main copy, at its memory's bandwidth; updated parameters go up. One after the
    other, or ``overlapped`` by parameter, so that the slowest of the three counts (Megatron's
    ``--overlap-cpu-optimizer-d2h-h2d``).
    """
    rate, gradient, stored = host_link_bandwidth(gpu), workload.gradient_bytes, BYTES[workload.params_dtype]
    state = optimizer_bytes_per_param(workload) + (0 if workload.main_params_bytes else stored)
    parts = (params * gradient / rate, params * (gradient + 2 * state) / HOST_MEMORY_BANDWIDTH, params * stored / rate)
    return max(parts) if overlapped else sum(parts)
