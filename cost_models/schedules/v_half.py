"""V-Half (arXiv 2405.15362): half of 1F1B's activations and about half of its bubble."""

from __future__ import annotations

from .building_block import BuildingBlockSchedule


class VHalf(BuildingBlockSchedule):
    name = "v-half"
    steps = 3

    def most_held(self, pp: int) -> int:
        return pp + 2
