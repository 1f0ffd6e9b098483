"""Seconds of one operator on one GPU, by shape. Arrays broadcast; all sizes are what one rank runs.

Formulas: tile-quantised roofline for matrix products (:mod:`.gemm`), a rate that rises with keys and thread blocks for
attention and scans (:mod:`.core_attention`), bandwidth for the rest. Constants come from :mod:`.efficiency`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import GpuType

from .core_attention import attention_share, scan_forward_s
from .efficiency import Efficiency, efficiency, sustained_share
from .few import KEPT, Columns, few_columns, of_shape
from .gemm import GemmFit, flat_gemm_s, gemm_s

Array = npt.ArrayLike

#: Bytes of an operand element, with its block scales: one of 32 (mxfp8), one of 16 (nvfp4).
OPERAND_BYTES = {"fp8": 1.0, "fp8_block": 1.03125, "mxfp8": 1.03125, "nvfp4": 0.5625, "fp32": 4.0, "tf32": 4.0}
#: Bytes of an output element: 16 bit; a weight gradient reads and writes the fp32 main gradient (Megatron's
#: gradient-accumulation fusion).
OUTPUT_BYTES, WEIGHT_GRADIENT_BYTES = 2.0, 8.0
#: Share of a dense product that a causal mask leaves.
CAUSAL = 0.5
#: Backward attention is five products where forward is two (recomputing the scores).
ATTENTION_BACKWARD_FLOPS = 2.5
#: Backward over forward seconds of a chunked scan: it computes the chunk states again and three gradients where the
#: forward has two products a chunk (counted, not measured).
SCAN_BACKWARD = 2.5


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
    peak, dense_peak = gpu.clock_share * peak, gpu.clock_share * dense_peak
    return Device(
        gpu, precision, peak, dense_peak, gpu.memory_bandwidth_bytes_per_s, gpu.num_sms, efficiency(gpu, precision)
    )


class _Products(NamedTuple):
    """How linear maps of one kind run on a device: ``peak`` in FLOP/s and ``speedup`` over the 16-bit peak, their fit,
    the speed ``sustained`` in a long run, bytes of an operand element, rate of weight gradients over forward ones."""

    fit: GemmFit
    peak: float
    speedup: float
    sustained: float
    element_bytes: float
    weight_gradient: float
    sms: int
    bandwidth: float

    def rate(self, flops: FloatArray) -> FloatArray:
        """FLOP/s of products of ``flops`` under a long run's clocks."""
        return self.peak * sustained_share(self.sustained, flops, self.speedup)


def _products(on: Device, low_precision: bool, grouped: bool) -> _Products:
    """``low_precision`` False keeps a map at 16 bit."""
    own = low_precision and on.precision != dense_precision(on.precision)
    size = OPERAND_BYTES.get(on.precision, 2.0) if own or on.precision in ("fp32", "tf32") else 2.0
    if low_precision:
        fit, peak, sustained = (on.fit.grouped if grouped else on.fit.gemm), on.peak, on.fit.sustained
    else:
        fit, peak = (on.fit.dense_grouped if grouped else on.fit.dense_gemm), on.dense_peak
        sustained = on.fit.dense_sustained
    speedup = peak / on.dense_peak if on.dense_peak else 1.0
    # The grouped fit has its weight gradients in it.
    weight_gradient = 1.0 if grouped else on.fit.weight_gradient
    return _Products(fit, peak, speedup, sustained, size, weight_gradient, on.sms, on.bandwidth)


def matmul_s(
    on: Device,
    m: Array,
    n: Array,
    k: Array,
    groups: Array = 1.0,
    low_precision: bool = True,
    grouped: bool = False,
    role: Literal["forward", "weight_gradient"] = "forward",
) -> FloatArray:
    """Seconds of a linear map on ``on`` under a long run's clocks; ``low_precision`` False keeps it at 16 bit.

    ``grouped`` products are ``groups`` experts in one call. A ``weight_gradient`` accumulates into fp32; its K are the
    tokens. An input gradient runs at the forward rate (within 1% on B200 and A100, SimuMax's measured layouts).
    """
    how = _products(on, low_precision, grouped)
    if not how.peak:
        return np.full(np.broadcast_shapes(*(np.shape(x) for x in (m, n, k, groups))), np.inf)
    m, n, k, groups = (np.asarray(x, dtype=float) for x in (m, n, k, groups))
    rate, output = how.rate(2.0 * m * n * k * groups), OUTPUT_BYTES
    if role == "weight_gradient":
        rate, output = rate * how.weight_gradient, WEIGHT_GRADIENT_BYTES
    return gemm_s(how.fit, rate, on.sms, on.bandwidth, m, n, k, groups, how.element_bytes, output)


