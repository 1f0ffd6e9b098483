"""What the best plan would be after a change, and what it would gain."""

from __future__ import annotations

import time

from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.goals import WhatIf

from ..answer.differences import differences, in_words
from ..answer.explain import describe, seconds
from ..errors import DeadlineExceeded
from ..experts.goal import with_expert_load
from ..request import PlanRequest
from ..variants import best_variant
from .changes import changed


def with_what_ifs(request: PlanRequest, document: PlanDocument, deadline: float | None) -> PlanDocument:
    """The document with the best plan after each change of the request, one at a time."""
    rows: list[WhatIf] = []
    complete = document.complete
    for k, change in enumerate(request.what_if):
        left = None if deadline is None else deadline - time.monotonic()
        asked = changed(request, change, f"/what_if/{k}")
        asked = asked.model_copy(update={"objective": "time", "deadline_s": left, "price": {}, "tokens": None})
        row = WhatIf(
            change=change, status="unknown", cluster=asked.cluster.name, num_gpus=asked.cluster.num_gpus,
            reason="the deadline came first",
        )  # fmt: skip
        if left is None or left > 0:
            try:
                _, found = best_variant(with_expert_load(asked))
                row, complete = _row(asked, change, document, found), complete and found.complete
            except DeadlineExceeded:
                complete = False
        else:
            complete = False
        rows.append(row)
    reasons = tuple(_reason(row) for row in rows)
    update: dict[str, object] = {"what_if": tuple(rows), "explanation": (*document.explanation, *reasons)}
    if document.complete and not complete:
        update |= {"complete": False, "status": "feasible" if document.status == "optimal" else document.status}
    return document.model_copy(update=update)


def _row(asked: PlanRequest, change: str, before: PlanDocument, found: PlanDocument) -> WhatIf:
    row = WhatIf(
        change=change,
        status=found.status,
        cluster=asked.cluster.name,
        num_gpus=asked.cluster.num_gpus,
        reason=found.reason,
    )
    if found.plan is None or found.estimate is None:
        return row
    throughput = asked.workload.tokens_per_step / found.estimate.step_time_s
    gain = None
    if before.estimate is not None:
        gain = throughput * before.estimate.step_time_s / before.inputs.workload.tokens_per_step - 1
    return row.model_copy(
        update={
            "step_time_s": found.estimate.step_time_s,
            "tokens_per_s": throughput,
            "gain": gain,
            "summary": describe(found.plan),
            "differences": differences(before.plan, found.plan) if before.plan is not None else (),
        }
    )


def _reason(row: WhatIf) -> Explanation:
    data = {"change": row.change, "gain": row.gain, "step_time_s": row.step_time_s}
    if row.step_time_s is None:
        message = f"with {row.change}: {row.reason or row.status}"
    else:
        faster = "" if row.gain is None else f", {row.gain:+.1%} throughput"
        moved = in_words(row.differences) or "the plan stays"
        message = f"with {row.change}: {seconds(row.step_time_s)} a step{faster}; {moved}"
    return Explanation(kind="what-if", message=message, data=data)
