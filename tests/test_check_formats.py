"""``check`` of configurations in every format: a legal one, and ones broken in ways that their frameworks refuse.

Expected rules are by hand, from the assertion named beside each rule's source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from meshwright.api.checks import run_check
from meshwright.megatron_export.formats import FORMATS, format_of
from meshwright.specs.errors import SpecError

ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "offload_optimizer": {"device": "none"}},
}
FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_processes": 8,
    "num_machines": 1,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}
TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = {seq_len}
[parallelism]
tensor_parallel_degree = {tp}
context_parallel_degree = {cp}
"""
PYTHON = """
from torchtitan.models.llama3 import model_registry
raise SystemExit("a checker that runs this fails")
def llama():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree={tp}),
    )
"""
MEGATRON_YAML = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 8
  --hidden-size: 1024
  --num-attention-heads: 16
  --seq-length: 2048
  --max-position-embeddings: 2048
  --tensor-model-parallel-size: {tp}
  --micro-batch-size: 1
  --global-batch-size: 64
  --bf16: true
"""
MODEL = {"model": "llama-3.1-8b", "workload": {"global_batch_size": 64, "seq_length": 4096}}
REPORTS = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parent / "data" / "check_reports.jsonl").read_text().splitlines())
}


def check(configuration, **more):
    more.setdefault("world_size", 8)
    return run_check({"configuration": configuration, **more})


def rules(result):
    return [row["rule"] for row in result["violations"]]


def merged(base, changes):
    """``base`` with values replaced by dotted names; None removes one."""
    out = json.loads(json.dumps(base))
    for name, value in changes.items():
        *way, last = name.split(".")
        at = out
        for step in way:
            at = at.setdefault(step, {})
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return out


def nested(depth):
    out = {"zero_optimization": {}}
    at = out["zero_optimization"]
    for _ in range(depth):
        at["x"] = {}
        at = at["x"]
    return out


@pytest.mark.parametrize(
    ("configuration", "name"),
    [
        (json.dumps(ZERO3), "deepspeed"),
        (ZERO3, "deepspeed"),
        (yaml.safe_dump(FSDP2), "accelerate"),
        (FSDP2, "accelerate"),
        (TOML.format(tp=1, cp=1, seq_len=4096), "torchtitan-toml"),
        (PYTHON.format(tp=2), "torchtitan-python"),
        (MEGATRON_YAML.format(tp=1), "megatron"),
    ],
)
def test_every_format_is_told_from_its_content_and_a_good_one_is_legal(configuration, name):
    assert format_of(configuration) == name
    found = check(configuration)
    assert (found["format"], found["legal"], found["violations"]) == (name, True, [])
    assert found["target"].startswith(FORMATS[name].framework + "@")
    assert check(configuration, format=name) == found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_batch_size": 63}, ["B2"]),  # 1 x 8 x 8 ranks = 64
        ({"train_micro_batch_size_per_gpu": None}, ["B1"]),  # accumulation alone says no batch
        ({"gradient_accumulation_steps": None, "train_batch_size": 60}, ["B2"]),  # 60 // 1 // 8 = 7, and 7 x 8 = 56
        ({"fp16.enabled": True}, ["N1"]),
        ({"zero_optimization.stage": 4}, ["A1"]),
        ({"zero_optimization.stages": 3}, ["A1"]),
        ({"gradient_accumulation_steps": "eight"}, ["A1"]),
        ({"zero_optimization": 3}, ["A1"]),
        ({"zero_optimization.offload_optimizer": {"device": "disk"}}, ["A1"]),
        (
            {"zero_optimization.stage": 2, "zero_optimization.offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            ["Z2"],
        ),
        ({"gradient_allreduce_op": "sum"}, ["Z3"]),
        ({"zero_optimization.compute_grad_norm": False}, ["Z4"]),
        ({"zero_optimization.zero_hpz_partition_size": 3}, ["Z5"]),
        ({"tensor_parallel": {"autotp_size": 3}}, ["W1"]),
    ],
)
def test_deepspeed_refuses(changes, expected):
    assert rules(check(merged(ZERO3, changes))) == [f"deepspeed.{rule}" for rule in expected]


def test_a_batch_that_the_others_do_not_make_names_those_that_they_do():
    (row,) = check(merged(ZERO3, {"train_batch_size": 63}))["violations"]
    assert row["alternatives"] == ["train_batch_size=64", "train_batch_size=56"]


def test_stages_of_the_script_exclude_gradient_sharding():
    assert rules(check(ZERO3, degrees={"pp": 2})) == ["deepspeed.Z1"]
    assert check(merged(ZERO3, {"zero_optimization.stage": 1}), degrees={"pp": 2})["legal"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_processes": 4}, ["W1"]),
        ({"num_machines": 3}, ["W2"]),  # 8 processes over 3 machines
        ({"distributed_type": "HOROVOD"}, ["A1"]),
        ({"distributed_type": None}, ["A1"]),
        ({"zero_stage": 3}, ["A1"]),  # belongs below deepspeed_config
        ({"mixed_precision": "int8"}, ["A1"]),
        ({"fsdp_config.fsdp_reshard_after_forward": "FULL_SHARD"}, ["F1"]),
        ({"fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_sharding_strategy": "SHARD"}, ["A1"]),
        ({"fsdp_config.fsdp_state_dict_type": "LOCAL_STATE_DICT"}, ["F4"]),
        ({"fsdp_config.fsdp_sync_module_states": False}, ["F3"]),  # loading on one rank is on by default
        (
            {
                "fsdp_config.fsdp_activation_checkpointing": False,
                "fsdp_config.fsdp_activation_checkpointing_offload": True,
            },
            ["F2"],
        ),
        ({"parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}}, ["P1"]),
        ({"parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 4}}, ["P2"]),
        (
            {"parallelism_config": {"parallelism_config_dp_replicate_size": 4, "parallelism_config_tp_size": 2}},
            ["P3", "P4"],
        ),
        ({"parallelism_config": {"parallelism_config_tp_size": 8}}, ["P4"]),
        ({"fsdp_config.fsdp_version": 1, "parallelism_config": {"parallelism_config_dp_shard_size": 8}}, ["P5"]),
    ],
)
def test_accelerate_refuses(changes, expected):
    assert rules(check(merged(FSDP2, changes))) == [f"accelerate.{rule}" for rule in expected]


def test_the_mesh_that_would_fit_is_named():
    mesh = {"parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}}
    (row,) = check(merged(FSDP2, mesh))["violations"]
    assert row["alternatives"] == ["dp_shard_size=4"]


def test_heads_of_the_model_limit_the_tensor_degree():
    mesh = {"num_processes": 48, "parallelism_config": {"dp_shard_size": 16, "tp_size": 3}}
    assert rules(check(merged(FSDP2, mesh), world_size=48, model="llama-3.1-8b")) == ["accelerate.T1"]


def test_accelerate_counts_the_ranks_itself_and_starts_deepspeed():
    zero = {
        "distributed_type": "DEEPSPEED",
        "fsdp_config": None,
        "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4},
    }
    given = {"model": "llama-3.1-8b", "workload": {"seq_length": 2048}, "degrees": {"micro_batch_size": 1}}
    body = {"configuration": merged(FSDP2, zero), "cluster": "8xH100"}
    found = run_check(body | given)
    assert (found["legal"], found["fits"], found["format"]) == (True, True, "accelerate")
    assert run_check({"configuration": FSDP2})["legal"]
    both = {"deepspeed_config.deepspeed_config_file": "ds.json"}
    assert rules(check(merged(merged(FSDP2, zero), both))) == ["accelerate.D1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TOML.format(tp=3, cp=1, seq_len=4096), ["W1", "T1", "T2"]),
        (TOML.format(tp=2, cp=2, seq_len=4098), ["T2"]),
        (TOML.format(tp=1, cp=1, seq_len='"long"'), ["A1"]),
        (PYTHON.format(tp=16), ["W2", "T1"]),
        (MEGATRON_YAML.format(tp=3), ["megatron.W1", "megatron.T1"]),
    ],
)
def test_torchtitan_and_megatron_refuse(text, expected):
    found = rules(check(text))
    assert set(found) >= {rule if "." in rule else f"torchtitan.{rule}" for rule in expected}


def test_reports_of_torchtitan_get_their_rule():
    """U051: key-value heads are not replicated, so TP 16 is no degree of Llama 3. U061: TP 2 x 2 CP 2 divide the
    sequence."""
    assert REPORTS["U051"]["inputs"]["tp"] == 16
    (heads,) = check(TOML.format(tp=16, cp=1, seq_len=4096), world_size=32)["violations"]
    assert (heads["rule"], heads["alternatives"][-1]) == ("torchtitan.T1", "tp=8")
    (sequence,) = check(TOML.format(tp=2, cp=2, seq_len=4100), world_size=16)["violations"]
    assert sequence["rule"] == "torchtitan.T2"
    assert check(TOML.format(tp=2, cp=2, seq_len=4104), world_size=16)["legal"]


@pytest.mark.parametrize(("cluster", "seq"), [("8xH100", 20000), ("16xH100", 32000)])
def test_the_report_of_a_full_tuning_that_ran_out_of_memory(cluster, seq):
    """U018: Qwen2.5-32B under FSDP with a micro-batch of 1."""
    assert seq in REPORTS["U018"]["inputs"]["seq"]
    ranks = int(cluster.partition("x")[0])
    configuration = merged(FSDP2, {"num_processes": ranks, "num_machines": ranks // 8})
    given = {"workload": {"global_batch_size": ranks, "seq_length": seq}, "degrees": {"micro_batch_size": 1}}
    found = run_check({"configuration": configuration, "cluster": cluster, "model": "qwen2.5-32b"} | given)
    assert (found["legal"], found["fits"]) == (True, False)


def test_states_follow_the_zero_stage():
    """Llama-3.1-8B has 8.03e9 parameters. In bf16 with fp32 main parameters and moments, stage s keeps 16, 4 + 12/8,
    2 + 14/8 and 16/8 bytes of each on one of 8 ranks (ZeRO paper, section 3, with 16-bit gradients)."""
    parameters = 8.03e9
    for stage, each in enumerate((16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8)):
        body = {"configuration": merged(ZERO3, {"zero_optimization.stage": stage}), "cluster": "8xH200"} | MODEL
        (memory,) = run_check(body)["estimate"]["stages"]
        states = sum(memory["breakdown_bytes"][name] for name in ("weights", "gradients", "optimizer"))
        assert states == pytest.approx(each * parameters, rel=0.02), stage


def test_what_has_no_effect_is_a_note_and_what_is_not_priced_a_reason():
    stage2 = {"zero_optimization.stage": 2, "zero_optimization.offload_param": {"device": "cpu"}}
    found = run_check({"configuration": merged(ZERO3, stage2), "cluster": "8xH100"} | MODEL)
    assert found["fits"] is True
    assert "offload_param has no effect at ZeRO stage 2" in found["notes"][0]
    offloaded = merged(ZERO3, {"zero_optimization.offload_param": {"device": "nvme"}})
    found = run_check({"configuration": offloaded, "cluster": "8xH100"} | MODEL)
    assert (found["legal"], found["fits"], found["estimate"]) == (True, None, None)
    assert "NVMe are not priced" in found["reason"]
    found = run_check({"configuration": ZERO3, "cluster": "8xH100"})
    assert "model is in the training script" in found["reason"]


def test_a_trainers_own_values_stand_in_for_auto():
    automatic = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
    }
    configuration = merged(ZERO3, automatic)
    assert check(configuration)["legal"]
    body = {"configuration": configuration, "cluster": "8xH100", "degrees": {"micro_batch_size": 2}} | MODEL
    found = run_check(body)
    assert found["fits"]
    assert any("precision bf16" in note for note in found["notes"])
    odd = MODEL | {"workload": {"global_batch_size": 60, "seq_length": 4096}}
    assert rules(run_check(body | odd)) == ["deepspeed.B2"]  # 60 is no multiple of 2 x 8


def test_compare_tells_how_far_the_best_plan_is():
    found = run_check({"configuration": ZERO3, "cluster": "8xH100", "compare": True, "deadline_s": None} | MODEL)
    best = found["best"]
    assert best["complete"]
    assert best["ratio"] == pytest.approx(found["estimate"]["step_time_s"] / best["step_time_s"])
    assert best["ratio"] >= 1
    assert "sharding" in [row["name"] for row in best["differences"]]
    stage = best["differences"][[row["name"] for row in best["differences"]].index("sharding")]["theirs"]
    better = merged(
        ZERO3, {"zero_optimization.stage": int(stage.removeprefix("zero")), "zero_optimization.overlap_comm": True}
    )
    better_found = run_check({"configuration": better, "cluster": "8xH100"} | MODEL)
    assert better_found["estimate"]["step_time_s"] < found["estimate"]["step_time_s"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"configuration": '{"a": '}, "/configuration"),
        ({"configuration": '{"zero_optimization": {}, "zero_optimization": {}}'}, "/configuration"),
        ({"configuration": {"a": 1}}, "/configuration"),
        ({"configuration": "[model]\nname = "}, "/configuration"),
        ({"configuration": "from torchtitan import ("}, "/configuration"),
        ({"configuration": "distributed_type: &a FSDP\nmixed_precision: *a"}, "/configuration"),
        ({"configuration": json.dumps(nested(300))}, "/configuration"),
        ({"configuration": "{" + " " * 1_000_001 + "}"}, "/configuration"),
        ({"configuration": {"distributed_type": "MEGATRON_LM"}}, "/configuration"),
        ({"configuration": ZERO3, "arguments": "--bf16"}, "/configuration"),
        ({}, "/arguments"),
        ({"configuration": ZERO3, "format": "hjson"}, "/format"),
        ({"configuration": ZERO3, "target": "megatron@0.19"}, "/target"),
        ({"configuration": 3}, "/configuration"),
        ({"configuration": ZERO3, "compare": True}, "/compare"),
        ({"configuration": ZERO3, "degrees": {"pp": 0}}, "/degrees/pp"),
        ({"configuration": ZERO3, "workload": {"seq": 1}}, "/workload/seq"),
    ],
)
def test_what_cannot_be_read_names_its_field(body, pointer):
    with pytest.raises(SpecError) as caught:
        run_check({"world_size": 8, **body})
    assert pointer in [fault.pointer for fault in caught.value.faults]
