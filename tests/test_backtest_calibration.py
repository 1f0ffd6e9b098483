"""Calibrations: what one run and many runs say, which entry serves, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from meshwright.api.requests import read_cluster, read_model, read_target, read_workload
from meshwright.api.rest import create_app
from meshwright.cost_models.backtest.anchors import COMPUTE, LINKS, anchor_of, calibrate
from meshwright.cost_models.backtest.bulk import price_row, setting_of
from meshwright.cost_models.backtest.price import price
from meshwright.cost_models.calibration import Calibration, Entry, Match, Setting, Source, corrected
from meshwright.cost_models.learned import shipped_multipliers
from meshwright.cost_models.multipliers import NEUTRAL, Multipliers
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.planner.single import estimate_degrees
from meshwright.specs.errors import SpecError

from .backtest_cases import MODELS, row


def predicted_s(cells: dict[str, str], factors: dict[str, float] | None = None) -> float:
    step = price(cells, MODELS, corrected(shipped_for(cells), factors or {})).step_time_s
    assert step is not None
    return step


def shipped_for(cells: dict[str, str]) -> Multipliers:
    return shipped_multipliers(setting_for(cells).traits)


def setting_for(cells: dict[str, str]) -> Setting:
    case = price(cells, MODELS).case
    assert case is not None
    found = setting_of(case)
    assert found is not None
    return found


def fitted(*rows: dict[str, str]) -> Calibration:
    found, skipped = calibrate(rows, MODELS, "runs.csv", "0" * 64)
    assert found is not None, skipped
    return found


def error(cells: dict[str, str], calibration: Calibration | None = None) -> float:
    step = price_row(cells, MODELS, calibration).step_time_s
    assert step is not None
    return step / float(cells["step_time_s"]) - 1


@pytest.mark.parametrize("slower", [0.6, 0.9, 1.0, 1.3, 2.5])
@pytest.mark.parametrize("cells", [{}, {"tp": 4, "pp": 2}, {"model": "experts", "ep": 8}, {"sharding": "fsdp"}])
def test_a_single_run_is_met_within_a_percent(slower: float, cells: dict[str, object]) -> None:
    run = row(**cells)
    run["step_time_s"] = str(slower * predicted_s(run))
    assert abs(error(run, fitted(run))) < 0.01


def test_beyond_the_bounds_the_nearest_is_taken_and_told() -> None:
    run = row()
    run["step_time_s"] = str(20 * predicted_s(run))
    found = anchor_of(run, MODELS)
    assert not isinstance(found, str)
    assert not found.met
    entry = fitted(run).entries[0]
    # a run moves a factor by at most 4, and no factor on physics is above 4
    assert entry.multipliers["gemm"] == pytest.approx(min(4.0, 4.0 * shipped_for(run).gemm))
    assert entry.largest_residual > 0.5


def test_the_middle_run_of_a_model_speaks_for_it() -> None:
    runs = [row(id=i, global_batch=64 * (i + 1)) for i in range(3)]
    for run, slower in zip(runs, (1.2, 1.3, 2.0), strict=True):
        run["step_time_s"] = str(slower * predicted_s(run))
    found = fitted(*runs)
    assert abs(error(runs[1], found)) < 0.01
    assert error(runs[0], found) > 0.05
    assert found.entries[0].runs == 3
    # logarithms of 1.3/1.2, 1 and 1.3/2.0: their standard deviation
    logs = [math.log(1.3 / slower) for slower in (1.2, 1.3, 2.0)]
    mean = sum(logs) / 3
    spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / 3)
    assert found.entries[0].residual_spread == pytest.approx(spread, rel=0.05)


def test_other_releases_and_other_models_are_drawn_less_and_less() -> None:
    run = row()
    run["step_time_s"] = str(1.5 * predicted_s(run))
    found = fitted(run)
    full = math.log(found.entries[0].multipliers["gemm"] / shipped_for(run).gemm)
    assert [entry.on for entry in found.entries] == ["physics", "shipped", "shipped"]
    by_level = {entry.match.level: math.log(entry.multipliers["gemm"]) for entry in found.entries[1:]}
    # one release of n / (n + 1/3), one model of n / (n + 1)
    assert by_level == {
        "model": pytest.approx(0.75 * full),
        "stack": pytest.approx(0.5 * full),
    }
    assert [abs(error(row(step_time_s=run["step_time_s"], release=r), found)) < 0.01 for r in ("0.12", "0.13")] == [
        True,
        False,
    ]


def test_a_calibration_halves_the_error_of_runs_that_it_has_not_seen() -> None:
    """Measured on a stack whose compute is 40% slower than predicted; one run of five is shown."""
    runs = [row(id=i, tp=tp, global_batch=batch) for i, (tp, batch) in
            enumerate([(1, 64), (2, 64), (4, 64), (1, 128), (2, 256)])]  # fmt: skip
    for run in runs:
        run["step_time_s"] = str(predicted_s(run, dict.fromkeys(COMPUTE, 1.4)))
    found = fitted(runs[0])
    assert all(abs(error(run, found)) < 0.5 * abs(error(run)) for run in runs[1:])


def test_links_are_told_from_compute_where_the_runs_differ_in_them() -> None:
    """The truth: compute 1.3 times, links 1.8 times as slow as predicted."""
    truth = dict.fromkeys(COMPUTE, 1.3) | dict.fromkeys(LINKS, 1.8)
    shapes = [(1, 16, 64), (8, 16, 64), (16, 16, 256), (4, 16, 64), (2, 8, 64), (16, 16, 64)]
    runs = [row(id=i, tp=tp, num_gpus=gpus, global_batch=batch) for i, (tp, gpus, batch) in enumerate(shapes)]
    for run in runs:
        run["step_time_s"] = str(predicted_s(run, truth))
    entry, shipped = fitted(*runs).entries[0], shipped_for(runs[0])
    assert entry.multipliers["gemm"] / shipped.gemm == pytest.approx(1.3, rel=0.1)
    assert entry.multipliers["tp_comm"] / shipped.tp_comm == pytest.approx(1.8, rel=0.15)
    assert entry.largest_residual < 0.05


def test_runs_that_cannot_serve_are_left_out_with_the_reason() -> None:
    runs = [row(step_time_s=""), row(task="lora"), row(tp="x"), row(model="none"), row(gpu_type="mixed")]
    found, skipped = calibrate(runs, MODELS, "runs.csv", "")
    assert found is None
    assert len(skipped) == 5
    assert skipped["no measured step time"] == 1


def entry(release: str | None, model: str | None, factor: float) -> Entry:
    match = Match(stack="megatron", gpu="H100-SXM", precision="16-bit", moe=False, model=model, release=release)
    factors = {"gemm": factor}
    if release is None:
        return Entry(match=match, on="shipped", multipliers=factors, runs=1, residual_spread=0, largest_residual=0)
    return Entry(match=match, on="physics", multipliers=factors, runs=1, residual_spread=0, largest_residual=0)


def calibration(*entries: Entry) -> Calibration:
    return Calibration.of(Source(name="t", sha256="0", rows=1, used=1), entries)


def test_the_nearest_entry_serves() -> None:
    here = setting_for(row())
    assert (here.cell, here.release, here.shape) == (("megatron", "H100-SXM", "16-bit", False), "0.12", "8x2048")
    exact, other = entry("0.12", "8x2048", 1.1), entry("0.11", "8x2048", 1.2)
    model, stack = entry(None, "8x2048", 1.3), entry(None, None, 1.4)

    def at(release: str | None, found: Calibration, model: str = "small") -> Entry | None:
        return found.find(replace(setting_for(row(model=model)), release=release))

    everything = calibration(stack, model, other, exact)
    assert at("0.12", everything) == exact
    assert at("0.13", everything) == model
    assert at(None, everything) == model  # two releases: neither is the target's
    assert at(None, calibration(stack, model, other)) == other  # the only release of the model
    assert at("0.12", everything, "large") == stack
    assert at("0.12", everything, "experts") is None
    assert everything.find(setting_for(row(precision="fp8"))) is None
    assert everything.find(setting_for(row(framework="NeMo"))) == exact  # runs the same code
    assert everything.find(setting_for(row(framework="torchtitan"))) is None


def test_a_file_round_trips_and_a_changed_one_is_refused() -> None:
    found = calibration(entry("0.12", "8x2048", 1.1))
    data = json.loads(json.dumps(found.to_json()))
    assert Calibration.parse(data) == found
    for change, pointer in (
        ({"entries": []}, "/c/entries"),
        ({"rung": "another"}, "/c/rung"),
        ({"id": "sha256:0"}, "/c/id"),
        ({"schema_version": 2}, "/c/schema_version"),
    ):
        with pytest.raises(SpecError) as raised:
            Calibration.parse(data | change, "/c")
        assert pointer in [item.pointer for item in raised.value.faults]
    for factors, pointer in (({"speed": 1.0}, "speed"), ({"gemm": 99.0}, "gemm")):
        bad = calibration(found.entries[0].model_copy(update={"multipliers": factors})).to_json()
        with pytest.raises(SpecError) as raised:
            Calibration.parse(bad, "")
        assert [item.pointer for item in raised.value.faults] == [f"/entries/0/multipliers/{pointer}"]


def test_factors_stay_in_bounds_on_any_base() -> None:
    assert corrected(Multipliers(gemm=2.0), {"gemm": 3.0}).gemm == 4.0
    assert corrected(NEUTRAL, {"dp_comm": 0.5}) == Multipliers(dp_comm=0.5)


def request(**options: object) -> PlanRequest:
    return PlanRequest(
        model=read_model("llama-3.1-8b"),
        cluster=read_cluster("8xH100"),
        workload=read_workload({"global_batch_size": 32, "seq_length": 8192}),
        target=read_target("megatron@0.19"),
        **options,  # type: ignore[arg-type]
    )


def test_plan_and_estimate_apply_a_calibration_and_say_so() -> None:
    plain = estimate_degrees(request(), {"tp": 2})  # one stage, as another split would change its layers
    match = Match(stack="megatron", gpu="H100-SXM", precision="16-bit", moe=False, model="32x4096")
    item = Entry(
        match=match,
        on="shipped",
        multipliers=dict.fromkeys(COMPUTE, 1.5),
        runs=3,
        residual_spread=0.0,
        largest_residual=0.0,
    )
    found = calibration(item)
    slower = estimate_degrees(request(calibration=found), {"tp": 2})
    assert plain.estimate is not None
    assert slower.estimate is not None
    assert slower.estimate.breakdown_s["gemm"] == pytest.approx(1.5 * plain.estimate.breakdown_s["gemm"])
    assert slower.provenance["calibration"] == found.id
    assert any(
        note.startswith(f"calibration {found.id[7:19]} on shipped corrections") for note in slower.estimate.assumptions
    )
    low, high = slower.estimate.interval_s
    assert low * high == pytest.approx(slower.estimate.step_time_s**2)  # even around the step
    best = plan(request(calibration=found, work_limit=20)).estimate
    assert best is not None
    assert any("calibration" in note for note in best.assumptions)


def test_a_calibration_without_an_entry_changes_no_figure_and_says_so() -> None:
    plain = estimate_degrees(request(), {"tp": 2}).estimate
    other = estimate_degrees(request(calibration=calibration(entry(None, "1x1", 3.0))), {"tp": 2}).estimate
    assert plain is not None
    assert other is not None
    assert (other.step_time_s, other.interval_s) == (plain.step_time_s, plain.interval_s)
    assert "not applied" in other.assumptions[-1]


def test_rest_takes_the_content_of_a_calibration() -> None:
    client = TestClient(create_app())
    found = calibration(entry(None, "32x4096", 1.5)).to_json()
    body = {
        "model": "llama-3.1-8b",
        "cluster": "8xH100",
        "workload": {"global_batch_size": 32, "seq_length": 8192},
        "degrees": {"tp": 2},
        "calibration": found,
    }
    answer = client.post("/v1/estimates", json=body)
    assert answer.status_code == 200
    assert answer.json()["provenance"]["calibration"] == found["id"]
    again = client.post("/v1/estimates", json={"document": answer.json(), "calibration": found}).json()
    assert again["estimate"]["step_time_s"] == answer.json()["estimate"]["step_time_s"]
    for wrong, pointer in (("calibration.json", "/calibration"), (found | {"id": "x"}, "/calibration/id")):
        for good in (body, {"document": answer.json()}):
            refused = client.post("/v1/estimates", json=good | {"calibration": wrong})
            assert refused.status_code == 422
            assert [item["pointer"] for item in refused.json()["errors"]] == [pointer]
