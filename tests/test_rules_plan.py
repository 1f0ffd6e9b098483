"""Rules on whole plans: each way to break one is found, with its numbers, and what is offered instead is legal."""

from __future__ import annotations

import pytest

from meshwright.megatron_export.megatron import check_arguments
from meshwright.planner.rules import MEGATRON, facts_of_plan, violations
from meshwright.specs.catalog import gpu
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import Chunk
from meshwright.specs.target import RecomputeMode

from .megatron_plans import document


def broken(doc, plan=None, **model_changes):
    inputs = doc.inputs
    model = inputs.model.model_copy(update=model_changes)
    gpus = [inputs.cluster.gpu_of(pool) for pool in inputs.cluster.pools]
    return violations(facts_of_plan(plan or doc.plan, model, inputs.workload, inputs.target, gpus))


def rules(found):
    return [item.rule.removeprefix("megatron.") for item in found]


@pytest.fixture(scope="module")
def llama():
    return load_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def mixtral():
    return load_model("mixtral-8x7b")


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("16xH100")


def test_ids_are_unique_and_every_rule_names_its_source():
    assert len({rule.id for rule in MEGATRON}) == len(MEGATRON)
    assert all(rule.source and rule.message for rule in MEGATRON)
    known = {rule.id for rule in MEGATRON}
    assert all(set(rule.after) <= known for rule in MEGATRON)


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 4, "pp": 2},
        {"tp": 2, "pp": 4, "vpp": 2, "micro_batches": 8},
        {"pp": 4, "layers": [5, 9, 10, 8]},
        {"cp": 2, "tp": 2},
        {"sharding": "fsdp"},
        {"tp": 8, "recompute": RecomputeMode(granularity="full", method="block", num_layers=3)},
        {"tp": 2, "pp": 2, "layers": [32, 0]},
    ],
)
def test_good_dense_plans(llama, cluster, plan):
    assert broken(document(llama, cluster, **plan)) == []


def test_overlap_of_the_expert_exchange(mixtral, cluster):
    on = {"ep_comm_overlap": True, "delay_wgrad": True}
    assert broken(document(mixtral, cluster, ep=8, options=on)) == []
    assert broken(document(mixtral, cluster, pp=2, vpp=2, ep=8, options=on)) == []
    assert rules(broken(document(mixtral, cluster, pp=2, ep=8, options=on))) == ["E11v"]
    full = RecomputeMode(granularity="full", method="uniform", num_layers=1)
    assert "E11" in rules(broken(document(mixtral, cluster, ep=8, recompute=full, options=on)))
    both = on | {"moe_shared_expert_overlap": True}
    assert "E11" in rules(broken(document(mixtral, cluster, ep=8, options=both)))


def test_good_mixture_plans(mixtral, cluster):
    assert broken(document(mixtral, cluster, tp=2, pp=2, ep=4)) == []
    assert broken(document(mixtral, cluster, tp=2, ep=8, etp=2)) == []


@pytest.mark.parametrize(
    ("plan", "rule", "words"),
    [
        ({"pp": 2, "vpp": 2, "micro_batches": 3}, "P9r", "3 micro-batches leave a remainder over groups of 2"),
        ({"pp": 4, "vpp": 2, "micro_batches": 2}, "P9", "PP 4 <= micro-batch group 4 <= micro-batches 2"),
        ({"pp": 2, "vpp": 2, "options": {"overlap_p2p": False}}, "P8", "PP > 2 without p2p overlap; PP is 2"),
        ({"options": {"fp8_dispatch": True}}, "E12f", "no switch for dispatching tokens in FP8"),
        ({"options": {"ep_comm_overlap": True}}, "E11", "overlap of expert communication needs EP > 1"),
        ({"options": {"delay_wgrad": True}}, "E12", "--overlap-moe-expert-parallel-comm"),
        ({"cp": 4, "options": {"cp_comm_type": "a2a+p2p"}}, "C5", "multiply to CP 4"),
        ({"cp": 4, "options": {"cp_comm_type": "a2a+p2p", "cp_a2a_size": 3}}, "C5", "3, 1"),
        ({"pp": 2, "layers": [16, 15]}, "P13", "31 decoder layers t, the model has 32"),
        ({"cp": 2, "seq_length": 4098}, "C1", "4098 is not divisible by 2 x CP 2"),
        ({"tp": 4, "seq_length": 4098}, "T6", "4098"),
        ({"sharding": "none", "options": {"overlap_param_gather": True}}, "D1", "distributed optimizer"),
        ({"options": {"overlap_grad_reduce": False}}, "D1g", "--overlap-grad-reduce"),
        ({"recompute": RecomputeMode(granularity="selective", modules=("mla_up_proj",))}, "R2m", "latent attention"),
        ({"recompute": RecomputeMode(granularity="selective", modules=("moe_act",))}, "R2a", "grouped GEMM"),
        ({"options": {"dist_opt_instances": 3}}, "W7", "3 distributed-optimizer instances"),
        ({"ep": 2}, "E1", "EP 2 needs a mixture-of-experts model"),
        ({"workload": {"moments_dtype": "bf16"}, "sharding": "none"}, "D8a", "distributed optimizer"),
        ({"workload": {"task": "lora", "lora": {"rank": 8}}}, "M1", "LoRA"),
        ({"workload": {"main_params_dtype": "bf16"}}, "M1", "main parameters in bf16"),
    ],
)
def test_each_break_is_named_with_its_numbers(llama, cluster, plan, rule, words):
    found = broken(document(llama, cluster, **plan))
    assert rule in rules(found)
    assert any(words in item.message for item in found)


