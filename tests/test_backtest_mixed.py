"""Runs on mixed GPU types: reading them, and prices worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from meshwright.cost_models.backtest.mixed import is_mixed_types, members_of, mixed_case, mixed_run
from meshwright.cost_models.backtest.price import Priced, price, price_case
from meshwright.cost_models.backtest.ranks import spearman
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import sending_bandwidth
from meshwright.cost_models.multipliers import NEUTRAL
from meshwright.cost_models.operators import device, matmul_s
from meshwright.cost_models.unfused import unfused_attention_s
from meshwright.specs import catalog
from meshwright.specs.batch import CellKeys
from meshwright.specs.cluster import NetworkLevel
from meshwright.specs.plan import expand_blocks

AMP = "3x p3.8xlarge (4xV100 each, 10 Gb/s) + 1x g4dn.12xlarge (4xT4, 50 Gb/s)"
Stages = list[list[tuple[str, int, int]]]


def row(stages: Stages, layers: list[int], batch: int = 32, mbs: int = 1, **changes: Any) -> dict[str, str]:
    """A run of a GPT of ``layers``; a stage is a list of (GPU, tp, replicas). AMP's stack and nodes by default."""
    devices = [[{"gpu": g, "tp": tp, "replicas": n} for g, tp, n in stage] for stage in stages]
    types = list(dict.fromkeys(g for stage in stages for g, _, _ in stage))
    data = {
        "id": "x", "kind": "measured", "model": "GPT", "num_layers": sum(layers), "hidden": 1024, "heads": 16,
        "vocab": 51200, "seq_len": 1024, "precision": "fp16", "recompute": "none", "cluster": AMP,
        "framework": "DeepSpeed 3D (Megatron-LM 1.1.5), fp32_allreduce", "gpu_types": "|".join(types),
        "num_gpus": sum(tp * n for stage in stages for _, tp, n in stage), "gpus_per_node": 4,
        "tp": stages[0][0][1], "pp": len(stages), "dp": sum(n for _, _, n in stages[0]), "micro_batch": mbs,
        "global_batch": batch, "num_microbatches": "", "layers_per_stage": json.dumps(layers),
        "partition_cut_points": "", "stage_devices": json.dumps(devices), "status": "ok",
        "measured_iter_time_s": 1.0,
    }  # fmt: skip
    return {name: str(value) for name, value in {**data, **changes}.items()}


def priced(*args: Any, **changes: Any) -> Priced:
    result = price(row(*args, **changes), {}, NEUTRAL)
    assert result.estimate is not None, result.reason
    return result


def test_a_row_becomes_a_plan_over_two_pools_with_its_layers() -> None:
    """AMP's 30 entries: embedding, transpose, 24 layers, four more with the head. 6 + 7 + 7 + 4 layers."""
    stages: Stages = [[("V100-16", 1, 4)]] * 3 + [[("T4-16", 1, 4)]]
    case = mixed_case(mixed_run(row(stages, [6, 7, 7, 4], partition_cut_points="[0, 8, 15, 22, 30]", mbs=2)), {})
    assert [pool.num_gpus for pool in case.cluster.pools] == [12, 4]
    assert [stage.groups[0].ranks for stage in case.plan.stages] == [("0-3",), ("4-7",), ("8-11",), ("12-15",)]
    assert case.plan.num_microbatches == 4  # 32 samples over 4 replicas of 2
    blocks = [expand_blocks(stage.chunks[0].blocks) for stage in case.plan.stages]
    assert [sum(kind == "decoder" for kind, _ in stage) for stage in blocks] == [6, 7, 7, 4]
    assert blocks[0][0] == ("embed", 0)
    assert blocks[3][-1] == ("head", 0)
    between = case.cluster.inter_pool
    assert between is not None
    assert between.bandwidth_bytes_per_s == pytest.approx(1.25e9 / 4)  # the slower pool's port, shared by four
    assert between.port_bytes_per_s == pytest.approx(1.25e9)


def test_sailors_lists_hold_embedding_and_head_as_entries() -> None:
    stages: Stages = [[("RTX-3090", 8, 1)], [("Titan-RTX", 8, 1)]]
    data = row(stages, [12, 14], partition_cut_points="[0, 12, 26]", num_layers=24, gpus_per_node=8, cluster="MIT")
    case = mixed_case(mixed_run(data), {})
    layers = [sum(k == "decoder" for k, _ in expand_blocks(s.chunks[0].blocks)) for s in case.plan.stages]
    assert layers == [11, 13]


