"""torchtitan exports: what they say, and that they read back as the plan they came from."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib

import pytest

from meshwright.megatron_export import LAUNCHERS
from meshwright.megatron_export.torchtitan import export_torchtitan, plan_from_python, plan_from_toml
from meshwright.megatron_export.torchtitan.shapes import PRESETS, model_of, preset_of, shape_of
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model

from .torchtitan_plans import DENSE, LATENT, PLANS, QWEN, titan


@pytest.mark.parametrize(("name", "model", "choices"), PLANS)
def test_exports_read_back_as_the_same_plan(name, model, choices):
    for target, file, read in (
        ("torchtitan@0.2", "train.toml", plan_from_toml),
        ("torchtitan@0.3", "plan_config.py", plan_from_python),
    ):
        doc = titan(target, model, seq_length=64, **choices)
        plan, _, workload = read(export_torchtitan(doc)[file], load_cluster("8xH100"), model)
        assert workload == doc.inputs.workload
        options = {"sequence_parallel", "cp_comm_type", "vp_group_size", "dist_opt_instances"}
        assert plan.options.model_dump(include=options) == doc.plan.options.model_dump(include=options)
        assert plan.model_copy(update={"options": doc.plan.options}) == doc.plan


def test_toml_says_what_the_plan_does():
    doc = titan("torchtitan@0.2", DENSE, pp=2, vpp=2, layers=[1, 2, 1, 1], micro_batches=4, micro_batch_size=2,
                cluster="8xH100", seq_length=64)  # fmt: skip
    data = tomllib.loads(export_torchtitan(doc)["train.toml"])
    # 4 replicas of 4 micro-batches of 2 sequences, all in one local batch.
    assert (data["training"]["local_batch_size"], data["training"]["global_batch_size"]) == (8, 32)
    parallel = data["parallelism"]
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallel["pipeline_parallel_microbatch_size"] == 2
    assert parallel["data_parallel_shard_degree"] == 4
    assert parallel["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3"],
        ["layers.4", "norm", "output"],
    ]


def test_without_stages_micro_batches_are_accumulated():
    doc = titan("torchtitan@0.2", DENSE, micro_batches=4, micro_batch_size=2, seq_length=64)
    training = tomllib.loads(export_torchtitan(doc)["train.toml"])["training"]
    assert (training["local_batch_size"], training["global_batch_size"]) == (2, 64)


def test_main_counts_tokens():
    doc = titan("torchtitan@main", DENSE, pp=2, micro_batches=4, micro_batch_size=2, seq_length=64)
    text = export_torchtitan(doc)["plan_config.py"]
    ast.parse(text)
    assert "num_tokens_per_microbatch_per_dp_rank=128" in text
    assert "num_tokens_per_train_step=2048" in text  # 32 sequences
    assert "num_pp_microbatches=4" in text
    assert "local_batch_size=8" not in text


@pytest.mark.parametrize(
    ("model", "version", "flavor"),
    [
        ("llama-3.1-8b", (0, 2), "8B"), ("llama-3.1-405b", (0, 2), "405B"), ("llama-3.2-1b", (0, 3), "1B"),
        ("qwen3-30b-a3b", (0, 3), "30B-A3B"), ("deepseek-v3", (0, 2), "671B"), ("llama-2-7b", (0, 2), None),
    ],
)  # fmt: skip
def test_presets_are_found_by_their_sizes(model, version, flavor):
    assert preset_of(shape_of(load_model(model), version), version) == flavor


def test_sizes_of_presets_come_back():
    for (family, _), shape in PRESETS.items():
        version = (0, 3)
        assert shape_of(model_of(shape, family), version) == shape


def test_a_preset_is_named_and_other_sizes_are_brought_along():
    big = titan("torchtitan@0.2", load_model("llama-3.1-8b"))
    files = export_torchtitan(big)
    assert 'flavor = "8B"' in files["train.toml"]
    assert "TransformerModelArgs" not in files["plan_model.py"]
    moe = export_torchtitan(titan("torchtitan@0.2", QWEN, ep=4, seq_length=64))
    assert 'flavor = "plan"' in moe["train.toml"]
    assert "num_experts=8" in moe["plan_model.py"]
    latent = export_torchtitan(titan("torchtitan@0.2", load_model("deepseek-v3"), "256xH100", ep=8))
    assert 'replace(deepseekv3_args["671B"], attn_type="sdpa"' in latent["plan_model.py"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("target", ["torchtitan@0.2", "torchtitan@0.3"])
def test_scripts_and_modules_are_sound(target, launcher, tmp_path):
    files = export_torchtitan(titan(target, LATENT, "16xH100", ep=2, pp=2, layers=[2, 3], seq_length=64), launcher)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if name.endswith(".py"):
            ast.parse(text)
    scripts = [str(path) for path in tmp_path.iterdir() if path.suffix in (".sh", ".sbatch")]
    subprocess.run(["shellcheck", "-x", *scripts], check=True)
    assert json.loads(files["plan.json"])["plan"]["pp"] == 2
    assert "c10d" not in files["launch_torchrun.sh"]


def test_names_with_quotes_stay_text():
    model = DENSE.model_copy(update={"name": 'a"b\\"""\nc'})
    tomllib.loads(export_torchtitan(titan("torchtitan@0.2", model, seq_length=64))["train.toml"])
    ast.parse(export_torchtitan(titan("torchtitan@0.3", model, seq_length=64))["plan_config.py"])


def test_what_is_illegal_is_not_exported():
    with pytest.raises(SpecError, match=r"torchtitan\.T1"):
        export_torchtitan(titan("torchtitan@0.2", DENSE, tp=4, seq_length=64))


def test_what_is_not_priced_is_named():
    text = '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "GPipe"\n'
    with pytest.raises(SpecError, match="GPipe"):
        plan_from_toml(text, load_cluster("8xH100"))
    with pytest.raises(SpecError, match="no preset"):
        plan_from_toml('[model]\nflavor = "mine"\n', load_cluster("8xH100"))
