"""Where files go, and which documents have files: told before any work, with the same code by every command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.cli import run

MODEL = ["llama-3.1-8b", "--cluster", "8xH100", "--global-batch-size", "8", "--seq-length", "1024"]
PLAN = ["plan", *MODEL, "--work-limit", "4"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with one file, one folder and no planner: nothing may be searched."""

    def searched(*_: object) -> Any:
        raise AssertionError("the search began")

    monkeypatch.setattr("meshwright.api.answers.answer", searched)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "sub").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("tail", "starts"),
    [
        (["-o", "none/plan.json"], ["--output: "]),
        (["-o", ""], ["--output: "]),
        (["-o", "-"], ["--output: "]),
        (["-o", "sub"], ["--output: "]),
        (["-o", "file/plan.json"], ["--output: "]),
        (["-o", "x" * 300], ["--output: "]),
        (["--export", ""], ["--export: "]),
        (["--export", "file"], ["--export: "]),
        (["--export", "file/run"], ["--export: "]),
        (["--export", "run", "--launcher", "bash"], ["--launcher: "]),
        (["--launcher", "slurm"], ["--launcher: says how --export"]),
        (["-o", "", "--export", "", "--seq-length", "0"], ["--output: ", "--export: ", "--seq-length: "]),
    ],
)
def test_a_bad_destination_is_told_before_the_search(
    folder: Path, capsys: pytest.CaptureFixture[str], tail: list[str], starts: list[str]
) -> None:
    assert run([*PLAN, *tail]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(starts), lines
    assert all(line.startswith(f"error: {start}") for line, start in zip(lines, starts, strict=True)), lines
    assert sorted(os.listdir(folder)) == ["file", "sub"]
    assert (folder / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(folder: Path) -> None:
    (folder / "sub").chmod(0o500)
    assert run([*PLAN, "-o", "sub/plan.json"]) == 2
    assert run([*PLAN, "--export", "sub/run"]) == 2


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert run([*PLAN, "-o", str(path)]) == 0
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def both(path: Path, data: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[list[int], list[str]]:
    """Exit codes and messages of estimate and export for a document."""
    path.write_text(json.dumps(data))
    capsys.readouterr()
    codes, messages = [], []
    for argv in (["estimate", str(path)], ["export", str(path), "-o", str(path.parent / "run")]):
        codes.append(run(argv))
        messages.append(capsys.readouterr().err)
    return codes, messages


def test_an_illegal_plan_is_illegal_for_export_too(
    tmp_path: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = document["plan"]
    plan = {**plan, "options": {**plan["options"], "dist_opt_instances": 3}}  # 3 divides no power of two
    codes, messages = both(tmp_path / "plan.json", {**document, "plan": plan}, capsys)
    assert codes == [4, 4], messages
    assert messages[0] == messages[1]
    assert "error: megatron." in messages[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("status", "code"), [("infeasible", 3), ("unknown", 5)])
def test_a_document_without_a_plan_means_the_same_everywhere(
    tmp_path: Path, document: dict[str, Any], capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    data = {**document, "status": status, "plan": None, "estimate": None, "alternatives": [], "explanation": []}
    codes, messages = both(tmp_path / "plan.json", data, capsys)
    assert codes == [code, code], messages
    assert messages[0] == messages[1]
    assert messages[0].startswith("error: PLAN.plan: is null")


def test_nothing_to_export_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "llama-2-70b", "--cluster", "2xH100", "--global-batch-size", "64", "--seq-length", "4096"]
    assert run([*argv, "--export", str(tmp_path / "run")]) == 3
    assert "nothing was exported" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["plan", "export"])
def test_help_names_every_launcher(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.megatron_export import LAUNCHERS

    run([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text.split("--launcher")[-1][:120] for name in LAUNCHERS)


def test_a_bad_host_name_is_told_where_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, plan = tmp_path / "cluster.yaml", tmp_path / "plan.json"
    cluster.write_text("pools: [{gpu: H100-SXM, nodes: 1, gpus_per_node: 8, hosts: ['-oProxyCommand=x']}]\n")
    argv = [*PLAN, "--cluster", str(cluster)]
    if run([*argv, "-o", str(plan)]) == 2:  # refused when the cluster is read, which is earlier still
        assert "error: --cluster" in capsys.readouterr().err
        return
    capsys.readouterr()
    assert run([*argv, "--export", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("error: --cluster: ")
    assert run(["export", str(plan), "-o", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("error: PLAN.inputs.cluster: ")
