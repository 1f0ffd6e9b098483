"""Whatever is asked, a plan that leaves the planner holds: rules, layers, ranks, batch, memory, sums."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner import rules
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.specs.document import PlanDocument
from meshwright.specs.model import MTP
from meshwright.specs.plan import expand_blocks, parse_range

from .planner_cases import request, small_model, workload

CLUSTERS = (
    "1x2xA100-SXM-80GB",
    "1x6xA100-SXM-40GB",
    "8xH100",
    "16xH100",
    "2xT4",
    "1x4xA100-SXM-80GB+1x4xV100-SXM2-32GB",
    "1x8xH100-SXM+2x8xA100-SXM-80GB",
)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    experts = draw(st.sampled_from([0, 0, 4, 8]))
    heads = draw(st.sampled_from([4, 6, 8]))
    model = small_model(draw(st.integers(1, 9)), 128 * heads, heads, experts, draw(st.sampled_from([1000, 50257])))
    mtp = draw(st.booleans())
    if mtp:
        model = model.model_copy(update={"mtp": MTP(num_layers=1, layer=model.kinds[0])})
    if draw(st.booleans()):
        model = model.model_copy(update={"tied_embeddings": True})
    work = workload(
        batch=draw(st.sampled_from([1, 2, 3, 12, 32, 60])),
        seq=draw(st.sampled_from([512, 2048, 4096])),
        precision=draw(st.sampled_from(["bf16", "fp16"])),
        mtp=mtp,
    )
    fix = draw(st.sampled_from([{}, {}, {"tp": 2}, {"pp": 2}, {"vpp": 2}, {"mbs": 1}]))
    headroom = draw(st.sampled_from([0.0, 0.05, 0.9]))
    cluster = draw(st.sampled_from(CLUSTERS))
    return request(model, cluster, work, fix=fix, memory_headroom=headroom, top=2)


def check(asked: PlanRequest, answer: PlanDocument) -> None:
    """Everything a plan must be, read from the document alone."""
    found, estimate = answer.plan, answer.estimate
    assert found is not None
    assert estimate is not None
    chunks = sorted((chunk for stage in found.stages for chunk in stage.chunks), key=lambda chunk: chunk.order)
    assert [chunk.order for chunk in chunks] == list(range(found.pp * found.vpp))
    blocks = [block for chunk in chunks for block in expand_blocks(chunk.blocks)]
    layers = [("decoder", index) for index in range(asked.model.num_layers)]
    mtp = [("mtp", 0)] if asked.workload.mtp and asked.model.mtp else []
    assert blocks == [("embed", 0), *layers, *mtp, ("head", 0)]
    assert len(found.stages) == found.pp

    ranks: list[int] = []
    used: dict[str, int] = {}
    for number, stage in enumerate(found.stages):
        assert [chunk.order % found.pp for chunk in stage.chunks] == [number] * found.vpp
        degrees = stage.degrees
        assert degrees.tp * degrees.cp * degrees.dp == degrees.ep * degrees.etp * degrees.edp
        mine = [rank for group in stage.groups for text in group.ranks for rank in parse_range(text)]
        assert len(mine) == degrees.tp * degrees.cp * degrees.dp
        ranks += mine
        for group in stage.groups:
            assert asked.cluster.gpus[group.gpu].supports(asked.workload.precision)
            used[group.pool] = used.get(group.pool, 0) + len(mine)
    assert ranks == list(range(found.num_ranks))
    assert all(count <= asked.cluster.pool(name).num_gpus for name, count in used.items())
    placed = [rank for run in found.devices for rank in parse_range(run.ranks)]
    assert placed == ranks

    assert found.dp is not None
    assert found.micro_batch_size is not None
    assert found.dp * found.micro_batch_size * found.num_microbatches == asked.workload.global_batch_size
    assert rules.violations(rules.facts_of_plan(found, asked.model, asked.workload, asked.target)) == []

    assert estimate.fits
    for stage_estimate in estimate.stages:
        assert stage_estimate.reserved_bytes <= stage_estimate.limit_bytes * (1 - asked.memory_headroom)
        assert sum(stage_estimate.breakdown_bytes.values()) == stage_estimate.allocated_bytes
    assert math.isclose(sum(estimate.breakdown_s.values()), estimate.step_time_s, rel_tol=1e-9)
    assert estimate.interval_s[0] <= estimate.step_time_s <= estimate.interval_s[1]
    assert answer.bound is not None
    assert answer.bound.step_time_s <= estimate.step_time_s * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(asked=requests())
def test_every_plan_that_leaves_the_planner_holds(asked: PlanRequest) -> None:
    answer = plan(asked)
    if answer.plan is None:
        assert answer.status == "infeasible"
        assert answer.reason
        return
    check(asked, answer)
    for name, value in asked.fix.items():
        assert getattr(answer.plan, {"mbs": "micro_batch_size"}.get(name, name)) == value
    for other in answer.alternatives:
        assert other.step_time_s >= answer.estimate.step_time_s  # type: ignore[union-attr]
        broken = rules.violations(rules.facts_of_plan(other.plan, asked.model, asked.workload, asked.target))
        assert broken == []


def test_the_same_request_gets_the_same_answer() -> None:
    asked = request(small_model(6, experts=8), "1x8xH100-SXM+1x8xA100-SXM-80GB", workload(32, 2048))
    first, second = plan(asked), plan(asked)
    assert first.model_dump(exclude={"run"}) == second.model_dump(exclude={"run"})
    assert first.run is not None
    assert second.run is not None
    assert first.run.id == second.run.id


def test_a_work_limit_cuts_reproducibly_and_says_so() -> None:
    asked = request(small_model(8), "16xH100", workload(64, 2048), work_limit=1)
    first, second = plan(asked), plan(asked)
    assert first.model_dump(exclude={"run"}) == second.model_dump(exclude={"run"})
    free = plan(asked.model_copy(update={"work_limit": None}))
    assert free.complete
    assert first.estimate is not None
    assert free.estimate is not None
    assert first.run is not None
    assert sum(first.run.pruned.values()) > 0
    assert first.estimate.step_time_s >= free.estimate.step_time_s
    assert first.bound is not None
    assert first.bound.step_time_s <= free.estimate.step_time_s
