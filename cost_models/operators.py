"""Seconds of one operator on one GPU, by shape. Arrays broadcast; all sizes are what one rank runs.

Formulas: tile-quantised roofline for matrix products, length-dependent rate for attention, bandwidth for the rest.
Constants come from :mod:`.efficiency`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import GpuType

from .efficiency import AttentionFit, Efficiency, GemmFit, efficiency

Array = npt.ArrayLike

#: Output tiles of the libraries' kernels (CUTLASS/cuBLAS); the best one is taken, as their heuristics do.
TILES = np.array([(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)], dtype=float)
#: Ways to cut K over thread blocks when a product has few output tiles.
SPLITS = np.array([1, 2, 4], dtype=float)
#: A tile of 128 x 128 is the smallest that runs at full rate.
FULL_TILE = 128 * 128
#: Query rows one thread block of a flash-attention kernel works on.
ATTENTION_ROWS = 128
#: Share of a dense product that a causal mask leaves.
CAUSAL = 0.5
#: Backward attention is five products where forward is two (recomputing the scores).
ATTENTION_BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Device:
    """A GPU type at a precision with its constants. ``peak`` is the precision's dense FLOP/s, 0 if unsupported."""

    gpu: GpuType
    precision: str
    peak: float
    dense_peak: float
    bandwidth: float
    sms: int
    fit: Efficiency

    @property
    def supported(self) -> bool:
        return self.peak > 0 and self.dense_peak > 0


def dense_precision(precision: str) -> str:
    """Precision of the products that stay out of low precision (head, router, attention)."""
    return "bf16" if precision in ("fp8", "mxfp8", "nvfp4") else precision


def device(gpu: GpuType, precision: str) -> Device:
    """``gpu`` at ``precision``; fp32 runs on tf32 matrix units where the type has them."""
    dense = dense_precision(precision)
    tf32 = gpu.peak_flops.get("tf32", 0.0)
    peak = gpu.peak_flops.get(precision, 0.0)  # type: ignore[call-overload]
    dense_peak = gpu.peak_flops.get(dense, 0.0)  # type: ignore[call-overload]
    if precision == "fp32":
        peak = dense_peak = max(peak, tf32)
    return Device(
        gpu, precision, peak, dense_peak, gpu.memory_bandwidth_bytes_per_s, gpu.num_sms, efficiency(gpu, precision)
    )


def gemm_s(
    fit: GemmFit,
    peak: float,
    sms: int,
    bandwidth: float,
    m: Array,
    n: Array,
    k: Array,
    groups: Array = 1.0,
    element_bytes: float = 2.0,
    output_bytes: float = 2.0,
) -> FloatArray:
    """Seconds of ``groups`` equal products (m, k) x (k, n), run as one kernel.

    The larger of tile time and memory time, plus the launch. A tile of Tm x Tn costs ``2 Tm Tn (K + k0)`` FLOP at the
    rate of one SM; the last, partly filled wave is paid by the share ``wave_hardness``.
    """
    m, n, k, groups = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (m, n, k, groups)))
    flat = [x.reshape(1, 1, -1) for x in (m, n, k, groups)]
    rows, columns, depth, count = flat
    tile_m, tile_n = TILES[:, None, None, 0], TILES[:, None, None, 1]
    splits = SPLITS[None, :, None]
    waves = count * np.ceil(rows / tile_m) * np.ceil(columns / tile_n) * splits / sms
    waves = fit.wave_hardness * np.ceil(waves) + (1 - fit.wave_hardness) * np.maximum(waves, 1.0)
    rate = peak / sms * fit.eff * np.minimum(1.0, tile_m * tile_n / FULL_TILE) ** fit.tile_exponent
    tile_s = (waves * 2 * tile_m * tile_n * (depth / splits + fit.overhead_k) / rate).min(axis=(0, 1))
    traffic = count * (element_bytes * (rows * depth + depth * columns) + output_bytes * rows * columns)
    memory_s = (traffic / (bandwidth * fit.bandwidth_eff))[0, 0]
    busy = np.maximum(tile_s, memory_s)
    out: FloatArray = np.where((m * n * k * groups).reshape(-1) > 0, busy + fit.launch_s, 0.0).reshape(m.shape)
    return out


