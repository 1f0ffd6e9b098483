"""The plan that arguments spell, by hand-worked layouts, ranks and pools; and plan -> files -> plan without loss."""

from __future__ import annotations

import pytest

from meshwright.megatron_export.megatron import (
    export_megatron,
    facts_from_arguments,
    model_from_arguments,
    plan_from_arguments,
    read_arguments,
    workload_from_arguments,
)
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import Hsdp, HsdpSharding
from meshwright.specs.target import RecomputeMode

from .megatron_plans import document

BASE = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --swiglu --seq-length 2048 --vocab-size 32000 "
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --bf16 --position-embedding-type rope "
)


def plan(flags, cluster="8xH100", world_size=None):
    args = read_arguments(BASE + flags)
    return plan_from_arguments(args, model_from_arguments(args), load_cluster(cluster), world_size)


def blocks(found):
    return [[list(chunk.blocks) for chunk in stage.chunks] for stage in found.stages]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--pipeline-model-parallel-size 2",
            [[["embed", "decoder:0-5"]], [["decoder:6-11", "head"]]],
        ),
        (  # chunk i sits on stage i mod 2: layers 0-2, 6-8 and 3-5, 9-11
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            [
                [["embed", "decoder:0-2"], ["decoder:6-8"]],
                [["decoder:3-5"], ["decoder:9-11", "head"]],
            ],
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 "
            "--decoder-last-pipeline-num-layers 5",
            [[["embed", "decoder:0"]], [["decoder:1-3"]], [["decoder:4-6"]], [["decoder:7-11", "head"]]],
        ),
        (  # 12 + 2 count as 14 over 2 stages
            "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            [[["embed", "decoder:0-5"]], [["decoder:6-11", "head"]]],
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*2|t*7|t*3|L'",
            [[["embed", "decoder:0-1"], ["decoder:9-11"]], [["decoder:2-8"], ["head"]]],
        ),
        (
            "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --pipeline-model-parallel-layout 'Et*8|t*4mL'",
            [[["embed", "decoder:0-7"]], [["decoder:8-11", "mtp:0", "head"]]],
        ),
    ],
)
def test_layers_of_stages(flags, expected):
    assert blocks(plan(flags)) == expected


def test_accounting_moves_a_layer_off_the_first_stage():
    found = plan("--num-layers 11 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split")
    assert blocks(found) == [
        [["embed", "decoder:0-1"]],
        [["decoder:2-4"]],
        [["decoder:5-7"]],
        [["decoder:8-10", "head"]],
    ]


def test_degrees_batch_and_defaults():
    found = plan("--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel")
    assert (found.tp, found.cp, found.dp, found.pp) == (2, 2, 2, 1)
    assert (found.ep, found.etp, found.edp) == (1, 2, 4)  # ETP follows TP; experts see no CP
    assert found.num_microbatches == 16  # 64 / (2 * DP 2)
    assert found.sharding == "none"
    assert found.options.sequence_parallel


def test_ffn_width_default_is_megatrons():
    # int(4 * 1024 * 2 / 3 / 64) * 64 = 2688
    assert facts_from_arguments(read_arguments(BASE), 8).ffn_hidden_sizes == (2688,)


def test_the_other_rank_order_strides_stages():
    found = plan("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping")
    assert [stage.groups[0].ranks for stage in found.stages] == [("0-1", "4-5"), ("2-3", "6-7")]


def test_ranks_follow_the_pools_of_the_cluster_in_order():
    found = plan("--pipeline-model-parallel-size 4", "1x8xH100-SXM+1x8xA100-80GB")
    assert [[(group.gpu, group.ranks) for group in stage.groups] for stage in found.stages] == [
        [("H100-SXM", ("0-3",))],
        [("H100-SXM", ("4-7",))],
        [("A100-SXM-80GB", ("8-11",))],
        [("A100-SXM-80GB", ("12-15",))],
    ]
    assert [(device.ranks, device.nodes) for device in found.devices] == [("0-7", "0"), ("8-15", "0")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-layers 13 --pipeline-model-parallel-size 2", "not divisible"),
        ("--pipeline-model-parallel-size 3", "not divisible"),
        ("--pipeline-model-parallel-layout 'Et*11L'", "11 decoder layers"),
        ("--hybrid-layer-pattern 'M*M-'", "are not read"),
    ],
)
def test_arguments_that_spell_no_plan_are_faults(flags, words):
    with pytest.raises(SpecError, match=words):
        plan(flags)


def test_a_batch_left_out_is_one_micro_batch_a_rank():
    args = read_arguments(BASE.replace("--global-batch-size 64", "") + "--tensor-model-parallel-size 2")
    assert workload_from_arguments(args, 8).global_batch_size == 2 * 4
    with pytest.raises(SpecError, match="global-batch-size"):
        workload_from_arguments(args)


def test_an_optimizer_that_is_not_priced_is_a_fault():
    with pytest.raises(SpecError, match="muon is not priced"):
        workload_from_arguments(read_arguments(BASE + "--optimizer muon"))


def test_a_model_without_sizes_names_the_flags():
    with pytest.raises(SpecError) as caught:
        model_from_arguments(read_arguments("--num-layers 4"))
    assert [fault.pointer for fault in caught.value.faults] == [
        "/--hidden-size",
        "/--num-attention-heads",
        "/--vocab-size",
    ]


