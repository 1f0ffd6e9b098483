"""torchtitan's rules on plans and configurations, each broken once, and what its models hold."""

from __future__ import annotations

import pytest

from meshwright.megatron_export.torchtitan import check_python, check_toml
from meshwright.planner.rules import RULE_SETS, facts_of_plan, violations
from meshwright.planner.rules.torchtitan_models import held_by, inexpressible
from meshwright.specs.model_io import load_model
from meshwright.specs.workload import workload_from_options

from .torchtitan_plans import DENSE, LATENT, PLANS, QWEN, titan


def broken(doc):
    inputs = doc.inputs
    return [item.rule for item in violations(facts_of_plan(doc.plan, inputs.model, inputs.workload, inputs.target))]


@pytest.mark.parametrize("target", ["torchtitan@0.2", "torchtitan@0.3", "torchtitan@main"])
@pytest.mark.parametrize(("name", "model", "choices"), PLANS)
def test_plans_of_every_kind_are_legal(target, name, model, choices):
    assert broken(titan(target, model, seq_length=64, **choices)) == []


OLD, NEW = "torchtitan@0.2", "torchtitan@0.3"


@pytest.mark.parametrize(
    ("rule", "target", "model", "choices"),
    [
        ("E2", OLD, QWEN, {"tp": 4, "ep": 2, "etp": 2}),  # expert tensor degree 2 is neither 1 nor TP
        ("E2n", NEW, QWEN, {"tp": 2, "ep": 2, "etp": 2}),
        ("E4", NEW, QWEN, {"cluster": "16xH100", "ep": 16}),  # 8 experts
        ("T1", OLD, DENSE, {"tp": 4}),  # 2 key-value heads
        ("T2", OLD, DENSE, {"tp": 2, "seq_length": 66}),  # 66 is not divisible by 2 x 2
        ("T2", NEW, DENSE, {"cp": 2, "tp": 2, "seq_length": 68}),
        ("C2", OLD, DENSE, {"cp": 2, "options": {"cp_comm_type": "p2p"}}),
        ("P1", OLD, QWEN, {"pp": 2, "ep": 2}),
        ("P3", NEW, DENSE, {"pp": 4, "micro_batches": 2}),
        ("P4", NEW, DENSE, {"pp": 2, "vpp": 2, "layers": [1, 2, 1, 1], "micro_batches": 5}),  # 2 rounds
        ("P5", NEW, DENSE, {"pp": 2, "vpp": 2, "layers": [1, 2, 1, 1], "micro_batches": 3}),  # 1 round of 3
        ("L1", NEW, DENSE, {"seq_length": 60}),  # 8 pieces of the loss
        ("F1", NEW, DENSE, {"sharding": "zero1"}),
        ("F2", OLD, DENSE, {"tp": 2, "sharding": "none"}),
        ("F3", OLD, DENSE, {"cluster": "1x4xH100", "tp": 2, "pp": 2}),
        ("O1", NEW, DENSE, {"options": {"cuda_graph": True}}),
        ("M1", NEW, DENSE, {"workload": {"moments_dtype": "bf16"}}),
    ],
)
def test_each_rule_refuses(rule, target, model, choices):
    choices = {"seq_length": 64, **choices}
    options = choices.get("options")
    doc = titan(target, model, **choices)
    if options:
        doc = doc.model_copy(
            update={"plan": doc.plan.model_copy(update={"options": doc.plan.options.model_copy(update=options)})}
        )
    assert f"torchtitan.{rule}" in broken(doc)


def test_what_passes_in_one_version_only():
    alone = {"cluster": "1x4xH100", "tp": 2, "pp": 2, "seq_length": 64}
    assert broken(titan(OLD, DENSE, **alone)) == ["torchtitan.F3"]  # trains in fp32 without a word
    assert broken(titan(NEW, DENSE, **alone)) == []
    assert broken(titan(NEW, QWEN, pp=2, ep=2, seq_length=64)) == []


