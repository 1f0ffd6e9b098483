"""Statistics of small tables, worked out by hand."""

from __future__ import annotations

import csv
import io

import pytest

from meshwright.cost_models.backtest.bulk import Outcome, price_row
from meshwright.cost_models.backtest.output import COLUMNS, write_outcomes
from meshwright.cost_models.backtest.ranking import Ranking, rankings
from meshwright.cost_models.backtest.report import report_of

from .backtest_cases import MODELS, row


def outcome(step_s: float, **figures: object) -> Outcome:
    given = {"interval_lo_s": 0.9 * step_s, "interval_hi_s": 1.25 * step_s, "fits": True} | figures
    return Outcome("x", "ok", step_time_s=step_s, **given)  # type: ignore[arg-type]


def test_errors_of_a_group_by_hand() -> None:
    rows = [row(step_time_s=10) for _ in range(5)] + [row(step_time_s="")]
    steps = (10.0, 9.0, 8.0, 5.0, 12.0)
    # errors 0, -10%, -20%, -50%, +20%; measured inside [0.9 p, 1.25 p] for 10, 9 and 8 (1.25 x 8 = 10 exactly)
    outcomes = [outcome(step) for step in steps] + [outcome(1.0)]
    total = report_of(rows, outcomes, MODELS).total
    assert (total.rows, total.ok) == (6, 5)
    assert total.mean == pytest.approx(0.20)
    assert total.median == pytest.approx(0.20)
    assert total.p90 == pytest.approx(0.38)  # between 20% and 50%, six tenths of the way
    assert total.bias == pytest.approx(-0.10)
    assert total.coverage == pytest.approx(3 / 5)


def test_groups_are_combinations_and_others_stand_apart() -> None:
    rows = [
        row(framework="NeMo"),
        row(framework="NeMo", model="experts"),
        row(framework="NeMo", model="experts"),
        row(task="lora", quality="A"),
        row(framework="", gpu_type="A100"),
    ]
    outcomes = [outcome(2.0), outcome(1.0), Outcome("x", "unsupported", "why"), outcome(1.0), outcome(1.0)]
    report = report_of(rows, outcomes, MODELS)
    assert [(group.key, group.rows, group.ok) for group in report.groups] == [
        (("NeMo", "moe"), 2, 1),
        (("(blank)", "dense"), 1, 1),
        (("NeMo", "dense"), 1, 1),
    ]
    assert [(group.key, group.rows) for group in report.others] == [(("lora", "A"), 1)]
    assert report.total.rows == 4
    assert report.unsupported == {"why": 1}
    by_gpu = report_of(rows, outcomes, MODELS, ("gpu_type",))
    assert [group.key for group in by_gpu.groups] == [("H100-SXM-80GB",), ("A100",)]


def test_memory_is_compared_like_with_like() -> None:
    rows = [
        row(peak_bytes=100, peak_kind="allocated"),
        row(peak_bytes=100, peak_kind="reserved"),
        row(peak_bytes=100, peak_kind="allocated", peak_reserved_bytes=200),
        row(peak_bytes=100, peak_kind="other"),
        row(peak_bytes=100, peak_kind="device"),
    ]
    outcomes = [outcome(1.0, peak_allocated_bytes=110, peak_reserved_bytes=150, fits=i < 3) for i in range(5)]
    total = report_of(rows, outcomes, MODELS).total
    assert (total.allocated_rows, total.reserved_rows) == (2, 2)
    assert total.allocated_error == pytest.approx(0.10)
    assert total.reserved_error == pytest.approx((0.50 + 0.25) / 2)
    assert total.fits == pytest.approx(3 / 5)


def test_a_group_without_measured_rows_has_no_figures() -> None:
    total = report_of([row(step_time_s="")], [outcome(1.0)], MODELS).total
    assert (total.rows, total.ok, total.mean, total.coverage, total.fits) == (1, 0, None, None, None)


def test_pairs_in_the_right_order_counted_by_hand() -> None:
    plans = [
        (row(tp=1, step_time_s=10.0), 5.0),
        (row(tp=2, step_time_s=10.2), 9.0),  # 2% from the first: not told apart
        (row(tp=4, step_time_s=11.0), 8.0),  # right against the first, wrong against the second
        (row(tp=8, step_time_s=20.0), 8.0),  # right against the first, wrong against the second, equal to the third
        (row(tp=8, step_time_s=30.0), 1.0),  # the fourth's plan again; wrong against the first three
        (row(tp=8, step_time_s=30.0, num_gpus=16), 99.0),  # another size: compared with none
        (row(tp=8, step_time_s=40.0, task="lora"), 99.0),  # not judged
    ]
    found = rankings([item[0] for item in plans], [outcome(item[1]) for item in plans], MODELS)
    assert found == (Ranking("Megatron-LM", pairs=8, right=2, equal=1),)
    assert found[0].share == 0.25


def test_experts_need_six_percent_and_sources_are_counted_apart() -> None:
    def pair(model: str, source: str) -> list[dict[str, str]]:
        cells = {"model": model, "source_repo": source}
        return [row(tp=1, step_time_s=1.00, **cells), row(tp=2, step_time_s=1.05, **cells)]

    rows = pair("small", "one") + pair("experts", "two")
    found = rankings(rows, [outcome(1.0), outcome(1.1)] * 2, MODELS)
    assert found == (Ranking("one", pairs=1, right=1, equal=0),)


def test_a_line_of_the_output_has_the_promised_columns() -> None:
    assert COLUMNS == (
        "id", "status", "reason", "assumptions", "step_time_s", "interval_lo_s", "interval_hi_s", "interval_level",
        "tokens_per_s_per_gpu", "peak_allocated_bytes", "peak_reserved_bytes", "fits", "ms",
    )  # fmt: skip
    file = io.StringIO()
    outcomes = [
        Outcome("a,1", "ok", assumptions=("x; y", "z"), step_time_s=0.1, fits=False, ms=1.23456),
        Outcome("b", "unsupported", "why"),
    ]
    assert list(write_outcomes(file, outcomes)) == outcomes
    first, second = csv.DictReader(io.StringIO(file.getvalue()))
    assert (first["id"], first["assumptions"], first["fits"], first["ms"]) == ("a,1", "x, y; z", "false", "1.235")
    assert float(first["step_time_s"]) == 0.1
    assert [second[name] for name in COLUMNS[3:12]] == [""] * 9


def test_a_batch_that_no_plan_divides_is_scaled_with_its_interval() -> None:
    """100 sequences on 8 ranks: 12 micro-batches each hold 96 of them, so the step of 96 is scaled by 100 / 96."""
    whole, odd = price_row(row(global_batch=96), MODELS), price_row(row(global_batch=100), MODELS)
    assert whole.step_time_s is not None
    assert odd.step_time_s == pytest.approx(whole.step_time_s * 100 / 96)
    assert odd.interval_hi_s == pytest.approx((whole.interval_hi_s or 0) * 100 / 96)
    assert odd.tokens_per_s_per_gpu == pytest.approx(100 * 4096 / odd.step_time_s / 8)
