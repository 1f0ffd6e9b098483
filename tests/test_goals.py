"""Goals beside the fastest step: money, targets, batch sizes, expert load, what-ifs, a plan in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.cli import run
from meshwright.planner.engine.widen import searched
from meshwright.planner.goals import answer
from meshwright.planner.objectives.batches import batch_sizes, finished_sweep
from meshwright.planner.objectives.cheapest import SIZES_TRIED
from meshwright.planner.objectives.costs import plan_price_per_s
from meshwright.planner.objectives.parts import growing, halvings, least_step_s, part_of, parts
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.expert_load import expert_load_from_data
from meshwright.specs.goals import BatchPoint

from .planner_cases import request, small_model, workload

MIXED = "2x2xH100-SXM+2x2xA100-80GB"
SMALL_MIXED = "1x2xH100-SXM+1x2xA100-80GB"
PRICE = {"H100-SXM": 3.6, "A100-SXM-80GB": 1.8}  # 1 and 0.5 thousandths a second


def test_parts_of_a_mixed_cluster_are_all_subsets() -> None:
    cluster = load_cluster(MIXED)
    found = parts(cluster)
    # 0 to 2 nodes of each of two pools, not none at all
    assert len(found) == 8
    assert found[-1] == cluster
    assert sorted(part.num_gpus for part in found) == [2, 2, 4, 4, 4, 6, 6, 8]


def test_large_pools_are_halved() -> None:
    assert halvings(12) == [1, 3, 6, 12]
    assert len(parts(load_cluster("128x8xH100-SXM"))) == 3 + 8  # 1, 2, 4 GPUs; 1, 2, 4 .. 128 nodes
    assert [part.num_gpus for part in growing(load_cluster("3x8xH100-SXM"))] == [1, 2, 4, 8, 16, 24]


def test_cheapest_step_against_every_part() -> None:
    asked = request(small_model(), SMALL_MIXED, objective="cost", price=PRICE, tokens=1e9)
    costs = {}
    for part in parts(asked.cluster):
        alone = asked.model_copy(update={"cluster": part, "objective": "time"})
        best = searched(alone).result.best
        if best is not None:
            pools = [part.pools[k].gpu for k in best.batch.arrangement.stage_pools]
            rate = sum(best.batch.arrangement.stage_ranks * PRICE[gpu] / 3600 for gpu in pools)
            costs[part.name] = best.step_time_s * rate
    document = answer(asked)
    assert document.goal is not None
    assert document.cost is not None
    assert document.goal.value == pytest.approx(min(costs.values()))
    assert costs[document.inputs.cluster.name] == pytest.approx(document.goal.value)
    assert document.goal.gap is not None
    assert 0 <= document.goal.gap < 1
    steps = 1e9 / (16 * 2048)
    assert document.cost.per_step == pytest.approx(document.goal.value)
    assert document.cost.total == pytest.approx(steps * document.cost.per_step)
    assert document.cost.days == pytest.approx(steps * document.estimate.step_time_s / 86400)  # type: ignore[union-attr]
    assert document.cost.per_million_tokens == pytest.approx(document.cost.per_step / (16 * 2048) * 1e6)


def test_a_price_decides_which_pool_is_used() -> None:
    dear = answer(
        request(small_model(), SMALL_MIXED, objective="cost", price={"H100-SXM": 1000.0, "A100-SXM-80GB": 0.1})
    )
    assert {pool.gpu for pool in dear.inputs.cluster.pools} == {"A100-SXM-80GB"}
    cheap = answer(
        request(small_model(), SMALL_MIXED, objective="cost", price={"H100-SXM": 0.1, "A100-SXM-80GB": 1000.0})
    )
    assert {pool.gpu for pool in cheap.inputs.cluster.pools} == {"H100-SXM"}
    assert any(each.status == "pruned" for each in cheap.goal.considered)  # type: ignore[union-attr]


def test_the_price_of_a_plan_counts_the_gpus_it_uses() -> None:
    document = answer(request(small_model(), "4xH100", price={"H100-SXM": 3600.0}))
    assert plan_price_per_s({"H100-SXM": 3600.0}, document.plan) == document.estimate.gpus_used  # type: ignore[arg-type,union-attr]
    assert document.cost.per_step == pytest.approx(document.estimate.gpus_used * document.estimate.step_time_s)  # type: ignore[union-attr]


def test_smallest_cluster_that_meets_a_target() -> None:
    base = request(small_model(), "4x2xH100", workload(8))
    steps = {}
    for part in growing(base.cluster):
        best = searched(base.model_copy(update={"cluster": part})).result.best
        steps[part.num_gpus] = best.step_time_s if best else float("inf")
    assert len(steps) <= SIZES_TRIED
    for target in (1.001 * steps[4], 1.001 * steps[8]):
        wanted = min(size for size, step_s in steps.items() if step_s <= target)
        found = answer(base.model_copy(update={"objective": "gpus", "target_step_time_s": target}))
        assert found.inputs.cluster.num_gpus == wanted
        assert found.estimate.step_time_s <= target  # type: ignore[union-attr]
    missed = answer(base.model_copy(update={"objective": "gpus", "target_step_time_s": 1e-4}))
    assert missed.status == "infeasible"
    assert "0.0001 s" in (missed.reason or "")


def test_no_plan_is_faster_than_the_peak_allows() -> None:
    asked = request(small_model(), SMALL_MIXED)
    for part in parts(asked.cluster):
        best = searched(asked.model_copy(update={"cluster": part})).result.best
        assert best is None or best.step_time_s > least_step_s(asked, part)


def test_the_front_holds_what_no_plan_beats() -> None:
    asked = request(small_model(), "8xH100", top=10)
    document = answer(asked)
    front = document.pareto
    assert front[0].step_time_s == pytest.approx(document.estimate.step_time_s)  # type: ignore[union-attr]
    fill = max(stage.reserved_bytes / stage.limit_bytes for stage in document.estimate.stages)  # type: ignore[union-attr]
    assert front[0].memory_headroom == pytest.approx(1 - fill, abs=1e-4)
    for one in front:
        for other in front:
            if one is not other:
                assert (
                    one.step_time_s < other.step_time_s
                    or one.memory_headroom > other.memory_headroom
                    or one.gpu_seconds < other.gpu_seconds
                )
    again = asked.model_copy(update={"fix": dict(front[-1].choices), "top": 1})
    if "block" not in str(front[-1].choices["recompute"]):
        assert answer(again).estimate.step_time_s <= front[-1].step_time_s * (1 + 1e-9)  # type: ignore[union-attr]


def test_the_knee_and_the_marginal_throughput() -> None:
    def row(batch: int, step_s: float) -> BatchPoint:
        return BatchPoint(
            global_batch_size=batch, status="feasible", step_time_s=step_s, tokens_per_s=batch * 10 / step_s
        )

    sweep = finished_sweep([row(1, 1.0), row(2, 1.1), row(4, 2.0), row(8, 4.0)], 10)
    # 10, 18.2, 20, 20 tokens/s: two of four are within 5 % of 20
    assert sweep.knee == 4
    assert [point.share_of_best for point in sweep.points] == pytest.approx([0.5, 1 / 1.1, 1.0, 1.0])
    assert sweep.points[0].marginal_tokens_per_s is None
    assert [point.marginal_tokens_per_s for point in sweep.points[1:]] == pytest.approx([100, 20 / 0.9, 20])
    assert batch_sizes(12) == [3, 6, 12, 24, 48, 96]


def test_a_sweep_leaves_the_workload_alone() -> None:
    document = answer(request(small_model(), "2xH100", workload(8), objective="batch"))
    assert document.inputs.workload.global_batch_size == 8
    rows = {row.global_batch_size: row for row in document.batch_sweep.points}  # type: ignore[union-attr]
    assert rows[8].step_time_s == pytest.approx(document.estimate.step_time_s)  # type: ignore[union-attr]
    alone = answer(request(small_model(), "2xH100", workload(32)))
    assert rows[32].step_time_s == pytest.approx(alone.estimate.step_time_s)  # type: ignore[union-attr]


def test_an_expert_load_is_placed_and_priced() -> None:
    model = small_model(experts=8)
    load = expert_load_from_data([8, 8, 1, 1, 1, 1, 2, 2], 8, 4)
    asked = request(model, "4xH100", expert_load=load, fix={"ep": 4})
    document = answer(asked)
    placement = document.expert_placement
    assert placement is not None
    # 24 tokens, 6 a rank: neighbours 8+8 = 16; an 8 with a 1 = 9, which equal counts cannot beat
    assert placement.contiguous_max_over_mean == pytest.approx(16 / 6)
    assert placement.max_over_mean == pytest.approx(9 / 6)
    assert placement.lower_bound == pytest.approx(9 / 6)
    assert placement.uneven_max_over_mean == pytest.approx(8 / 6)
    assert sorted(expert for rank in placement.layers[0] for expert in rank) == list(range(8))
    assert document.estimate.step_time_s == placement.step_time_s < placement.contiguous_step_time_s  # type: ignore[union-attr]
    free = asked.model_copy(update={"target": asked.target.model_copy(update={"uneven_experts": True})})
    assert answer(free).expert_placement.max_over_mean == pytest.approx(8 / 6)  # type: ignore[union-attr]
    same = request(model, "4xH100", workload(moe_load_factor=1.5), fix={"ep": 4})
    assert answer(same).estimate.step_time_s == pytest.approx(placement.step_time_s)  # type: ignore[union-attr]


def test_an_even_load_changes_nothing() -> None:
    model = small_model(experts=8)
    even = answer(request(model, "4xH100", expert_load=expert_load_from_data("zipf:0", 8, 4)))
    plain = answer(request(model, "4xH100"))
    assert even.estimate.step_time_s == plain.estimate.step_time_s  # type: ignore[union-attr]
    assert even.plan == plain.plan


def test_part_of_a_pool_keeps_its_links() -> None:
    cluster = load_cluster("4x8xH100-SXM")
    half = part_of(cluster, (2,))
    assert half.num_gpus == 16
    assert half.pools[0].levels[-1].bandwidth_bytes_per_s == cluster.pools[0].levels[-1].bandwidth_bytes_per_s
    assert part_of(cluster, (4,)) is cluster


def test_goals_that_contradict_are_refused() -> None:
    for options, word in (
        ({"objective": "cost"}, "price"),
        ({"price": {"B200": 1.0}}, "B200"),
        ({"tokens": 1e9}, "tokens"),
        ({"target_step_time_s": 1.0}, "target_step_time_s"),
        ({"expert_load": expert_load_from_data([1, 2], 2, 1)}, "expert_load"),
    ):
        with pytest.raises(ValueError, match=word):
            request(small_model(), "2xH100", **options)


COMMAND = ["plan", "llama-3.1-8b", "--cluster", "8xH100", "--global-batch-size", "64", "--seq-length", "4096"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--objective", "cost"], "--price: is missing for a GPU-hour of H100-SXM"),
        (["--price", "H200=2"], "--price H200: is no GPU type of the cluster"),
        (["--price", "H100=cheap"], "--price H100: "),
        (["--tokens", "15T"], "--tokens: "),
        (["--tokens", "many"], "--tokens: "),
        (["--target-step-time", "5s"], "--target-step-time: belongs"),
        (["--expert-load", "zipf:0.6"], "--expert-load: is given, but the model has no experts"),
        (["--expert-load", "no/such/file"], "--expert-load: "),
        (["--what-if", "gpus=lots"], "--what-if.0: "),
        (["--what-if", "beauty=2x"], "--what-if.0: "),
        (["--from", "no/such/file"], "--from: "),
    ],
)
def test_the_command_names_the_option(more: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, *more]) == 2
    assert named in capsys.readouterr().err


def test_command_and_service_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    from meshwright.api.rest import create_app

    file = tmp_path / "load.json"
    file.write_text(json.dumps({"tokens": [5, 5, 1, 1, 1, 1, 1, 1]}))
    argv = [
        "plan", "mixtral-8x7b", "--cluster", "16xH100", "--global-batch-size", "64", "--seq-length", "4096", "--json",
        "--price", "H100=2.5", "--tokens", "1B", "--expert-load", str(file), "--what-if", "network=2x", "--top", "2",
        "--fix", "tp=1",
        "--deadline", "600s",
    ]  # fmt: skip
    assert run(argv) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    body = {
        "model": "mixtral-8x7b",
        "cluster": "16xH100",
        "workload": {"global_batch_size": 64, "seq_length": 4096},
        "price": {"H100-SXM": 2.5},
        "tokens": 1e9,
        "expert_load": [5, 5, 1, 1, 1, 1, 1, 1],
        "what_if": ["network=2x"],
        "top": 2,
        "fix": {"tp": 1},
        "deadline_s": 600,
    }
    posted = TestClient(create_app()).post("/v1/plans", json=body).json()
    assert {k: v for k, v in posted.items() if k != "run"} == {k: v for k, v in told.items() if k != "run"}
    assert told["what_if"][0]["gain"] >= 0
    assert told["expert_placement"]["layers"]


@pytest.mark.parametrize(
    ("more", "pointer"),
    [
        ({"objective": "cost"}, "/price"),
        ({"price": {"H200": 1.0}}, "/price/H200"),
        ({"price": {"H100-SXM": -1.0}}, "/price/H100-SXM"),
        ({"tokens": 1e12}, "/tokens"),
        ({"target_tokens_per_s": 1e6}, "/target_tokens_per_s"),
        ({"objective": "gpus", "target_tokens_per_s": 1e6, "target_step_time_s": 1.0}, "/target_tokens_per_s"),
        ({"expert_load": "zipf:0.6"}, "/expert_load"),
        ({"what_if": ["gpus=2x", "gpu=X99"]}, "/what_if/1"),
        ({"from": {"tp": 1}}, "/from/pp"),
        ({"from": 5}, "/from"),
        ({"allow": ["magic"]}, "/allow/0"),
    ],
)
def test_the_service_points_at_the_field(more: dict[str, Any], pointer: str) -> None:
    from fastapi.testclient import TestClient

    from meshwright.api.rest import create_app

    workload = {"global_batch_size": 64, "seq_length": 4096}
    body = {"model": "llama-3.1-8b", "cluster": "8xH100", "workload": workload, **more}
    answered = TestClient(create_app()).post("/v1/plans", json=body)
    assert answered.status_code == 422, answered.text
    assert pointer in [error["pointer"] for error in answered.json()["errors"]]


def test_wrong_changes_are_named_before_the_search() -> None:
    with pytest.raises(SpecError) as caught:
        answer(request(small_model(), "2xH100", what_if=("gpus=2x", "gpu=X1")))
    assert [fault.pointer for fault in caught.value.faults] == ["/what_if/1"]