def test_rules_have_one_id_each_and_a_source():
    rules = RULE_SETS["torchtitan"]
    assert len({rule.id for rule in rules}) == len(rules)
    assert all(rule.source for rule in rules)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("llama-3.1-8b", "llama3"), ("llama-2-70b", "llama3"), ("mistral-nemo-12b", "qwen3"),
        ("qwen3-30b-a3b", "qwen3"), ("mixtral-8x7b", "qwen3"), ("deepseek-v3", "deepseek_v3"),
        ("kimi-k2", "deepseek_v3"),
    ],
)  # fmt: skip
def test_families_hold_the_models_of_their_kind(model, family):
    held = held_by(load_model(model), (0, 2))
    assert (held.family, held.faults) == (family, ())


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("gpt-oss-120b", "bias"),
        ("gpt3-175b", "positions other than rotary"),
        ("qwen2.5-72b", "biases"),
        ("gemma-2-9b", "activation"),
        ("llama-3.2-11b-vision", "vision"),
        ("deepseek-v3.2", "sparse"),
        ("qwen1.5-moe-a2.7b", "experts"),
    ],
)
def test_what_no_family_holds_is_named(model, word):
    assert word in "; ".join(held_by(load_model(model), (0, 2)).faults)


def test_tied_embeddings_are_held_by_llama_from_0_3():
    tied = load_model("llama-3.2-1b")
    assert held_by(tied, (0, 2)).family == "qwen3"  # whose query-key norms can be off there
    assert held_by(tied, (0, 3)).family == "llama3"
    assert held_by(load_model("mixtral-8x7b"), (0, 3)).faults == ("experts in llama3",)  # qwen3's norms stay on


def test_numerics_that_it_cannot_are_named():
    work = workload_from_options({"global_batch_size": 8, "seq_length": 64, "precision": "fp8", "optimizer": "muon"})
    found = "; ".join(inexpressible(LATENT, work, (0, 3)))
    assert "precision fp8" in found
    assert "muon" in found


BASE = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
[parallelism]
"""


@pytest.mark.parametrize(
    ("rule", "lines", "world"),
    [
        ("W1", "tensor_parallel_degree = 3", 8),
        ("W2", "tensor_parallel_degree = 0", 8),
        ("A1", "tensor_parallel = 2", 8),
        ("A1", 'tensor_parallel_degree = "2"', 8),
        ("T1", "tensor_parallel_degree = 16", 16),  # 8 key-value heads
        ("T3", "tensor_parallel_degree = 2\nenable_async_tensor_parallel = true", 8),
        ("P2", 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F2B"', 8),
        ("P2", "pipeline_parallel_degree = 3\npipeline_parallel_layers_per_stage = 8", 9),  # 5 stages over 3 ranks
        (
            "P2",
            'pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["tok_embeddings"], ["norm", "output"]]',
            8,
        ),
        ("P3", "pipeline_parallel_degree = 8", 16),  # 4 micro-batches
        ("F3", "tensor_parallel_degree = 8", 8),
        ("F2", "data_parallel_replicate_degree = 2\ntensor_parallel_degree = 4", 8),
        ("E1", "expert_parallel_degree = 16", 8),
    ],
)
def test_configurations_break_rules_by_name(rule, lines, world):
    assert f"torchtitan.{rule}" in [item.rule for item in check_toml(BASE + lines, world)]


def test_a_legal_configuration_breaks_none():
    assert check_toml(BASE + "tensor_parallel_degree = 2", 8) == []
    assert check_toml(BASE + "pipeline_parallel_degree = 2", 8) == []
    assert check_toml("", 8) == []  # all defaults
    assert check_toml("[training", 8)[0].rule == "torchtitan.A1"


def test_python_configurations_are_judged_without_being_run():
    text = """
raise SystemExit("never run")
from torchtitan.models.llama3 import model_registry
def f():
    config = Trainer.Config(
        model_spec=model_registry("8B"),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, pipeline_parallel_degree=2),
        training=TrainingConfig(local_batch_size=4, seq_len=8192),
    )
    config.parallelism.tensor_parallel_degree = 16
    return config
"""
    assert [item.rule for item in check_python(text, 64)] == ["torchtitan.T1"]
    assert check_python(text.replace("= 16", "= 8"), 16) == []
    assert check_python("def f(:", 8)[0].rule == "torchtitan.A1"
