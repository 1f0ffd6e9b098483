"""Constants and rates of core attention and of chunked scans. Arrays broadcast; sizes are what one rank runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import GpuType

Array = npt.ArrayLike

#: Query rows (forward) or key rows (backward) that one thread block of a flash-attention kernel works on.
ATTENTION_ROWS = 128
#: Head sizes at which the peak share is fitted.
HEAD_DIMS = (64, 128, 256)
#: Tokens of one chunk of a chunked scan: the kernels of flash-linear-attention and Mamba-2 take 64 to 256.
SCAN_CHUNK = 64


@dataclass(frozen=True)
class AttentionFit:
    """Constants of :func:`attention_share`, fitted on causal kernels with and without a window.

    ``eff`` is the peak share of long sequences at head sizes :data:`HEAD_DIMS`, ``half_keys`` the mean number of keys a
    query sees at which half of it is reached. ``blocks`` thread blocks an SM are needed to fill the chip, approached in
    the norm ``blocks_power``. ``memory_eff`` is the bandwidth share of reading and writing Q, K, V and O, ``launch_s``
    the fixed seconds. ``backward_eff`` is the backward over the forward rate, ``backward_blocks`` and
    ``backward_blocks_power`` are the blocks that fill the chip backward.
    """

    eff: tuple[float, float, float]
    half_keys: float
    blocks: float
    blocks_power: float
    memory_eff: float
    launch_s: float
    backward_eff: float
    backward_blocks: float
    backward_blocks_power: float


def attention_share(
    fit: AttentionFit, sms: int, rows: Array, keys: Array, heads: Array, width: float
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) share of the dense peak.

    ``rows`` query tokens of each of ``heads`` (heads x sequences), each seeing ``keys`` keys on average; ``width`` is
    the head size.
    """
    rows, keys, heads = (np.asarray(x, dtype=float) for x in (rows, keys, heads))
    eff = float(np.interp(np.log2(width), np.log2(HEAD_DIMS), fit.eff)) * min(1.0, width / HEAD_DIMS[0])
    blocks = heads * np.ceil(rows / ATTENTION_ROWS) / sms
    depth = keys / (keys + fit.half_keys)

    def filled(needed: float, power: float) -> FloatArray:
        out: FloatArray = blocks / (blocks**power + needed**power) ** (1 / power)
        return out

    forward = eff * depth * filled(fit.blocks, fit.blocks_power)
    return forward, eff * depth * fit.backward_eff * filled(fit.backward_blocks, fit.backward_blocks_power)


#: FlashAttention-2 multiplies with the instructions of Ampere. FlashAttention-3, written for Hopper, is 1.5 to 2.0
#: times as fast forward and 1.5 to 1.75 times backward on H100 (arXiv 2407.08608); geometric means. Ampere runs it at
#: the measured rates, and on Blackwell PyTorch's users take cuDNN.
FLASH2_SLOWER, FLASH2_SLOWER_BACKWARD = 3.0**0.5, (1.5 * 1.75) ** 0.5


def of_kernel(kernel: str, gpu: GpuType, forward: FloatArray, backward: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds of an attention ``kernel`` from those of the generation's own kernels."""
    if kernel == "flash2" and 9.0 <= (gpu.compute_capability or 0.0) < 10.0:
        return forward * FLASH2_SLOWER, backward * FLASH2_SLOWER_BACKWARD
    return forward, backward


@dataclass(frozen=True)
class ScanFit:
    """A chunked scan: ``eff`` share of the dense peak once the chip is full, ``chunk_s`` seconds of one step of the
    chain of chunks of a sequence, ``launch_s`` fixed seconds."""

    eff: float
    chunk_s: float
    launch_s: float


def scan_forward_s(
    fit: ScanFit, peak: float, sms: int, flops: Array, sequence_heads: Array, length: Array
) -> FloatArray:
    """Seconds of a forward scan: work at the full rate, and the chain of chunks with one thread block a head and
    sequence."""
    waves = np.maximum(np.asarray(sequence_heads, dtype=float) / sms, 1.0)
    chain = np.asarray(length, dtype=float) / SCAN_CHUNK * fit.chunk_s * waves
    out: FloatArray = np.asarray(flops, dtype=float) / max(peak * fit.eff, 1e-30) + chain + fit.launch_s
    return out
