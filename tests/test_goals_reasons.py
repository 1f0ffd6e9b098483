"""What-ifs, a plan in use, allowed options, what runners-up and constraints cost, what would fit."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.cli import run
from meshwright.planner.answer.differences import differences, in_runs, why
from meshwright.planner.engine.explore import Search
from meshwright.planner.goals import answer
from meshwright.planner.objectives.changes import changed
from meshwright.planner.single import estimate_degrees
from meshwright.planner.variants import variants
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError
from meshwright.specs.goals import Difference
from meshwright.specs.workload import workload_from_options

from .planner_cases import request, small_model, workload


def step_s(document: PlanDocument) -> float:
    assert document.estimate is not None
    return document.estimate.step_time_s


def test_changes_change_one_thing() -> None:
    asked = request(small_model(), "2x8xH100-SXM")
    pool = asked.cluster.pools[0]
    assert changed(asked, "gpus=2x").cluster.num_gpus == 32
    assert changed(asked, "gpus=8").cluster.num_gpus == 8
    assert changed(request(small_model(), "1x8xH100-SXM"), "gpus=0.5x").cluster.pools[0].gpus_per_node == 4
    faster = changed(asked, "network=2x").cluster.pools[0]
    assert [level.bandwidth_bytes_per_s for level in faster.levels] == [
        level.bandwidth_bytes_per_s * (2 if level.span > 8 else 1) for level in pool.levels
    ]
    inner = changed(asked, "nvlink=2x").cluster.pools[0]
    assert inner.levels[0].bandwidth_bytes_per_s == 2 * pool.levels[0].bandwidth_bytes_per_s
    assert inner.levels[-1] == pool.levels[-1]
    other = changed(asked, "gpu=H200").cluster
    assert [pool.gpu for pool in other.pools] == ["H200-SXM"]
    assert set(other.gpus) == {"H200-SXM"}
    now, more = asked.cluster.gpu_of(pool), changed(asked, "memory=2x").cluster
    assert more.gpu_of(more.pools[0]).usable_memory_bytes == 2 * now.usable_memory_bytes
    assert changed(asked, "batch=2x").workload.global_batch_size == 32
    assert changed(asked, "batch=48").workload.global_batch_size == 48


def test_one_pool_of_a_mixed_cluster_changes_its_type() -> None:
    asked = request(small_model(), "1x8xH100-SXM+1x8xA100-80GB")
    got = changed(asked, "gpu=A100-80GB:H100").cluster
    assert [pool.gpu for pool in got.pools] == ["H100-SXM", "H100-SXM"]
    assert changed(asked, "gpus=3x").cluster.num_gpus == 48


@pytest.mark.parametrize(
    "change",
    [
        "gpus",
        "gpus=",
        "gpus=0",
        "gpus=0.3x",
        "gpus=12",
        "network=fast",
        "network=5000x",
        "gpu=X99",
        "gpu=L40S:H100",
        "memory=80",
        "batch=0.03x",
        "batch=0",
        "=2x",
        "gpus=99999x",
        "without=Z1",
    ],
)
def test_wrong_changes_are_refused(change: str) -> None:
    with pytest.raises(SpecError) as caught:
        changed(request(small_model(), "2x8xH100-SXM"), change, "/what_if/0")
    assert caught.value.faults[0].pointer == "/what_if/0"


def test_a_what_if_is_the_plan_after_the_change() -> None:
    asked = request(small_model(), "2xH100", what_if=("gpus=2x", "batch=2x"))
    document = answer(asked)
    more, batch = document.what_if
    after = answer(request(small_model(), "4xH100"))
    assert more.step_time_s == pytest.approx(step_s(after), rel=0.01)  # the name of the cluster and node form differ
    assert more.gain == pytest.approx(step_s(document) / more.step_time_s - 1)
    larger = answer(request(small_model(), "2xH100", workload(32)))
    assert batch.step_time_s == pytest.approx(step_s(larger))
    # twice the tokens in the new step time
    assert batch.gain == pytest.approx(2 * step_s(document) / step_s(larger) - 1)
    assert document.inputs.workload.global_batch_size == 16


def test_a_what_if_without_a_plan_says_so() -> None:
    document = answer(request(small_model(), "2xH100", what_if=("memory=0.01x",)))
    (row,) = document.what_if
    assert (row.status, row.step_time_s, row.gain) == ("infeasible", None, None)
    assert row.reason


def test_a_rule_is_waived_by_family() -> None:
    # 6 heads cannot be split over TP 4, whatever else the plan does
    asked = request(small_model(hidden=1536, heads=6), "4xH100", fix={"tp": 4})
    assert answer(asked).status == "infeasible"
    tied, waived = Search(asked), Search(changed(asked, "without=T"))
    assert not tied.run().priced
    assert waived.run().best is not None
    assert waived.result.candidates == tied.result.candidates


def test_what_each_difference_to_a_plan_in_use_is_worth() -> None:
    asked = request(small_model(), "4xH100")
    current = estimate_degrees(asked, {"tp": 4, "micro_batch_size": 1, "recompute": "full"})
    assert current.plan is not None
    document = answer(asked.model_copy(update={"current": current.plan}))
    found = document.current
    assert found is not None
    assert found.step_time_s == pytest.approx(step_s(current))
    assert found.ratio == pytest.approx(step_s(current) / step_s(document))
    by_name = {each.name: each for each in found.differences}
    assert by_name["recompute"].ours == "full"
    plain = estimate_degrees(asked, {"tp": 4, "micro_batch_size": 1, "recompute": by_name["recompute"].theirs})
    assert by_name["recompute"].worth_s == pytest.approx(step_s(current) - step_s(plain))
    assert by_name["recompute"].worth_s > 0
    assert by_name["dp"].worth_s is None
    assert sum(found.terms_s.values()) == pytest.approx(step_s(current) - step_s(document))
    assert found.terms_s["recompute"] > 0
    assert found.why is not None
    assert "recompute full -> " in found.why
    assert found.why in next(each.message for each in document.explanation if each.kind == "current")
    assert by_name["options.sequence_parallel"].reason == "follows from tp"


def test_the_best_plan_as_plan_in_use_has_no_differences() -> None:
    asked = request(small_model(), "4xH100")
    best = answer(asked)
    document = answer(asked.model_copy(update={"current": best.plan}))
    assert document.current is not None
    assert document.current.ratio == pytest.approx(1.0)
    assert document.current.differences == ()
    assert document.current.why is None


def test_a_reason_names_what_was_chosen_and_what_it_saves() -> None:
    found = (
        Difference(name="tp", ours=8, theirs=4),
        Difference(name="etp", ours=8, theirs=4),  # follows
        Difference(name="dp", ours=1, theirs=2, reason="follows from the other degrees"),
        Difference(name="sharding", ours={"hsdp": {"replicate": 2, "shard": 8}}, theirs="zero1"),
        Difference(name="options.grouped_gemm", ours=False, theirs=True, worth_s=0.001),  # too little of 2 s
        Difference(name="options.cuda_graph_scope", ours=[], theirs=["attn", "mlp"], worth_s=0.1),
    )
    moved = {"bubble": 0.5, "gemm": 0.009, "host": 0.2, "dp_comm": -0.04, "optimizer": -0.001}
    assert why(found, moved, 2.0) == (
        "tp 8 -> 4, sharding hsdp 8 x 2 -> zero1, cuda_graph_scope none -> attn+mlp: "
        "less the pipeline bubble 25%, kernel launches 10%, for more gathers and scatters of full sharding 2%"
    )
    layers = (Difference(name="layers", ours="9, 7", theirs="8 x 2"),)
    assert why(layers, {"bubble": 0.004}, 2.0) == "layers 9, 7 -> 8 x 2: less the pipeline bubble 0.2%"


def test_arguments_in_use_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    common = ["--cluster", "8xH100", "--global-batch-size", "64", "--seq-length", "4096"]
    file, folder = tmp_path / "plan.json", tmp_path / "run"
    fixed = ["plan", "llama-3.1-8b", *common, "--fix", "tp=4", "-o", str(file), "--export", str(folder)]
    assert run(fixed) == 0
    script = next(path for path in folder.iterdir() if path.suffix == ".sh" and "--num-layers" in path.read_text())
    for source in (file, script):
        capsys.readouterr()
        assert run(["plan", "llama-3.1-8b", *common, "--from", str(source)]) == 0
        assert "the current plan (tp 4" in capsys.readouterr().out


def test_lifting_a_constraint_tells_its_cost() -> None:
    free = answer(request(small_model(), "4xH100"))
    tied = answer(request(small_model(), "4xH100", fix={"tp": 4}, forbid=("vpp",)))
    costs = {item.data["constraint"]: item.data["costs"] for item in tied.explanation if item.kind == "constraint"}
    assert set(costs) == {"--fix tp=4", "--forbid vpp"}
    assert costs["--fix tp=4"] == pytest.approx(1 - step_s(free) / step_s(tied), abs=1e-3)
    assert not [item for item in free.explanation if item.kind == "constraint"]


def test_a_constraint_that_leaves_no_plan_is_named() -> None:
    model = small_model(layers=24, hidden=8192, heads=64)
    tied = answer(request(model, "8xH100", forbid=("tp", "pp", "fsdp")))
    assert tied.status == "infeasible"
    freed = [item.message for item in tied.explanation if item.kind == "constraint"]
    assert any("without --forbid" in message and "there is a plan that fits" in message for message in freed)


def test_the_next_best_plan_names_its_terms() -> None:
    document = answer(request(small_model(), "8xH100"))
    (reason,) = [item for item in document.explanation if item.kind == "next-best"]
    other = document.alternatives[0]
    assert sum(reason.data["terms_s"].values()) == pytest.approx(other.step_time_s - step_s(document))
    assert other.differences
    assert all(d.ours != d.theirs for d in other.differences)
    assert document.plan is not None
    assert {d.name for d in other.differences} <= {d.name for d in differences(document.plan, other.plan)}


def test_layers_are_told_in_runs() -> None:
    assert in_runs([3, 2, 2, 2, 1]) == "3, 2 x 3, 1"


def test_what_would_fit_is_tried() -> None:
    model = small_model(layers=48, hidden=8192, heads=64)
    document = answer(request(model, "2xH100", workload(2, 1024)))
    assert document.status == "infeasible"
    would = [item.data for item in document.explanation if item.kind == "would-fit"]
    changes = [data["change"] for data in would if "change" in data]
    for change in changes:
        name = change.partition("=")[0]
        if name == "gpu":
            asked = changed(request(model, "2xH100", workload(2, 1024)), change)
            assert Search(asked).run(first_fit=True).best is not None
    assert any("num_gpus" in data for data in would)


def test_sets_of_allowed_options() -> None:
    dense = request(small_model(), "4xH100", allow=("tp_comm_overlap", "ep_comm_overlap"))
    usual = ("moe_shared_expert_overlap",)
    assert [each.target.switches for each in variants(dense)] == [(*usual, "tp_comm_overlap")]
    experts = request(small_model(experts=8), "4xH100", allow=("ep_comm_overlap", "tp_comm_overlap", "cuda_graph"))
    assert {each.target.switches for each in variants(experts)} == {
        (*usual, "tp_comm_overlap"),
        ("ep_comm_overlap", *usual, "tp_comm_overlap"),
        ("cuda_graph", *usual, "tp_comm_overlap"),
        ("cuda_graph", "ep_comm_overlap", *usual, "tp_comm_overlap"),
    }
    assert [each.target.switches for each in variants(request(small_model(), "4xH100"))] == [usual]


@pytest.mark.parametrize("experts", [0, 8])
def test_allowed_options_never_make_a_plan_slower(experts: int) -> None:
    work = workload_from_options({"global_batch_size": 8, "seq_length": 2048})
    base = request(small_model(hidden=4096, heads=32, experts=experts), "4xH100", work, fix={"tp": 2})
    plain = answer(base)
    allowed = answer(base.model_copy(update={"allow": ("tp_comm_overlap", "ep_comm_overlap", "cuda_graph")}))
    assert step_s(allowed) < step_s(plain)
    assert allowed.plan is not None
    assert allowed.plan.options.tp_comm_overlap
    if not experts:
        assert allowed.plan.recompute.label == "none"  # nothing is lost to what graphs refuse
    assert plain.plan is not None
    assert not plain.plan.options.tp_comm_overlap
    # what the search prices is what the plan's options say
    assert allowed.pareto[0].step_time_s == pytest.approx(step_s(allowed))
    assert allowed.bound is not None
    assert allowed.bound.step_time_s <= step_s(allowed)
    assert any(line.startswith("options:") for line in allowed.bound.space)
