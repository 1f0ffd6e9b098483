"""What came to Megatron or left it between 0.16 and 0.19: rules and flags, as the releases' own code states them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.megatron_export.megatron import check_arguments, export, export_megatron
from meshwright.megatron_export.megatron.flags import inventory_of, load_flags
from meshwright.planner.rules import Facts, violations
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model

from .megatron_plans import document

BASE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 32 --bf16 --disable-bias-linear --position-embedding-type rope "
)
MOE = "--num-experts 8 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 "
OVERLAP = MOE + "--overlap-moe-expert-parallel-comm "


def rules(flags: str, version: str) -> list[str]:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return [item.rule.removeprefix("megatron.") for item in check_arguments(BASE + flags, 8, env, version=version)]


@pytest.mark.parametrize(
    ("flags", "by_version"),
    [
        # The expert width of a model that may be mixed: an error until 0.17, then a warning.
        ("--moe-ffn-hidden-size 704 --moe-layer-freq 2", {"0.17": ["E1m"], "0.18": [], "0.19": []}),
        ("--moe-ffn-hidden-size 704", {"0.17": ["E1m"], "0.18": ["E1m"], "0.19": ["E1m"]}),
        # Recompute of moe beside the overlap of its exchange: refused since 0.17.
        (
            OVERLAP + "--recompute-granularity selective --recompute-modules moe",
            {"0.16": [], "0.17": ["E11"], "0.19": ["E11"]},
        ),
        # The overlap with MTP on one stage: since 0.18.
        (OVERLAP + "--mtp-num-layers 1", {"0.16": ["E11m"], "0.17": ["E11m"], "0.18": [], "0.19": []}),
        # Graphs of an expert grid: until 0.17 only with padded experts.
        (MOE + "--cuda-graph-impl local", {"0.17": ["R7e"], "0.18": [], "0.19": []}),
        (MOE + "--cuda-graph-impl local --moe-pad-experts-for-cuda-graph-inference", {"0.17": [], "0.19": []}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"0.17": [], "0.18": ["D12"], "0.19": ["D12"]}),
        (
            "--recompute-granularity selective --recompute-modules gdn_norm_out",
            {"0.17": ["R2", "R2g"], "0.18": ["R2", "R2g"], "0.19": ["R2g"]},
        ),
        # The whole iteration as a graph: a scope until 0.17, an implementation since 0.18.
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad",
            {"0.17": []},
        ),
        ("--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", {"0.17": ["A0"], "0.18": []}),
        # Flags that a release does not have.
        ("--eval-global-batch-size 32", {"0.17": ["A0"], "0.18": []}),
        ("--tensor-parallel-num-weight-shards 1", {"0.18": ["A0"], "0.19": []}),
        ("--moe-router-score-function sqrtsoftplus", {"0.17": ["A0"], "0.18": []}),
        ("--moe-flex-dispatcher-backend ncclep", {"0.18": ["A0"], "0.19": ["E4n"]}),
        ("--moe-use-legacy-grouped-gemm", {"0.16": [], "0.17": ["A0"], "0.19": ["A0"]}),
        ("--fp4-param-gather", {"0.16": ["A0"], "0.17": ["D10f"]}),
        ("--moe-token-dispatcher-type flex", {"0.17": [], "0.19": []}),  # a dense model has no dispatcher
        (MOE.replace("4", "1") + "--moe-token-dispatcher-type flex", {"0.17": ["E4"], "0.19": ["E4"]}),
        (
            MOE.replace("4", "1") + "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            {"0.16": ["E4"], "0.17": [], "0.19": []},
        ),
        ("--optimizer muon --overlap-grad-reduce", {"0.17": ["D16"], "0.18": []}),
        (
            "--optimizer muon --ckpt-format fsdp_dtensor --use-megatron-fsdp",
            {"0.17": ["D4c", "D16"], "0.18": ["D4c", "D4", "D16e"]},
        ),
    ],
)
def test_a_verdict_is_that_of_the_version(flags: str, by_version: dict[str, list[str]]) -> None:
    assert {version: rules(flags, version) for version in by_version} == by_version


@pytest.mark.parametrize(
    ("given", "broken"),
    [
        ({"kv_heads": (2,), "tp": 8, "heads": (16,)}, {(0, 15): ["T2o"], (0, 16): []}),
        ({"gated_delta_net": True, "cp": 2}, {(0, 17): ["C8c"], (0, 18): []}),
        (
            {"sparse_attention": True, "cp": 2, "cp_comm_type": ("allgather",)},
            {(0, 17): ["C8n"], (0, 18): ["C8n"], (0, 19): []},
        ),
        ({"sparse_attention": True, "cp": 2}, {(0, 18): ["C8n"], (0, 19): ["C8s"]}),
    ],
)
def test_attention_rules_by_version(given: dict[str, Any], broken: dict[tuple[int, ...], list[str]]) -> None:
    tp = given.get("tp", 1)
    facts = Facts(
        world_size=tp * given.get("cp", 1),
        etp=tp,
        edp=given.get("cp", 1),
        seq_length=64,
        hidden_size=1024,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        **given,
    )
    found = {
        version: [
            item.rule.removeprefix("megatron.") for item in violations(dataclasses.replace(facts, version=version))
        ]
        for version in broken
    }
    assert found == broken


def test_a_version_without_an_inventory_takes_that_of_the_release_before() -> None:
    assert [inventory_of(version) for version in ("0.20", "0.19", "0.18.2", "0.16.1", "0.15", "1.0")] == [
        "0.19",
        "0.19",
        "0.18",
        "0.16",
        "0.16",
        "0.19",
    ]
    assert len(load_flags("0.16")) < len(load_flags("0.17")) < len(load_flags("0.18")) < len(load_flags("0.19"))


def test_an_unknown_flag_names_the_version() -> None:
    (found,) = check_arguments(BASE + "--cuda-graph-modules attn", 8, version="0.17")
    assert found.rule == "megatron.A0"
    assert found.message.startswith("--cuda-graph-modules is not an argument of Megatron 0.17")


def test_an_export_writes_the_flags_of_its_version() -> None:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xH100")
    graphs = {"cuda_graph": True, "cuda_graph_scope": ("attn",)}
    for version, name in (("0.17", "--cuda-graph-scope attn"), ("0.18", "--cuda-graph-modules attn")):
        doc = document(model, cluster, tp=2, options=graphs, target=f"megatron@{version}")
        files = export_megatron(doc)
        assert name in files["train_args.sh"]
        assert f"for megatron {version}" in files["train_args.sh"]
        assert f"core {version}" in files["README.md"]


def test_an_export_refuses_by_name_what_the_version_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_RUN", [("--mlp-chunks-for-training", "2")])  # new in 0.18
    model, cluster = load_model("llama-3.1-8b"), load_cluster("8xH100")
    assert (
        "--mlp-chunks-for-training"
        in export_megatron(document(model, cluster, target="megatron@0.18"))["train_args.sh"]
    )
    with pytest.raises(SpecError, match="--mlp-chunks-for-training: is not an argument of Megatron"):
        export_megatron(document(model, cluster, target="megatron@0.17"))