def test_stages_may_differ_in_both_degrees() -> None:
    """Two replicas of two GPUs, then four of one: a micro-batch of 2 x 2 samples is 4 x 1 on the second stage."""
    case = mixed_case(mixed_run(row([[("V100-16", 2, 2)], [("T4-16", 1, 4)]], [2, 2], mbs=2)), {})
    assert (case.plan.tp, case.plan.dp, case.plan.micro_batch_size) == (None, None, None)
    assert [stage.micro_batch_size for stage in case.plan.stages] == [2, 1]
    assert price_case(case).step_time_s > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "TransGAN (depth 12)"}, "TransGAN"),
        ({"stage_devices": ""}, "no plan"),
        ({"stage_devices": "[[]]"}, "no devices"),
        ({"stage_devices": "[[{}]]"}, "cannot be read"),
        ({"global_batch": "31"}, "evenly"),
        ({"partition_cut_points": "[0, 9]"}, "9 entries"),
        ({"layers_per_stage": "[3]"}, "3 of 4"),
        ({"kind": "measured (profile total)"}, "profile"),
        ({"gpu_types": "T4-16", "stage_devices": '[[{"gpu": "Z9", "tp": 1, "replicas": 4}]]'}, "Z9"),
        ({"heads": ""}, "shape"),
    ],
)
def test_what_cannot_be_priced_says_why(changes: dict[str, str], words: str) -> None:
    result = price(row([[("T4-16", 1, 4)]], [4], **changes), {})
    assert result.estimate is None
    assert words in result.reason


def test_replicas_of_a_stage_with_different_tensor_parallelism_are_refused() -> None:
    result = price(row([[("V100-16", 4, 1), ("T4-16", 2, 1)]], [4]), {})
    assert "tensor parallelism" in result.reason
    assert members_of('[[{"gpu": "A", "tp": 2, "replicas": 3}]]')[0][0].replicas == 3


def test_the_slower_stage_sets_the_pace() -> None:
    """Every further micro-batch takes what the T4 stage needs for it, its sends included, whatever the V100 does."""
    stages: Stages = [[("V100-16", 1, 1)], [("T4-16", 1, 1)]]
    short, long = (priced(stages, [4, 4], batch=batch) for batch in (32, 64))
    on_t4 = priced([[("T4-16", 1, 1)], [("T4-16", 1, 1)]], [4, 4], batch=32)
    assert short.estimate is not None
    assert long.estimate is not None
    assert on_t4.estimate is not None
    slow = short.estimate.stages[1]
    assert slow.forward_s == pytest.approx(on_t4.estimate.stages[1].forward_s)
    assert short.estimate.stages[0].busy_s < 0.6 * slow.busy_s
    # One send back a micro-batch: 2 bytes x 1024 x 1024 over the whole 1.25 GB/s port at 0.8, 30 + 25 us to start.
    send = 2 * 1024 * 1024 / (1.25e9 * 0.8) + 55e-6
    grown = long.estimate.step_time_s - short.estimate.step_time_s
    assert grown == pytest.approx(32 * (slow.forward_s + slow.backward_s + send), rel=1e-3)


def test_a_mixed_group_waits_for_its_slowest_member() -> None:
    mixed, slow, fast = (
        priced([[(first, 1, 1), (second, 1, 1)]], [4], batch=16)
        for first, second in (("V100-16", "T4-16"), ("T4-16", "T4-16"), ("V100-16", "V100-16"))
    )
    assert mixed.estimate is not None
    assert slow.estimate is not None
    assert fast.estimate is not None
    assert mixed.estimate.stages[0].busy_s == pytest.approx(slow.estimate.stages[0].busy_s)
    assert fast.estimate.stages[0].busy_s < 0.6 * mixed.estimate.stages[0].busy_s


def test_gradients_of_a_mixed_group_meet_on_the_slower_network() -> None:
    """Two GPUs on two nodes pass the whole fp32 buffer once over 10 Gbit/s at 0.8, though one node has 50 Gbit/s."""
    result = priced([[("T4-16", 1, 1), ("V100-16", 1, 1)]], [4], batch=16)
    assert result.estimate is not None
    hidden, vocab = 1024, 51200
    layer = 4 * hidden * hidden + 2 * 4 * hidden * hidden + 4 * hidden
    volume = 4 * (4 * layer + vocab * hidden)
    expected = volume / (1.25e9 * 0.8)
    assert result.estimate.breakdown_s["grad_reduce"] == pytest.approx(expected, rel=0.02)


