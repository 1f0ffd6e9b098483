"""Megatron's own code as referee: known cases, random argument lines, and exports of plans."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from meshwright.megatron_export.launch.shell import argument_array
from meshwright.megatron_export.megatron import check_arguments, export_megatron, read_arguments
from meshwright.megatron_export.megatron.flags import INVENTORIES
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import list_presets, load_model
from meshwright.specs.plan import expand_blocks, parse_range
from meshwright.specs.targets import load_target
from meshwright.specs.workload import workload_from_options

from .megatron_exports import request_of
from .megatron_plans import document
from .megatron_random import random_plan
from .megatron_requests import request
from .test_megatron_plan import ROUNDTRIPS

PYTHON = os.environ.get("MESHWRIGHT_MEGATRON_PYTHON")
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_MEGATRON_PYTHON names no python with megatron-core"),
]
#: Releases whose parser runs here -> random lines that each judges.
RANDOM_LINES = {"0.19": 500, "0.18": 150, "0.17": 150}
RANDOM_PLANS = 200


def ask(requests, version="0.19"):
    """The verdicts of a release's own code, in order."""
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).parent.parent / ".ci/megatron/referee.py"), version],
        input="\n".join(map(json.dumps, requests)),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def layers(found):
    return [
        [sum(kind == "decoder" for kind, _ in expand_blocks(chunk.blocks)) for chunk in stage.chunks]
        for stage in found.stages
    ]


def test_known_cases():
    path = Path(__file__).parent / "data" / "megatron_cases.jsonl"
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    for case, verdict in zip(cases, ask(cases), strict=True):
        assert verdict["ok"] == (case["expect"] == "ok"), (case["name"], verdict)


@pytest.mark.parametrize("version", RANDOM_LINES)
def test_rules_agree_on_random_lines(version):
    count = RANDOM_LINES[version]
    requests = [request(number, seed=11) for number in range(count)]
    accepted = 0
    for line, verdict in zip(requests, ask(requests, version), strict=True):
        ours = check_arguments(line["args"], line["world_size"], line["env"] or None, sm=line["sm"], version=version)
        assert verdict["ok"] == (not ours), (line["args"], verdict, ours)
        accepted += verdict["ok"]
    assert count / 5 < accepted < 3 * count / 4


def test_random_plans_are_accepted_with_their_layers_by_their_release():
    drawn = [
        random_plan(number, tuple(f"megatron@{version}" for version in RANDOM_LINES)) for number in range(RANDOM_PLANS)
    ]
    for version in RANDOM_LINES:
        mine = [(name, doc) for name, doc in drawn if doc.inputs.target.version == version]
        assert len(mine) > RANDOM_PLANS / 6
        for (name, doc), verdict in zip(mine, ask([request_of(doc, name) for name, doc in mine], version), strict=True):
            assert verdict["ok"], verdict
            assert verdict["derived"]["layers"] == layers(doc.plan), name
            assert verdict["derived"]["num_microbatches"] == doc.plan.num_microbatches, name


def test_exports_are_accepted_with_the_plans_layers_and_ranks():
    docs = [document(load_model(name), load_cluster(cluster), **choices) for name, cluster, choices in ROUNDTRIPS]
    requests = [request_of(doc, name) for doc, (name, *_) in zip(docs, ROUNDTRIPS, strict=True)]
    for doc, verdict in zip(docs, ask(requests), strict=True):
        assert verdict["ok"], verdict
        derived = verdict["derived"]
        assert derived["layers"] == layers(doc.plan)
        assert derived["num_microbatches"] == doc.plan.num_microbatches
        assert derived["stage_ranks"] == [
            [rank for group in stage.groups for text in group.ranks for rank in parse_range(text)]
            for stage in doc.plan.stages
        ]


def test_every_expressible_preset_is_accepted():
    docs = {}
    for name in list_presets():
        model = load_model(name)
        doc = document(model, load_cluster("64xH100"), pp=4, ep=2 if model.is_moe else 1, seq_length=1024)
        try:
            export_megatron(doc)
        except ValueError:
            continue
        docs[name] = doc
    assert len(docs) > 50
    for verdict in ask([request_of(doc, name) for name, doc in docs.items()]):
        assert verdict["ok"], verdict


PROMISED = [
    ("llama-3.1-8b", "8xH100", 512, 8192, "bf16"),
    ("llama-3.1-70b", "64xH100", 512, 8192, "bf16"),
    ("llama-3.1-405b", "1024xH100", 2048, 8192, "bf16"),
    ("deepseek-v3", "256xH100", 2048, 4096, "bf16"),
    ("deepseek-v3", "256xGB200-NVL72", 2048, 4096, "bf16"),
    ("mixtral-8x7b", "32xA100-40GB", 256, 4096, "bf16"),
    ("qwen3-30b-a3b", "16xH100", 256, 4096, "bf16"),
    ("kimi-k2", "512xH200", 2048, 4096, "bf16"),
    ("gpt-oss-120b", "64xH100", 512, 4096, "bf16"),
    ("llama-2-13b", "4x8xA100-80GB+4x8xV100-32GB", 512, 4096, "fp16"),
]


def test_plans_of_the_search_are_accepted_with_their_layers():
    docs = []
    for model, cluster, batch, length, precision in PROMISED:
        work = workload_from_options({"global_batch_size": batch, "seq_length": length, "precision": precision})
        request = PlanRequest(
            model=load_model(model), cluster=load_cluster(cluster), workload=work, target=load_target("megatron@0.19")
        )
        docs.append(plan(request))
    verdicts = ask([request_of(doc, case[0]) for doc, case in zip(docs, PROMISED, strict=True)])
    for doc, verdict in zip(docs, verdicts, strict=True):
        assert verdict["ok"], verdict
        assert verdict["derived"]["layers"] == layers(doc.plan)


@pytest.mark.parametrize("version", INVENTORIES)
def test_flag_inventory_is_that_of_the_parser(version):
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [str(PYTHON), str(root / ".ci/megatron/dump_flags.py"), version], capture_output=True, text=True, check=True
    )
    stored = (root / f"megatron_export/megatron/data/flags-{version}.json").read_text()
    assert json.loads(done.stdout) == json.loads(stored)


def test_bash_reads_the_array_as_we_do():
    flags = [("--pipeline-model-parallel-layout", "Et*3|(tt|)*2L"), ("--moe-layer-freq", "([0]*3+[1]*2)"), ("--bf16",)]
    text = argument_array("MEGATRON_ARGS", {"quotes ' and $(x)": flags})
    done = subprocess.run(
        ["bash", "-c", f'{text}\nprintf "%s\\n" "${{MEGATRON_ARGS[@]}}"'], capture_output=True, text=True, check=True
    )
    assert read_arguments(done.stdout.splitlines()).given == read_arguments(text).given