def matmul_s(
    on: Device, m: Array, n: Array, k: Array, groups: Array = 1.0, low_precision: bool = True, grouped: bool = False
) -> FloatArray:
    """Seconds of a linear map on ``on`` under a long run's clocks; ``low_precision`` False keeps it at 16 bit."""
    low = low_precision and on.precision != dense_precision(on.precision)
    fit, peak = (on.fit.gemm, on.peak) if low_precision else (on.fit.dense_gemm, on.dense_peak)
    rate = peak * on.fit.sustained * (on.fit.grouped if grouped else 1.0)
    size = {"nvfp4": 0.5625, "fp8": 1.0, "mxfp8": 1.03}[on.precision] if low else 2.0
    if on.precision in ("fp32", "tf32"):
        size = 4.0
    if not rate:
        return np.full(np.broadcast_shapes(*(np.shape(x) for x in (m, n, k, groups))), np.inf)
    return gemm_s(fit, rate, on.sms, on.bandwidth, m, n, k, groups, element_bytes=size)


def attention_rate(fit: AttentionFit, sms: int, length: Array, heads: Array) -> FloatArray:
    """Share of the peak: rises with the length, and with the thread blocks that there are for the SMs."""
    length, heads = np.asarray(length, dtype=float), np.asarray(heads, dtype=float)
    blocks = heads * np.ceil(length / ATTENTION_ROWS) / sms
    out: FloatArray = fit.eff * length / (length + fit.half_length) * blocks / (blocks + 1.0)
    return out


def attention_s(
    on: Device,
    sequences: Array,
    length: Array,
    keys: Array,
    heads: Array,
    qk_dim: float,
    v_dim: float,
    shards: Array = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of flash attention of ``sequences`` of ``length`` tokens.

    ``keys`` are the keys that a query sees on average (half the length when causal, less in a window); ``heads`` on
    this rank; ``shards`` ranks share a sequence evenly (context parallel).
    """
    sequences, length, heads, shards = (np.asarray(x, dtype=float) for x in (sequences, length, heads, shards))
    if not on.dense_peak:
        nothing = np.full(np.broadcast_shapes(*(np.shape(x) for x in (sequences, length, heads, shards))), np.inf)
        return nothing, nothing
    flops = 2.0 * sequences * heads * length / shards * np.asarray(keys, dtype=float) * (qk_dim + v_dim)
    rate = on.dense_peak * attention_rate(on.fit.attention, on.sms, length / shards, sequences * heads)
    launch = on.fit.attention.launch_s * shards
    forward = flops / rate + launch
    backward = ATTENTION_BACKWARD_FLOPS * flops / (rate * on.fit.attention.backward_eff) + launch
    return forward, backward


def seen_keys(length: float, window: int | None, top_k: int | None = None) -> float:
    """Mean number of keys that a causal query of a sequence sees, with a sliding window or a top-k selection."""
    limit = min(x for x in (window, top_k, length) if x)
    if limit >= length:
        return length * CAUSAL
    return float(limit - limit * limit / (2 * length))


def scan_s(on: Device, tokens: Array, flops_per_token: Array) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of a chunked linear-attention or state-space scan."""
    flops = np.asarray(tokens, dtype=float) * np.asarray(flops_per_token, dtype=float)
    forward = flops / max(on.dense_peak * on.fit.scan, 1e-30) + on.fit.kernel_s
    return forward, ATTENTION_BACKWARD_FLOPS * forward


def stream_s(on: Device, moved_bytes: Array, share: float | None = None, kernels: float = 1.0) -> FloatArray:
    """Seconds of memory-bound kernels that move ``moved_bytes``; ``share`` of the bandwidth (default: streaming)."""
    moved = np.asarray(moved_bytes, dtype=float)
    out: FloatArray = moved / (on.bandwidth * (share or on.fit.memory)) + kernels * on.fit.kernel_s
    return out