def test_heads_and_widths_hold_for_every_layer_kind(cluster):
    hybrid = load_model("qwen3-next-80b-a3b")  # 16 key and 32 value heads of linear attention, 2 key/value heads
    assert broken(document(hybrid, cluster, tp=2, ep=8)) == []
    found = broken(document(hybrid, load_cluster("32xH100"), tp=8, cp=4))
    assert "C8" in rules(found)
    assert "linear-attention heads 16, 32 must be divisible by TP 8 x CP 4" in str(found[0])
    nemotron = load_model("nemotron-3-nano-30b-a3b")  # 8 Mamba groups
    assert "T3s" in rules(broken(document(nemotron, load_cluster("16xH100"), tp=16)))


def test_more_ranks_than_key_value_heads_need_a_target_that_replicates_them(cluster):
    doc = document(load_model("qwen3-30b-a3b"), cluster, tp=8)  # 4 key/value heads
    assert broken(doc) == []
    target = doc.inputs.target.model_copy(update={"kv_head_replication": False})
    found = violations(facts_of_plan(doc.plan, doc.inputs.model, doc.inputs.workload, target))
    assert rules(found) == ["T2"]
    assert found[0].alternatives == ("tp=1", "tp=2", "tp=4")


def test_stages_that_differ_or_share_unevenly_are_refused(llama, cluster):
    doc = document(llama, cluster, pp=2)
    first, second = doc.plan.stages
    full = second.model_copy(update={"recompute": RecomputeMode(granularity="full")})
    assert rules(broken(doc, doc.plan.model_copy(update={"stages": (first, full)}))) == ["W9"]
    fewer = second.model_copy(update={"groups": (second.groups[0].model_copy(update={"micro_batches": 3}),)})
    assert rules(broken(doc, doc.plan.model_copy(update={"stages": (first, fewer)}))) == ["W10"]
    swapped = [a.model_copy(update={"groups": b.groups}) for a, b in ((first, second), (second, first))]
    assert rules(broken(doc, doc.plan.model_copy(update={"stages": tuple(swapped)}))) == ["W10"]


@pytest.mark.parametrize(
    "blocks",
    [
        [("embed", "decoder:0-15"), ("decoder:15-31", "head")],
        [("embed", "decoder:0-15"), ("decoder:17-31", "head")],
        [("embed", "decoder:16-31"), ("decoder:0-15", "head")],
        [("decoder:0-15",), ("decoder:16-31", "head")],
        [("embed", "decoder:0-15"), ("decoder:16-31",)],
    ],
)
def test_layers_that_are_lost_repeated_or_out_of_order_are_refused(llama, cluster, blocks):
    doc = document(llama, cluster, pp=2)
    stages = tuple(
        stage.model_copy(update={"chunks": (Chunk(order=index, blocks=blocks[index]),)})
        for index, stage in enumerate(doc.plan.stages)
    )
    assert broken(doc, doc.plan.model_copy(update={"stages": stages}))


def test_a_precision_that_a_gpu_lacks_is_refused_naming_one_that_all_have(llama):
    mixed = load_cluster("1x8xA100-80GB+1x8xV100-32GB")
    found = broken(document(llama, mixed, pp=2))
    assert [item.rule for item in found] == ["hardware.precision"]
    assert "V100" in found[0].message
    assert "precision=fp16" in found[0].alternatives
    assert not gpu("V100-32GB").gpu.supports("bf16")


BASE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 32 --bf16 --disable-bias-linear "
)


@pytest.mark.parametrize(
    ("flags", "rule", "fix"),
    [
        ("--tensor-model-parallel-size 3", "T1", {"tp": "--tensor-model-parallel-size"}),
        ("--pipeline-model-parallel-size 3", "P1", {"pp": "--pipeline-model-parallel-size"}),
        ("--global-batch-size 30", "B1", {"global_batch_size": "--global-batch-size"}),
        ("--context-parallel-size 2 --seq-length 4095", "C1", {"seq_length": "--seq-length"}),
        ("--num-experts 8 --expert-model-parallel-size 3", "E1", {"ep": "--expert-model-parallel-size"}),
        (
            "--num-distributed-optimizer-instances 5",
            "W7",
            {"num_distributed_optimizer_instances": "--num-distributed-optimizer-instances"},
        ),
    ],
)
def test_what_is_offered_instead_breaks_the_rule_no_more(flags, rule, fix):
    found = {item.rule: item for item in check_arguments(BASE + flags, 24 if "3" in flags else 16)}
    offered = found[f"megatron.{rule}"].alternatives
    assert offered
    for text in offered:
        name, _, value = text.partition("=")
        if name in fix:
            again = check_arguments(f"{BASE}{flags} {fix[name]} {value}", 24 if "3" in flags else 16)
            assert f"megatron.{rule}" not in {item.rule for item in again}
