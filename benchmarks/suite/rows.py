"""A line of the suite, and whether all lines together pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

#: Largest median and largest single proven gap.
MEDIAN_GAP, WORST_GAP = 0.03, 0.12
#: Step times nearer than this share are equal: event times of two sums differ by rounding.
EQUAL = 1e-6


@dataclass
class Row:
    """A case with its answer. Seconds a step, CPU seconds and MiB of the whole planning process; baselines by name,
    each with ``step_time_s`` (null: no plan), ``plan`` and ``why``."""

    name: str
    model: str
    cluster: str
    gpus: int
    batch: int
    seq: int
    precision: str
    tags: list[str]
    cpu_s: float
    peak_mib: float
    refused: str | None = None
    status: str = "unknown"
    reason: str | None = None
    complete: bool = True
    candidates: int = 0
    step_time_s: float | None = None
    gap: float | None = None
    plan: str = ""
    layers: str = ""
    faults: list[str] = field(default_factory=list)
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)

    def gain(self, name: str) -> float | None:
        """How much longer the step of a baseline is; None where it has none."""
        other = self.baselines.get(name, {}).get("step_time_s")
        return None if other is None or self.step_time_s is None else other / self.step_time_s - 1

    @property
    def faster(self) -> list[str]:
        """Baselines that are faster than our plan."""
        gains = {name: self.gain(name) for name in self.baselines}
        return [name for name, gain in gains.items() if gain is not None and gain < -EQUAL]

    @property
    def as_expected(self) -> bool:
        """Whether there is a plan where one should be, and the expected refusal otherwise."""
        if self.refused is not None:
            return self.step_time_s is None and self.refused in (self.reason or "")
        return self.step_time_s is not None


@dataclass(frozen=True)
class Summary:
    """All rows together. ``illegal`` counts plans and alternatives with a fault."""

    cases: int
    median_gap: float
    worst_gap: float
    wide: tuple[str, ...]
    illegal: int
    slower: tuple[str, ...]
    unexpected: tuple[str, ...]
    most_cpu_s: float
    most_mib: float

    @property
    def failures(self) -> list[str]:
        """Bars that are missed, in words."""
        out = []
        if self.median_gap > MEDIAN_GAP:
            out.append(f"median gap {self.median_gap:.2%} is above {MEDIAN_GAP:.0%}")
        out += [f"a gap is above {WORST_GAP:.0%}: {each}" for each in self.wide]
        if self.illegal:
            out.append(f"{self.illegal} faults in plans")
        out += [f"a baseline is faster: {each}" for each in self.slower]
        return out + [f"another answer than expected: {each}" for each in self.unexpected]


def summary(rows: Sequence[Row]) -> Summary:
    """The summary of some rows."""
    gaps = [row.gap for row in rows if row.gap is not None]
    return Summary(
        cases=len(rows),
        median_gap=median(gaps) if gaps else 0.0,
        worst_gap=max(gaps, default=0.0),
        wide=tuple(f"{row.name} ({row.gap:.2%})" for row in rows if row.gap is not None and row.gap > WORST_GAP),
        illegal=sum(len(row.faults) for row in rows),
        slower=tuple(f"{row.name} ({name} {row.gain(name):.3%})" for row in rows for name in row.faster),
        unexpected=tuple(f"{row.name} ({row.reason or row.status})" for row in rows if not row.as_expected),
        most_cpu_s=max((row.cpu_s for row in rows), default=0.0),
        most_mib=max((row.peak_mib for row in rows), default=0.0),
    )
