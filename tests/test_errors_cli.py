"""Bad input on the command line: exit code 2, one line a fault that names the field, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.api.cli import run

MODEL = ["llama-3.1-8b"]
CLUSTER = ["--cluster", "8xH100"]
WORK = ["--global-batch-size", "64", "--seq-length", "4096"]
GOOD = [*MODEL, *CLUSTER, *WORK]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wrong files, made the current one."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "truncated.json").write_text('{"model_type": "llama", "hidden_size": 40')
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "nan.json").write_text('{"model_type": "llama", "hidden_size": NaN}')
    (tmp_path / "lacking.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 99, "num_attention_heads": 4,'
        ' "intermediate_size": 8}'
    )
    (tmp_path / "large.json").write_text('{"model_type": "' + "x" * 10_000_000 + '"}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x01" * 100)
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "old.json").write_text('{"schema_version": 0, "inputs": {}}')
    (tmp_path / "plan.json").write_text('{"schema_version": 1, "status": "feasible", "inputs": {}}')
    (tmp_path / "damaged.json").write_text('{"schema_version": 1, "status": "feasible", "inputs": {')
    (tmp_path / "bad.yaml").write_text("pools: [{gpu: H100-SXM, nodes: 0, gpus_per_node: 8}]\n")
    (tmp_path / "truncated.yaml").write_text("pools: [{gpu: H100-SXM, nodes: \n")
    (tmp_path / "bomb.yaml").write_text("a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\npools: [*c, *c]\n")
    (tmp_path / "tagged.yaml").write_text("pools: !!python/object/apply:os.getcwd []\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# (name, command line, piece of each line that standard error must hold, one a fault)
CASES: list[tuple[str, list[str], list[str]]] = [
    ("no such command", ["plans"], ["plans"]),
    ("unknown flag", ["plan", *GOOD, "--tensor", "8"], ["--tensor"]),
    ("flag without value", ["plan", *GOOD, "--top"], ["--top"]),
    ("too many arguments", ["plan", *GOOD, "more"], ["more"]),
    ("nothing given", ["plan"], ["MODEL", "--cluster", "--global-batch-size", "--seq-length"]),
    ("unknown model", ["plan", "llama-99", *CLUSTER, *WORK], ["MODEL: "]),
    ("model is a folder", ["plan", "folder", *CLUSTER, *WORK], ["MODEL: "]),
    ("model file is missing", ["plan", "nothing.json", *CLUSTER, *WORK], ["MODEL: "]),
    ("model file is truncated", ["plan", "truncated.json", *CLUSTER, *WORK], ["line 1, column"]),
    ("model file is empty", ["plan", "empty.json", *CLUSTER, *WORK], ["MODEL: "]),
    ("model file is a list", ["plan", "list.json", *CLUSTER, *WORK], ["MODEL: "]),
    ("model file has NaN", ["plan", "nan.json", *CLUSTER, *WORK], ["MODEL"]),
    ("model file lacks a field", ["describe", "lacking.json"], ["MODEL.hidden_size: "]),
    ("model file of 10 MB", ["describe", "large.json"], ["MODEL: "]),
    ("model file is binary", ["describe", "binary.json"], ["UTF-8"]),
    ("model file is deep", ["describe", "deep.json"], ["nested"]),
    ("model is a device", ["describe", "/dev/zero"], ["MODEL: "]),
    ("sequence length of describe", ["describe", *MODEL, "--seq-length", "0"], ["--seq-length: "]),
    ("unknown GPU", ["plan", *MODEL, "--cluster", "8xH900", *WORK], ["--cluster: unknown GPU"]),
    ("zero GPUs", ["plan", *MODEL, "--cluster", "0xH100", *WORK], ["--cluster"]),
    ("negative GPUs", ["plan", *MODEL, "--cluster", "-8xH100", *WORK], ["--cluster"]),
    ("too many GPUs", ["plan", *MODEL, "--cluster", "9" * 40 + "xH100", *WORK], ["--cluster"]),
    ("cluster is a folder", ["plan", *MODEL, "--cluster", "folder", *WORK], ["--cluster"]),
    ("cluster file has zero nodes", ["plan", *MODEL, "--cluster", "bad.yaml", *WORK], ["--cluster.pools.0.nodes: "]),
    ("cluster file is truncated", ["plan", *MODEL, "--cluster", "truncated.yaml", *WORK], ["--cluster: "]),
    ("cluster file is a bomb", ["plan", *MODEL, "--cluster", "bomb.yaml", *WORK], ["--cluster: "]),
    ("cluster file has a tag", ["plan", *MODEL, "--cluster", "tagged.yaml", *WORK], ["--cluster: "]),
    ("batch is a word", ["plan", *MODEL, *CLUSTER, "--global-batch-size", "many", "--seq-length", "8"], ["'many'"]),
    ("batch is zero", ["plan", *GOOD, "--global-batch-size", "0"], ["--global-batch-size: "]),
    ("batch is negative", ["plan", *GOOD, "--global-batch-size", "-8"], ["--global-batch-size: "]),
    ("batch is huge", ["plan", *GOOD, "--global-batch-size", "9" * 5000], ["--global-batch-size: "]),
    ("batch is NaN", ["plan", *GOOD, "--global-batch-size", "nan"], ["--global-batch-size: "]),
    ("sequence is broken", ["plan", *GOOD, "--seq-length", "4096.5"], ["--seq-length: "]),
    ("precision", ["plan", *GOOD, "--precision", "int3"], ["--precision: "]),
    ("task", ["plan", *GOOD, "--task", "dream"], ["--task: "]),
    ("LoRA rank", ["plan", *GOOD, "--task", "lora", "--lora-rank", "0"], ["--lora-rank: "]),
    ("frozen module", ["plan", *GOOD, "--frozen", "ears"], ["--frozen"]),
    ("load factor", ["plan", *GOOD, "--moe-load-factor", "inf"], ["--moe-load-factor: "]),
    ("target", ["plan", *GOOD, "--target", "megatron@99"], ["--target: "]),
    ("objective", ["plan", *GOOD, "--objective", "beauty"], ["--objective: "]),
    ("fix without value", ["plan", *GOOD, "--fix", "tp"], ["--fix tp: takes"]),
    ("fix of a strange name", ["plan", *GOOD, "--fix", "tpp=2"], ["--fix tpp: is no choice"]),
    ("max of a label", ["plan", *GOOD, "--max", "recompute=2"], ["--max recompute: is no choice"]),
    ("fix of two values", ["plan", *GOOD, "--fix", "tp=2", "--fix", "tp=4"], ["--fix tp: is given as 2 and as 4"]),
    (
        "fix under two names",
        ["plan", *GOOD, "--fix", "mbs=2", "--fix", "micro_batch_size=4"],
        ["--fix micro_batch_size: and mbs are one choice"],
    ),
    ("max of a word", ["plan", *GOOD, "--max", "pp=lots"], ["--max pp: "]),
    ("forbidden name", ["plan", *GOOD, "--forbid", "wings"], ["wings"]),
    ("deadline", ["plan", *GOOD, "--deadline", "3 parsecs"], ["--deadline: "]),
    ("work limit", ["plan", *GOOD, "--work-limit", "0"], ["--work-limit: "]),
    ("headroom", ["plan", *GOOD, "--memory-headroom", "120%"], ["--memory-headroom: "]),
    (
        "four faults",
        ["plan", "llama-99", "--cluster", "8xH900", "--global-batch-size", "0", "--seq-length", "4096", "--top", "0"],
        ["MODEL: ", "--cluster: ", "--global-batch-size: ", "--top: "],
    ),
    ("output into no folder", ["describe", *MODEL, "-o", "none/such.json"], ["--output: "]),
    ("degree", ["estimate", *GOOD, "--tp", "0"], ["--tp: "]),
    ("degree is a word", ["estimate", *GOOD, "--tp", "two"], ["--tp: "]),
    ("degrees do not divide", ["estimate", *GOOD, "--tp", "3"], ["--tp: "]),
    ("batch not divisible", ["estimate", *GOOD, "--global-batch-size", "63", "--tp", "2"], ["--global-batch-size: "]),
    ("recompute", ["estimate", *GOOD, "--recompute", "twice"], ["--recompute: "]),
    ("sharding", ["estimate", *GOOD, "--sharding", "zero9"], ["--sharding: "]),
    ("check without arguments", ["check", "--world-size", "8"], ["arguments"]),
    ("check without world size", ["check", "--", "--num-layers", "2"], ["--world-size"]),
    ("check of a folder", ["check", "--world-size", "8", "folder"], ["folder"]),
    ("check of a pair", ["check", "--world-size", "8", "--env", "A", "--", "--num-layers", "2"], ["--env"]),
    ("check of a file and arguments", ["check", "--world-size", "8", "bad.yaml", "--", "--bf16"], ["not both"]),
    ("check of a plan", ["check", "--world-size", "8", "plan.json"], ["FILE: "]),
    ("check of an empty file", ["check", "--world-size", "8", "empty.json"], ["FILE: holds no"]),
    ("check of broken YAML", ["check", "--world-size", "8", "truncated.yaml"], ["FILE: is not valid YAML"]),
    ("check of a cluster", ["check", "--world-size", "8", "bad.yaml"], ["FILE: /pools must be"]),
    ("check of very many", ["check", "--world-size", "8", "--", *["--x"] * 10_001], ["at most 10000 arguments"]),
    ("estimate of very many", ["estimate", *CLUSTER, "--", *["--x"] * 10_001], ["at most 10000 arguments"]),
    ("check of pairs", ["check", "--env", "A=1", "--env", "A=2", "--", "--bf16"], ["--env A: is given as 1 and as 2"]),
    ("estimate of a damaged plan", ["estimate", "damaged.json"], ["PLAN: is not valid JSON"]),
    ("estimate of a wrong plan", ["estimate", "old.json"], ["PLAN.schema_version: "]),
    ("export of nothing", ["export", "-o", "out"], ["PLAN: "]),
    ("export to nowhere", ["export", "old.json"], ["--output: "]),
    ("export of a missing file", ["export", "nothing.json", "-o", "out"], ["PLAN: "]),
    ("export of a folder", ["export", "folder", "-o", "out"], ["PLAN: "]),
    ("export of another version", ["export", "old.json", "-o", "out"], ["PLAN.schema_version: "]),
    ("export of truncated JSON", ["export", "truncated.json", "-o", "out"], ["PLAN: "]),
    ("export of NaN", ["export", "nan.json", "-o", "out"], ["PLAN.hidden_size: "]),
    ("catalog of wheels", ["catalog", "wheels"], ["wheels"]),
    ("catalog without the GPU", ["catalog", "gpus", "H900"], ["H900"]),
    ("port", ["serve", "--port", "99999"], ["--port"]),
    ("log level", ["serve", "--log-level", "loud"], ["loud"]),
]


@pytest.mark.parametrize(("name", "argv", "pieces"), CASES, ids=[case[0] for case in CASES])
def test_bad_input(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, argv: list[str], pieces: list[str]
) -> None:
    code = run(argv)
    out, err = capsys.readouterr()
    assert code == 2, (out, err)
    assert out == ""
    lines = err.splitlines()
    assert all(line.startswith("error: ") for line in lines), err
    assert len(lines) == len(pieces), err
    for piece in pieces:
        assert any(piece in line for line in lines), (piece, err)
    assert not any(len(line) > 600 for line in lines), err


@pytest.mark.parametrize(
    ("name", "argv", "pieces"),
    [case for case in CASES if case[1][0] != "serve"][::4],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_as_json(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, argv: list[str], pieces: list[str]
) -> None:
    command, *rest = argv
    code = run([command, "--json", *rest])
    out, err = capsys.readouterr()
    document = json.loads(out)
    if name == "export to nowhere":  # --json needs no folder; the file itself is wrong
        assert document["errors"][0]["pointer"] == "/document/schema_version"
        return
    if name != "no such command":
        assert len(document["errors"]) == len(pieces)
        assert all(set(error) == {"pointer", "message", "alternatives"} for error in document["errors"])
    assert code == 2
    assert err.count("error: ") == len(pieces)


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["describe", "\x1b[31mred\nerror: forged"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_the_installed_command_prints_no_traceback(files: Path) -> None:
    command = Path(sys.executable).with_name("meshwright")
    argv = [b"describe", b"\xff\xfe.json"]  # a file name that is not text
    done = subprocess.run([str(command), *argv], capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: MODEL: ")
    assert b"Traceback" not in done.stderr


def test_an_export_neither_overwrites_nor_leaves_its_folder(tmp_path: Path) -> None:
    from meshwright.api.files import write_folder
    from meshwright.specs.errors import SpecError

    folder = tmp_path / "out"
    write_folder(str(folder), {"a.sh": "one", "sub/b.txt": "two"}, force=False)
    assert (folder / "a.sh").stat().st_mode & 0o100
    assert not (folder / "sub/b.txt").stat().st_mode & 0o100
    with pytest.raises(SpecError, match=r"a\.sh exists"):
        write_folder(str(folder), {"new.txt": "x", "a.sh": "three"}, force=False)
    assert not (folder / "new.txt").exists()
    assert (folder / "a.sh").read_text() == "one"
    for name in ("../escape", "/tmp/escape", "sub/../../escape", ""):  # noqa: S108
        with pytest.raises(SpecError, match="leaves the folder"):
            write_folder(str(folder), {name: "x"}, force=True)
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="by a link"):
        write_folder(str(folder), {"link/escape": "x"}, force=True)
    (folder / "file").symlink_to(tmp_path / "victim")
    write_folder(str(folder), {"file": "x"}, force=True)
    assert not (tmp_path / "victim").exists()
    assert not (tmp_path / "escape").exists()
