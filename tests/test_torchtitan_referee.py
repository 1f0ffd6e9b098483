"""torchtitan's own code as referee: exports of plans, random configurations, and a tiny training run on gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from meshwright.megatron_export.torchtitan import check_toml, configuration_files, export_torchtitan
from meshwright.megatron_export.torchtitan.shapes import PRESETS, model_of
from meshwright.specs.plan import expand_blocks

from .torchtitan_plans import DENSE, PLANS, random_configuration, titan

#: Pythons with torchtitan, by target.
PYTHONS = {
    "torchtitan@0.2": os.environ.get("MESHWRIGHT_TORCHTITAN_PYTHON"),
    "torchtitan@0.3": os.environ.get("MESHWRIGHT_TORCHTITAN_03_PYTHON"),
}
REFEREE = Path(__file__).parent.parent / ".ci/torchtitan/referee.py"
RANDOM = int(os.environ.get("MESHWRIGHT_TORCHTITAN_RANDOM", "200"))
pytestmark = [
    pytest.mark.torchtitan,
    pytest.mark.skipif(
        not any(PYTHONS.values()), reason="MESHWRIGHT_TORCHTITAN_PYTHON names no python with torchtitan"
    ),
]
TARGETS = [
    pytest.param(name, marks=pytest.mark.skipif(not python, reason=f"no python with {name}"))
    for name, python in PYTHONS.items()
]
#: Rules on what only the first step would show.
LATE = {"torchtitan.T1", "torchtitan.E4", "torchtitan.C2", "torchtitan.L1", "torchtitan.F3", "torchtitan.P5"}


def ask(target, requests):
    """The referee's verdicts, in order."""
    done = subprocess.run(
        [str(PYTHONS[target]), str(REFEREE)],
        input="\n".join(map(json.dumps, requests)),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def write(folder, files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def decoder(chunk):
    return [index for kind, index in expand_blocks(chunk.blocks) if kind == "decoder"]


@pytest.mark.parametrize("target", TARGETS)
def test_exports_are_built_with_the_plans_layers(target, tmp_path):
    requests, wanted = [], []
    for number, (name, model, choices) in enumerate(PLANS):
        if target == "torchtitan@0.2" and model.family == "qwen3" and choices.get("pp", 1) > 1:
            continue
        doc = titan(target, model, seq_length=64, **choices)
        folder = write(tmp_path / str(number), configuration_files(doc))
        per_stage = doc.plan.num_ranks // doc.plan.pp
        for index, stage in enumerate(doc.plan.stages):
            requests.append({"name": name, "folder": folder, "world_size": 8, "rank": index * per_stage})
            wanted.append((doc, stage))
    totals: dict[str, int] = {}
    for request, verdict, (doc, stage) in zip(requests, ask(target, requests), wanted, strict=True):
        assert verdict["ok"], verdict
        degrees = stage.degrees
        found = verdict["dims"]
        assert (found["tp"], found["cp"], found["pp"], found["ep"]) == (degrees.tp, degrees.cp, doc.plan.pp, degrees.ep)
        assert found["dp_replicate"] * found["dp_shard"] == degrees.dp
        assert verdict["layers"] == [decoder(chunk) for chunk in stage.chunks]
        assert verdict["heads"] == [["embed" in chunk.blocks, "head" in chunk.blocks] for chunk in stage.chunks]
        assert verdict["micro_batches"] == doc.plan.num_microbatches
        totals[request["folder"]] = totals.get(request["folder"], 0) + verdict["parameters"]
    for request, (doc, _) in zip(requests, wanted, strict=True):
        assert totals[request["folder"]] == doc.inputs.model.total_params


@pytest.mark.parametrize("target", TARGETS)
def test_presets_have_our_sizes(target, tmp_path):
    requests, sizes = [], []
    for number, ((family, flavor), shape) in enumerate(PRESETS.items()):
        if target == "torchtitan@0.2" and (family, flavor) in {("llama3", "1B"), ("llama3", "3B")}:
            continue
        model = model_of(shape, flavor)
        files = configuration_files(titan(target, model, seq_length=64))
        assert f'"{flavor}"' in "".join(files.values())
        requests.append({"folder": write(tmp_path / str(number), files), "world_size": 8})
        sizes.append(model.total_params)
    for verdict, size in zip(ask(target, requests), sizes, strict=True):
        assert verdict["ok"], verdict
        assert verdict["parameters"] == size


@pytest.mark.skipif(not PYTHONS["torchtitan@0.2"], reason="no python with torchtitan 0.2.2")
def test_verdicts_agree_on_random_configurations(tmp_path):
    module = configuration_files(titan("torchtitan@0.2", DENSE, seq_length=64))["plan_model.py"]
    requests, ours = [], []
    for number in range(RANDOM):
        text, world = random_configuration(number, seed=3)
        family = re.search(r'name = "(\w+)"', text)[1]
        args = {"llama3": "llama3_args", "qwen3": "qwen3_args", "deepseek_v3": "deepseekv3_args"}[family]
        # The same random tokens for every family; the sizes of the module are not used.
        mock = re.sub(r"llama3_args\[.plan.\] = .*?^\)\n", "", module, flags=re.S | re.M).replace("llama3_args", args)
        mock = re.sub(r"^from .*TransformerModelArgs\n", "", mock, flags=re.M).replace("llama3", family)
        mock = mock.replace(f"{family}_args", args)
        files = {"train.toml": text + '[experimental]\ncustom_import = "plan_model"\n', "plan_model.py": mock}
        requests.append({"folder": write(tmp_path / str(number), files), "world_size": world})
        ours.append([item for item in check_toml(text, world) if item.rule not in LATE])
    accepted = 0
    for request, verdict, broken in zip(requests, ask("torchtitan@0.2", requests), ours, strict=True):
        text = Path(request["folder"], "train.toml").read_text()
        assert verdict["ok"] == (not broken), (text, request["world_size"], verdict, broken)
        accepted += verdict["ok"]
    assert RANDOM / 5 < accepted < 4 * RANDOM / 5


@pytest.mark.skipif(not PYTHONS["torchtitan@0.2"], reason="no python with torchtitan 0.2.2")
def test_a_tiny_plan_trains_on_gloo(tmp_path):
    doc = titan("torchtitan@0.2", DENSE, cluster="1x4xH100", tp=2, pp=2, layers=[2, 3], seq_length=64,
                workload={"precision": "fp32"})  # fmt: skip
    folder = write(tmp_path / "run", export_torchtitan(doc))
    torchrun = str(Path(str(PYTHONS["torchtitan@0.2"])).parent / "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "4", "--local-ranks-filter", "2", str(REFEREE), "--train"]
    command += ["--job.config_file", f"{folder}/train.toml", "--job.dump_folder", str(tmp_path / "out")]
    # What only a GPU has: compiled kernels and the fused optimizer.
    command += ["--compile.no-enable", "--optimizer.implementation", "foreach", "--training.steps", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folder}, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    losses = [float(loss) for loss in re.findall(r"loss: +(\d+\.\d+)", plain)]
    assert len(losses) >= 3
    # Random weights guess one of 512 tokens.
    assert all(6.0 < loss < 7.5 for loss in losses)
