"""Plans in the formats of other planners, so that their simulators can judge them."""

from __future__ import annotations
