"""What a plan's options hide: each switch against what it must save, and nothing below zero."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import collective_s
from meshwright.cost_models.efficiency import efficiency
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.layer_time import LayerTimer
from meshwright.cost_models.local import Local
from meshwright.cost_models.multipliers import NEUTRAL
from meshwright.cost_models.overlap import Overlap, overlap_of, sharded_exposed_s
from meshwright.cost_models.protocol import TERMS
from meshwright.cost_models.schedules import Interleaved, get
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Options

from .cost_cases import H100, cluster, dense, keys, llama_70b, mla_moe, plan, pool, target, workload

MOE = mla_moe(8, 4096, 32, 64, 8, 2048, 4096, 32000)
#: tp, cp, ep, etp, ranks, micro-batch, recompute, sharding: experts over four nodes.
ROW = (1, 1, 32, 1, 32, 1, 0, 0)


def terms(overlap: Overlap, model: ModelSpec = MOE, row: tuple[int, ...] = ROW, **changes: object) -> np.ndarray:
    """[2, TERMS] forward and backward seconds of a decoder layer."""
    costs = CostModel(model, cluster(4), workload(), target(**changes), overlap=overlap, multipliers=(NEUTRAL,))
    cells = costs.cells(keys(row))  # type: ignore[arg-type]
    return np.stack([cells.forward_terms_s[0, 0, 1], cells.backward_terms_s[0, 0, 1]])


def of(seconds: np.ndarray, name: str) -> np.ndarray:
    out: np.ndarray = seconds[:, TERMS.index(name)]
    return out


def compute(seconds: np.ndarray) -> np.ndarray:
    return sum(of(seconds, name) for name in ("gemm", "attention", "memory_bound"))  # type: ignore[return-value]


def test_a_plan_without_options_hides_nothing() -> None:
    assert overlap_of(Options(overlap_p2p=True)) == Overlap()


@pytest.mark.parametrize(("delayed", "most"), [(False, 0.65), (True, 0.85)])
def test_expert_exchange_hides_under_the_other_micro_batch(delayed: bool, most: float) -> None:
    """Forward under backward compute and vice versa; InfiniBand's kernels take 2% of what they run beside."""
    plain, hidden = terms(Overlap()), terms(Overlap(expert=True, delay_wgrad=delayed))
    busy, windows = of(plain, "ep_comm"), compute(plain)[::-1]
    covered = np.minimum(most * busy, windows)
    assert of(hidden, "ep_comm") == pytest.approx(busy - 0.98 * covered)
    assert (of(hidden, "ep_comm") > 0).all()
    assert compute(hidden) == pytest.approx(compute(plain))


def test_a_deduplicated_exchange_sorts_tokens_once() -> None:
    """A token has 8 copies on its way by all-to-all: made (1 + 8 read and written), then sorted (8 + 8). The flex
    dispatcher makes the 8 copies from those that arrive, one for each of the 32 * (1 - (31/32)^8) ranks it touches."""
    plain, once = terms(Overlap()), terms(Overlap(), dispatcher="flex")
    token = 2.0 * 4096 * 4096
    share = efficiency(H100, "bf16").permute * H100.memory_bandwidth_bytes_per_s
    spared = 2 * token * (1 + 8 + 16 - (32 * (1 - (31 / 32) ** 8) + 8)) / share
    assert of(plain, "memory_bound") - of(once, "memory_bound") == pytest.approx([spared, spared])


def test_deduplicating_kernels_take_20_sms_while_they_overlap() -> None:
    plain = terms(Overlap(), dispatcher="flex")
    hidden = terms(Overlap(expert=True), dispatcher="flex")
    covered = np.minimum(0.65 * of(plain, "ep_comm"), compute(plain)[::-1])
    assert of(hidden, "ep_comm") == pytest.approx(of(plain, "ep_comm") - (1 - 20 / 132) * covered)


def test_shared_expert_covers_at_most_its_own_time() -> None:
    plain, hidden = terms(Overlap()), terms(Overlap(shared_expert=True))
    without = terms(Overlap(), mla_moe(8, 4096, 32, 64, 8, 2048, 0, 32000))
    window = compute(plain) - compute(without)
    saved = of(plain, "ep_comm") - of(hidden, "ep_comm")
    assert (saved > 0).all()
    assert (saved <= window * (1 + 1e-9)).all()


