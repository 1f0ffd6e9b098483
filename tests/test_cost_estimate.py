"""Estimates of whole plans: sums that close, the same mechanism as bulk pricing, and what a plan's parts change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models import memory, schedules
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.flops import model_flops
from meshwright.cost_models.step import step_bound_s, step_time
from meshwright.specs.cluster import ClusterSpec, NetworkLevel
from meshwright.specs.errors import SpecError
from meshwright.specs.estimate import Estimate
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan
from meshwright.specs.target import RecomputeMode
from meshwright.specs.workload import Workload

from .cost_cases import FULL, H100, NONE, V100, cluster, dense, keys, llama_70b, mla_moe, plan, pool, target, workload

TERMS_OF_A_STEP = {
    "gemm", "attention", "memory_bound", "host", "tp_comm", "cp_comm", "ep_comm", "dp_comm", "recompute", "pp_comm",
    "bubble", "grad_reduce", "optimizer", "param_gather",
}  # fmt: skip


def run(model: ModelSpec, laid: Plan, nodes: int = 4, work: Workload | None = None, **kwargs: float) -> Estimate:
    return estimate(model, cluster(nodes), work or workload(), target(), laid, **kwargs)


def small(layers: int = 8) -> ModelSpec:
    return dense(layers, 4096, 32, 8, 14336, 32000)


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelSpec, Plan, int]:
    """A dense or mixture model over 32 GPUs with any legal degrees."""
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    rest = 32 // (tp * pp)
    cp = draw(st.sampled_from([c for c in (1, 2) if rest % c == 0]))
    dp = rest // cp
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    m = pp * draw(st.integers(1, 3))
    moe = draw(st.booleans())
    model = mla_moe(8, 2048, 16, 32, 4, 1024, 512, 32000) if moe else small()
    ep = draw(st.sampled_from([e for e in (1, 2, 8) if (32 // pp) % e == 0])) if moe else 1
    laid = plan(
        model, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, vpp=vpp, m=m, mbs=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from([NONE, FULL])), sharding=draw(st.sampled_from(["none", "zero1", "fsdp"])),
        overlap=draw(st.booleans()),
    )  # fmt: skip
    return model, laid, m * dp * laid.stages[0].micro_batch_size


@settings(max_examples=60)
@given(plans())
def test_time_and_memory_add_up(case: tuple[ModelSpec, Plan, int]) -> None:
    model, laid, batch = case
    work = workload(batch)
    result = run(model, laid, work=work)
    assert set(result.breakdown_s) == TERMS_OF_A_STEP
    assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)
    assert all(value >= -1e-9 * result.step_time_s for value in result.breakdown_s.values())
    assert result.interval_s[0] < result.step_time_s < result.interval_s[1]
    assert result.tokens_per_s_per_gpu == pytest.approx(work.tokens_per_step / result.step_time_s / 32)
    assert result.mfu == pytest.approx(model_flops(model, work) / result.step_time_s / (32 * 989e12))
    for stage in result.stages:
        assert sum(stage.breakdown_bytes.values()) == stage.allocated_bytes
        assert stage.reserved_bytes > stage.allocated_bytes / 0.94
        assert stage.busy_s <= result.step_time_s * (1 + 1e-9)
    assert result.fits == all(s.reserved_bytes <= s.limit_bytes for s in result.stages)


@settings(max_examples=40)
@given(plans())
def test_estimate_is_bulk_pricing_summed(case: tuple[ModelSpec, Plan, int]) -> None:
    """Sum the cells of the target's own lists over the blocks by hand: same step, same memory, and the bound below."""
    model, laid, batch = case
    work, spec, aim = workload(batch), cluster(4), target()
    if laid.options.overlap_grad_reduce is False:
        aim = target(overlap_grad_reduce=False, overlap_param_gather=False)
    costs = CostModel(model, spec, work, aim)
    d = laid.stages[0].degrees
    ranks = d.tp * d.cp * d.dp
    row = (
        d.tp, d.cp, d.ep, d.etp, ranks, laid.stages[0].micro_batch_size,
        aim.recompute.index(laid.stages[0].recompute), aim.sharding.index(str(laid.sharding)),
    )  # fmt: skip
    cells = costs.cells(keys(row))
    where = dict(zip(costs.blocks.instances, costs.blocks.kind_of, strict=True))
    count = costs.blocks.kind_of
    pp, vpp = laid.pp, laid.vpp
    forward, backward = np.zeros((pp, vpp)), np.zeros((pp, vpp))
    kept = np.zeros((pp, vpp))
    static, work_bytes, dense_params, expert_params = (np.zeros(pp) for _ in range(4))
    layers = model.num_layers // (pp * vpp)
    for q in range(pp * vpp):
        own = [("decoder", i) for i in range(q * layers, (q + 1) * layers)]
        own += [("embed", 0)] if q == 0 else []
        own += [("head", 0)] if q == pp * vpp - 1 else []
        for block in own:
            b, p, v = where[block], q % pp, q // pp
            forward[p, v] += cells.forward_s[0, 0, b]
            backward[p, v] += cells.backward_s[0, 0, b]
            kept[p, v] += cells.activation_bytes[0, b]
            static[p] += cells.static_bytes[0, b]
            work_bytes[p] = max(work_bytes[p], cells.transient_bytes[0, b])
            dense_params[p] += cells.dense_params[0, b]
            expert_params[p] += cells.expert_params[0, b]
    zeros = np.zeros(pp, dtype=np.int64)
    tail = costs.tail(cells, zeros, zeros, dense_params, expert_params, backward.sum(axis=1))
    send = costs.boundary_s(cells, zeros[1:], zeros[1:], zeros[1:], np.arange(pp - 1) * ranks)
    beside = vpp == 1 or laid.options.overlap_p2p
    step = step_time(laid.schedule, forward, backward, send, laid.num_microbatches, tail, sends_overlap=beside)
    result = run(model, laid, work=work)
    assert result.step_time_s == pytest.approx(step.step_time_s, rel=1e-12)
    bound = float(step_bound_s(laid.schedule, forward, backward, send, laid.num_microbatches, tail))
    assert bound <= step.step_time_s * (1 + 1e-12)
    held = schedules.get(laid.schedule).in_flight(pp, vpp, laid.num_microbatches)
    for p, stage in enumerate(result.stages):
        least = static[p] + work_bytes[p] + (held[p] * kept[p]).sum()
        assert stage.allocated_bytes >= least - 10
        if vpp == 1:
            assert stage.allocated_bytes == pytest.approx(least, abs=10)
    assert len(count) == model.num_layers + 2


