"""Bytes that stay: weights, gradients, optimizer state by sharding; the rule that says what fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.workload import BYTES, Workload

#: Allocated over reserved bytes of torch's caching allocator: median of the eleven measured runs that state both
#: (SimuMax docs/b200, Megatron-Bridge verification cards), 0.93 to 0.98. It holds on a full card too: the fullest
#: published run allocates 0.954 of what the context leaves (Megatron-Bridge, Qwen3.8-27B on GB200).
ALLOCATED_OVER_RESERVED = 0.96
#: Context, modules and lazily loaded kernels of a CUDA process, outside torch's allocator (nvidia-smi of an idle
#: torch process on H100: about 0.5 GiB).
CONTEXT_BYTES = 0.5 * 2**30
#: NCCL buffers of one family of process groups: 342 to 392 MB measured on H100 (aiconfigurator systems/h100_sxm.yaml).
NCCL_FAMILY_BYTES = 367e6
#: Workspaces that torch does count: cuBLAS 32 MiB on Hopper (torch default CUBLAS_WORKSPACE_CONFIG) for torch and
#: again for Transformer Engine, and its 32 MiB of scratch.
WORKSPACE_BYTES = 96 * 2**20
#: FSDP units whose full parameters are live at once: the one that runs and the one prefetched.
FSDP_LIVE_UNITS = 2
#: Bytes of a stored element and its scales by precision: one scale byte for 32 (MX) or 16 (NVFP4) elements; NVFP4 packs
#: two elements a byte (OCP MX specification 1.0; NVIDIA NVFP4).
LOW_PRECISION_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


@dataclass(frozen=True)
class Held:
    """What a sharding name means for memory: its ``level`` divides over a group's ranks / ``replicas``."""

    level: str
    replicas: int


@cache
def held(name: str) -> Held:
    """``zero1``, ``zero1:4``: optimizer state sharded inside each of 4 replicas; ``hsdp:4``: so is everything."""
    level, _, replicas = name.partition(":")
    return Held("fsdp" if level == "hsdp" else level, int(replicas or 1))


def reserved_bytes(allocated_bytes: npt.ArrayLike, fixed_bytes: npt.ArrayLike) -> FloatArray:
    """Device memory that a process takes: what torch reserves for ``allocated_bytes`` plus what lies outside it."""
    out: FloatArray = np.asarray(allocated_bytes, dtype=float) / ALLOCATED_OVER_RESERVED + np.asarray(fixed_bytes)
    return out


def block_capacity_bytes(limit_bytes: npt.ArrayLike, fixed_bytes: npt.ArrayLike, headroom: float = 0.0) -> FloatArray:
    """Allocated bytes that the blocks of a stage may fill: the inverse of :func:`reserved_bytes` at the limit."""
    usable = np.asarray(limit_bytes, dtype=float) * (1.0 - headroom) - np.asarray(fixed_bytes, dtype=float)
    out: FloatArray = usable * ALLOCATED_OVER_RESERVED
    return out


def fits(
    allocated_bytes: npt.ArrayLike, fixed_bytes: npt.ArrayLike, limit_bytes: npt.ArrayLike, headroom: float = 0.0
) -> npt.NDArray[np.bool_]:
    """Whether a rank fits: ``fixed + allocated / 0.96 <= limit * (1 - headroom)``."""
    return np.asarray(np.asarray(allocated_bytes) <= block_capacity_bytes(limit_bytes, fixed_bytes, headroom))


def fixed_bytes(tp: IntArray, cp: IntArray, ep: IntArray, stage_ranks: IntArray) -> FloatArray:
    """Bytes outside torch's allocator: the context and one NCCL family for each kind of group larger than one.

    Pipeline groups are always counted (the keys do not know the pipeline degree).
    """
    families = (
        (tp > 1).astype(float) + (cp > 1) + (ep > 1) + (stage_ranks // tp > 1) + 1.0  # pipeline and world
    )
    out: FloatArray = CONTEXT_BYTES + NCCL_FAMILY_BYTES * families
    return out


def optimizer_bytes_per_param(workload: Workload, matrices: bool = True) -> float:
    """Main copy (none where the stored parameters are of its dtype) and :func:`moment_bytes_per_param`."""
    return workload.main_params_bytes + moment_bytes_per_param(workload, matrices)


def update_bytes_per_param(workload: Workload) -> float:
    """Bytes that the update of a parameter moves: the gradient as it was added up is read, main copy and moments are
    read and written, the stored parameter is written, and read where it is its own main copy."""
    stored = BYTES[workload.params_dtype] * (1 if workload.main_params_bytes else 2)
    return workload.gradient_bytes + 2 * optimizer_bytes_per_param(workload) + stored


def moment_bytes_per_param(workload: Workload, matrices: bool = True) -> float:
    """Two moments of Adam, one of SGD with momentum.

    Muon keeps one for the matrices of the layers; embedding and head (``matrices`` false) stay with Adam.
    """
    single = workload.optimizer == "sgd" or (workload.optimizer == "muon" and matrices)
    return (1 if single else 2) * BYTES[workload.moments_dtype]


def static_bytes(
    stored: FloatArray,
    trained: FloatArray,
    shards: FloatArray,
    sharding: str,
    workload: Workload,
    low: FloatArray | float = 0.0,
    low_bytes: float = 0.0,
    matrices: bool = True,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(weights, gradients, optimizer) bytes of ``stored`` parameters of which ``trained`` are trained.

    ``shards`` ranks divide: nothing under ``none``, optimizer state under ``zero1``, gradients too under ``zero2``,
    and all three under ``zero3`` and ``fsdp``; under ``hsdp:N`` they are N replicas. ``low`` of the stored parameters
    are in low precision themselves (``params_dtype`` fp8) at ``low_bytes`` each; the others are then 16 bit.
    """
    kept = held(sharding)
    part = np.maximum(shards / kept.replicas, 1.0)
    whole = np.ones_like(part)
    divides = {
        "none": (whole, whole, whole),
        "zero1": (whole, whole, part),
        "zero2": (whole, part, part),
        "zero3": (part, part, part),
        "fsdp": (part, part, part),
    }[kept.level]
    each = 2 if workload.params_dtype == "fp8" else BYTES[workload.params_dtype]
    weights = ((stored - low) * each + low * low_bytes) / divides[0]
    gradients = trained * workload.gradient_bytes / divides[1]
    return weights, gradients, trained * optimizer_bytes_per_param(workload, matrices) / divides[2]


def low_precision_bytes(precision: str, transposed: bool) -> float:
    """Bytes a weight takes in the precision that GEMMs read: two layouts of MX and NVFP4 blocks (scales run along the
    reduced axis), and of fp8 where the hardware multiplies only one (Hopper; ``transposed``). 0 in 16 and 32 bit."""
    size = LOW_PRECISION_BYTES.get(precision, 0.0)
    return size * (2.0 if precision != "fp8" or transposed else 1.0)
