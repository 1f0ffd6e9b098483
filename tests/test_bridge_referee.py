"""Megatron-Bridge's own code as referee: it accepts every export, and refuses what our rules refuse."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from meshwright.megatron_export.bridge import check_overrides, export_bridge
from meshwright.megatron_export.megatron import environment_of
from meshwright.specs.plan import expand_blocks

from .bridge_plans import bridge_document, documents

PYTHON = os.environ.get("MESHWRIGHT_BRIDGE_PYTHON")
pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_BRIDGE_PYTHON names no python with megatron-bridge"),
]

#: Changes of a legal export of two stages, and whether Bridge itself accepts them.
CHANGES = [
    ([], True),
    (["dataset.seq_length=2048"], False),
    (["model.tensor_model_parallel_size=3"], False),
    (["model.context_parallel_size=3"], False),
    (["model.expert_model_parallel_size=3"], False),
    (["model.virtual_pipeline_model_parallel_size=3"], False),
    (["model.virtual_pipeline_model_parallel_size=2"], True),
    (['model.pipeline_model_parallel_layout="Et*15|t*17L"'], True),
    (['model.pipeline_model_parallel_layout="Et*15|t*16L"'], False),
    (
        ['model.pipeline_model_parallel_layout="Et*8|t*8|t*8|t*8L"', "model.virtual_pipeline_model_parallel_size=4"],
        False,
    ),
    (["model.recompute_granularity=full"], False),
    (["model.cuda_graph_impl=local", "model.use_te_rng_tracker=true"], False),
    (["ddp.use_megatron_fsdp=true", "dist.use_tp_pp_dp_mapping=true"], False),
    (["checkpoint.save=/x", "checkpoint.ckpt_format=fsdp_dtensor"], False),
    (["model.context_parallel_size=2", "model.cp_comm_type=a2a+p2p"], False),
    (["comm_overlap.delay_wgrad_compute=true"], False),
    (["validation.eval_global_batch_size=7"], False),
]


def request_of(doc, arguments=()):
    files = export_bridge(doc)
    cluster = doc.inputs.cluster
    return {
        "train": files["train.py"],
        "overrides": files["overrides.txt"],
        "arguments": list(arguments),
        "world_size": doc.plan.num_ranks,
        "env": {key: value or "" for key, value in environment_of(doc.plan, cluster).items()},
        "sm": min(cluster.gpu_of(pool).compute_capability for pool in cluster.pools),
    }


def ask(requests):
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).parent.parent / ".ci/bridge/referee.py")],
        input="\n".join(map(json.dumps, requests)),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_export_is_accepted_with_the_plans_layers() -> None:
    docs = documents()
    for doc, verdict in zip(docs, ask([request_of(doc) for doc in docs]), strict=True):
        assert verdict["ok"], verdict
        derived, plan = verdict["derived"], doc.plan
        assert derived["layers"] == [
            [sum(kind == "decoder" for kind, _ in expand_blocks(chunk.blocks)) for chunk in stage.chunks]
            for stage in plan.stages
        ]
        assert (derived["dp"], derived["vpp"], derived["etp"]) == (plan.dp, plan.vpp, plan.etp)
        assert derived["vocab_size"] == doc.inputs.model.vocab_size
        assert derived["overlap"][:2] == [plan.options.overlap_grad_reduce, plan.options.overlap_param_gather]
        half = doc.inputs.workload.precision
        assert derived["precision"][:2] == [half != "fp16", half == "fp16"]


def test_rules_agree_with_bridge_on_changed_settings() -> None:
    doc = bridge_document("llama-3.1-8b", "32xH100", tp=2, pp=2)
    verdicts = ask([request_of(doc, changes) for changes, _ in CHANGES])
    text = export_bridge(doc)["overrides.txt"]
    for (changes, accepted), verdict in zip(CHANGES, verdicts, strict=True):
        ours = check_overrides("\n".join([text, *changes]), doc.plan.num_ranks)
        assert verdict["ok"] == accepted, (changes, verdict)
        assert (ours == []) == accepted, (changes, ours)
