"""``backtest`` and ``calibrate`` on the command line: outputs, exit codes, interrupts."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.cli import run
from meshwright.cost_models.backtest.bulk import price_row

from .backtest_cases import MODELS, row, write_models, write_runs

COMMAND = str(Path(sys.executable).with_name("meshwright"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """A table of two good runs and a bad one, its models, and where to write."""
    rows = [row(), row(id="b", tp=2, step_time_s=1.2), row(id="b", model="none")]
    runs, models = write_runs(tmp_path / "runs.csv", rows), write_models(tmp_path / "models.json")
    return str(runs), str(models), str(tmp_path / "out.csv")


def test_backtest_writes_a_line_a_run_and_prints_groups(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs, models, out = files
    assert run(["backtest", runs, "--models", models, "--out", out, "--ranking"]) == 0
    shown = capsys.readouterr()
    assert "Megatron-LM" in shown.out
    assert "model 'none' is not in the models file" in shown.out
    assert shown.err == ""
    with open(out, encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["id"], line["status"]) for line in lines] == [("a", "ok"), ("b", "ok"), ("b", "unsupported")]
    assert float(lines[0]["interval_lo_s"]) < float(lines[0]["step_time_s"]) < float(lines[0]["interval_hi_s"])


def test_json_is_one_document_with_groups_by_any_columns(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs, models, out = files
    arguments = [
        "backtest",
        runs,
        "--models",
        models,
        "--out",
        out,
        "--by",
        "tp",
        "--by",
        "stack",
        "--ranking",
        "--json",
    ]
    assert run(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    keys = [group["key"] for group in data["groups"]]
    assert keys == [{"tp": "1", "stack": "megatron-lm"}, {"tp": "2", "stack": "megatron-lm"}]
    assert (data["total"]["rows"], data["total"]["ok"]) == (3, 2)
    assert data["unsupported"] == {"model 'none' is not in the models file": 1}
    assert data["ranking"][0]["pairs"] == 1


def test_every_fault_of_a_call_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    bad = ["backtest", str(empty), "--models", str(tmp_path / "none.json"), "--out", str(tmp_path), "--jobs", "0"]
    assert run(bad) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["RUNS.csv", "--models", "--out", "--jobs"]
    assert run(["backtest"]) == 2
    assert run(["calibrate"]) == 2


def test_an_unknown_column_is_named_with_the_known_ones(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs, models, out = files
    assert run(["backtest", runs, "--models", models, "--out", out, "--by", "colour"]) == 2
    assert "--by: 'colour' is no column (valid: id, framework," in capsys.readouterr().err
    assert not Path(out).exists()


def test_no_input_is_ever_replaced(files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    runs, models, _ = files
    before = Path(runs).read_text()
    assert run(["backtest", runs, "--models", models, "--out", runs]) == 2
    assert run(["calibrate", runs, "--models", models, "-o", models]) == 2
    assert Path(runs).read_text() == before
    assert json.loads(Path(models).read_text()) == MODELS
    assert "is the same file as" in capsys.readouterr().err


def test_the_calibration_is_not_replaced_by_what_it_corrects(
    files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    runs, models, file = files
    assert run(["calibrate", runs, "--models", models, "--jobs", "1", "-o", file]) == 0
    before = Path(file).read_text()
    assert run(["backtest", runs, "--models", models, "--out", file, "--calibration", file, "--jobs", "1"]) == 2
    assert capsys.readouterr().err == "error: --out: is the same file as --calibration; it would be replaced\n"
    assert Path(file).read_text() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told(files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    runs, models, _ = files
    assert run(["backtest", runs, "--models", models, "--out", "/dev/full"]) == 2
    assert capsys.readouterr().err == "error: --out: cannot write /dev/full: No space left on device\n"


def test_a_calibration_serves_backtest_estimate_and_plan(
    files: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, models, out = files
    one, file = str(write_runs(tmp_path / "one.csv", [row(step_time_s=0.4)])), str(tmp_path / "calibration.json")
    assert run(["calibrate", one, "--models", models, "-o", file]) == 0
    assert "from 1 of 1 runs" in capsys.readouterr().out
    assert run(["backtest", one, "--models", models, "--out", out, "--calibration", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["mean"] < 0.01
    shape = [
        "--cluster",
        "8xH100",
        "--global-batch-size",
        "32",
        "--seq-length",
        "2048",
        "--json",
        "--calibration",
        file,
    ]
    assert run(["estimate", "llama-3.2-1b", *shape]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["provenance"]["calibration"] == json.loads(Path(file).read_text())["id"]
    assert any("dense, from 1 run" in note for note in document["estimate"]["assumptions"])
    assert run(["plan", "llama-3.2-1b", *shape, "--work-limit", "5", "-o", str(tmp_path / "plan.json")]) in (0, 5)
    capsys.readouterr()
    assert run(["estimate", str(tmp_path / "plan.json"), "--calibration", file, "--json"]) == 0
    assert "calibration" in json.loads(capsys.readouterr().out)["provenance"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "sha256:1"}', '{"a": NaN}'])
def test_a_file_that_is_no_calibration_is_refused(
    files: tuple[str, str, str], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, models, out = files
    file = tmp_path / "bad.json"
    file.write_text(text)
    shape = ["--cluster", "8xH100", "--global-batch-size", "32", "--seq-length", "2048"]
    for head in (["backtest", runs, "--models", models, "--out", out], ["plan", "llama-3.2-1b", *shape]):
        assert run([*head, "--calibration", str(file)]) == 2
        assert all(line.startswith("error: --calibration") for line in capsys.readouterr().err.splitlines())


def test_runs_that_make_no_calibration_are_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(write_runs(tmp_path / "runs.csv", [row(step_time_s="")]))
    models = str(write_models(tmp_path / "models.json"))
    assert run(["calibrate", runs, "--models", models, "-o", str(tmp_path / "c.json")]) == 2
    assert "1 x no measured step time" in capsys.readouterr().err
    assert not (tmp_path / "c.json").exists()


def test_an_interrupt_keeps_the_lines_so_far(
    files: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, models, out = files
    left = [price_row]

    def once(*arguments: Any, **named: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        return left.pop()(*arguments, **named)

    monkeypatch.setattr("meshwright.cost_models.backtest.bulk.price_row", once)
    assert run(["backtest", runs, "--models", models, "--out", out, "--jobs", "1"]) == 130
    assert capsys.readouterr().err == f"1 of 3 runs are in {out}\ninterrupted\n"
    assert Path(out).read_text().count("\n") == 2  # header and the first run


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    rows = [row(id=i, global_batch=8 * (i % 50 + 1)) for i in range(2_000)]
    runs, models = write_runs(tmp_path / "runs.csv", rows), write_models(tmp_path / "models.json")
    out = tmp_path / "out.csv"
    call = [COMMAND, "backtest", runs, "--models", models, "--out", out, "--jobs", "2"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    limit = time.monotonic() + 30
    while time.monotonic() < limit and not (out.exists() and out.read_text().count("\n") > 20):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    shown, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert shown == ""
    assert told.splitlines()[-1] == "interrupted"
    text = out.read_text()
    assert text.endswith("\n")
    done = list(csv.DictReader(text.splitlines()))
    assert 20 <= len(done) < 2_000
    assert [line["id"] for line in done] == [str(i) for i in range(len(done))]
    assert told.splitlines()[-2] == f"{len(done):,} of 2,000 runs are in {out}"
    limit = time.monotonic() + 10
    while time.monotonic() < limit and _alive(process.pid):  # multiprocessing's own helper goes a moment later
        time.sleep(0.05)
    assert not _alive(process.pid)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
