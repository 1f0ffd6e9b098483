"""Many runs priced: one outcome a row, in order, by as many processes as are asked for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from meshwright.specs.errors import Fault, SpecError

from ..calibration import Calibration, Entry, Setting, calibrated, multipliers_under
from ..cells import traits_of
from ..learned import shape_of
from ..multipliers import Multipliers
from .inputs import row_fault
from .plans import Case, case_of
from .price import Priced, price
from .rows import UnsupportedError, run_of

T = TypeVar("T")
R = TypeVar("R")
#: Rows that a process takes at once: enough to hide the hand-over, few enough for a smooth progress bar.
CHUNK = 8
#: Below this many rows starting processes takes longer than pricing (0.7 s a process, 15 ms a row).
WORTH_PROCESSES = 100


@dataclass(frozen=True)
class Outcome:
    """What a row came to: the columns of OUT.csv. Times in seconds, of the stated batch; bytes of the fullest rank.
    Figures are None where ``status`` is ``unsupported``."""

    id: str
    status: str
    reason: str = ""
    assumptions: tuple[str, ...] = ()
    step_time_s: float | None = None
    interval_lo_s: float | None = None
    interval_hi_s: float | None = None
    interval_level: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    fits: bool | None = None
    ms: float = 0.0


def price_rows(
    rows: Sequence[Mapping[str, str]],
    models: Mapping[str, Any],
    calibration: Calibration | None = None,
    processes: int = 1,
) -> Generator[Outcome, None, None]:
    """Outcomes of ``rows`` in order. Nothing about a row raises: what cannot be priced is ``unsupported``.

    Closing the iterator early stops the processes.
    """
    return in_order(partial(price_row, models=models, calibration=calibration), rows, processes)


def in_order(work: Callable[[T], R], items: Sequence[T], processes: int = 1) -> Generator[R, None, None]:
    """``map`` over ``items`` by several processes, where there are enough items to make that worth while."""
    if processes <= 1 or len(items) < WORTH_PROCESSES:
        yield from map(work, items)
        return
    # Spawned, as a fork would copy the locks of whatever threads the caller runs.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _leave_interrupts)
    try:
        waiting: list[Future[list[R]]] = [
            pool.submit(_some, work, list(items[start : start + CHUNK])) for start in range(0, len(items), CHUNK)
        ]
        waiting.reverse()
        while waiting:
            yield from waiting.pop().result()
    except BrokenProcessPool:
        raise SpecError(Fault("/jobs", "a process was ended from outside, perhaps for its memory; use fewer")) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; the one that started the others tells them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _some(work: Callable[[T], R], items: list[T]) -> list[R]:
    return [work(item) for item in items]


def price_row(row: Mapping[str, str], models: Mapping[str, Any], calibration: Calibration | None = None) -> Outcome:
    """The outcome of one row."""
    name, start = (row.get("id") or "").strip(), time.perf_counter()
    fault = row_fault(row, models)
    if fault:
        return Outcome(name, "unsupported", fault)
    try:
        usable = {key: value for key, value in models.items() if isinstance(value, dict)}
        entry, multipliers = _correction(row, usable, calibration)
        priced = price(row, usable, multipliers)
        milliseconds = 1e3 * (time.perf_counter() - start)
        if priced.estimate is None or priced.step_time_s is None:
            return Outcome(name, "unsupported", priced.reason, ms=milliseconds)
        return _outcome(name, priced, milliseconds, calibration, entry)
    except (Exception, MemoryError) as error:  # a table of a stranger: one row must not lose the others
        milliseconds = 1e3 * (time.perf_counter() - start)
        return Outcome(name, "unsupported", f"cannot be priced ({type(error).__name__}: {str(error)[:120]})",
                       ms=milliseconds)  # fmt: skip


def _outcome(
    name: str, priced: Priced, milliseconds: float, calibration: Calibration | None, entry: Entry | None
) -> Outcome:
    found, step = priced.estimate, priced.step_time_s
    assert found is not None  # noqa: S101 - the caller has looked
    assert step is not None  # noqa: S101
    scale = step / found.step_time_s
    if calibration is not None:
        found = calibrated(found, calibration, [entry])
    notes = [*(priced.case.assumptions if priced.case else ()), *found.assumptions]
    low, high = found.interval_s
    return Outcome(
        id=name,
        status="ok",
        assumptions=tuple(dict.fromkeys(notes)),
        step_time_s=step,
        interval_lo_s=low * scale,
        interval_hi_s=high * scale,
        interval_level=found.interval_level,
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        peak_allocated_bytes=max(stage.allocated_bytes for stage in found.stages),
        peak_reserved_bytes=max(stage.reserved_bytes for stage in found.stages),
        fits=found.fits,
        ms=milliseconds,
    )


def _correction(
    row: Mapping[str, str], models: dict[str, dict[str, Any]], calibration: Calibration | None
) -> tuple[Entry | None, Multipliers | None]:
    """The calibration's entry for a row and the factors that it means; None where there is none."""
    if calibration is None:
        return None, None
    try:
        setting = setting_of(case_of(run_of(row), models))
    except UnsupportedError:  # pricing will tell
        return None, None
    entry = calibration.find(setting) if setting else None
    if entry is None or setting is None:
        return None, None
    return entry, multipliers_under(setting, entry)


def setting_of(case: Case) -> Setting | None:
    """What a calibration's entry must match; None for a cluster of several pools, which no one factor can serve."""
    if len(case.cluster.pools) != 1:
        return None
    traits = traits_of(case.model, case.cluster.gpu_of(case.cluster.pools[0]), case.workload, case.target)
    return Setting(traits, case.release, shape_of(case.model))
