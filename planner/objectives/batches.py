"""Throughput against batch size: the best plan at other global batch sizes. The workload of the plan stays as it is."""

from __future__ import annotations

import time

from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.goals import BatchPoint, BatchSweep

from ..request import PlanRequest
from ..variants import best_search
from .pareto import choices_of

#: Batch sizes tried: these multiples of the asked one.
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
#: The knee is the smallest batch with this share of the highest throughput of the sweep.
KNEE_SHARE = 0.95


def batch_sizes(batch: int) -> list[int]:
    """Whole multiples and parts of ``batch`` by :data:`FACTORS`, rising."""
    return sorted({int(batch * factor) for factor in FACTORS if batch * factor >= 1 and batch * factor % 1 == 0})


def batch_sweep(request: PlanRequest, deadline: float | None = None) -> tuple[BatchSweep, bool]:
    """The sweep, and whether every size was searched in full before ``deadline`` (``time.monotonic()``)."""
    rows: list[BatchPoint] = []
    complete = True
    for size in batch_sizes(request.workload.global_batch_size):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            rows.append(BatchPoint(global_batch_size=size, status="unknown", reason="the deadline came first"))
            complete = False
            continue
        workload = request.workload.model_copy(update={"global_batch_size": size})
        changed = {"workload": workload, "objective": "time", "deadline_s": left}
        asked = request.model_copy(update=changed)
        chosen, result, _, whole = best_search(asked)
        complete = complete and whole
        best = result.best
        if best is None:
            status = "infeasible" if whole else "unknown"
            rows.append(BatchPoint(global_batch_size=size, status=status, reason="no plan is legal and fits"))
            continue
        rows.append(
            BatchPoint(
                global_batch_size=size,
                status="feasible",
                step_time_s=best.step_time_s,
                tokens_per_s=workload.tokens_per_step / best.step_time_s,
                summary=", ".join(f"{name} {value}" for name, value in choices_of(chosen, best).items()),
            )
        )
    return finished_sweep(rows, request.workload.seq_length), complete


def finished_sweep(rows: list[BatchPoint], seq_length: int) -> BatchSweep:
    """Rows, rising in batch size, with shares and marginal throughput, and the knee."""
    best = max((row.tokens_per_s for row in rows if row.tokens_per_s is not None), default=None)
    out, before = [], None
    for row in rows:
        if row.tokens_per_s is not None and row.step_time_s is not None and best is not None:
            marginal = None
            if before is not None and row.step_time_s > before[1]:
                marginal = (row.global_batch_size - before[0]) * seq_length / (row.step_time_s - before[1])
            before = (row.global_batch_size, row.step_time_s)
            row = row.model_copy(update={"share_of_best": row.tokens_per_s / best, "marginal_tokens_per_s": marginal})
        out.append(row)
    knee = next((row.global_batch_size for row in out if (row.share_of_best or 0.0) >= KNEE_SHARE), None)
    return BatchSweep(knee=knee, knee_share=KNEE_SHARE, points=tuple(out))


def with_sweep(request: PlanRequest, document: PlanDocument, deadline: float | None) -> PlanDocument:
    """The document with a sweep over batch sizes."""
    sweep, complete = batch_sweep(request, deadline)
    asked = request.workload.global_batch_size
    if sweep.knee is None:
        message = "no batch size of the sweep has a plan that fits"
    else:
        own = next((row.share_of_best for row in sweep.points if row.global_batch_size == asked), None)
        share = "has no plan that fits" if own is None else f"reaches {own:.0%}"
        message = (
            f"global batch {sweep.knee:,} is the smallest with {sweep.knee_share:.0%} of the highest throughput of "
            f"the sweep; {asked:,} as asked {share}"
        )
    reason = Explanation(kind="batch", message=message, data={"knee": sweep.knee})
    update = {"batch_sweep": sweep, "explanation": (*document.explanation, reason)}
    if not complete:
        update |= {"complete": False, "status": "feasible" if document.status == "optimal" else document.status}
    return document.model_copy(update=update)