def test_one_stage_has_no_bubble_and_sends_nothing() -> None:
    result = run(small(), plan(small(), tp=4, dp=8, m=4))
    assert result.breakdown_s["bubble"] == pytest.approx(0.0, abs=1e-12)
    assert result.breakdown_s["pp_comm"] == 0.0


def test_equal_stages_bubble_is_the_textbook_share() -> None:
    """Many layers, so that embedding and head weigh little: (p - 1) / m of the busy time, within a few percent."""
    model = dense(128, 4096, 32, 8, 14336, 1000)
    result = run(model, plan(model, tp=8, pp=4, dp=1, m=8))
    busy = result.stages[0].busy_s
    assert result.breakdown_s["bubble"] / busy == pytest.approx(3 / 8, rel=0.1)


def test_block_method_recomputes_the_first_layers_of_each_chunk() -> None:
    """num_layers of two chunks of four: time and bytes are the sums of recomputed and kept layers."""
    model = small(16)
    block = RecomputeMode(granularity="full", method="block", num_layers=1)
    parts = {
        mode.label: run(model, plan(model, tp=4, pp=2, dp=4, vpp=2, m=4, recompute=mode))
        for mode in (NONE, FULL, block)
    }
    none, full, mixed = (parts[mode.label] for mode in (NONE, FULL, block))
    again = [e.breakdown_s["recompute"] for e in (none, full, mixed)]
    assert again[0] == 0.0
    assert again[2] == pytest.approx(again[1] / 4)
    for p in range(2):
        low, high = full.stages[p].breakdown_bytes["activations"], none.stages[p].breakdown_bytes["activations"]
        assert mixed.stages[p].breakdown_bytes["activations"] == pytest.approx(low / 4 + 3 * high / 4, rel=0.01)


