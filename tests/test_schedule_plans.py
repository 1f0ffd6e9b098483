"""Plans under every schedule: what documents accept, what estimates and targets refuse, and sums that close."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models import schedules
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate, plan_step
from meshwright.cost_models.multipliers import Multipliers
from meshwright.cost_models.operators import device, matmul_s
from meshwright.cost_models.protocol import TERMS
from meshwright.cost_models.stage_sums import stage_sums
from meshwright.cost_models.step import step_bound_s
from meshwright.planner.rules import facts_of_plan, violations
from meshwright.specs.errors import SpecError
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Plan
from meshwright.specs.schedules import CHUNKS, ScheduleName, runs_chunks
from meshwright.specs.targets import load_target

from .cost_cases import FULL, H100, cluster, dense, keys, physics, plan, target, workload
from .schedule_cases import ALL, SPLIT, TWO_CHUNKS, scheduled

MODEL = dense(16, 2048, 16, 8, 5632, 32000)
TIED = MODEL.model_copy(update={"tied_embeddings": True})


def chunks_of(name: ScheduleName) -> int:
    return CHUNKS[name][0]


def laid_out(name: ScheduleName, m: int = 8, **kwargs: object) -> Plan:
    return scheduled(plan(MODEL, pp=4, dp=2, vpp=chunks_of(name), m=m, **kwargs), name)  # type: ignore[arg-type]


def run(laid: Plan, model: object = MODEL) -> Estimate:
    return estimate(model, cluster(1), workload(laid.num_microbatches * 2), target(), laid)  # type: ignore[arg-type]


def test_names_of_documents_and_of_schedules_are_the_same() -> None:
    assert set(schedules.SCHEDULES) == set(CHUNKS) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_plan_has_the_chunks_that_its_schedule_runs(name: ScheduleName) -> None:
    good = laid_out(name).to_json()
    assert Plan.parse(good).schedule == name
    other = 1 if chunks_of(name) > 1 else 2
    wrong = plan(MODEL, pp=4, dp=2, vpp=other, m=8).to_json() | {"schedule": name}
    with pytest.raises(SpecError, match=f"schedule {name} does not run {other} chunks"):
        Plan.parse(wrong)
    assert runs_chunks(name, 3) == (CHUNKS[name][1] is None)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sharding", ["zero1", "fsdp"])
def test_time_and_memory_add_up(name: ScheduleName, sharding: str) -> None:
    laid = laid_out(name, sharding=sharding)
    result = run(laid)
    assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s)
    assert result.breakdown_s["bubble"] >= 0
    for stage in result.stages:
        assert sum(stage.breakdown_bytes.values()) == stage.allocated_bytes
        assert stage.busy_s <= result.step_time_s
    costs, sums = stage_sums(MODEL, cluster(1), workload(16), target(), laid)
    step = plan_step(costs, laid, sums)
    forward, backward = sums.forward_terms_s.sum(axis=-1), sums.backward_terms_s.sum(axis=-1)
    assert (sums.weight_s < backward).all()
    work = 8 / schedules.get(name).copies * (forward + backward).sum(axis=1)
    np.testing.assert_allclose(step.timeline.busy_s, work)
    tail = costs.tail(sums.cells, sums.rows, sums.pools, sums.dense, sums.expert, backward.sum(axis=1))
    send = costs.boundary_s(sums.cells, sums.rows[:-1], sums.pools[:-1], sums.pools[1:], sums.first_ranks[:-1])
    bound = float(step_bound_s(name, forward, backward, send, 8, tail, sums.weight_s))
    assert 0.7 * result.step_time_s < bound <= result.step_time_s * (1 + 1e-12)


def test_weight_gradients_are_the_products_of_output_gradients_and_inputs() -> None:
    costs = physics(MODEL, cluster(1), workload(16), target())
    cells = costs.cells(keys((1, 1, 1, 1, 2, 1, 0, 1), (1, 1, 1, 1, 2, 1, 1, 1)))
    on = device(H100, "bf16")
    one = np.ones(1)
    tokens, hidden, vocabulary = 4096 * one, 2048 * one, 32000 * one
    head = costs.blocks.kinds.index("head")
    expected = matmul_s(on, vocabulary, hidden, tokens, one, False, False, "weight_gradient")
    assert cells.weight_gradient_s[0, 0, head] == pytest.approx(float(expected[0]))
    layer = 1
    shapes = [(2048, 4096), (2048, 2048), (2048, 11264), (5632, 2048)]  # qkv, out, gate and up, down
    by_hand = sum(
        float(matmul_s(on, o * one, i * one, tokens, one, True, False, "weight_gradient")[0]) for i, o in shapes
    )
    assert cells.weight_gradient_s[0, 0, layer] == pytest.approx(by_hand)
    slower = CostModel(MODEL, cluster(1), workload(16), target(), multipliers=(Multipliers(gemm=1.5),))
    corrected = slower.cells(keys((1, 1, 1, 1, 2, 1, 0, 1))).weight_gradient_s[0, 0, layer]
    assert corrected == pytest.approx(1.5 * by_hand)
    # Recomputation adds to the backward, not to its weight gradients.
    assert cells.weight_gradient_s[1, 0, layer] == cells.weight_gradient_s[0, 0, layer]
    frozen = physics(MODEL, cluster(1), workload(16, frozen=("decoder",)), target())
    assert frozen.cells(keys((1, 1, 1, 1, 2, 1, 0, 1))).weight_gradient_s[0, 0, layer] == 0


def test_dualpipe_holds_the_mirrored_stage_too() -> None:
    once, twice = run(laid_out("1f1b")), run(laid_out("dualpipe"))
    for p in range(4):
        for kind in ("weights", "gradients", "optimizer"):
            both = once.stages[p].breakdown_bytes[kind] + once.stages[3 - p].breakdown_bytes[kind]
            assert twice.stages[p].breakdown_bytes[kind] == pytest.approx(both, abs=2)
        own = once.stages[p].busy_s + once.stages[3 - p].busy_s
        assert twice.stages[p].busy_s == pytest.approx(own / 2)


def test_a_v_keeps_a_tied_embedding_once_and_sums_no_gradients_between_stages() -> None:
    """The first and the last chunk share stage 0: no copy of the table, no exchange after the backward."""
    table = 2 * 32000 * 2048  # bf16
    looped = {name: run(laid_out("interleaved"), model) for name, model in (("plain", MODEL), ("tied", TIED))}
    vee = {name: run(laid_out("zb-v"), model) for name, model in (("plain", MODEL), ("tied", TIED))}
    weights = {
        name: sum(stage.breakdown_bytes["weights"] for stage in result.stages)
        for name, result in (("looped", looped["tied"]), ("vee", vee["tied"]), ("plain", vee["plain"]))
    }
    assert weights["looped"] == weights["plain"]
    assert weights["plain"] - weights["vee"] == pytest.approx(table, rel=0.01)
    assert looped["tied"].breakdown_s["grad_reduce"] > looped["plain"].breakdown_s["grad_reduce"]
    assert vee["tied"].breakdown_s["grad_reduce"] <= vee["plain"].breakdown_s["grad_reduce"]


def test_breadth_first_gathers_sharded_parameters_once_a_chunk() -> None:
    _, often = stage_sums(MODEL, cluster(1), workload(16), target(), laid_out("interleaved", sharding="fsdp"))
    _, once = stage_sums(MODEL, cluster(1), workload(16), target(), laid_out("looped-bfs", sharding="fsdp"))
    assert TERMS[-1] == "dp_comm"
    at = -1
    assert often.backward_terms_s[..., at].max() > 0
    np.testing.assert_allclose(once.backward_terms_s[..., at], often.backward_terms_s[..., at] / 8)
    np.testing.assert_allclose(once.backward_terms_s[..., :at], often.backward_terms_s[..., :at])


@pytest.mark.parametrize("name", ALL)
def test_recomputation_and_split_backwards_do_not_combine(name: ScheduleName) -> None:
    laid = laid_out(name, recompute=FULL)
    if name not in SPLIT:
        assert run(laid).breakdown_s["recompute"] > 0
        return
    with pytest.raises(SpecError, match="runs weight gradients apart") as caught:
        run(laid)
    assert caught.value.faults[0].pointer == "/stages/0/recompute"


def test_what_a_schedule_does_not_run_is_refused_with_its_place() -> None:
    with pytest.raises(SpecError, match="at least 8 micro-batches, got 6") as caught:
        run(laid_out("dualpipe-v", m=6))
    assert caught.value.faults[0].pointer == "/num_microbatches"
    looped = plan(MODEL, pp=4, dp=2, vpp=2, m=8).model_copy(update={"schedule": "zb-v"})
    with pytest.raises(SpecError, match="zb-v has place 7 of the pipeline here") as caught:
        run(looped)
    assert caught.value.faults[0].pointer == "/stages/0/chunks/1/order"


@pytest.mark.parametrize("name", ALL)
def test_megatron_refuses_schedules_that_it_does_not_have(name: ScheduleName) -> None:
    aim = load_target("megatron@0.19")
    found = violations(facts_of_plan(laid_out(name), MODEL, workload(16), aim, [H100]))
    named = [item for item in found if item.rule == "megatron.P10"]
    if name in ("1f1b", "interleaved"):
        assert not named
        return
    assert named[0].message == f"there is no schedule {name}, only 1f1b, interleaved"
    assert named[0].alternatives == ("schedule=1f1b", "schedule=interleaved")
    assert not any(item.rule == "megatron.P11" for item in found), "the places of a V are no fault of their own"


@pytest.mark.parametrize("name", TWO_CHUNKS)
def test_the_last_stage_of_a_v_is_the_turning_point(name: ScheduleName) -> None:
    laid = laid_out(name)
    assert [chunk.order for chunk in laid.stages[3].chunks] == [3, 4]
    assert [chunk.order for chunk in laid.stages[0].chunks] == [0, 7]
