"""FlagScale as a target: rules of its meshes, files, and which ranks land on which device type."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig

import pytest
import yaml

from meshwright.megatron_export.flagscale import export_flagscale
from meshwright.megatron_export.launch import Site
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import RULE_SETS, facts_of_plan, violations
from meshwright.planner.search import plan
from meshwright.specs.cluster_io import cluster_from_data, load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from .megatron_plans import document

TARGET = load_target("flagscale")
NUMERICS = {"precision": "fp16", "params_dtype": "fp16"}
POOLS = {
    "pools": [
        {"gpu": "V100-32GB", "nodes": 2, "gpus_per_node": 8},
        {"gpu": "A100-80GB", "nodes": 2, "gpus_per_node": 8},
    ]
}
HOSTS = {"zeta": "A100-SXM-80GB", "beta": "V100-SXM2-32GB", "alpha": "A100-SXM-80GB", "omega": "V100-SXM2-32GB"}


def made(layers=(6, 6, 14, 14), **choices):
    doc = document(
        load_model("llama-2-13b"),
        cluster_from_data(POOLS),
        **{"tp": 2, "pp": 4, "layers": list(layers), "workload": NUMERICS, **choices},
    )
    return doc.model_copy(update={"inputs": doc.inputs.model_copy(update={"target": TARGET})})


def broken(doc):
    inputs = doc.inputs
    return [item.rule for item in violations(facts_of_plan(doc.plan, inputs.model, inputs.workload, inputs.target))]


def test_meshes_hold_the_split_and_the_types():
    files = export_flagscale(made(), hosts=HOSTS)
    train = yaml.safe_load(files["conf/train/plan.yaml"])
    assert train["system"]["hetero"] == {
        "enable_hetero": True,
        "hetero_pipeline_layer_split": [6, 6, 14, 14],
        "hetero_process_meshes": [2, 1, 1, 4, 2, 2, 1, 1, 4, 2],
        "hetero_device_types": ["V100-SXM2-32GB", "A100-SXM-80GB"],
    }
    assert train["system"]["pipeline_model_parallel_size"] == 4
    assert train["system"]["sequence_parallel"] is True
    assert train["model"]["num_layers"] == 40
    assert train["data"] == {"tokenizer_type": "NullTokenizer", "mock_data": True}
    assert not any("layout" in key for section in train.values() for key in section)
    runner = yaml.safe_load(files["conf/experiment.yaml"])["experiment"]["runner"]
    assert (runner["nnodes"], runner["nproc_per_node"], runner["rdzv_backend"]) == (4, 8, "static")


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_every_stage_lands_on_its_type_whatever_the_order_of_hosts(order):
    """FlagScale's rule: ranks sorted by the place of their device type, then by rank; meshes take them in turn."""
    files = export_flagscale(made(), hosts=HOSTS)
    lines = files["hostfile"].splitlines()
    hetero = yaml.safe_load(files["conf/train/plan.yaml"])["system"]["hetero"]
    ranks = []
    for node, index in enumerate(order):
        host, slots, kind = re.fullmatch(r"(\S+) slots=(\d+) type=(\S+)", lines[index]).groups()
        assert HOSTS[host] == kind
        ranks += [
            (hetero["hetero_device_types"].index(kind), node * int(slots) + local, kind) for local in range(int(slots))
        ]
    logical = [kind for *_, kind in sorted(ranks)]
    stages, at = [], 0
    for start in range(0, len(hetero["hetero_process_meshes"]), 5):
        tp, cp, _, dp, pp = hetero["hetero_process_meshes"][start : start + 5]
        for _ in range(pp):
            stages.append(set(logical[at : at + tp * cp * dp]))
            at += tp * cp * dp
    assert at == len(logical) == 32
    assert stages == [{"V100-SXM2-32GB"}] * 2 + [{"A100-SXM-80GB"}] * 2


def test_pools_of_one_gpu_are_types_of_their_own():
    cluster = {"pools": [{**POOLS["pools"][1], "name": "old room"}, {**POOLS["pools"][1], "name": "new"}]}
    doc = document(load_model("llama-2-13b"), cluster_from_data(cluster), tp=2, pp=2, workload=NUMERICS)
    doc = doc.model_copy(update={"inputs": doc.inputs.model_copy(update={"target": TARGET})})
    files = export_flagscale(doc)
    assert [line.split("type=")[1] for line in files["hostfile"].splitlines() if line[0] != "#"] == [
        "old-room",
        "old-room",
        "new",
        "new",
    ]


