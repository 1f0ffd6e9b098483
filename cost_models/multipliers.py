"""Bounded corrections of named terms: what measured runs say about a stack that physics does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

#: No correction makes a term cheaper than a quarter or dearer than four times what physics says, but for the host:
#: framework overhead differs by an order of magnitude between stacks.
LOWEST, HIGHEST, HIGHEST_HOST = 0.25, 4.0, 12.0


@dataclass(frozen=True)
class Multipliers:
    """Factors of the terms of one GPU type under one stack; 1 leaves the physics as it is.

    ``gemm`` dense products, ``experts`` grouped products, ``attention`` core attention, ``scan`` linear attention and
    state-space scans, ``head`` the output projection and its loss, ``memory_bound`` other streaming kernels, ``host``
    the host's time for a call; ``tp_comm``, ``cp_comm``, ``ep_comm``, ``dp_comm``, ``pp_comm`` transfers of that
    dimension before overlap; ``optimizer`` the update; ``step`` what a step costs once.
    """

    gemm: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    scan: float = 1.0
    head: float = 1.0
    memory_bound: float = 1.0
    host: float = 1.0
    tp_comm: float = 1.0
    cp_comm: float = 1.0
    ep_comm: float = 1.0
    dp_comm: float = 1.0
    pp_comm: float = 1.0
    optimizer: float = 1.0
    step: float = 1.0

    @classmethod
    def bounded(cls, factors: Mapping[str, float]) -> Self:
        """From factors by name, each cut to its bounds; unknown names are a KeyError."""
        known = {field.name for field in fields(cls)}
        for name in factors:
            if name not in known:
                raise KeyError(name)
        return cls(
            **{
                name: min(max(value, LOWEST), HIGHEST_HOST if name in ("host", "step") else HIGHEST)
                for name, value in factors.items()
            }
        )


NEUTRAL = Multipliers()
#: Names of the corrected terms, in the order of the fields.
CORRECTED = tuple(field.name for field in fields(Multipliers))