def test_uneven_layers_balance_a_mixed_cluster() -> None:
    """H100 and V100 stages in fp16: giving the H100 stage most layers is faster than an even split."""
    model = dense(40, 5120, 40, 40, 13824, 32000)
    inter = NetworkLevel(name="eth", kind="ethernet", span=16, bandwidth_bytes_per_s=12e9, latency_s=2e-5)
    spec = ClusterSpec(
        name="mixed", gpus={H100.name: H100, V100.name: V100}, pools=(pool(1, H100, "new"), pool(1, V100, "old")),
        inter_pool=inter,
    )  # fmt: skip
    work = workload(64, 2048, precision="fp16", params_dtype="fp16")

    def seconds(split: list[int]) -> float:
        laid = plan(model, tp=8, pp=2, m=64, split=split, pools=["new", "old"])
        return estimate(model, spec, work, target(), laid).step_time_s

    assert seconds([34, 6]) < 0.5 * seconds([20, 20])
    assert seconds([34, 6]) < seconds([39, 1])


def test_headroom_and_more_layers_decide_what_fits() -> None:
    model = llama_70b()
    tight = plan(model, tp=8, pp=4, dp=1, m=8)
    result = run(model, tight)
    assert result.fits
    fullest = max(s.reserved_bytes / s.limit_bytes for s in result.stages)
    assert not run(model, tight, memory_headroom=1 - fullest + 0.01).fits
    assert not run(model, plan(model, tp=8, pp=1, dp=4, m=8, sharding="none")).fits


def test_stages_of_two_chunks_hold_their_worst_mix() -> None:
    """The first chunk of stage 0 is heavier here: the peak is that of the mix with most of it alive."""
    model = small(8)
    laid = plan(model, tp=4, pp=2, dp=4, vpp=2, m=8, split=[5, 1, 1, 1])
    result = run(model, laid)
    costs = CostModel(model, cluster(4), workload(), target())
    cells = costs.cells(keys((4, 1, 1, 1, 16, 1, 0, 1)))
    layer, embed = costs.blocks.kinds.index("gqa+dense"), costs.blocks.kinds.index("embed")
    one, tiny = cells.activation_bytes[0, layer], cells.activation_bytes[0, embed]
    # Stage 0 of PP 2, V 2: four forwards of warm-up (chunks 0 0 1 1), then forward 0, backward 1, forward 0: four of
    # chunk 0 and one of chunk 1 are alive, no more in all than when the fifth forward had made it three and two.
    expected = 4 * (5 * one + tiny) + 1 * one
    assert result.stages[0].breakdown_bytes["activations"] == pytest.approx(expected, rel=1e-6)


def test_switches_of_the_plan_are_priced() -> None:
    model = llama_70b()
    laid = plan(model, tp=8, pp=2, dp=2, m=8)
    base = run(model, laid)
    overlapped = laid.model_copy(update={"options": laid.options.model_copy(update={"tp_comm_overlap": True})})
    assert run(model, overlapped).breakdown_s["tp_comm"] < base.breakdown_s["tp_comm"]
    unfused = laid.model_copy(update={"options": laid.options.model_copy(update={"fused_cross_entropy": False})})
    assert run(model, unfused).stages[-1].breakdown_bytes["logits"] > base.stages[-1].breakdown_bytes["logits"]
    whole = laid.model_copy(update={"options": laid.options.model_copy(update={"sequence_parallel": False})})
    more = run(model, whole).stages[0].breakdown_bytes["activations"]
    assert more > 1.5 * base.stages[0].breakdown_bytes["activations"]


