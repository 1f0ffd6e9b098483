"""The planning suite: its cases, its baselines on small clusters against values found another way, its bars."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import baselines
from benchmarks.suite.blind import flattened, levels_of
from benchmarks.suite.cases import cases, scaling
from benchmarks.suite.legality import faults_of_answer
from benchmarks.suite.report import HEADINGS, gain_of, page
from benchmarks.suite.rows import Row, summary
from meshwright.api.cli import run
from meshwright.planner.errors import IllegalPlan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.planner.single import estimate_degrees
from meshwright.specs.cluster_io import cluster_from_data, load_cluster
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model

from .planner_cases import request, small_model, workload

DOCS = Path(__file__).parents[1] / "docs"


def asked(layers: int = 6, cluster: str = "4xH100", **more: Any) -> PlanRequest:
    """A request for a small model with a large vocabulary, so that an even split is not the best one."""
    return request(small_model(layers=layers, vocab=128_000), load_cluster(cluster), workload(batch=16), **more)


def estimated_s(document: PlanDocument, folder: Path, capsys: pytest.CaptureFixture[str]) -> float | None:
    """Step time of a document's plan by ``meshwright estimate PLAN.json``; None where it does not fit."""
    path = folder / "plan.json"
    path.write_text(json.dumps(document.to_json()), encoding="utf-8")
    code = run(["estimate", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    return float(found["estimate"]["step_time_s"]) if code == 0 else None


def with_blocks(document: PlanDocument, blocks: list[list[str]]) -> PlanDocument:
    """The document with other blocks in the chunks of its plan, in pipeline order."""
    data = document.to_json()
    for stage in data["plan"]["stages"]:
        for chunk in stage["chunks"]:
            chunk["blocks"] = blocks[chunk["order"]]
    return PlanDocument.parse(data)


def test_every_case_is_one_that_the_planner_takes() -> None:
    every = cases()
    assert len(every) >= 32
    assert len({case.name for case in (*every, *scaling())}) == len(every) + len(scaling())
    gpus = []
    for case in (*every, *scaling()):
        assert load_model(case.model).num_layers > 0
        spec = case.spec()
        gpus.append(spec.num_gpus)
        assert ("mixed" in case.tags) == (len({pool.gpu for pool in spec.pools}) > 1), case.name
        assert case.batch > 0
        assert case.seq > 0
    assert (min(gpus), max(gpus)) == (8, 16384)
    tags = {tag for case in every for tag in case.tags}
    assert {"dense", "moe", "mla", "hybrid", "mixed", "network"} <= tags


def test_a_case_writes_the_cluster_that_it_means(tmp_path: Path) -> None:
    for case in cases():
        words = case.command(tmp_path)
        named = load_cluster(words[words.index("--cluster") + 1])
        assert named.digest() == case.spec().digest(), case.name


def test_even_split_on_our_grid_is_what_the_command_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten layers over four stages; the best split leaves fewest to the last, which holds the head."""
    ask = asked(layers=10)
    document = estimate_degrees(ask, {"pp": 4})
    assert document.plan is not None
    even = with_blocks(document, [["embed", "decoder:0-2"], ["decoder:3-5"], ["decoder:6-7"], ["decoder:8-9", "head"]])
    expected = estimated_s(even, tmp_path, capsys)
    assert expected is not None
    assert expected != estimated_s(document, tmp_path, capsys)
    found = baselines.even_on_our_grid(ask, document.plan)
    assert found.step_time_s == pytest.approx(expected, rel=1e-12)


def test_best_even_split_is_the_best_of_all_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = asked(fix={"recompute": "none", "sharding": "zero1"})
    blocks = {
        1: [["embed", "decoder:0-5", "head"]],
        2: [["embed", "decoder:0-2"], ["decoder:3-5", "head"]],
        4: [["embed", "decoder:0-1"], ["decoder:2-3"], ["decoder:4"], ["decoder:5", "head"]],
        6: [["embed", "decoder:0"], *([f"decoder:{k}"] for k in range(1, 5)), ["decoder:5", "head"]],
    }
    times = []
    for tp, pp, cp, vpp, size in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 3), (1, 2, 4, 8, 16)):
        degrees = {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "micro_batch_size": size, "sharding": "zero1"}
        if pp * vpp not in blocks:
            continue
        try:
            document = estimate_degrees(ask, degrees)
        except (SpecError, IllegalPlan):
            continue
        times.append(estimated_s(with_blocks(document, blocks[pp * vpp]), tmp_path, capsys))
    fitting = [time for time in times if time is not None]
    assert len(fitting) > 20
    assert baselines.best_even(ask, []).step_time_s == pytest.approx(min(fitting), rel=1e-9)


def test_an_even_split_that_does_not_fit_says_so() -> None:
    ask = request(load_model("llama-3.1-70b"), load_cluster("8xH100"), workload(batch=8, seq=2048))
    document = estimate_degrees(ask, {"tp": 2, "pp": 4})
    assert document.plan is not None
    assert baselines.even_on_our_grid(ask, document.plan).why == "does not fit"
    assert baselines.best_even(ask, []).why == "none fits"


def two_levels(**outer: Any) -> dict[str, Any]:
    """Two nodes of two GPUs; the network of a node unless ``outer`` says otherwise."""
    inner = {"name": "inner", "kind": "infiniband", "bandwidth": "100 GB/s", "latency": "2 us"}
    levels = [{**inner, "span": 2}, {**inner, "name": "outer", "span": "all", **outer}]
    return {"pools": [{"gpu": "H100-SXM", "nodes": 2, "gpus_per_node": 2, "levels": levels}]}


def test_a_blind_search_sees_the_mean_of_all_pairs() -> None:
    """Two of the six pairs meet in a node at 100 GB/s and 2 us, four outside at 40 / 4 GB/s and 8 us."""
    cluster = cluster_from_data(two_levels(bandwidth="40 GB/s", latency="8 us", oversubscription=4))
    levels = flattened(cluster).pools[0].levels
    assert [level.span for level in levels] == [2, 4]
    for level in levels:
        assert level.bandwidth_bytes_per_s == pytest.approx((2 * 100e9 + 4 * 10e9) / 6)
        assert level.latency_s == pytest.approx((2 * 2e-6 + 4 * 8e-6) / 6)
        assert level.oversubscription == 1


def test_a_blind_search_misses_nothing_where_all_levels_are_alike() -> None:
    cluster = cluster_from_data(two_levels())
    ask = asked().model_copy(update={"cluster": cluster})
    ours = plan(ask).estimate
    assert ours is not None
    assert baselines.topology_blind(ask).step_time_s == pytest.approx(ours.step_time_s, rel=1e-12)
    assert levels_of(load_cluster("4xH100")) == 1
    assert baselines.topology_blind(asked()).why == "one level"


def test_the_published_recipe_is_the_one_for_the_case() -> None:
    """titan-0036 is fully sharded without model parallelism, micro-batch 2, for 128 x 4096 on 64 A100-80GB."""
    case = next(case for case in cases() if case.recipes == ("llama2-13b",))
    ask = request(load_model(case.model), case.spec(), workload(batch=case.batch, seq=case.seq))
    figures = estimate_degrees(ask, {"micro_batch_size": 2, "sharding": "fsdp"}).estimate
    assert figures is not None
    found = baselines.published(ask, case.recipes)
    assert "titan-0036 (128 x 4096)" in found.plan
    assert found.step_time_s == pytest.approx(figures.step_time_s)
    assert baselines.published(ask, ()).why == "none published"
    assert baselines.published(ask, ("no such model",)).why == "none published"


def test_the_best_single_pool_is_the_quicker_pool_alone() -> None:
    ask = asked(cluster="1x4xH100-SXM+1x4xA100-80GB")
    alone = plan(asked(cluster="1x4xH100-SXM")).estimate
    assert alone is not None
    assert baselines.best_single_pool(ask).step_time_s == pytest.approx(alone.step_time_s)


def test_legality_is_judged_anew() -> None:
    ask = asked()
    document = plan(ask)
    assert faults_of_answer(ask, document) == []
    assert document.plan is not None
    broken = document.plan.model_copy(update={"schedule": "zb-h1"})
    assert faults_of_answer(ask, document.model_copy(update={"plan": broken}))


def row(**more: Any) -> Row:
    known: dict[str, Any] = {
        "name": "m c 8x1",
        "model": "m",
        "cluster": "c",
        "gpus": 8,
        "batch": 8,
        "seq": 1,
        "precision": "bf16",
        "tags": [],
        "cpu_s": 1.0,
        "peak_mib": 60.0,
        "step_time_s": 2.0,
        "gap": 0.01,
    }
    return Row(**{**known, **more})


def test_bars() -> None:
    good = [row(gap=gap) for gap in (0.0, 0.03, 0.12)]
    found = summary(good)
    assert (found.median_gap, found.worst_gap, found.failures) == (0.03, 0.12, [])
    assert "median" in summary([row(gap=0.031)]).failures[0]
    assert summary([*good, row(gap=0.01), row(gap=0.121)]).failures == ["a gap is above 12%: m c 8x1 (12.10%)"]
    assert summary([row(faults=["plan 0: x", "plan 1: y"])]).illegal == 2
    assert "faults" in summary([row(faults=["plan 0: x"])]).failures[0]
    assert "expected" in summary([row(step_time_s=None, gap=None, reason="does not fit")]).failures[0]
    refused = row(step_time_s=None, gap=None, refused="megatron.M1", reason="rules refuse it: megatron.M1")
    assert summary([*good, refused]).failures == []
    assert "expected" in summary([row(refused="megatron.M1")]).failures[0]


def test_a_baseline_that_is_faster_fails() -> None:
    slow = row(baselines={"uniform_even": {"step_time_s": 1.99}, "even_on_grid": {"step_time_s": 2.0}})
    assert slow.faster == ["uniform_even"]
    assert "uniform_even" in summary([slow]).failures[0]
    rounded = row(baselines={"uniform_even": {"step_time_s": 2.0 * (1 - 1e-9)}})
    assert summary([rounded]).failures == []


def test_gains_in_words() -> None:
    others = {"published": {"step_time_s": 2.5}, "uniform_even": {"step_time_s": None, "why": "none fits"}}
    assert [gain_of(row(baselines=others), name) for name in ("published", "uniform_even")] == ["+25.0%", "none fits"]


def test_the_page_holds_every_case() -> None:
    text = (DOCS / "suite.md").read_text(encoding="utf-8")
    for case in cases():
        shape = f"{case.batch} x {case.seq}" + ("" if case.precision == "bf16" else f", {case.precision}")
        start = f"| {case.model} | {case.cluster} | {case.spec().num_gpus} | {shape} |"
        assert start in text, f"run python -m benchmarks.suite --scaling --out docs/suite.md, which adds {start}"


def test_the_page_shows_failures() -> None:
    bad = row(baselines={name: {"step_time_s": 1.0} for name in HEADINGS})
    assert "- a baseline is faster: m c 8x1" in page([bad], [])
    assert "missed" not in page([row()], [])
