"""Bytes of model states and activations: formulas by hand, Megatron's own figure, measured peaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost_models import memory
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.specs.attention import MLAAttention
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.target import RecomputeMode

from .cost_cases import (
    FULL,
    H100,
    NONE,
    cluster,
    dense,
    keys,
    llama_70b,
    mla_moe,
    physics,
    plan,
    pool,
    target,
    workload,
)


def kind_index(costs: CostModel, name: str) -> int:
    return costs.blocks.kinds.index(name)


def test_first_stage_of_llama_70b_equals_megatrons_estimator() -> None:
    """Megatron's theoretical_memory_usage for TP4 PP4 on 64 GPUs: 38,981.8 MiB of weights and optimizer on the fullest
    rank, 9 bytes for each of 4.5417e9 parameters (6 + 12 / 4)."""
    model = llama_70b()
    result = estimate(model, cluster(8), workload(), target(), plan(model, tp=4, pp=4, dp=4, m=16))
    parts = result.stages[0].breakdown_bytes
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states / 2**20 == pytest.approx(38981.8, rel=2e-4)


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("none", (2.0, 4.0, 12.0)),
        ("zero1", (2.0, 4.0, 12.0 / 8)),
        ("zero2", (2.0, 4.0 / 8, 12.0 / 8)),
        ("fsdp", (2.0 / 8, 4.0 / 8, 12.0 / 8)),
    ],
)
def test_bytes_per_parameter_by_sharding(sharding: str, expected: tuple[float, float, float]) -> None:
    parts = memory.static_bytes(np.array([1e9]), np.array([1e9]), np.array([8.0]), sharding, workload())
    assert [float(part[0]) / 1e9 for part in parts] == pytest.approx(expected)


def test_dtypes_and_optimizer_change_the_bytes() -> None:
    def optimizer(**changes: object) -> float:
        return memory.optimizer_bytes_per_param(workload(**changes))

    assert optimizer() == 12
    assert optimizer(moments_dtype="bf16") == 8
    assert optimizer(params_dtype="fp32", precision="fp32") == 8  # no second copy of fp32 parameters
    assert optimizer(optimizer="sgd") == 8


def test_experts_shard_over_their_own_replicas() -> None:
    """tp 1, ep 4 of 16 ranks: dense state over 16, expert state over 4; a rank holds a quarter of the experts."""
    model = mla_moe(2, 2048, 16, 8, 2, 1024, 0, 32000)
    costs = physics(model, cluster(2), workload(), target())
    cells = costs.cells(keys((1, 1, 4, 1, 16, 1, 0, 1)))
    layer = kind_index(costs, "mla+moe")
    expert = 8 * 3 * 2048 * 1024
    assert cells.expert_params[0, layer] == expert / 4
    per_layer = sum(w.numel for w in model.kinds[0].weights(2048))
    assert cells.dense_params[0, layer] == per_layer - expert
    optimizer = 12 * ((per_layer - expert) / 16 + expert / 4 / 4)
    assert cells.static_bytes_by[0, layer] == pytest.approx(
        [2 * (per_layer - 0.75 * expert), 4 * (per_layer - 0.75 * expert), optimizer]
    )


def test_vocabulary_is_padded_for_tensor_parallelism() -> None:
    model = dense(2, 1024, 8, 8, 4096, 50257)
    costs = physics(model, cluster(1), workload(), target())
    cells = costs.cells(keys((8, 1, 1, 1, 8, 1, 0, 0)))
    assert cells.dense_params[0, kind_index(costs, "embed")] == 51200 * 1024 / 8  # Megatron's own padding of GPT-2


def test_tied_embedding_is_held_twice_only_by_two_stages() -> None:
    model = dense(2, 1024, 8, 8, 4096, 32000).model_copy(update={"tied_embeddings": True})
    costs = physics(model, cluster(1), workload(), target())
    stages = keys((1, 1, 1, 1, 8, 1, 0, 0), (1, 1, 1, 1, 4, 1, 0, 0))
    cells = costs.cells(replace(stages, one_stage=np.array([1, 0])))
    whole, half = cells.dense_params[:, costs.blocks.kind_of].sum(axis=1)
    assert whole == model.total_params
    assert half == model.total_params + 32000 * 1024


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    """8 ranks, 2 KV heads: every rank holds one whole head."""
    model = dense(1, 1024, 16, 2, 4096, 32000)
    costs = physics(model, cluster(1), workload(), target())
    cells = costs.cells(keys((8, 1, 1, 1, 8, 1, 0, 0)))
    head = 64
    expected = 1024 * (2 * head) * 2 + 2 * 1024 * head + 3 * 1024 * 4096 / 8 + 2 * 1024
    assert cells.dense_params[0, kind_index(costs, "gqa+dense")] == expected


# -- activations -------------------------------------------------------------------------------------------------------


def layer_bytes(model: ModelSpec, row: tuple[int, ...], *modes: RecomputeMode, **changes: object) -> float:
    """Activation bytes of the first decoder layer kind at one key."""
    costs = physics(model, cluster(4), workload(**changes), target(*modes))
    cells = costs.cells(keys(row))  # type: ignore[arg-type]
    return float(cells.activation_bytes[0, kind_index(costs, costs.blocks.kinds[1])])


@pytest.mark.parametrize(("tp", "cp", "mbs"), [(1, 1, 1), (2, 1, 1), (8, 1, 2), (4, 2, 1)])
def test_dense_gqa_swiglu_activations(tp: int, cp: int, mbs: int) -> None:
    """(8h + 4ad + 4gd + 6f + 4a) a token, over tp * cp."""
    h, a, g, d, f = 4096, 32, 8, 128, 14336
    model = dense(2, h, a, g, f, 32000)
    expected = (8 * h + 4 * a * d + 4 * g * d + 6 * f + 4 * a) * mbs * 4096 / (tp * cp)
    assert layer_bytes(model, (tp, cp, 1, 1, 8, mbs, 0, 0)) == pytest.approx(expected)


def test_gelu_keeps_four_f() -> None:
    h, a, f = 2048, 16, 8192
    model = dense(2, h, a, a, f, 32000, gated=False)
    expected = (8 * h + 8 * h + 4 * f + 4 * a) * 4096
    assert layer_bytes(model, (1, 1, 1, 1, 8, 1, 0, 0)) == pytest.approx(expected)


def test_mla_moe_activations() -> None:
    """MLA 4h + 4rq + 2(rkv+dr) + 2rkv + 4a(dn+dr) + 4a dv + 4a; MoE 4h + k(4h + 6fe) + 6fs + 2h + 4E; one rank."""
    h, a, e, k, fe, fs = 7168, 128, 256, 8, 2048, 2048
    model = mla_moe(2, h, a, e, k, fe, fs, 129280)
    mla = 4 * h + 4 * 1536 + 2 * (512 + 64) + 2 * 512 + 4 * a * 192 + 4 * a * 128 + 4 * a
    moe = 4 * h + k * (4 * h + 6 * fe) + 6 * fs + 2 * h + 4 * e
    assert layer_bytes(model, (1, 1, 8, 1, 8, 1, 0, 0)) == pytest.approx((mla + moe) * 4096)


def test_load_of_the_fullest_rank_multiplies_routed_activations() -> None:
    model = mla_moe(2, 2048, 16, 8, 2, 1024, 0, 32000)
    row = (1, 1, 8, 1, 8, 1, 0, 0)
    routed = 2 * (4 * 2048 + 6 * 1024) * 4096
    even = layer_bytes(model, row)
    assert layer_bytes(model, row, moe_load_factor=1.5) - even == pytest.approx(0.5 * routed)
    assert layer_bytes(model, row, moe_load_factor=1.5, moe_capacity_factor=1.0) == pytest.approx(even)


def test_what_each_recomputation_saves() -> None:
    h, a, g, f = 4096, 32, 8, 14336
    model, row = dense(2, h, a, g, f, 32000), (1, 1, 1, 1, 8, 1, 1, 0)
    whole = layer_bytes(model, row, NONE, NONE)

    def saved(*modules: str) -> float:
        mode = RecomputeMode(granularity="selective", modules=modules)  # type: ignore[arg-type]
        return (whole - layer_bytes(model, row, NONE, mode)) / 4096

    assert saved("layernorm") == pytest.approx(4 * h)
    assert saved("mlp") == pytest.approx(6 * f)
    assert saved("core_attn") == pytest.approx(4 * a)
    assert layer_bytes(model, row, NONE, FULL) == pytest.approx(2 * h * 4096)


def test_what_moe_recomputations_save() -> None:
    h, a, e, k, fe, fs = 2048, 16, 8, 2, 1024, 512
    model, row = mla_moe(2, h, a, e, k, fe, fs, 32000), (1, 1, 8, 1, 8, 1, 1, 0)
    whole = layer_bytes(model, row, NONE, NONE)

    def saved(*modules: str) -> float:
        mode = RecomputeMode(granularity="selective", modules=modules)  # type: ignore[arg-type]
        return (whole - layer_bytes(model, row, NONE, mode)) / 4096

    assert saved("moe_act") == pytest.approx(2 * k * fe)
    assert saved("mla_up_proj") == pytest.approx(4 * a * 192 + 2 * a * 128)
    assert saved("moe") == pytest.approx(k * (4 * h + 6 * fe) + 6 * fs + 2 * h + 4 * e)


def deepseek_of_four_layers(hidden: int, dense_ffn: int, experts: int, top_k: int, ffn: int, shared: int, vocab: int):
    """The shortened DeepSeek models of SimuMax's runs: one dense and three MoE layers."""
    attention = MLAAttention(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    moe = MoEFFN(num_experts=experts, top_k=top_k, expert_intermediate_size=ffn, shared_intermediate_size=shared)
    kinds = (
        LayerKind(attention=attention, feed_forward=DenseFFN(intermediate_size=dense_ffn)),
        LayerKind(attention=attention, feed_forward=moe),
    )
    return ModelSpec(
        name="l4", family="deepseek", hidden_size=hidden, vocab_size=vocab, kinds=kinds, pattern=(0, 1, 1, 1)
    )


@pytest.mark.parametrize(
    ("name", "pp", "ep", "measured"),
    [("v2", 1, 8, 48.99e9), ("v2", 2, 4, 47.996e9), ("v3", 1, 8, 111.991e9), ("v3", 2, 4, 122.41e9)],
)
def test_peaks_measured_on_b200(name: str, pp: int, ep: int, measured: float) -> None:
    """max_memory_allocated over ranks of SimuMax's runs on 8 B200 (docs/b200, Apache-2.0): within 1.5%."""
    model = (
        deepseek_of_four_layers(5120, 12288, 160, 6, 1536, 3072, 102400)
        if name == "v2"
        else deepseek_of_four_layers(7168, 18432, 256, 8, 2048, 2048, 129280)
    )
    gpu = H100.model_copy(update={"compute_capability": 10.0})
    spec = ClusterSpec(name="b200", gpus={gpu.name: gpu}, pools=(pool(1, gpu),))
    laid = plan(model, pp=pp, ep=ep, dp=8 // pp, m=4)
    result = estimate(model, spec, workload(batch=32 // pp), target(), laid)
    assert max(s.allocated_bytes for s in result.stages) == pytest.approx(measured, rel=0.015)


# -- what fits ---------------------------------------------------------------------------------------------------------


def test_capacity_and_reserved_are_inverse() -> None:
    fixed, limit = 2e9, 80e9
    capacity = float(memory.block_capacity_bytes(limit, fixed))
    assert capacity == pytest.approx(0.96 * 78e9)
    assert float(memory.reserved_bytes(capacity, fixed)) == pytest.approx(limit)
    assert bool(memory.fits(capacity, fixed, limit))
    assert not bool(memory.fits(capacity + 2.0, fixed, limit))
    assert not bool(memory.fits(capacity, fixed, limit, headroom=0.05))


def test_lora_trains_adapters_alone() -> None:
    """Rank 16 on the output projection of one layer: 16 (a d + h) parameters with gradients and moments."""
    model = dense(2, 1024, 8, 8, 4096, 32000)
    work = workload(task="lora", lora={"rank": 16, "targets": ("proj",)})
    costs = physics(model, cluster(1), work, target())
    cells = costs.cells(keys((1, 1, 1, 1, 8, 1, 0, 0)))
    layer = kind_index(costs, "mha+dense")
    adapters = 16 * (1024 + 1024)
    assert cells.dense_params[0, layer] == adapters
    base = sum(w.numel for w in model.kinds[0].weights(1024))
    assert cells.static_bytes_by[0, layer] == pytest.approx([2 * (base + adapters), 4 * adapters, 12 * adapters])
    assert cells.dense_params[0, kind_index(costs, "head")] == 0
    full = physics(model, cluster(1), workload(), target()).cells(cells.keys)
    assert cells.backward_s[0, 0, layer] < 0.8 * full.backward_s[0, 0, layer]  # no weight gradients of the base