HSDP = Hsdp(hsdp=HsdpSharding(replicate=2, shard=16))
ROUNDTRIPS = [
    ("llama-3.1-70b", "64xH100", {"tp": 4, "pp": 4, "vpp": 5}),
    ("llama-3.1-70b", "64xH100", {"tp": 4, "pp": 4, "layers": [17, 22, 22, 19]}),
    ("llama-3.1-70b", "64xH100", {"tp": 8, "pp": 2, "vpp": 3, "layers": [13, 14, 14, 14, 13, 12]}),
    ("llama-3.1-8b", "32xH100", {"sharding": "fsdp"}),
    ("llama-3.1-8b", "32xH100", {"sharding": HSDP}),
    ("llama-3.1-8b", "32xH100", {"sharding": "zero2", "cp": 2, "options": {"cp_comm_type": "a2a"}}),
    ("llama-3.1-8b", "8xA100-80GB", {"tp": 2, "workload": {"precision": "fp16", "params_dtype": "fp16"}}),
    ("llama-3.1-8b", "8xH100", {"tp": 2, "workload": {"precision": "fp8", "moments_dtype": "bf16"}}),
    ("llama-3.1-8b", "8xB200", {"tp": 2, "workload": {"precision": "mxfp8", "params_dtype": "fp8"}}),
    ("llama-3.1-8b", "8xB200", {"workload": {"precision": "nvfp4", "gradient_dtype": "bf16"}}),
    ("llama-3.1-8b", "8xH100", {"recompute": RecomputeMode(granularity="full", method="block", num_layers=7)}),
    ("llama-3.1-8b", "8xH100", {"options": {"dist_opt_instances": 2, "fused_cross_entropy": False}}),
    (
        "llama-3.1-8b",
        "8xH100",
        {"pp": 2, "options": {"optimizer_offload_fraction": 0.5, "optimizer_offload_overlap": True}},
    ),
    ("llama-3.1-8b", "8xH100", {"sharding": "fsdp", "options": {"activation_offload_layers": 5}}),
    ("llama-3.1-8b", "8xH100", {"pp": 2, "options": {"activation_offload_modules": ("core_attn", "attn_proj")}}),
    ("llama-3.1-8b", "16xH100", {"pp": 2, "vpp": 2, "sharding": "fsdp"}),
    ("llama-3.1-8b", "16xH100", {"pp": 2, "sharding": "zero2"}),
    ("llama-3.1-8b", "16xH100", {"cp": 2, "options": {"cp_comm_type": "allgather"}}),
    ("mixtral-8x7b", "32xH100", {"tp": 2, "pp": 2, "ep": 4, "etp": 2, "workload": {"moe_capacity_factor": 1.25}}),
    ("deepseek-v3", "256xH100", {"pp": 16, "ep": 16, "layers": [3, *[4] * 13, 3, 3], "workload": {"mtp": True}}),
    (
        "deepseek-v3",
        "256xH100",
        {
            "pp": 4,
            "vpp": 2,
            "ep": 16,
            "layers": [7, 8, 8, 8, 8, 8, 7, 7],
            "options": {"ep_comm_overlap": True, "delay_wgrad": True, "grad_bucket_params": 100_000_000},
        },
    ),
    ("deepseek-v3", "256xH100", {"ep": 16, "options": {"moe_shared_expert_overlap": True}}),
    ("llama-3.1-8b", "32xH100", {"cp": 8, "options": {"cp_comm_type": "a2a+p2p", "cp_a2a_size": 4}}),
    ("deepseek-v3.2", "256xH100", {"tp": 2, "pp": 4, "ep": 32}),
    ("qwen3-30b-a3b", "16xH100", {"tp": 2, "pp": 2, "ep": 4, "cp": 2, "layers": [25, 23]}),
    ("qwen3-next-80b-a3b", "32xH100", {"tp": 2, "ep": 16}),
    ("kimi-k2", "512xH200", {"pp": 16, "ep": 32, "layers": [3, *[4] * 14, 2]}),
    (
        "gpt-oss-120b",
        "64xH100",
        {
            "tp": 2,
            "pp": 4,
            "ep": 8,
            "recompute": RecomputeMode(granularity="selective", modules=("moe_act", "layernorm")),
        },
    ),
    ("gpt3-175b", "128xA100-80GB", {"tp": 8, "pp": 16, "vpp": 3, "seq_length": 2048}),
    (
        "llama-2-13b",
        "1x8xA100-80GB+1x8xV100-32GB",
        {"tp": 2, "pp": 4, "layers": [14, 14, 6, 6], "workload": {"precision": "fp16", "params_dtype": "fp16"}},
    ),
    ("nemotron-4-340b", "64xH100", {"tp": 8, "pp": 8}),
    ("qwen2.5-72b", "64xH100", {"tp": 8, "pp": 2}),
]


@pytest.mark.parametrize(("name", "cluster", "choices"), ROUNDTRIPS)
def test_a_plan_survives_its_export(name, cluster, choices):
    doc = document(load_model(name), load_cluster(cluster), **choices)
    args = read_arguments(export_megatron(doc)["train_args.sh"])
    model = model_from_arguments(args)
    expected = doc.inputs.model
    assert model.total_params == expected.total_params
    assert model.active_params == expected.active_params
    assert [kind.weights(model.hidden_size) for kind in model.layers] == [
        kind.weights(model.hidden_size) for kind in expected.layers
    ]
    assert workload_from_arguments(args) == doc.inputs.workload
    assert plan_from_arguments(args, model, doc.inputs.cluster) == doc.plan
