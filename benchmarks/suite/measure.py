"""What there is to say about the answer to one case, in a process of its own.

python -m benchmarks.suite.measure NAME PLAN.json      # prints one JSON object
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.planner.answer.explain import decoder_layers, describe
from meshwright.planner.request import PlanRequest
from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Plan

from .baselines import Baseline, best_even, best_single_pool, even_on_our_grid, published, topology_blind
from .cases import Case, case_named
from .legality import faults_of_answer


def measured(case: Case, document: PlanDocument) -> dict[str, Any]:
    """The answer's figures, what is wrong with it, and every baseline."""
    out: dict[str, Any] = {"status": document.status, "reason": document.reason, "complete": document.complete}
    if document.run is not None:
        out["candidates"] = document.run.candidates
    plan, figures, bound = document.plan, document.estimate, document.bound
    inputs = document.inputs
    request = PlanRequest(model=inputs.model, cluster=inputs.cluster, workload=inputs.workload, target=inputs.target)
    out["faults"] = faults_of_answer(request, document)
    if plan is None or figures is None or bound is None:
        return out
    out |= {"step_time_s": figures.step_time_s, "gap": bound.gap, "plan": describe(plan), "layers": layers_of(plan)}
    others = [each.plan for each in document.alternatives]
    ways: dict[str, Callable[[], Baseline]] = {
        "published": lambda: published(request, case.recipes),
        "uniform_even": lambda: best_even(request, [plan, *others]),
        "even_on_grid": lambda: even_on_our_grid(request, plan),
        "topology_blind": lambda: topology_blind(request),
    }
    if len(inputs.cluster.pools) > 1:
        ways["single_pool"] = lambda: best_single_pool(request)
    out["baselines"] = {name: asdict(way()) for name, way in ways.items()}
    return out


def layers_of(plan: Plan) -> str:
    """Decoder layers of every stage with its pool, equal neighbours in one phrase."""
    stages = [(stage.groups[0].pool, count) for stage, count in zip(plan.stages, decoder_layers(plan), strict=True)]
    return ", ".join(f"{len(list(run))} x {pool}: {count}" for (pool, count), run in groupby(stages))


def main() -> int:
    """Measure the case of a name and its document."""
    name, path = sys.argv[1:]
    document = PlanDocument.parse(json.loads(Path(path).read_text(encoding="utf-8")))
    print(json.dumps(measured(case_named(name), document)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
