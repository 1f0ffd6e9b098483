"""Pipeline schedules, one file each, found by name."""

from __future__ import annotations

from .base import Event, Schedule, Timeline, in_flight_states
from .interleaved import Interleaved
from .one_f_one_b import OneFOneB

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in (OneFOneB(), Interleaved())}


def get(name: str) -> Schedule:
    """The schedule called ``name``; KeyError names the known ones."""
    if name not in SCHEDULES:
        raise KeyError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


__all__ = ["SCHEDULES", "Event", "Interleaved", "Schedule", "Timeline", "get", "in_flight_states"]