def test_tensor_parallelism_through_host_memory_is_what_the_cards_measured() -> None:
    """8 RTX-3090: 16 MiB all-reduced in 22 ms (measured), four times a layer and a few more a micro-batch."""
    stages: Stages = [[("RTX-3090", 8, 1)]]
    result = priced(
        stages, [24], batch=8, mbs=2, precision="fp32", seq_len=2048, cluster="MIT", gpus_per_node=8,
        framework="Sailor Megatron-DeepSpeed",
    )  # fmt: skip
    assert result.estimate is not None
    assert result.estimate.breakdown_s["tp_comm"] / 4 == pytest.approx(0.022 * (4 * 24 + 2), rel=0.04)


def test_a_gpu_that_sends_alone_has_the_whole_port() -> None:
    """A quarter of 6.25 GB/s each; two senders have a half each, one the whole, at the 0.8 of Ethernet."""
    level = NetworkLevel(
        name="e", kind="ethernet", span=16, bandwidth_bytes_per_s=6.25e9 / 4, latency_s=0.0, port_bytes_per_s=6.25e9
    )
    assert sending_bandwidth(level, 4, np.array([1, 2, 4, 16])) == pytest.approx(np.array([5e9, 2.5e9, 1.25e9, 1.25e9]))
    own = level.model_copy(update={"port_bytes_per_s": None})
    assert sending_bandwidth(own, 4, 1) == pytest.approx(1.25e9)


def test_deepspeed_sends_a_part_from_every_rank_and_adds_the_shared_embedding_in_16_bit() -> None:
    case = mixed_case(mixed_run(row([[("T4-16", 4, 1)]] * 2, [2, 2])), {})
    zero = np.zeros(1, dtype=np.int64)
    times = []
    for deepspeed in (True, False):
        target = case.target.model_copy(update={"deepspeed_pipeline": deepspeed, "sequence_parallel": False})
        costs = CostModel(case.model, case.cluster, case.workload, target, shardings=("none",), multipliers=(NEUTRAL,))
        cells = costs.cells(CellKeys(*np.array([[4, 1, 1, 4, 4, 1, 0, 0, 0]], dtype=np.int64).T))
        times.append((costs.boundary_s(cells, zero, zero, zero, zero), costs.shared_embedding_s(cells, zero, 0, 0, 2)))
    start = 30e-6 + 25e-6
    assert (times[0][0] - start) * 4 == pytest.approx(times[1][0] - start)
    assert (times[0][1] - start) * 2 == pytest.approx(times[1][1] - start)


@pytest.mark.parametrize(
    ("name", "forward_us", "backward_us", "product_us"),
    [
        ("Titan-RTX", 1914 + 6696 + 2317 + 1971, 3253 + 11949 + 2166 + 3169, 2683),
        ("RTX-3090", 1007 + 4855 + 1527 + 802, 1524 + 8051 + 1432 + 1806, 1063),
        ("RTX-2080-Ti", 1985 + 6968 + 2440 + 2116, 3392 + 12478 + 2257 + 3166, 2777),
        ("V100-16", 1546 + 4398 + 1664 + 1496, 2929 + 8192 + 1452 + 2834, 2485),
    ],
)
def test_32_bit_attention_and_products_are_those_measured(
    name: str, forward_us: float, backward_us: float, product_us: float
) -> None:
    """Sailor's profiles of OPT-350M, 2 x 2048 tokens: score, softmax, dropout, context; first product of the MLP."""
    on = device(catalog.gpu(name).gpu, "fp32")
    forward, backward = unfused_attention_s(on, 2, 2048, 16, 64, 64)
    assert 1e6 * float(forward) == pytest.approx(forward_us, rel=0.15)
    assert 1e6 * float(backward) == pytest.approx(backward_us, rel=0.15)
    assert 1e6 * float(matmul_s(on, 4096, 4096, 1024)) == pytest.approx(product_us, rel=0.06)


def test_16_bit_attention_moves_less() -> None:
    on = device(catalog.gpu("V100-SXM2-16GB").gpu, "fp16")
    forward, _ = unfused_attention_s(on, 2, 2048, 16, 64, 64)
    assert 1e6 * float(forward) == pytest.approx(496 + 589 + 943 + 653, rel=0.15)


def test_a_published_error_is_that_of_the_measured_time() -> None:
    result = priced([[("T4-16", 1, 4)]], [4], measured_iter_time_s="0.5")
    assert result.step_time_s is not None
    assert result.error == pytest.approx(result.step_time_s / 0.5 - 1)
    failed = price(row([[("T4-16", 1, 4)]], [4], measured_iter_time_s=""), {})
    assert failed.estimate is not None
    assert failed.error is None
    assert not is_mixed_types(result.row)


def test_rank_correlation() -> None:
    """1 - 6 sum(d^2) / (n (n^2 - 1)) without ties; with ties the correlation of mean ranks."""
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([1, 2], [1, 2]))
