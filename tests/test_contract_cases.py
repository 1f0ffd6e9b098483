"""The cases that the first release promises: each is planned, checked, priced again and exported.

How long each takes is for ``benchmarks/promised_cases.py``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.cli import run

# (name, model, cluster, global batch, sequence length, further options)
FITS = [
    ("llama-3.1-8b", "8xH100", 128, 8192, []),
    ("llama-3.1-70b", "64xH100", 512, 8192, []),
    ("llama-3.1-405b", "1024xH100", 2048, 8192, []),
    ("deepseek-v3", "256xH100", 2048, 4096, []),
    ("deepseek-v3", "256xGB200-NVL72", 2048, 4096, []),
    ("mixtral-8x7b", "32xA100-40GB", 256, 4096, []),
    ("qwen3-30b-a3b", "16xH100", 256, 4096, []),
    ("kimi-k2", "512xH200", 2048, 4096, []),
    ("gpt-oss-120b", "64xH100", 512, 4096, []),
    ("llama-2-13b", "4x8xA100-80GB+4x8xV100-32GB", 512, 4096, ["--precision", "fp16"]),
]


def plan(model: str, cluster: str, batch: int, length: int, *more: str) -> tuple[int, list[str]]:
    """Exit code of ``plan``, and the command line."""
    argv = ["plan", model, "--cluster", cluster, "--global-batch-size", str(batch), "--seq-length", str(length), *more]
    return run(argv), argv


def layers_in_order(document: dict[str, Any]) -> list[str]:
    """Every block along the pipeline, one by one."""
    chunks = [chunk for stage in document["plan"]["stages"] for chunk in stage["chunks"]]
    out = []
    for chunk in sorted(chunks, key=lambda item: item["order"]):
        for block in chunk["blocks"]:
            kind, colon, span = block.partition(":")
            first, _, last = span.partition("-")
            out += [f"{kind}:{i}" for i in range(int(first), int(last or first) + 1)] if colon else [kind]
    return out


def environment(script: Path) -> list[str]:
    """``--env`` options for what a script of an export does to the environment."""
    options = []
    for line in script.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word in ("export", "unset"):
            options += ["--env", rest.replace('"', "") if word == "export" else f"{rest}="]
    return options


@pytest.mark.parametrize(("model", "cluster", "batch", "length", "more"), FITS, ids=[f"{c[0]} {c[1]}" for c in FITS])
def test_a_promised_case(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    cluster: str,
    batch: int,
    length: int,
    more: list[str],
) -> None:
    file, folder = tmp_path / "plan.json", tmp_path / "run"
    code, _ = plan(model, cluster, batch, length, *more, "--json", "-o", str(file))
    out, err = capsys.readouterr()
    assert code == 0, out[-2000:] + err
    document = json.loads(out)
    assert json.loads(file.read_text()) == document

    chosen, figures = document["plan"], document["estimate"]
    blocks = layers_in_order(document)
    decoder = [f"decoder:{index}" for index in range(len(document["inputs"]["model"]["pattern"]))]
    assert blocks == ["embed", *decoder, "head"]
    ranks = sum(math.prod(stage["degrees"][name] for name in ("tp", "cp", "dp")) for stage in chosen["stages"])
    assert ranks == figures["gpus_used"] <= figures["gpus_offered"]
    dp = chosen["dp"]
    assert dp * chosen["micro_batch_size"] * chosen["num_microbatches"] == batch
    assert figures["fits"]
    for stage in figures["stages"]:
        assert stage["reserved_bytes"] <= 0.95 * stage["limit_bytes"]
        assert sum(stage["breakdown_bytes"].values()) == stage["allocated_bytes"]
    assert sum(figures["breakdown_s"].values()) == pytest.approx(figures["step_time_s"], rel=1e-9)
    assert figures["interval_s"][0] < figures["step_time_s"] < figures["interval_s"][1]
    tokens = batch * length / figures["step_time_s"] / figures["gpus_used"]
    assert figures["tokens_per_s_per_gpu"] == pytest.approx(tokens, rel=1e-9)
    assert 0.05 < figures["mfu"] < 0.75
    assert 0 <= document["bound"]["gap"] < 1
    assert document["bound"]["step_time_s"] <= figures["step_time_s"] * (1 + 1e-9)
    assert all(other["step_time_s"] >= figures["step_time_s"] for other in document["alternatives"])

    assert run(["estimate", str(file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["plan"] == chosen
    assert again["estimate"]["step_time_s"] == pytest.approx(figures["step_time_s"], rel=1e-12)

    assert run(["export", str(file), "-o", str(folder)]) == 0
    assert run(["export", str(file), "-o", str(folder)]) == 2
    capsys.readouterr()
    env = environment(folder / "env.sh")
    code = run(["check", "--world-size", str(ranks), *env, "--json", str(folder / "train_args.sh")])
    verdict = json.loads(capsys.readouterr().out)
    assert (code, verdict["violations"]) == (0, [])
    assert verdict["legal"]


def test_uneven_layers_on_a_mixed_cluster_are_justified(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = plan("llama-2-13b", "4x8xA100-80GB+4x8xV100-32GB", 512, 4096, "--precision", "fp16", "--json")
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    layers: dict[str, list[int]] = {}
    for stage in document["plan"]["stages"]:
        count = sum(
            int(block.partition("-")[2] or block.partition(":")[2]) - int(block.partition(":")[2].partition("-")[0]) + 1
            for chunk in stage["chunks"]
            for block in chunk["blocks"]
            if block.startswith("decoder:")
        )
        layers.setdefault(stage["groups"][0]["gpu"], []).append(count)
    assert len(layers) == 2, "both pools are used"
    fast, slow = (next(counts for gpu, counts in layers.items() if gpu.startswith(name)) for name in ("A100", "V100"))
    assert min(fast) > max(slow)
    assert any(item["kind"] == "layout" and "uneven" in item["message"] for item in document["explanation"])


def test_gpus_without_the_precision_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = plan("llama-2-13b", "4x8xA100-80GB+4x8xV100-32GB", 512, 4096, "--precision", "bf16", "--json")
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {group["gpu"][:4] for stage in document["plan"]["stages"] for group in stage["groups"]} == {"A100"}
    refused = [item["message"] for item in document["explanation"] if item["kind"] == "left-out"]
    assert len(refused) == 1
    assert "V100" in refused[0]
    assert "fp16" in refused[0]


def test_a_model_that_does_not_fit_says_what_binds_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, argv = plan("llama-2-70b", "2xH100", 64, 4096, "--json")
    document = json.loads(capsys.readouterr().out)
    assert code == 3
    assert document["status"] == "infeasible"
    assert document["plan"] is None
    binding = next(item for item in document["explanation"] if item["kind"] == "no-fit")
    assert binding["data"]["needed_bytes"] > binding["data"]["allowed_bytes"]
    smallest = next(item for item in document["explanation"] if item["kind"] == "would-fit")["data"]["num_gpus"]
    assert binding["data"]["term"].replace("optimizer", "optimizer state") in document["reason"]
    assert f"{smallest} GPUs" in document["reason"]
    # 69e9 parameters with 18 bytes of state each (bf16 copy, fp32 gradient, main copy and two moments) need 14.6 GPUs
    # of 85 GB, and two or more nodes leave room for activations
    assert 15 <= smallest <= 32

    argv.remove("--json")
    bigger = [f"{smallest}xH100" if item == "2xH100" else item for item in argv]
    assert run(bigger) == 0
    text = capsys.readouterr().out
    assert f"{smallest} of {smallest} GPUs used" in text
    assert run(argv) == 3
    assert document["reason"] in capsys.readouterr().out.splitlines()


def test_mixtral_on_sixteen_small_gpus_names_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = plan("mixtral-8x7b", "16xA100-40GB", 256, 4096, "--json")
    document = json.loads(capsys.readouterr().out)
    assert code == 3
    assert "optimizer state" in document["reason"]
