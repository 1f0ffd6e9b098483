"""The accuracy page: its statistics by hand, and its text made again from the data that ship."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accuracy import memory
from benchmarks.accuracy.__main__ import DATA, PAGE, page
from benchmarks.accuracy.memory import MemoryRow
from benchmarks.accuracy.order import by_distance, pairs_of, release_differences
from benchmarks.accuracy.others import ours
from benchmarks.accuracy.page import render
from benchmarks.accuracy.statistics import (
    Row,
    errors_of,
    family_of,
    framework_of,
    median_of_groups,
    precision_of,
    weak_groups,
)

LEFT_OUT = DATA / "left_out.csv.gz"
ROW = Row(
    id="", source_repo="me/runs", framework="NeMo", release="25.02", model="Llama3 8b", group="dense-a|H100",
    gpu_type="H100-SXM-80GB", precision="bf16", kind="dense", num_gpus=8, scheme="group", measured_s=1.0,
    predicted_s=1.0, low_s=0.9, high_s=1.1, level=0.8,
)  # fmt: skip


def row(name: str, predicted: float, group: str = "dense-a|H100", **changes: object) -> Row:
    """Measured at 1 s unless said otherwise; the interval is 0.1 s to both sides."""
    made = replace(ROW, id=name, predicted_s=predicted, low_s=predicted - 0.1, high_s=predicted + 0.1, group=group)
    return replace(made, **changes)  # type: ignore[arg-type]


#: Errors: +5%, -20%, +30%, -40% in one group of four, +10% in another of one.
ROWS = [row("1", 1.05), row("2", 0.8), row("3", 1.3), row("4", 0.6), row("5", 1.1, "moe-b|T4", kind="moe")]


def test_statistics_by_hand() -> None:
    errors = errors_of(ROWS[:4])
    assert errors.n == 4
    assert errors.mean == pytest.approx((0.05 + 0.2 + 0.3 + 0.4) / 4)
    assert errors.median == pytest.approx(0.25)
    assert errors.p90 == pytest.approx(0.3 + 0.7 * 0.1)  # rank 0.9 x 3 = 2.7 of 0.05, 0.2, 0.3, 0.4
    assert errors.bias == pytest.approx((0.05 - 0.2) / 2)
    assert errors.inside == 0.25


def test_groups_count_once_and_weak_ones_are_named() -> None:
    assert median_of_groups(ROWS) == pytest.approx((0.25 + 0.10) / 2)
    ((group, frameworks, errors),) = weak_groups([*ROWS, replace(ROWS[3], framework="MaxText")])
    assert (group, frameworks, errors.n) == ("dense-a|H100", "MaxText, NeMo", 5)
    assert errors.median == pytest.approx(0.30)
    assert weak_groups(ROWS[1:3]) == []  # of two runs only


def test_names_are_put_together() -> None:
    assert framework_of("Alpa (JAX/XLA), inter-op only (GPipe)") == "Alpa"
    assert framework_of("Megatron-LM 0.14 + TE 2.11") == "Megatron-LM 0.14 + TE 2.11"
    assert [family_of(name) for name in ("Llama3 8b", "gpt-oss-20b", "OPT-350", "xyz")] == [
        "Llama",
        "gpt-oss",
        "OPT",
        "other",
    ]
    names = [precision_of(name) for name in ("fp8-cs", "mxfp8-rceil", "BF16", "")]
    assert names == ["fp8", "mxfp8", "bf16", "fp16 (not stated)"]


def test_order_is_told_for_pairs_that_differ_in_their_plan_and_time() -> None:
    rows = [
        row("a", 1.0), row("b", 1.2, measured_s=1.1), row("c", 0.9, measured_s=1.5), row("d", 2.0, measured_s=1.52),
        row("e", 9.0, measured_s=3.0),
    ]  # fmt: skip
    runs = {name: {"tp": tp, "global_batch": "8"} for name, tp in zip("abcd", "1244", strict=True)}
    runs["e"] = {"tp": "8", "global_batch": "16"}  # another batch: no pair
    pairs = {round(pair.apart, 3): pair.right for pair in pairs_of(rows, runs)}
    # c and d have one plan; a-b right, a-c and b-c wrong, a-d and b-d right
    assert pairs == {0.1: True, 0.5: False, 0.364: False, 0.52: True, 0.382: True}
    assert by_distance(pairs_of(rows, runs)) == [("6 to 12%", 1, 1.0), ("25 to 50%", 2, 0.5), ("50 to 100%", 2, 0.5)]


def test_neighbouring_releases_are_compared_at_equal_settings() -> None:
    rows = [
        row("a", 1.0), row("b", 1.0, measured_s=1.25), row("c", 1.0, measured_s=2.5), row("d", 1.0, measured_s=9.0),
    ]  # fmt: skip
    releases = {"a": "25.02", "b": "25.07", "c": "25.04", "d": "25.07"}
    runs = {name: {"release": release, "tp": "2" if name == "d" else "1"} for name, release in releases.items()}
    # in the order of releases a, c, b: 1 s, 2.5 s, 1.25 s; d has another plan
    assert release_differences(rows, runs) == {"dense": [pytest.approx(1.5), pytest.approx(1.0)]}


def test_our_figures_beside_a_tool_are_of_the_same_kind_of_runs() -> None:
    blank = dict.fromkeys(("frameworks", "kind", "gpus", "precisions", "min_gpus", "max_gpus"), "")
    rows = [row("1", 1.1), row("2", 1.5, num_gpus=16), row("3", 1.7, precision="fp8-cs"), row("4", 1.9, kind="moe")]
    tool = blank | {"frameworks": "NeMo|MaxText", "kind": "dense", "gpus": "A100|H100", "precisions": "bf16"}
    found = ours(tool | {"max_gpus": "8"}, rows)
    assert found is not None
    assert (found.n, found.mean) == (1, pytest.approx(0.1))
    several = ours(tool | {"min_gpus": "9"}, rows)
    assert several is not None
    assert (several.n, several.mean) == (1, pytest.approx(0.5))
    assert ours(blank, rows) is None
    assert ours(tool | {"frameworks": "Alpa"}, rows) is None


def test_the_page_states_what_the_rows_hold() -> None:
    anchored = [row(name, 1.02, scheme="anchor") for name in "1234"]
    runs = {str(i): {"tp": str(i), "global_batch": "8"} for i in range(1, 6)}
    peaks = [
        MemoryRow("allocated", "NeMo", "pretrain", 100.0, 104.0, "1"),
        MemoryRow("allocated", "NeMo", "sft", 100.0, 90.0, "2"),
        MemoryRow("other", "Alpa", "pretrain", 100.0, 300.0, "3"),
        MemoryRow(memory.OUT, "NeMo", "", 0.0, 0.0, "4"),
        MemoryRow(memory.OUT, "NeMo", "", 0.0, 1.0, "5"),
    ]
    text = render([*ROWS, *anchored], runs, peaks, [], "make")
    assert "| dense | 4 | 23.8% | 25.0% | 37.0% | -7.5% | 25.0% | 25.0% |" in text
    assert "| NeMo | dense | 4 | 2.0% | 2.0% | 2.0% | +2.0% | 100.0% | 23.8% | 25.0% |" in text
    assert "| dense-a on H100 | NeMo | 4 |" in text
    assert "| allocated | NeMo | 2 | 7.0% | 7.0% | 10.0% | -3.0% |" in text
    assert "| ran out of memory: said not to fit | 2 | 50.0% |" in text
    assert "`architecture`:" not in text  # no such rows


def test_memory_rows_are_written_and_read(tmp_path: Path) -> None:
    rows = memory.read(DATA / "memory.csv.gz")
    again = tmp_path / "memory.csv.gz"
    memory.write(again, rows)
    assert memory.read(again) == rows
    assert again.read_bytes()[4:8] == bytes(4)  # no time stamp: equal rows make an equal file


@pytest.mark.skipif(not LEFT_OUT.exists(), reason="the left-out predictions have not been made")
def test_the_page_is_that_of_the_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "make it again with python -m benchmarks.accuracy"
