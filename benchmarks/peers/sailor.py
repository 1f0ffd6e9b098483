"""Our search on Sailor's two mixed clusters with Sailor's costs.

    python -m benchmarks.peers.sailor [--write]

For every case: the plans that the search finds (whole pools, any order, any split by events), the orders and splits
near them, and the scores of the best of these by Sailor's closed form in both of its readings. ``--write`` stores plans
(in Sailor's format) and scores beside this file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise, permutations, product
from typing import Any

from meshwright.megatron_export.peers.sailor import sailor_plan
from meshwright.planner.answer.document import inputs_of, plan_of
from meshwright.planner.engine.explore import Search
from meshwright.planner.request import PlanRequest
from meshwright.profiler.importers import read
from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.document import PlanDocument
from meshwright.specs.feed_forward import DenseFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.targets import load_target
from meshwright.specs.workload import workload_from_options

from .data import HERE, SAILOR
from .sailor_costs import NEVER_S, SailorCosts
from .sailor_score import Score, score
from .sailor_tables import SailorTables

GLOBAL_BATCH, SEQUENCE = 1024, 2048
#: Plans of different degrees and orders that the search settles.
PLACES = 50
#: Layers by which a boundary is moved from where events have it best.
NEARBY = 2
#: Stages of the plans whose order is changed too; the closed form, unlike events, charges a stage for one of its links.
MOST_TO_REORDER = 3
#: Share by which the closed form of a plan may be below the best one's for its boundaries to be moved.
WORTH_MOVING = 0.1
#: Plans that near to the best one by the careful form are told apart by the closed form: the careful one only guards
#: against a reading of it.
NEAR_TIE = 0.01


@dataclass(frozen=True)
class Case:
    """A cluster, by the trace that describes it, with the published scores in Sailor's own simulator."""

    name: str
    trace: str
    sailor_per_s: float
    best_known_per_s: float

    @property
    def plan_file(self) -> str:
        return f"sailor_plan_{self.trace.removesuffix('.csv')}.json"


CASES = (
    Case("16 A100-40 + 16 V100-16", "a100_v100.csv", 0.0771, 0.0829),
    Case("16 A100-40 + 16 GH-96 + 16 V100-16", "a100_gh200_v100.csv", 0.1356, 0.1920),
)


@dataclass(frozen=True)
class Outcome:
    """What the search found, in Sailor's format, with its scores and the CPU seconds it took."""

    plan: dict[str, Any]
    score: Score
    search_step_s: float
    cpu_s: float


def opt_350m() -> ModelSpec:
    """The layers of Sailor's OPT-350 profile: an embedding, 24 decoder layers and a head."""
    attention = SoftmaxAttention(num_heads=16, num_kv_heads=16, head_dim=64, qkv_bias=True, out_bias=True)
    return ModelSpec(
        name="OPT-350",
        family="opt",
        hidden_size=1024,
        vocab_size=50272,
        kinds=(LayerKind(attention=attention, feed_forward=DenseFFN(intermediate_size=4096, gated=False, bias=True)),),
        pattern=(0,) * 24,
        activation="gelu",
        max_position_embeddings=2048,
    )


def solve(case: Case) -> Outcome:
    """The best plan of the search under both readings of the closed form."""
    started = time.process_time()
    found = read("sailor", SAILOR / case.trace)
    assert found.profile is not None
    assert found.cluster is not None
    tables = SailorTables(found.profile)
    request = PlanRequest(
        model=opt_350m(),
        cluster=found.cluster,
        workload=workload_from_options(
            {"global_batch_size": GLOBAL_BATCH, "seq_length": SEQUENCE, "precision": "fp32"}
        ),
        target=load_target("megatron@0.19"),
        top=PLACES,
        fix={"sharding": "none"},
        forbid=("vpp", "cp", "recompute"),
        memory_headroom=0.0,
    )
    names = [pool.name.partition("_") for pool in found.cluster.pools]
    search = Search(request, costs=SailorCosts(tables, [(gpu, zone) for gpu, _, zone in names]))
    result = search.run()
    plans: list[tuple[dict[str, Any], Score, float]] = []
    for finalist in sorted(result.finalists, key=lambda item: item.order):
        if finalist.step_time_s < NEVER_S:
            document = PlanDocument(
                status="feasible", inputs=inputs_of(request), plan=plan_of(request, search, finalist)
            )
            plan = sailor_plan(document)
            plans.append((plan, score(plan, tables, GLOBAL_BATCH, events=False), finalist.step_time_s))
    assert plans, "the search found no plan"
    least = max(scored.closed_form_per_s for _, scored, _ in plans) * (1 - WORTH_MOVING)
    plans = [
        (moved, score(moved, tables, GLOBAL_BATCH, events=False), step_s)
        for plan, scored, step_s in plans
        if scored.closed_form_per_s >= least
        for moved in plans_near(plan)
    ]
    plans = [each for each in plans if not each[1].too_full]
    least = max(scored.careful_form_per_s for _, scored, _ in plans) * (1 - NEAR_TIE)
    near = [each for each in plans if each[1].careful_form_per_s >= least]
    plan, _, step_s = max(near, key=lambda each: each[1].closed_form_per_s)
    return Outcome(plan, score(plan, tables, GLOBAL_BATCH), step_s, time.process_time() - started)


def plans_near(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The stages of a plan in every order, each with as many layers, and all boundaries moved by up to ``NEARBY``."""
    (pipeline,) = plan["pipeline_list"]
    held = [len(layers) for layers in pipeline["layers_per_stage"]]
    moves = list(product(range(-NEARBY, NEARBY + 1), repeat=len(held) - 1))
    for order in permutations(range(len(held))) if len(held) <= MOST_TO_REORDER else [range(len(held))]:
        machines = [pipeline["tmp_per_stage"][stage] for stage in order]
        cuts = list(accumulate(held[stage] for stage in order))
        for move in moves:
            edges = [0, *(cut + by for cut, by in zip(cuts, (*move, 0), strict=True))]
            if all(low < high for low, high in pairwise(edges)):
                layers = [list(range(low, high)) for low, high in pairwise(edges)]
                changed = {**pipeline, "layers_per_stage": layers, "tmp_per_stage": machines}
                yield {**plan, "pipeline_list": [changed]}


def describe(plan: dict[str, Any]) -> str:
    """The stages of a plan in words."""
    pipeline = plan["pipeline_list"][0]
    stages = zip(pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True)
    text = ", ".join(f"{stage[0][0][0][0]} tp{stage[0][1]} x{len(stage)}: {len(held)}" for held, stage in stages)
    return f"mbs {plan['mbs']}; layers {text}"


def main(arguments: list[str]) -> None:
    print(f"{'case':36s} {'events':>8s} {'blocking':>8s} {'closed':>8s} {'careful':>8s}", end="")
    print(f" {'Sailor':>8s} {'known':>8s} {'CPU s':>6s}")
    scores = {}
    for case in CASES:
        found = solve(case)
        scores[case.name] = {name: value for name, value in asdict(found.score).items() if name != "too_full"}
        one = found.score
        print(
            f"{case.name:36s} {one.events_per_s:8.4f} {one.blocking_events_per_s:8.4f} {one.closed_form_per_s:8.4f} "
            f"{one.careful_form_per_s:8.4f} {case.sailor_per_s:8.4f} {case.best_known_per_s:8.4f} {found.cpu_s:6.2f}  "
            f"{describe(found.plan)}"
        )
        if "--write" in arguments:
            (HERE / case.plan_file).write_text(json.dumps(found.plan) + "\n", encoding="utf-8")
    if "--write" in arguments:
        (HERE / "sailor_scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
