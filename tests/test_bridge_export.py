"""Exports for Megatron-Bridge: read back they are the plan; what is written is Python and bash."""

from __future__ import annotations

import ast
import subprocess

import pytest

from meshwright.megatron_export import EXPORTERS
from meshwright.megatron_export.bridge import (
    check_overrides,
    export_bridge,
    model_from_overrides,
    plan_from_overrides,
    workload_from_overrides,
)
from meshwright.megatron_export.bridge.overrides import format_value, parse_value, read_overrides
from meshwright.specs.errors import SpecError

from .bridge_plans import bridge_document, documents


def test_every_export_reads_back_as_its_plan() -> None:
    for doc in documents():
        text = export_bridge(doc)["overrides.txt"]
        assert check_overrides(text, doc.plan.num_ranks) == []
        assert plan_from_overrides(text, model_from_overrides(text), doc.inputs.cluster) == doc.plan
        work = workload_from_overrides(text, doc.plan.num_ranks)
        assert work.precision == doc.inputs.workload.precision
        assert work.global_batch_size == doc.inputs.workload.global_batch_size
        assert work.gradient_dtype == doc.inputs.workload.gradient_dtype


def test_model_of_an_export_has_the_models_size() -> None:
    doc = bridge_document("deepseek-v3", "256xH100", pp=4, ep=16, vpp=1, layers=[15, 15, 15, 16])
    found = model_from_overrides(export_bridge(doc)["overrides.txt"])
    assert found.total_params == doc.inputs.model.total_params


def test_settings_of_an_interleaved_plan_by_hand() -> None:
    doc = bridge_document("llama-3.1-70b", "64xH100", tp=4, pp=4, vpp=5)
    given = read_overrides(export_bridge(doc)["overrides.txt"]).given
    assert given["model.virtual_pipeline_model_parallel_size"] == 5  # the degree, not layers a stage
    assert given["model.pipeline_model_parallel_layout"] is None
    assert given["model.tensor_model_parallel_size"] == 4
    assert given["model.sequence_parallel"] is True
    assert given["comm_overlap.overlap_p2p_comm"] is True
    assert given["dataset.seq_length"] == given["model.seq_length"]


def test_program_is_python_and_scripts_are_bash() -> None:
    files = EXPORTERS["bridge"](bridge_document("mixtral-8x7b", "32xH100", tp=2, pp=2, ep=4), "slurm")
    tree = ast.parse(files["train.py"])
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == {"base_config", "plan_config"}
    assert "--node-rank" in files["launch_torchrun.sh"]
    assert "c10d" not in files["launch_torchrun.sh"].replace("c10d sorts", "")
    for name in ("launch_torchrun.sh", "job.sbatch", "env.sh"):
        subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.5, "alltoall", "Et*3|(tt|)*29,m|L", [0, 1], ["a", "b"], [], 'say "x"']
)
def test_values_survive_the_grammar(value) -> None:
    assert parse_value(format_value(value)) == value


def test_illegal_plans_do_not_leave() -> None:
    doc = bridge_document("llama-3.1-8b", "8xH100", tp=1)
    plan = doc.plan.model_copy(update={"num_microbatches": doc.plan.num_microbatches + 1})
    with pytest.raises(SpecError, match=r"megatron\.B5"):
        export_bridge(doc.model_copy(update={"plan": plan}))
