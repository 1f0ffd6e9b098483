"""Memory traffic of casts to low precision around a product, by how a library scales them.

``transformer_engine`` reads a 16-bit operand once and writes it in both layouts, with scales that are known or found on
the way. torchao's traffic is counted kernel by kernel as in its own roofline (``torchao/testing/training/
roofline_utils.py``, BSD-3): a scale for the whole operand takes a pass of its own; scales by rows and by columns
(``rowwise``) or by blocks (``blocks``) take one read for each layout, and weights are cast again for every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recipe = Literal["transformer_engine", "tensorwise", "rowwise", "blocks"]


@dataclass(frozen=True)
class Casts:
    """Bytes an element of the input (forward, and again backward for the weight gradient), of the result's gradient and
    of the weight (forward, backward). ``passes`` are kernels each way. ``rate`` is the speed of the products over that
    with one scale for an operand. ``before_gather``: tensor parallelism gathers operands that are cast already."""

    input_forward: float
    input_backward: float
    gradient: float
    weight_forward: float
    weight_backward: float
    passes: float = 2.0
    rate: float = 1.0
    before_gather: bool = False


#: Rate of products with scales along K over those with one scale: 1117 of 1243 TFLOP/s at 8192^3 on H100, block-scaled
#: against plain fp8 (aiconfigurator's medians). Row-wise products were not measured; they scale as many results.
SCALED_RATE = 1117 / 1243
#: Bytes an element of a gathered 8-bit operand moves to lie in the other layout.
TURNED = 2.0
CASTS: dict[Recipe, Casts | None] = {
    "transformer_engine": None,
    # Largest value (2), cast (3); both again for the other layout less what is known by then (1). Sharded weights are
    # cast before they are gathered: the gathered 8-bit copy is turned round for the input gradient (2). Tensor
    # parallelism gathers 8-bit operands (torchtitan's Float8ColwiseParallel).
    "tensorwise": Casts(5.0, 1.0, 6.0, 0.0, 2.0, passes=3.0, before_gather=True),
    # Cast by rows, and a 16-bit copy turned round (5) that is cast by columns (3).
    "rowwise": Casts(5.0, 3.0, 8.0, 3.0, 7.0, rate=SCALED_RATE),
    # One read for each layout.
    "blocks": Casts(3.0, 3.0, 6.0, 3.0, 3.0),
}
