"""Attention as separate kernels: scores, softmax, dropout and context, as stacks before flash attention run it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray

from .operators import Device, matmul_s, stream_s

#: Bytes of memory traffic a score at 16 bit besides the products' own: masked softmax reads and writes 16 bit, dropout
#: reads and writes them and writes a mask (Megatron-LM fused_softmax.py and CoreAttention); backward reads one more
#: input each.
SCORE_BYTES, SCORE_BYTES_BACKWARD = 9.0, 11.0
#: The same at 32 bit, where the fused softmax kernel does not run and scaling, masking and softmax are kernels of their
#: own: softmax and dropout of Sailor's Aceso profiles (MIT) move 45 and 67 bytes at the full bandwidth of V100, Turing,
#: GA102, A100 and GH200 alike; here at the streaming share of 0.8.
SCORE_BYTES_FP32, SCORE_BYTES_FP32_BACKWARD = 36.0, 54.0


def unfused_attention_s(
    on: Device, sequences: npt.ArrayLike, length: float, heads: npt.ArrayLike, qk_dim: float, v_dim: float
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds; every score is computed, also those above the diagonal."""
    sequences, heads = np.asarray(sequences, dtype=float), np.asarray(heads, dtype=float)
    groups = sequences * heads
    scores = matmul_s(on, length, length, qk_dim, groups, low_precision=False)
    context = matmul_s(on, length, v_dim, length, groups, low_precision=False)
    wide = on.precision in ("fp32", "tf32")
    moved, moved_back = (SCORE_BYTES_FP32, SCORE_BYTES_FP32_BACKWARD) if wide else (SCORE_BYTES, SCORE_BYTES_BACKWARD)
    forward = scores + context + stream_s(on, moved * groups * length * length, kernels=2)
    backward = 2 * (scores + context) + stream_s(on, moved_back * groups * length * length, kernels=2)
    return forward, backward
