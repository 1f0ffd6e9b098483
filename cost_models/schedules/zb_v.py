"""ZB-V (arXiv 2401.10241): no bubble with the memory of 1F1B, where forward, input and weight gradient take the same.

For equal stages and passes of F seconds each, M >= 2 P: the last stage begins after (P - 1) F and never waits.
"""

from __future__ import annotations

from .building_block import BuildingBlockSchedule


class ZeroBubbleV(BuildingBlockSchedule):
    name = "zb-v"
    steps = 6

    def most_held(self, pp: int) -> int:
        return 2 * pp
