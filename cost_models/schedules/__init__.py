"""Pipeline schedules, one file each, found by name."""

from __future__ import annotations

from .base import Event, Schedule, Timeline, in_flight_states
from .dualpipe import DualPipe
from .dualpipe_v import DualPipeV
from .gpipe import GPipe
from .interleaved import Interleaved
from .listed import activation_peak_bytes, finish_times_s
from .looped_bfs import LoopedBreadthFirst
from .one_f_one_b import OneFOneB
from .v_half import VHalf
from .v_min import VMin
from .zb_auto import ZeroBubbleAuto
from .zb_h1 import ZeroBubbleH1
from .zb_v import ZeroBubbleV

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        OneFOneB(),
        Interleaved(),
        GPipe(),
        LoopedBreadthFirst(),
        ZeroBubbleH1(),
        ZeroBubbleAuto(),
        ZeroBubbleV(),
        VHalf(),
        VMin(),
        DualPipe(),
        DualPipeV(),
    )
}


def get(name: str) -> Schedule:
    """The schedule called ``name``; KeyError names the known ones."""
    if name not in SCHEDULES:
        raise KeyError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


__all__ = [
    "SCHEDULES",
    "Event",
    "Interleaved",
    "Schedule",
    "Timeline",
    "activation_peak_bytes",
    "finish_times_s",
    "get",
    "in_flight_states",
]
