"""Memory traffic of element-wise operators that run one kernel each, as PyTorch does without torch.compile.

Bytes an element of the operator's result, counted kernel by kernel: reads and writes at 2 bytes (16 bit) or 4 (fp32).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes an element that an operator moves ``forward`` and ``backward``."""

    forward: float
    backward: float


#: RMSNorm as ``aten`` decomposes it: to fp32 (6), square (8), mean (4), times the root (8), back to 16 bit (6), times
#: the weight (4). Backward: through the weight (4), its gradient (6, summed 2), to fp32 (6), through the product (8,
#: and 12 with a sum of 4), through the square (12), the two branches added (12), back to 16 bit (6).
RMS_NORM = Traffic(36.0, 72.0)
#: Rotary embedding through complex numbers: to fp32 (6), product (8), back (6); the gradient goes the same way.
ROPE = Traffic(20.0, 20.0)
#: Gated activation: its function (4), the product (6). Backward: two products (12), the function's derivative (6).
GATED = Traffic(10.0, 18.0)
