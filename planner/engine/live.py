"""Which activations are alive: the schedule that virtual stages mean, and what its stages hold at their peak."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.cost_models import schedules
from meshwright.specs.batch import IntArray


def in_flight(pp: int, vpp: int, micro_batches: int) -> IntArray:
    """[P, V] micro-batches whose activations are alive at a stage's peak, by chunk."""
    # The warm-up holds at most 2P + VP chunk forwards, which is less than 4 groups of P micro-batches.
    return _in_flight(pp, vpp, min(micro_batches, 4 * pp))


def live_mixes(pp: int, vpp: int, micro_batches: int) -> IntArray:
    """[P, K, V] all mixes of live activations over chunks at which a stage holds the most; the last one is repeated."""
    return _live_mixes(pp, vpp, min(micro_batches, 4 * pp))


@lru_cache(maxsize=1024)
def _live_mixes(pp: int, vpp: int, micro_batches: int) -> IntArray:
    if vpp == 1:
        return in_flight(pp, vpp, micro_batches)[:, None, :]
    orders = schedules.get(schedule_name(vpp)).arrays(pp, vpp, micro_batches)
    mixes = schedules.in_flight_states(orders, vpp)
    most = max(len(rows) for rows in mixes)
    return np.stack([np.pad(rows, ((0, most - len(rows)), (0, 0)), mode="edge") for rows in mixes])


@lru_cache(maxsize=4096)
def _in_flight(pp: int, vpp: int, micro_batches: int) -> IntArray:
    return schedules.get(schedule_name(vpp)).in_flight(pp, vpp, micro_batches)


def schedule_name(vpp: int) -> str:
    """The schedule that a number of virtual stages means."""
    return "interleaved" if vpp > 1 else "1f1b"
