"""Runs priced one by one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.specs.estimate import Estimate

from ..estimate import estimate
from ..multipliers import Multipliers
from .mixed import is_mixed, mixed_case, mixed_run
from .plans import Case, case_of
from .rows import Run, UnsupportedError, run_of


@dataclass(frozen=True)
class Priced:
    """A run with its estimate, or the reason why there is none."""

    run: Run | None
    row: Mapping[str, str]
    case: Case | None
    estimate: Estimate | None
    reason: str
    milliseconds: float

    @property
    def step_time_s(self) -> float | None:
        """Predicted seconds of the stated batch."""
        return self.estimate.step_time_s * self.case.scale if self.estimate and self.case else None

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less one."""
        measured = self.run.measured_s if self.run else None
        return self.step_time_s / measured - 1 if self.step_time_s and measured else None


def price(row: Mapping[str, str], models: dict[str, dict[str, Any]], multipliers: Multipliers | None = None) -> Priced:
    """Price one row, of the table of runs or of the table of runs on mixed GPU types (told apart by its columns)."""
    start = time.perf_counter()
    run: Run | None = None
    try:
        mixed = is_mixed(row)
        run = mixed_run(row) if mixed else run_of(row)
        case = mixed_case(run, models) if mixed else case_of(run, models)
        result = price_case(case, multipliers)
    except UnsupportedError as error:
        return Priced(run, row, None, None, str(error), 1e3 * (time.perf_counter() - start))
    return Priced(run, row, case, result, "", 1e3 * (time.perf_counter() - start))


def price_case(case: Case, multipliers: Multipliers | None = None) -> Estimate:
    """The estimate of a case under corrections."""
    by = (multipliers,) * len(case.cluster.pools) if multipliers else None
    return estimate(case.model, case.cluster, case.workload, case.target, case.plan, multipliers=by)
