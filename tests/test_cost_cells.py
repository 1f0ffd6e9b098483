"""Cells, tail and boundaries: monotone where physics says so, equal to hand sums where they are plain."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest

from meshwright.cost_models.blocks import block_table
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import CONTENTION, collective_s
from meshwright.cost_models.flops import model_flops
from meshwright.cost_models.multipliers import Multipliers
from meshwright.cost_models.overlap import Overlap
from meshwright.cost_models.pieces import host_exposed_s
from meshwright.cost_models.protocol import TERMS, CellCosts
from meshwright.specs.attention import LinearAttention, MambaMixer, SoftmaxAttention
from meshwright.specs.cluster import ClusterSpec, NetworkLevel
from meshwright.specs.feed_forward import DenseFFN
from meshwright.specs.model import MTP, LayerKind, ModelSpec, VisionTower
from meshwright.specs.target import RecomputeMode

from .cost_cases import (
    FULL,
    H100,
    NONE,
    V100,
    cluster,
    dense,
    keys,
    llama_70b,
    mla_moe,
    physics,
    pool,
    target,
    workload,
)


def price(model: ModelSpec, *rows: tuple[int, ...], nodes: int = 4, **changes: object) -> tuple[CostModel, CellCosts]:
    costs = physics(model, cluster(nodes), workload(**changes), target())
    return costs, costs.cells(keys(*rows))  # type: ignore[arg-type]


def term(cells: CellCosts, name: str, row: int, block: int, backward: bool = False) -> float:
    table = cells.backward_terms_s if backward else cells.forward_terms_s
    return float(table[row, 0, block, TERMS.index(name)])


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_stand_in_pipeline_order() -> None:
    attention = SoftmaxAttention(num_heads=8, num_kv_heads=8, head_dim=64)
    sliding = attention.model_copy(update={"window": 1024})
    ffn = DenseFFN(intermediate_size=1024)
    wide, narrow = LayerKind(attention=attention, feed_forward=ffn), LayerKind(attention=sliding, feed_forward=ffn)
    tower = VisionTower(num_layers=2, hidden_size=64, intermediate_size=256, num_heads=4, parameters=1000)
    model = ModelSpec(
        name="m", family="f", hidden_size=512, vocab_size=1000, kinds=(wide, narrow), pattern=(1, 0, 1), vision=tower,
        mtp=MTP(num_layers=1, layer=wide),
    )  # fmt: skip
    table = block_table(model, workload(mtp=True), target())
    assert table.instances == (
        ("vision", 0), ("embed", 0), ("decoder", 0), ("decoder", 1), ("decoder", 2), ("mtp", 0), ("head", 0),
    )  # fmt: skip
    assert table.kind_of[2] == table.kind_of[4] != table.kind_of[3]
    assert len(set(table.kinds)) == len(table.kinds) == 6
    assert ("mtp", 0) not in block_table(model, workload(), target()).instances


# -- cells -------------------------------------------------------------------------------------------------------------


def test_arrays_have_the_protocols_shapes() -> None:
    costs, cells = price(llama_70b(), (4, 1, 1, 1, 16, 1, 0, 1), (8, 1, 1, 1, 16, 2, 1, 0))
    assert cells.forward_terms_s.shape == cells.backward_terms_s.shape == (2, 1, 3, len(TERMS))
    assert cells.static_bytes_by.shape == (2, 3, 3)
    assert cells.activation_bytes.shape == cells.transient_bytes.shape == (2, 3)
    assert cells.fixed_bytes.shape == (2, 1)
    assert (cells.forward_terms_s >= 0).all()
    assert np.isfinite(cells.backward_terms_s).all()
    assert cells.limit_bytes.tolist() == [H100.usable_memory_bytes]
    assert costs.blocks.kinds[1] == "gqa+dense"


def test_rows_do_not_influence_each_other() -> None:
    rows = [(4, 1, 1, 1, 16, 1, 0, 1), (8, 2, 1, 1, 16, 2, 1, 0), (1, 1, 1, 1, 8, 4, 0, 2)]
    _, together = price(llama_70b(), *rows)
    for i, row in enumerate(rows):
        _, alone = price(llama_70b(), row)
        np.testing.assert_allclose(together.forward_terms_s[i], alone.forward_terms_s[0])
        np.testing.assert_allclose(together.backward_terms_s[i], alone.backward_terms_s[0])
        np.testing.assert_allclose(together.activation_bytes[i], alone.activation_bytes[0])


def test_layer_gemm_time_is_near_its_flops() -> None:
    """Large products reach 0.6 to 0.8 of the peak: 2 FLOP a weight and token forward, 4 backward."""
    model = llama_70b()
    _, cells = price(model, (1, 1, 1, 1, 8, 1, 0, 0))
    weights = sum(w.numel for w in model.kinds[0].weights(8192) if w.matmul)
    ideal = 2 * weights * 4096 / 989e12
    assert 0.55 < ideal / term(cells, "gemm", 0, 1) < 0.85
    assert 0.55 < 2 * ideal / term(cells, "gemm", 0, 1, backward=True) < 0.85


def test_tensor_parallelism_adds_two_gathers_and_two_scatters_each_way() -> None:
    levels = pool(4).levels
    _, cells = price(llama_70b(), (8, 1, 1, 1, 8, 1, 0, 0))
    volume = 2 * 8192 * 4096
    pair = float(
        collective_s("all_gather", levels, volume, 8, 1) + collective_s("reduce_scatter", levels, volume, 8, 1)
    )
    assert term(cells, "tp_comm", 0, 1) == pytest.approx(2 * pair)
    # Backward gathers the input a third time under the product of the input gradient, at the cost of contention.
    gather = float(collective_s("all_gather", levels, volume, 8, 1))
    assert term(cells, "tp_comm", 0, 1, backward=True) == pytest.approx(2 * pair + 2 * CONTENTION * gather)
    _, alone = price(llama_70b(), (1, 1, 1, 1, 8, 1, 0, 0))
    assert term(alone, "tp_comm", 0, 1) == 0.0


def test_overlap_of_tensor_parallelism_leaves_a_part() -> None:
    costs = physics(llama_70b(), cluster(4), workload(), target(), overlap=Overlap(tensor=True))
    row = keys((8, 1, 1, 1, 8, 1, 0, 0))
    hidden = term(costs.cells(row), "tp_comm", 0, 1)
    _, open_ = price(llama_70b(), (8, 1, 1, 1, 8, 1, 0, 0))
    assert 0 < hidden < term(open_, "tp_comm", 0, 1)


def test_expert_exchange_crosses_nodes_only_when_it_must() -> None:
    model = mla_moe(2, 2048, 16, 32, 4, 1024, 0, 32000)
    _, cells = price(model, (1, 1, 1, 1, 32, 1, 0, 0), (1, 1, 8, 1, 32, 1, 0, 0), (1, 1, 32, 1, 32, 1, 0, 0))
    none, node, far = (term(cells, "ep_comm", row, 1) for row in range(3))
    assert none == 0.0
    levels = pool(4).levels
    sent = 2 * 2048 * 4096 * 4
    assert node == pytest.approx(2 * float(collective_s("all_to_all", levels, sent, 8, 1)))
    assert far > 3 * node


def test_full_recomputation_costs_a_forward() -> None:
    _, cells = price(llama_70b(), (4, 1, 1, 1, 16, 1, 0, 0), (4, 1, 1, 1, 16, 1, 1, 0))
    again = term(cells, "recompute", 1, 1, backward=True)
    assert again == pytest.approx(cells.forward_terms_s[0, 0, 1].sum() - term(cells, "host", 0, 1))
    assert term(cells, "recompute", 0, 1, backward=True) == 0.0
    assert cells.activation_bytes[1, 1] < cells.activation_bytes[0, 1] / 10


def test_small_layers_are_bound_by_the_host() -> None:
    """A tiny layer's GPU time is far below what launching its kernels takes; a large one's is above."""
    _, small = price(dense(2, 256, 4, 4, 512, 1000), (1, 1, 1, 1, 8, 1, 0, 0), seq=128)
    assert term(small, "host", 0, 1) > 0.5 * small.forward_s[0, 0, 1]
    _, large = price(llama_70b(), (1, 1, 1, 1, 8, 1, 0, 0))
    assert term(large, "host", 0, 1) < 1e-3 * large.forward_s[0, 0, 1]


def test_host_and_gpu_that_take_as_long_do_not_hide_each_other() -> None:
    """The cube root of 2 for equal times, in the norm 3; beyond, the longer counts."""
    exposed = host_exposed_s(np.array([1.0, 0.0, 100.0]), np.array([1.0, 2.0, 1.0]))
    assert exposed == pytest.approx(np.array([2 ** (1 / 3) - 1, 0.0, 99.0 + 100 / 3e6]), abs=1e-6)


def test_fsdp_hides_its_gathers_only_under_enough_compute() -> None:
    rows = ((1, 1, 1, 1, 32, 1, 0, 2), (1, 1, 1, 1, 32, 8, 0, 2), (1, 1, 1, 1, 32, 1, 0, 1))
    _, cells = price(llama_70b(), *rows, seq=1024)
    params = cells.dense_params[0, 1]
    one, many, zero1 = (term(cells, "dp_comm", row, 1, backward=True) for row in range(3))
    both = float(collective_s("all_gather", pool(4).levels, 2 * params, 32, 1))
    both += float(collective_s("reduce_scatter", pool(4).levels, 4 * params, 32, 1))
    # Kernels of InfiniBand take 2% of the compute, less the moments in which the device waits for the host.
    assert many == pytest.approx(0.02 * both, rel=1e-4)
    assert one > 2 * many
    assert zero1 == 0.0
    assert cells.static_bytes[0, 1] < cells.static_bytes[2, 1] / 3


def test_context_ring_shows_when_attention_is_short() -> None:
    """Across nodes a short sequence cannot hide the key/value blocks, a long one can."""
    model = llama_70b()
    row = (8, 4, 1, 1, 32, 1, 0, 0)
    _, short = price(model, row, seq=4096)
    _, long = price(model, row, seq=131072)
    assert term(short, "cp_comm", 0, 1) > 2 * CONTENTION * term(short, "attention", 0, 1)  # sticks out
    assert 0.0 < term(long, "cp_comm", 0, 1) < CONTENTION * term(long, "attention", 0, 1)


def test_window_and_scan_layers_cost_less_than_full_attention_at_length() -> None:
    ffn = DenseFFN(intermediate_size=4096)
    full = SoftmaxAttention(num_heads=16, num_kv_heads=16, head_dim=128)
    mixers = (
        full,
        full.model_copy(update={"window": 1024}),
        LinearAttention(num_key_heads=16, key_head_dim=128, num_value_heads=16, value_head_dim=128, conv_kernel=4),
        MambaMixer(num_heads=32, head_dim=64, num_groups=8, state_size=128, conv_kernel=4),
    )
    kinds = tuple(LayerKind(attention=mixer, feed_forward=ffn) for mixer in mixers)
    model = ModelSpec(
        name="hybrid", family="f", hidden_size=2048, vocab_size=32000, kinds=kinds, pattern=tuple(range(4))
    )
    _, cells = price(model, (1, 1, 1, 1, 8, 1, 0, 0), (2, 2, 1, 1, 8, 1, 1, 0), seq=65536)
    seconds = [term(cells, "attention", 0, 1 + i) for i in range(4)]
    assert all(0 < s < seconds[0] / 4 for s in seconds[1:])
    assert np.isfinite(cells.backward_s).all()


def test_pool_without_the_precision_never_finishes() -> None:
    inter = NetworkLevel(name="eth", kind="ethernet", span=32, bandwidth_bytes_per_s=12e9, latency_s=2e-5)
    spec = ClusterSpec(
        name="mixed", gpus={H100.name: H100, V100.name: V100},
        pools=(pool(2, H100, "new"), pool(2, V100, "old")), inter_pool=inter,
    )  # fmt: skip
    costs = physics(llama_70b(), spec, workload(), target())
    cells = costs.cells(keys((8, 1, 1, 1, 8, 1, 0, 0)))
    assert np.isfinite(cells.forward_s[0, 0]).all()
    assert np.isinf(cells.forward_s[0, 1, 1])
    half = physics(llama_70b(), spec, workload(precision="fp16", params_dtype="fp16"), target())
    both = half.cells(cells.keys)
    assert both.forward_s[0, 1, 1] > 5 * both.forward_s[0, 0, 1]  # 125 against 989 TFLOP/s
    c = json.loads(files("meshwright.cost_models.data").joinpath("collectives.json").read_text())["links"]
    volume = 2 * 8192 * 4096 / 8
    between = half.boundary_s(both, np.array([0]), np.array([0]), np.array([1]), np.array([0]))
    assert between[0] == pytest.approx(c["ethernet"]["start_s"] + 2e-5 + volume / (12e9 * c["ethernet"]["busbw_eff"]))
    corrections = Multipliers(pp_comm=1.5), Multipliers(pp_comm=2.5)
    corrected = CostModel(half.model, spec, half.workload, target(), multipliers=corrections)
    slower = corrected.boundary_s(both, np.array([0]), np.array([0, 1]), np.array([1, 0]), np.array([0]))
    assert slower == pytest.approx(2.5 * between[0])  # the slower end sets the pace, whichever sends


# -- tail --------------------------------------------------------------------------------------------------------------


def tail_seconds(sharding: int, backward: float, **changes: object) -> tuple[float, float, float]:
    costs = physics(llama_70b(), cluster(4), workload(), target(**changes))
    cells = costs.cells(keys((4, 1, 1, 1, 32, 1, 0, sharding)))
    zero = np.array([0])
    tail = costs.tail(cells, zero, zero, np.array([2e9]), np.array([0.0]), np.array([backward]))
    return float(tail.grad_reduce_s[0]), float(tail.optimizer_s[0]), float(tail.param_gather_s[0])


def test_gradient_reduction_hides_under_the_last_backward() -> None:
    """2e9 fp32 gradients over 8 replicas (stride 4: two members a node, 4 nodes) in 50 buckets of 40e6."""
    levels = pool(4).levels
    bucket = float(collective_s("reduce_scatter", levels, 4 * 40e6, 8, 4))
    whole = 50 * bucket
    gather = 50 * float(collective_s("all_gather", levels, 2 * 40e6, 8, 4))
    assert tail_seconds(1, 0.0) == pytest.approx((whole, tail_seconds(1, 0.0)[1], gather))
    assert tail_seconds(1, 0.02)[0] == pytest.approx(whole - 0.02 + 0.02 * 0.02)
    assert tail_seconds(1, 10.0)[0] == pytest.approx(bucket + 0.02 * (whole - bucket))
    at_once = float(collective_s("reduce_scatter", levels, 8e9, 8, 4))
    assert tail_seconds(1, 10.0, overlap_grad_reduce=False)[0] == pytest.approx(at_once)
    assert tail_seconds(1, 10.0, overlap_param_gather=False)[2] == pytest.approx(gather)


def test_unsharded_optimizer_reduces_all_and_updates_all() -> None:
    levels = pool(4).levels
    reduce_s, optimizer, gather = tail_seconds(0, 0.0)
    assert reduce_s == pytest.approx(50 * float(collective_s("all_reduce", levels, 4 * 40e6, 8, 4)))
    assert gather == 0.0
    assert optimizer > 2 * tail_seconds(1, 0.0)[1]


def test_full_sharding_leaves_the_update_alone() -> None:
    reduce_s, optimizer, gather = tail_seconds(2, 0.0)
    assert (reduce_s, gather) == (0.0, 0.0)
    assert optimizer > 0


# -- flops -------------------------------------------------------------------------------------------------------------


def test_model_flops_equal_megatrons() -> None:
    """num_floating_point_operations of Megatron for Llama-3-70B, s 8192, batch 128: 4.7106e17 (padded vocabulary)."""
    padded = llama_70b().model_copy(update={"vocab_size": 128512})
    assert model_flops(padded, workload(128, 8192)) == pytest.approx(4.7106e17, rel=1e-3)


def test_model_flops_count_active_experts_and_what_is_trained() -> None:
    model = mla_moe(4, 2048, 16, 64, 4, 1024, 512, 32000)
    work = workload(8, 1024)
    matmul = (
        4 * sum(w.numel * (4 / 64 if w.expert else 1) for w in model.kinds[0].weights(2048) if w.matmul) + 2048 * 32000
    )
    mixer = 4 * 2 * 16 * 512 * (192 + 128)
    tokens = 8 * 1024
    assert model_flops(model, work) == pytest.approx(tokens * (6 * matmul + 3 * mixer))
    frozen = workload(8, 1024, frozen=("decoder", "head"))
    assert model_flops(model, frozen) == pytest.approx(tokens * (4 * matmul + 3 * mixer))


@pytest.mark.parametrize("mode", [NONE, FULL, RecomputeMode(granularity="selective", modules=("moe", "mla_up_proj"))])
def test_every_mode_prices_a_mixture(mode: RecomputeMode) -> None:
    model = mla_moe(4, 2048, 16, 64, 4, 1024, 512, 32000)
    costs = physics(model, cluster(4), workload(), target(mode))
    cells = costs.cells(keys((2, 2, 4, 2, 32, 1, 0, 1)))
    assert np.isfinite(cells.backward_terms_s).all()
    assert (cells.transient_bytes > 0).all()
