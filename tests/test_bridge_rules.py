"""Megatron-Bridge settings judged: public reports of broken recipes, published runs, rules of Bridge's own."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from meshwright.cost_models.backtest.architectures import model_of
from meshwright.megatron_export.bridge import check_overrides, load_recipes, preset_of, read_overrides
from meshwright.specs.model_io import load_model

LLAMA = (
    "model.num_layers=32 model.hidden_size=4096 model.num_attention_heads=32 model.num_query_groups=8 "
    "model.ffn_hidden_size=14336 model.gated_linear_unit=true model.add_bias_linear=false "
    "train.global_batch_size=512 train.micro_batch_size=1 model.seq_length=8192 dataset.seq_length=8192 "
)
MOE = (
    LLAMA + "model.num_moe_experts=64 model.moe_router_topk=8 model.moe_ffn_hidden_size=1024 "
    "model.moe_token_dispatcher_type=alltoall "
)


def rules(text, world=64, **known):
    return {item.rule for item in check_overrides(text, world, **known)}


@pytest.mark.parametrize(
    ("text", "world", "rule"),
    [
        # A published recipe for 32 GPUs with PP6 and EP8: 48 ranks do not divide 32.
        (MOE + "model.tensor_model_parallel_size=2 model.pipeline_model_parallel_size=6 "
         "model.expert_model_parallel_size=8 model.sequence_parallel=true", 32, "megatron.W2"),
        # Recipes that left ETP to become TP: 2 x 8 x 1 ranks on 8 GPUs.
        (MOE + "model.tensor_model_parallel_size=2 model.expert_model_parallel_size=8 "
         "model.expert_tensor_parallel_size=2 model.sequence_parallel=true", 8, "megatron.W2"),
        # 48 layers, PP8, VPP4: 6 layers a rank.
        (MOE.replace("num_layers=32", "num_layers=48") + "model.tensor_model_parallel_size=2 "
         "model.pipeline_model_parallel_size=8 model.virtual_pipeline_model_parallel_size=4 "
         "model.expert_model_parallel_size=16 model.sequence_parallel=true comm_overlap.tp_comm_overlap=false",
         128, "megatron.P3"),
        # 64-GPU topologies that need 256 and 128 ranks.
        (MOE + "model.pipeline_model_parallel_size=8 model.expert_model_parallel_size=32", 64, "megatron.W2"),
        (MOE + "model.pipeline_model_parallel_size=4 model.expert_model_parallel_size=32", 64, "megatron.W2"),
    ],
)  # fmt: skip
def test_reported_recipes_name_their_fault(text, world, rule) -> None:
    assert rule in rules(text, world)


def test_experts_are_not_split_by_tp_unless_asked() -> None:
    legal = MOE + "model.tensor_model_parallel_size=2 model.expert_model_parallel_size=8 model.sequence_parallel=true"
    assert rules(legal, 8) == set()


def test_layout_kept_after_a_change_of_stages_is_refused() -> None:
    """DeepSeek-V3's 16-stage layout under PP 8 would quietly run as two virtual stages."""
    layout = "Et*4|" + "t*4|" * 14 + "tmL"
    text = f'--recipe deepseek_v3_pretrain_1024gpu_h100_bf16_config model.pipeline_model_parallel_layout="{layout}"'
    degrees = " model.pipeline_model_parallel_size=8 model.virtual_pipeline_model_parallel_size="
    tokens = [*text.split(" ", 2)]
    assert "bridge.V1" in rules([*tokens, *(degrees + "1").split()], 1024)
    assert "bridge.V1" in rules([*tokens, *(degrees + "null").split()], 1024)
    assert rules([*tokens, *(degrees + "2").split()], 1024) == set()


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("dataset.seq_length=4096", "bridge.S1"),
        ("mixed_precision=bf16_with_fp9_mixed", "bridge.A3"),
        ("model.pipeline_model_parallel_size=2 model.virtual_pipeline_model_parallel_size=2", "megatron.P8"),
        ("model.cuda_graph_impl=local model.cuda_graph_modules=[attn] model.use_te_rng_tracker=true", "bridge.G1"),
        ("model.cuda_graph_impl=transformer_engine model.cuda_graph_modules=[attn]", "bridge.G2"),
        ("model.cuda_graph_impl=full_iteration model.use_te_rng_tracker=true", "bridge.G3"),
        ("ddp.use_megatron_fsdp=true dist.use_tp_pp_dp_mapping=true", "bridge.D2"),
        ("ddp.use_megatron_fsdp=true checkpoint.save=/x checkpoint.ckpt_format=torch_dist", "bridge.D1"),
        ("checkpoint.save=/x checkpoint.ckpt_format=fsdp_dtensor", "bridge.D1k"),
        ("mixed_precision=bf16_with_mxfp8_mixed mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false", "bridge.Q1"),
        ("peft.dim=8 model.context_parallel_size=2", "bridge.F1"),
        ("dataset.enable_offline_packing=true train.micro_batch_size=2", "bridge.F2"),
        ("model.tensor_model_parallel_size=3", "megatron.T1"),
    ],
)
def test_each_rule_refuses(more, rule) -> None:
    assert rule in rules(LLAMA + more, 96 if "=3" in more else 64)
    assert rule not in rules(LLAMA, 96 if "=3" in more else 64)


def test_two_stages_interleave_where_p2p_overlap_is_configured() -> None:
    stages = "model.pipeline_model_parallel_size=2 model.virtual_pipeline_model_parallel_size=2 "
    assert rules(LLAMA + stages + "comm_overlap.tp_comm_overlap=false") == set()