def test_fp8_dispatch_saves_a_quarter_of_the_forward_bytes() -> None:
    """Out in 1 + 4/128 bytes, back in 2: (1.03125 + 2) / 4 of the bytes where they dominate."""
    plain, low = terms(Overlap()), terms(Overlap(fp8_dispatch=True))
    assert of(low, "ep_comm")[0] / of(plain, "ep_comm")[0] == pytest.approx(3.03125 / 4, rel=0.02)
    assert of(low, "ep_comm")[1] == of(plain, "ep_comm")[1]


def test_context_exchange_by_kind() -> None:
    """70B, TP 2 x CP 4 in a node. Bytes of a rank: 4 of 8 kv heads, 32 of 64 heads of 128, 1024 tokens of 2 bytes."""
    row, levels = (2, 4, 1, 1, 32, 1, 0, 0), pool(4).levels
    kv, q = 2 * 4 * 128 * 2 * 1024, 32 * 128 * 2 * 1024
    got = {kind: of(terms(Overlap(context=kind), llama_70b(), row), "cp_comm") for kind in ("p2p", "a2a", "allgather")}  # type: ignore[arg-type]
    both = sum(float(collective_s("all_to_all", levels, v, 4, 2)) for v in (kv + q, q))
    assert got["a2a"] == pytest.approx([both, both])
    gather, scatter = (float(collective_s(op, levels, 4 * kv, 4, 2)) for op in ("all_gather", "reduce_scatter"))  # type: ignore[arg-type]
    assert got["allgather"] == pytest.approx([gather, gather + scatter])
    assert 0 < got["p2p"][0] < got["a2a"][0]  # the ring hides under attention


def test_hierarchical_context_exchange_lies_between_its_parts() -> None:
    row = (1, 16, 1, 1, 32, 1, 0, 0)
    model = dense(4, 4096, 32, 8, 14336, 32000)
    ring, heads = (of(terms(Overlap(context=kind), model, row), "cp_comm") for kind in ("p2p", "a2a"))  # type: ignore[arg-type]
    all_heads = of(terms(Overlap(context="a2a+p2p", context_a2a_size=16), model, row), "cp_comm")
    no_heads = of(terms(Overlap(context="a2a+p2p", context_a2a_size=1), model, row), "cp_comm")
    assert all_heads == pytest.approx(heads)
    assert no_heads == pytest.approx(ring)
    node = of(terms(Overlap(context="a2a+p2p", context_a2a_size=8), model, row), "cp_comm")
    assert (node < np.maximum(ring, heads)).all()  # the ring across nodes has one hop instead of fifteen


def test_sends_that_block_cost_time() -> None:
    forward, backward = np.full((4, 2), 1.0), np.full((4, 2), 2.0)
    beside = get("interleaved").simulate(forward, backward, np.full(3, 0.1), 8)
    held = Interleaved(blocking=True).simulate(forward, backward, np.full(3, 0.1), 8)
    # A stage in the middle sends every chunk on and back: 8 micro-batches x 2 chunks x 2 ways x 0.1 s.
    assert held.send_s[1] == pytest.approx(3.2)
    assert beside.makespan_s < held.makespan_s <= beside.makespan_s + 4 * 3.2


def test_smaller_buckets_start_more_often_and_leave_less_for_the_end() -> None:
    zero, tails = np.array([0]), []
    for params in (10_000_000, 40_000_000, 1_000_000_000):
        costs = CostModel(
            llama_70b(), cluster(4), workload(), target(), overlap=Overlap(bucket_params=params), multipliers=(NEUTRAL,)
        )
        cells = costs.cells(keys((4, 1, 1, 1, 32, 1, 0, 1)))
        backward = np.array([0.0, 10.0])
        tail = costs.tail(cells, zero, zero, np.array([2e9]), np.array([0.0]), backward)
        tails.append(tail.grad_reduce_s.tolist())
    (open_small, end_small), (open_usual, end_usual), (open_large, end_large) = tails
    assert open_small > open_usual > open_large
    assert end_large > 5 * end_usual
    assert end_large > 5 * end_small


def test_options_reach_the_estimate() -> None:
    laid = plan(MOE, ep=32, dp=32, m=2)

    def step(**options: object) -> float:
        changed = laid.model_copy(update={"options": laid.options.model_copy(update=options)})
        return estimate(MOE, cluster(4), workload(), target(), changed).step_time_s

    plain = step()
    assert step(ep_comm_overlap=True, delay_wgrad=True) < step(ep_comm_overlap=True) < plain
    assert step(moe_shared_expert_overlap=True) < plain
    assert step(fp8_dispatch=True) < plain