def test_unbalanced_experts_cost_time_and_are_said() -> None:
    model = mla_moe(8, 2048, 16, 32, 4, 1024, 512, 32000)
    laid = plan(model, ep=8, dp=32, m=2)
    even = run(model, laid)
    skewed = run(model, laid, work=workload(moe_load_factor=1.5))
    assert skewed.step_time_s > even.step_time_s
    assert any("balanced" in text for text in even.assumptions)
    assert not any("balanced" in text for text in skewed.assumptions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blocks: (*blocks, "decoder:99"), "decoder:99 is not a block"),
        (lambda blocks: (*blocks, "decoder:0"), "decoder:0 stands in the plan twice"),
        (lambda blocks: ("embed",), "decoder:0 is in no stage"),
    ],
)
def test_lost_and_repeated_blocks_are_named(change, message: str) -> None:  # type: ignore[no-untyped-def]
    model = small(4)
    laid = plan(model, tp=8, pp=2, dp=2, m=4)
    first = laid.stages[0]
    chunk = first.chunks[0].model_copy(update={"blocks": change(first.chunks[0].blocks)})
    broken = laid.model_copy(update={"stages": (first.model_copy(update={"chunks": (chunk,)}), *laid.stages[1:])})
    with pytest.raises(SpecError, match=message):
        run(model, broken)


def test_unknown_pool_lists_the_known() -> None:
    model = small(4)
    with pytest.raises(SpecError, match="unknown pool nowhere"):
        run(model, plan(model, tp=8, dp=4, m=4, pools=["nowhere"]))


def test_terms_say_where_their_numbers_come_from() -> None:
    result = run(small(), plan(small(), tp=4, dp=8, m=4))
    assert result.rungs["gemm"] == "shipped fit"
    odd = H100.model_copy(update={"name": "X-1", "compute_capability": 6.0})
    spec = ClusterSpec(name="odd", gpus={"X-1": odd}, pools=(pool(4, odd),))
    other = estimate(small(), spec, workload(), target(), plan(small(), tp=4, dp=8, m=4, gpu="X-1"))
    assert other.rungs["gemm"] == "spec roofline"
    assert any("X-1" in text for text in other.assumptions)
    assert set(TERMS_OF_A_STEP) <= set(other.rungs)


def test_workspace_is_the_fixed_part_of_what_torch_allocates() -> None:
    result = run(small(), plan(small(), tp=4, dp=8, m=4))
    assert result.stages[0].breakdown_bytes["fixed"] == memory.WORKSPACE_BYTES
    outside = result.stages[0].reserved_bytes - result.stages[0].allocated_bytes / 0.96
    assert outside == pytest.approx(memory.CONTEXT_BYTES + 3 * memory.NCCL_FAMILY_BYTES, abs=2)


def test_a_tied_embedding_is_added_up_between_the_ends_of_the_pipeline() -> None:
    """Megatron all-reduces V x h fp32 gradients between first and last stage: with two nodes, over one 50 GB/s port."""
    untied, shape = small(), {"pp": 2, "dp": 8, "m": 8}
    tied = untied.model_copy(update={"tied_embeddings": True})
    work = workload(64)
    apart, shared = (run(model, plan(model, **shape), 2, work) for model in (untied, tied))
    table_bytes = 32000 * 4096 * 4
    assert shared.breakdown_s["grad_reduce"] - apart.breakdown_s["grad_reduce"] == pytest.approx(
        table_bytes / 50e9, rel=0.3
    )
    alone = run(tied, plan(tied, dp=8, m=8), 1, work)
    assert alone.breakdown_s["grad_reduce"] < table_bytes / 50e9 / 2