def test_rules_of_the_meshes():
    assert broken(made()) == []
    assert "flagscale.H1" in broken(made(layers=[5] * 8, vpp=2, micro_batches=8))
    assert "flagscale.H2" in broken(made(layers=[0, 12, 14, 14]))
    doc = made()
    first, *middle, last = doc.plan.stages
    swapped = (first, *(s.model_copy(update={"groups": last.groups}) for s in middle[:1]), middle[0], last)
    assert "flagscale.H3" in broken(doc.model_copy(update={"plan": doc.plan.model_copy(update={"stages": swapped})}))
    mixed = first.model_copy(update={"groups": (*first.groups, *last.groups)})
    both = doc.plan.model_copy(update={"stages": (mixed, *doc.plan.stages[1:])})
    assert "flagscale.H3" in broken(doc.model_copy(update={"plan": both}))


def test_megatrons_rules_of_its_time_hold_too():
    own = {rule.id for rule in RULE_SETS["flagscale"]}
    assert {"megatron.W1", "flagscale.H1", "flagscale.H2", "flagscale.H3"} <= own
    later = {rule.id for rule in RULE_SETS["megatron"] if rule.since and rule.since > (0, 15)}
    assert not later & own
    assert all(rule.applies((2025, 11)) for rule in RULE_SETS["flagscale"])


def test_a_search_makes_plans_that_export():
    answer = plan(
        PlanRequest(
            model=load_model("llama-3.2-1b"),
            cluster=load_cluster("1x8xH100-SXM+1x8xA100-80GB"),
            workload=Workload(global_batch_size=64, seq_length=2048),
            target=TARGET,
            top=3,
            fix={"tp": 2},
        )
    )
    assert answer.plan is not None
    assert answer.plan.vpp == 1
    files = export_flagscale(answer)
    hetero = yaml.safe_load(files["conf/train/plan.yaml"])["system"]["hetero"]
    assert sum(hetero["hetero_pipeline_layer_split"]) == 16
    assert sum(hetero["hetero_process_meshes"][4::5]) == answer.plan.pp


def test_the_script_runs_flagscale_and_passes_shellcheck(tmp_path):
    for name, text in export_flagscale(made()).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = shutil.which("shellcheck", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    subprocess.run([found, "launch_flagscale.sh"], cwd=tmp_path, check=True)
    checkout, tools = tmp_path / "it's $(here)", tmp_path / "tools"
    for folder in (checkout, tools):
        folder.mkdir()
    (checkout / "run.py").touch()
    (tools / "python").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$PLAN_DIR" "$@"\n')
    (tools / "python").chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "FLAGSCALE": str(checkout)}

    def start():
        return subprocess.run(
            ["bash", "launch_flagscale.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    refused = start()
    assert refused.returncode == 2
    assert "replace the placeholders" in refused.stderr
    (tmp_path / "hostfile").write_text(export_flagscale(made(), hosts=HOSTS)["hostfile"])
    assert start().stdout.splitlines() == [
        str(checkout),
        str(tmp_path),
        "run.py",
        "--config-path",
        str(tmp_path / "conf"),
        "--config-name",
        "experiment",
        "action=run",
    ]


def test_sites_and_launchers():
    site = Site.read({"environment": {"A": "${oc.env:HOME}"}, "arguments": ["--data-path", "/d", "--lr", "2e-4"]})
    files = export_flagscale(made(), site=site)
    train = yaml.safe_load(files["conf/train/plan.yaml"])
    assert train["data"] == {"tokenizer_type": "NullTokenizer", "data_path": "/d"}
    assert train["model"]["lr"] == "2e-4"
    assert yaml.safe_load(files["conf/experiment.yaml"])["experiment"]["envs"]["A"] == "\\${oc.env:HOME}"
    with pytest.raises(SpecError, match="FlagScale's own runner") as caught:
        export_flagscale(made(), "slurm")
    assert caught.value.faults[0].alternatives == ("torchrun", "ssh")