@pytest.mark.parametrize(
    ("busy", "device", "host", "exposed"),
    [
        (4.0, 10.0, 0.0, 0.4),  # as without a host: a tenth of the compute beside it is lost
        (4.0, 10.0, 5.0, 0.0),  # the device waits five anyway, which the lost 0.4 fills
        (4.0, 10.0, 0.1, 0.3),
        (12.0, 2.0, 20.0, 0.0),  # launch-bound: of 22 - 0.16 free ones 0.8 hide all twelve
        (24.0, 2.0, 20.0, 24.0 - 0.8 * (2.0 + 20.0 - 0.1 * 0.8 * 2.0)),
        (12.0, 10.0, 0.0, 0.1 * 8.0 + 4.0),
    ],
)
def test_sharded_parameters_also_hide_where_the_host_sets_the_pace(
    busy: float, device: float, host: float, exposed: float
) -> None:
    found = sharded_exposed_s(np.array(busy), np.array(device), np.array(host), 0.8, 0.1)
    assert float(found) == pytest.approx(exposed)


def test_a_slower_host_never_makes_a_sharded_layer_faster() -> None:
    host = np.linspace(0.0, 30.0, 301)
    for busy in (1.0, 8.0, 40.0):
        spent = host + sharded_exposed_s(np.full(301, busy), np.full(301, 10.0), host, 0.95, 0.15)
        assert (np.diff(spent) > -1e-12).all()


def test_gathers_of_a_launch_bound_layer_cost_nothing_there() -> None:
    """A narrow layer on two GPUs of a node: its gather takes less than its host calls, so that nothing of it shows."""
    narrow = dense(2, 512, 8, 8, 1024, 32000)
    found = terms(Overlap(), narrow, (1, 1, 1, 1, 2, 1, 0, 2))
    gather = float(collective_s("all_gather", pool(1).levels, 2.0 * 2.6e6, 2, 1))
    assert (of(found, "host") > gather).all()
    assert of(found, "dp_comm") == pytest.approx(0.0)


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_scatters_follow_weight_gradients_and_gathers_input_gradients(sharding: str) -> None:
    """32 ranks, bf16 parameters gathered and fp32 gradients scattered: weight gradients, which need no parameters, take
    the scatter's share of what shows."""
    model, plain = llama_70b(), (1, 1, 1, 1, 32, 1, 0, 0)
    costs = CostModel(
        model, cluster(4), workload(seq=1024), target(), shardings=("none", sharding), multipliers=(NEUTRAL,)
    )
    cells = costs.cells(keys(plain, (*plain[:-1], 1)))
    params, levels = float(cells.dense_params[0, 1]), pool(4).levels
    gather = float(collective_s("all_gather", levels, 2 * params, 32, 1)) if sharding == "fsdp" else 0.0
    scatter = float(collective_s("reduce_scatter", levels, 4 * params, 32, 1))
    shown = float(cells.backward_terms_s[1, 0, 1, TERMS.index("dp_comm")])
    more = cells.weight_gradient_s[1, 0, 1] - cells.weight_gradient_s[0, 0, 1]
    assert shown > 0
    assert more == pytest.approx(shown * scatter / (gather + scatter))


@pytest.mark.parametrize("share_of_window", [10.0, 1.0, 0.3, 0.0])
def test_tensor_parallel_overlap_uses_the_backward_window_once(share_of_window: float) -> None:
    """A pair of products on 8 ranks. Forward: gather and scatter less their first chunk under the products. Backward:
    the same and the input's second gather together under the two products that there are, not under three."""
    costs = CostModel(llama_70b(), cluster(1), workload(), target(), multipliers=(NEUTRAL,))
    at = Local(costs.model, costs.workload, costs.target, keys((8, 1, 1, 1, 8, 1, 0, 0)))
    levels, volume = cluster(1).pools[0].levels, 2.0 * 8192 * 4096
    gather, scatter = (float(collective_s(op, levels, volume, 8, 1)) for op in ("all_gather", "reduce_scatter"))
    window = share_of_window * (gather + scatter)
    timer = LayerTimer(at, costs.devices[0], levels, Overlap(tensor=True))
    pieces = timer.pieces()
    timer.tensor_parallel(pieces, "mlp", np.array([window]))
    forward, backward = pieces.finish(frozenset(), 0.0)

    def shown(busy: float, free: float) -> float:
        return max(busy - free, 0.0) + 0.15 * min(busy, free)

    first, rest = (gather + scatter) / 8, (gather + scatter) * 7 / 8
    assert of(forward, "tp_comm") == pytest.approx(first + shown(rest, window))
    assert of(backward, "tp_comm") == pytest.approx(first + shown(rest + gather, 2 * window))
