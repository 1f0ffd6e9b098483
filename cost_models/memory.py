"""Bytes that stay: weights, gradients, optimizer state by sharding; the rule that says what fits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.workload import BYTES, Workload

#: Allocated over reserved bytes of torch's caching allocator: 66.55 of 70.9 GB measured on a B200 run of SimuMax
#: (docs/b200, Apache-2.0), whose own model uses the same 0.94.
ALLOCATED_OVER_RESERVED = 0.94
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
    """Whether a rank fits: ``fixed + allocated / 0.94 <= limit * (1 - headroom)``."""
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


def optimizer_bytes_per_param(workload: Workload) -> float:
    """Main copy (none where parameters are fp32 themselves) and the moments: two of Adam, one of SGD with momentum."""
    own_master = workload.params_dtype == "fp32" and workload.main_params_dtype == "fp32"
    main = 0 if own_master else BYTES[workload.main_params_dtype]
    moments = 2 if workload.optimizer == "adam" else 1
    return main + moments * BYTES[workload.moments_dtype]


def static_bytes(
    stored: FloatArray, trained: FloatArray, shards: FloatArray, sharding: str, workload: Workload
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(weights, gradients, optimizer) bytes of ``stored`` parameters of which ``trained`` are trained.

    ``shards`` ranks divide: nothing under ``none``, optimizer state under ``zero1``, gradients too under ``zero2``,
    and all three under ``zero3`` and ``fsdp``.
    """
    part = np.maximum(shards, 1.0)
    whole = np.ones_like(part)
    divides = {
        "none": (whole, whole, whole),
        "zero1": (whole, whole, part),
        "zero2": (whole, part, part),
        "zero3": (part, part, part),
        "fsdp": (part, part, part),
    }[sharding]
    weights = stored * BYTES[workload.params_dtype] / divides[0]
    gradients = trained * BYTES[workload.gradient_dtype] / divides[1]
    return weights, gradients, trained * optimizer_bytes_per_param(workload) / divides[2]


def low_precision_copy_bytes(linear_params: FloatArray, precision: str, transposed: bool) -> FloatArray:
    """Quantised weight copies that Transformer Engine caches beside 16-bit parameters: one, or two where the hardware
    multiplies only one layout (Hopper fp8)."""
    size = {"fp8": 1.0, "mxfp8": 2 * 1.03125, "nvfp4": 2 * 0.5625}.get(precision, 0.0)
    return linear_params * size * (2.0 if transposed and precision == "fp8" else 1.0)
