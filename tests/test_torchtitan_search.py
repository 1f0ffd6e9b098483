"""The search under torchtitan's rules: what it returns is legal, exports, and reads back."""

from __future__ import annotations

import pytest

from meshwright.megatron_export import EXPORTERS
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import facts_of_plan, violations
from meshwright.planner.search import plan
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import Hsdp
from meshwright.specs.targets import load_target
from meshwright.specs.workload import workload_from_options


def search(target, model, cluster, batch, length, **more):
    return plan(
        PlanRequest(
            model=load_model(model),
            cluster=load_cluster(cluster),
            workload=workload_from_options({"global_batch_size": batch, "seq_length": length}),
            target=load_target(target),
            **more,
        )
    )


@pytest.mark.parametrize(
    ("target", "model", "cluster", "batch"),
    [
        ("torchtitan@0.2", "llama-3.1-8b", "8xH100", 64),
        ("torchtitan@0.3", "llama-3.1-8b", "16xH100", 64),
        ("torchtitan@0.2", "qwen3-30b-a3b", "16xH100", 64),
        ("torchtitan@main", "llama-3.2-1b", "8xH100", 64),
    ],
)
def test_plans_are_legal_and_export(target, model, cluster, batch):
    doc = search(target, model, cluster, batch, 4096)
    assert doc.plan
    inputs = doc.inputs
    assert violations(facts_of_plan(doc.plan, inputs.model, inputs.workload, inputs.target)) == []
    for alternative in doc.alternatives:
        assert alternative.plan.sharding != "zero1" or alternative.plan.pp > 1
    assert "plan.json" in EXPORTERS["torchtitan"](doc)


def test_stages_keep_their_parameters():
    doc = search("torchtitan@0.2", "llama-3.1-8b", "8xH100", 32, 4096, fix={"pp": 2, "vpp": 1, "tp": 1})
    assert doc.plan
    assert doc.plan.sharding == "zero1"


def test_context_parallelism_gathers():
    doc = search("torchtitan@0.2", "llama-3.1-8b", "8xH100", 8, 8192, fix={"cp": 2, "tp": 1, "pp": 1})
    assert doc.plan
    assert doc.plan.options.cp_comm_type == "allgather"


def test_hybrid_sharding_is_searched_on_one_stage():
    # Short sequences over a slow fabric: shards inside a node spare the gathers between nodes.
    doc = search(
        "torchtitan@0.3", "llama-3.1-8b", "64xA100-80GB", 2048, 512, fix={"pp": 1, "tp": 1, "micro_batch_size": 1}
    )
    assert doc.plan
    assert isinstance(doc.plan.sharding, Hsdp)


def test_a_model_that_none_holds_says_why():
    doc = search("torchtitan@0.2", "gpt-oss-20b", "8xH100", 64, 4096)
    assert doc.status == "infeasible"
    assert "torchtitan.M1" in doc.reason
