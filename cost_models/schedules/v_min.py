"""V-Min (arXiv 2405.15362): a third of 1F1B's activations, with about two thirds of its bubble where all passes take
the same, and more where they do not."""

from __future__ import annotations

from .building_block import BuildingBlockSchedule


class VMin(BuildingBlockSchedule):
    name = "v-min"
    steps = 2

    def most_held(self, pp: int) -> int:
        return -(-2 * pp // 3) + 2
