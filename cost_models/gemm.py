"""Seconds of a matrix product by shape: a tile-quantised roofline with a bounded, fitted correction.

Fitted by ``benchmarks/fit_efficiency.py`` on measured shapes. Arrays broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray

Array = npt.ArrayLike

#: (rows, columns, parts of K) of the libraries' kernels (CUTLASS, cuBLAS): output tiles, and K cut over thread blocks
#: where a product has few of them. The best one is taken, as their heuristics do.
TILINGS = (
    *((m, n, 1) for m, n in ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))),
    *((m, n, parts) for m, n in ((128, 128), (128, 64), (64, 128)) for parts in (2, 4, 8)),
    (64, 64, 2),
    (64, 64, 4),
)
TILE_ROWS = np.array([[64.0], [128.0], [256.0]])
TILING_ROWS = np.array([{64: 0, 128: 1, 256: 2}[m] for m, _, _ in TILINGS])
TILING_COLUMNS = np.array([{64: 0, 128: 1, 256: 2}[n] for _, n, _ in TILINGS])
SPLITS = np.array([[float(parts)] for _, _, parts in TILINGS])
AREAS = np.array([[float(m * n)] for m, n, _ in TILINGS])
#: A tile of 128 x 128 is the smallest that runs at full rate.
FULL_TILE = 128 * 128
#: Time scale on which a power-limited chip lowers its clock inside one call, in seconds (fitted form, as published with
#: aiconfigurator's operator data).
THROTTLE_S = 200e-6
#: Knots of the correction in log2 of m, n, k: two octaves apart over the measured shapes.
KNOTS = (np.arange(7.0, 15.1, 2), np.arange(6.0, 16.1, 2), np.arange(6.0, 16.1, 2))
KNOT_STEP = 2.0
FIRST_KNOT = np.array([[axis[0]] for axis in KNOTS])
LAST_CELL = np.array([[len(axis) - 2] for axis in KNOTS])
STRIDES = np.array([len(KNOTS[1]) * len(KNOTS[2]), len(KNOTS[2]), 1])
CORNERS = np.array([[(STRIDES * (i, j, q)).sum()] for i in (0, 1) for j in (0, 1) for q in (0, 1)])
#: Cells from which on equal shapes are priced once.
MANY = 256
#: Incommensurable weights of sizes, groups and peak in a row's code.
CODE_SCALES = (1.0, 2.0**0.5, 3.0**0.5, 5.0**0.5, 7.0**0.5 * 1e-12)


@dataclass(frozen=True, eq=False)
class GemmFit:
    """Constants of :func:`gemm_s` for one GPU type and precision.

    ``eff`` is the share of the dense peak inside a full tile, ``overhead_k`` the depth of K that filling and draining a
    tile costs, ``launch_s`` the fixed seconds of a call, ``wave_hardness`` how much of a partly filled last wave is
    paid, ``tile_exponent`` how fast small tiles lose rate, ``bandwidth_eff`` the share of memory bandwidth.
    ``sharpness`` is the norm in which tile and memory time add (infinite: the larger counts), ``throttle`` the share
    by which long calls slow down, ``group_s`` the seconds each further group of a grouped product costs.
    ``correction`` is log(measured / formula) at :data:`KNOTS`, flat, or None.
    """

    eff: float
    overhead_k: float
    launch_s: float
    wave_hardness: float
    tile_exponent: float
    bandwidth_eff: float
    sharpness: float = np.inf
    throttle: float = 0.0
    group_s: float = 0.0
    correction: npt.NDArray[np.float64] | None = None


def log_correction(table: npt.NDArray[np.float64], m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
    """Trilinear in the logarithms of the sizes, all of shape [N]; beyond the knots it fades by e for each octave."""
    position = (np.log2(np.stack((m, n, k))) - FIRST_KNOT) / KNOT_STEP
    inside = np.minimum(np.maximum(position, 0.0), LAST_CELL + 1)
    left = np.minimum(inside.astype(np.int64), LAST_CELL)
    right = inside - left
    sides = np.stack((1.0 - right, right))  # [side, axis, N]
    weights = (sides[:, None, None, 0] * sides[None, :, None, 1] * sides[None, None, :, 2]).reshape(8, -1)
    corners = (STRIDES @ left)[None, :] + CORNERS
    outside = np.abs(position - inside).sum(axis=0)
    out: FloatArray = (table[corners] * weights).sum(axis=0) * np.exp(-KNOT_STEP * outside)
    return out


@lru_cache(maxsize=256)
def _tile_flops(fit: GemmFit, sms: int) -> FloatArray:
    """FLOP that the whole chip could do while a tile of each tiling takes one step of K."""
    out: FloatArray = 2 * AREAS * sms / (fit.eff * np.minimum(1.0, AREAS / FULL_TILE) ** fit.tile_exponent)
    return out


def gemm_s(
    fit: GemmFit,
    peak: Array,
    sms: int,
    bandwidth: float,
    m: Array,
    n: Array,
    k: Array,
    groups: Array = 1.0,
    element_bytes: float = 2.0,
    output_bytes: float = 2.0,
) -> FloatArray:
    """Seconds of ``groups`` equal products (m, k) x (k, n) on a GPU of ``peak`` FLOP/s; 0 where a size is 0.

    Tile time and memory time in the norm ``sharpness``, plus the launch. A tile of Tm x Tn costs
    ``2 Tm Tn (K + k0)`` FLOP at the rate of one SM; the last, partly filled wave is paid by ``wave_hardness``.
    """
    arrays = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (m, n, k, groups, peak)))
    columns = [x.reshape(-1) for x in arrays]
    shape = arrays[0].shape
    if len(columns[0]) <= MANY:
        return flat_gemm_s(fit, sms, bandwidth, element_bytes, output_bytes, *columns).reshape(shape)
    # Many cells share few shapes. Equal rows have equal codes; should two others meet in one, all are priced.
    code = sum(scale * x for scale, x in zip(CODE_SCALES, columns, strict=True))
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    if all(np.array_equal(x[first][inverse], x) for x in columns):
        seconds = flat_gemm_s(fit, sms, bandwidth, element_bytes, output_bytes, *(x[first] for x in columns))[inverse]
    else:
        seconds = flat_gemm_s(fit, sms, bandwidth, element_bytes, output_bytes, *columns)
    out: FloatArray = seconds.reshape(shape)
    return out


def flat_gemm_s(
    fit: GemmFit,
    sms: int,
    bandwidth: float,
    element_bytes: float,
    output_bytes: float | FloatArray,
    rows: FloatArray,
    columns: FloatArray,
    depth: FloatArray,
    count: FloatArray,
    peak: FloatArray,
) -> FloatArray:
    """:func:`gemm_s` of arrays of one length; ``output_bytes`` may differ by shape."""
    waves = np.ceil(rows / TILE_ROWS)[TILING_ROWS] * np.ceil(columns / TILE_ROWS)[TILING_COLUMNS]
    waves *= SPLITS * (count / sms)
    if fit.wave_hardness:
        waves = fit.wave_hardness * np.ceil(waves) + (1 - fit.wave_hardness) * np.maximum(waves, 1.0)
    else:
        np.maximum(waves, 1.0, out=waves)
    waves *= depth / SPLITS + fit.overhead_k
    waves *= _tile_flops(fit, sms)
    tile_s = waves.min(axis=0) / peak
    tile_s *= 1 + fit.throttle * tile_s / (tile_s + THROTTLE_S)
    traffic = count * (element_bytes * (rows + columns) * depth + output_bytes * rows * columns)
    memory_s = traffic / (bandwidth * fit.bandwidth_eff)
    longer = np.maximum(np.maximum(tile_s, memory_s), 1e-30)
    busy = longer * (1 + (np.minimum(tile_s, memory_s) / longer) ** fit.sharpness) ** (1 / fit.sharpness)
    total = busy + (fit.launch_s + fit.group_s * np.maximum(count - 1.0, 0.0))
    if fit.correction is not None:
        sizes = (np.maximum(x, 1.0) for x in (rows, columns, depth))
        # Measured on single products: a batch of small ones has other waves and one launch.
        total *= np.exp(np.where(count == 1, log_correction(fit.correction, *sizes), 0.0))
    out: FloatArray = np.where(rows * columns * depth * count > 0, total, 0.0)
    return out