def linear_s(
    on: Device,
    tokens: FloatArray,
    inputs: FloatArray,
    outputs: FloatArray,
    groups: FloatArray,
    low_precision: bool = True,
    grouped: bool = False,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[C] seconds of the three products of a linear map, each as :func:`matmul_s` has it: forward, input gradient,
    weight gradient."""
    few, how = few_columns(tokens, outputs, inputs, groups), _products(on, low_precision, grouped)
    if few is None or not how.peak:
        return (
            matmul_s(on, tokens, outputs, inputs, groups, low_precision, grouped),
            matmul_s(on, tokens, inputs, outputs, groups, low_precision, grouped),
            matmul_s(on, outputs, inputs, tokens, groups, low_precision, grouped, "weight_gradient"),
        )
    forward, backward, weight = _few_linear_s(how, few[1])
    return of_shape(forward, few[0]), of_shape(backward, few[0]), of_shape(weight, few[0])


@lru_cache(maxsize=KEPT)
def _few_linear_s(how: _Products, columns: Columns) -> tuple[tuple[float, ...], ...]:
    """:func:`linear_s` of few shapes, which the layers and plans of one model repeat; its products go at once."""
    tokens, outputs, inputs, groups = columns
    each = len(tokens)
    m, n, k, count, speed, output_bytes = np.array(
        (
            tokens + tokens + outputs,
            outputs + inputs + inputs,
            inputs + outputs + tokens,
            3 * groups,
            2 * each * (1.0,) + each * (how.weight_gradient,),
            2 * each * (OUTPUT_BYTES,) + each * (WEIGHT_GRADIENT_BYTES,),
        ),
        dtype=float,
    )
    rate = how.rate(2.0 * m * n * k * count) * speed
    seconds = flat_gemm_s(
        how.fit, how.sms, how.bandwidth, how.element_bytes, output_bytes, m, n, k, count, rate
    ).tolist()
    return tuple(seconds[:each]), tuple(seconds[each : 2 * each]), tuple(seconds[2 * each :])


def attention_s(
    on: Device,
    sequences: Array,
    length: Array,
    keys: Array,
    heads: Array,
    qk_dim: float,
    v_dim: float,
    shards: Array = 1.0,
    kv_heads: Array | None = None,
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of flash attention of ``sequences`` of ``length`` tokens.

    ``keys`` are the keys that a query sees on average (half the length when causal, less in a window); ``heads`` (and
    ``kv_heads``, by default as many) on this rank; ``shards`` ranks share a sequence evenly (context parallel).
    """
    sequences, length, heads, shards = (np.asarray(x, dtype=float) for x in (sequences, length, heads, shards))
    if not on.dense_peak:
        nothing = np.full(np.broadcast_shapes(*(np.shape(x) for x in (sequences, length, heads, shards))), np.inf)
        return nothing, nothing
    latent = 0 < v_dim < qk_dim
    fit = on.fit.latent_attention if latent else on.fit.attention
    keys, rows = np.asarray(keys, dtype=float), length / shards
    kv_heads = heads if kv_heads is None else np.asarray(kv_heads, dtype=float)
    flops = 2.0 * sequences * heads * rows * keys * (qk_dim + v_dim)
    share, share_back = attention_share(fit, on.sms, rows, keys / shards, sequences * heads, max(qk_dim, v_dim))
    moved = OUTPUT_BYTES * sequences * rows * (heads + kv_heads) * (qk_dim + v_dim)
    memory_s = moved / (on.bandwidth * fit.memory_eff)
    launch = fit.launch_s * shards
    forward = np.hypot(flops / (on.dense_peak * share), memory_s) + launch
    # Backward reads all that forward reads and writes, with the gradient of the output, and writes three gradients.
    busy = ATTENTION_BACKWARD_FLOPS * flops / (on.dense_peak * share_back)
    return forward, np.hypot(busy, 2 * memory_s) + launch


def seen_keys(length: float, window: int | None, top_k: int | None = None) -> float:
    """Mean number of keys that a causal query of a sequence sees, with a sliding window or a top-k selection."""
    limit = min(x for x in (window, top_k, length) if x)
    if limit >= length:
        return length * CAUSAL
    return float(limit - limit * limit / (2 * length))


def scan_s(
    on: Device,
    tokens: Array,
    flops_per_token: Array,
    sequence_heads: Array = 1.0,
    length: Array = 0.0,
    kda: bool = False,
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of a chunked linear-attention or state-space scan of ``tokens`` on this rank.

    ``sequence_heads`` (heads x sequences) chains of ``length`` tokens, one after the other where there are more than
    SMs. ``kda`` takes the rate of Kimi Delta Attention's finer decay; Mamba-2 scans take that of gated DeltaNet.
    """
    flops = np.asarray(tokens, dtype=float) * np.asarray(flops_per_token, dtype=float)
    forward = scan_forward_s(
        on.fit.scan_kda if kda else on.fit.scan, on.dense_peak, on.sms, flops, sequence_heads, length
    )
    return forward, SCAN_BACKWARD * forward


def cast_bytes(precision: str, elements: Array, source_bytes: float = 2.0) -> FloatArray:
    """Bytes that casting a 16-bit matrix for a product of ``precision`` and its gradient moves; 0 at 16 bit and more.

    One read; a row-wise and a column-wise copy with their block scales are written, as Transformer Engine does. The
    block scales of nvfp4 are relative to the largest value of the matrix, which takes a read before.
    """
    if precision not in ("fp8", "mxfp8", "nvfp4"):
        return np.zeros(np.shape(elements))
    reads = 2 if precision == "nvfp4" else 1
    out: FloatArray = np.asarray(elements, dtype=float) * (reads * source_bytes + 2 * OPERAND_BYTES[precision])
    return out


def stream_s(on: Device, moved_bytes: Array, share: float | None = None, kernels: float = 1.0) -> FloatArray:
    """Seconds of memory-bound kernels that move ``moved_bytes``; ``share`` of the bandwidth (default: streaming)."""
    moved = np.asarray(moved_bytes, dtype=float)
    out: FloatArray = moved / (on.bandwidth * (share or on.fit.memory)) + kernels * on.fit.kernel_s
    return out