def test_what_cannot_be_read_or_known_is_said() -> None:
    assert rules("hello") == {"bridge.A0"}
    assert rules("--recipe llama3_70b_pretrain_32gpu_h100_bf17_config") == {"bridge.A0"}
    assert rules("model.tensor_model_parallel_size=4") == {"bridge.A1"}
    assert rules("model.tensor_model_parallel_size=4", model=load_model("llama-3.1-8b")) == set()
    assert rules(LLAMA + "model.tensor_model_parallel_size=x") == {"bridge.A0"}


def test_python_assignments_are_read() -> None:
    text = "cfg = llama3_70b_pretrain_32gpu_h100_bf16_config()\ncfg.model.tensor_model_parallel_size = 16\nf(x)\n"
    found = read_overrides(text)
    assert found.recipe == "llama3_70b_pretrain_32gpu_h100_bf16_config"
    assert found.given == {"model.tensor_model_parallel_size": 16}
    assert "megatron.W1" in rules(text, None)


def test_recipes_bring_model_gpus_and_degrees() -> None:
    recipe = load_recipes()["llama3_70b_pretrain_32gpu_h100_bf16_config"]
    assert (recipe["model"], recipe["num_gpus"]) == ("meta-llama/Meta-Llama-3-70B", 32)
    settings = recipe["settings"]
    degrees = [settings[f"model.{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context")]
    assert degrees == [4, 4, 2]
    assert settings["model.virtual_pipeline_model_parallel_size"] == 5
    assert rules("--recipe llama3_70b_pretrain_32gpu_h100_bf16_config", None) == set()
    assert preset_of("deepseek-ai/DeepSeek-V3") == "deepseek-v3"
    assert len(load_recipes()) > 700


ROOT = Path(__file__).parent.parent / "benchmarks/data"
#: Rows whose source prints an expert grid larger than the world (EP x PP above the GPUs).
MISPRINTED = {"nv-mb-0036"}


def settings_of_row(row) -> str:
    """A row's stated degrees, batch, recompute and layout as overrides."""
    flags = dict(item.split("=", 1) for item in row["other_flags"].split("; ") if "=" in item)
    keys = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
    degrees = {
        f"model.{name}{'' if name == 'context' else '_model'}_parallel_size": int(row[column] or 1)
        for name, column in keys.items()
    }
    sequence = row["sequence_parallel"] != "False" and int(row["tp"]) > 1
    recompute, _, detail = row["recompute"].partition(":")
    method, _, count = detail.partition(":")
    out = {
        **degrees,
        "model.virtual_pipeline_model_parallel_size": int(row["vp"] or 1) if int(row["vp"] or 1) > 1 else None,
        "model.expert_tensor_parallel_size": int(row["etp"]) if row["etp"] else None,
        "model.sequence_parallel": sequence,
        "model.seq_length": int(row["seq_len"]),
        "dataset.seq_length": int(row["seq_len"]),
        "train.micro_batch_size": int(row["micro_batch"]),
        "train.global_batch_size": int(row["global_batch"]),
        "model.moe_token_dispatcher_type": "alltoall",
        "ddp.use_megatron_fsdp": row["sharding"] in ("fsdp", "hsdp"),
        "comm_overlap.tp_comm_overlap": flags.get("tp_comm_overlap", "False").lower(),
    }
    layout = flags.get("pp_layout", "")
    if layout:
        out["model.pipeline_model_parallel_layout"] = layout
        out["model.mtp_num_layers"] = layout.count("m")
    if recompute == "full":
        out |= {"model.recompute_granularity": "full", "model.recompute_method": method}
        out["model.recompute_num_layers"] = count
    elif recompute == "selective" and detail not in ("", "none"):
        out["model.recompute_granularity"] = "selective"
        out["model.recompute_modules"] = "[" + detail.replace("+", ",") + "]"
    return "\n".join(f"{key}={'null' if value is None else value}" for key, value in out.items())


@cache
def published_models():
    with gzip.open(ROOT / "published_models.json.gz") as file:
        found = json.load(file)
    return found.get("models", found)


@cache
def model_named(name, overrides):
    return model_of(name, {**published_models()[name], **json.loads(overrides or "{}")}, [])


def test_published_runs_of_bridge_and_nemo_are_legal() -> None:
    with gzip.open(ROOT / "published_runs.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["framework"] in ("Megatron-Bridge", "NeMo")]
    counts: Counter[str] = Counter()
    refused = {}
    for row in rows:
        if not all(row[name] for name in ("tp", "pp", "micro_batch", "global_batch", "seq_len")):
            counts["degrees not stated"] += 1
            continue
        if row["model"].startswith("DeepSeekV4"):  # its compressed attention is only approximated by our layers
            counts["attention not modelled"] += 1
            continue
        model = model_named(row["model"], row["model_overrides"])
        stages = int(row["pp"]) * int(row["vp"] or 1)
        layout = re.search(r"pp_layout=(\S+)", row["other_flags"])
        if "pp_layout=custom" in row["other_flags"] or (model.num_layers % stages and not layout):
            counts["split of layers not stated"] += 1
            continue
        found = check_overrides(settings_of_row(row), int(row["num_gpus"]), model=model)
        counts["judged"] += 1
        if found:
            refused[row["id"]] = [str(item) for item in found]
    assert {name: text for name, text in refused.items() if name not in MISPRINTED} == {}
    assert counts["judged"] > 300, counts
