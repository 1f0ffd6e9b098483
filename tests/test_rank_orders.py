"""Rank orders: which level each group and each send crosses, priced by hand, searched, exported and read back."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from meshwright.cost_models.blocks import block_table
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import collective_s, members_inside, p2p_s
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.rank_order import DATA_INSIDE, PIPELINE_INSIDE, replica_send_s, stage_levels
from meshwright.megatron_export.megatron import plan_from_arguments, read_arguments
from meshwright.megatron_export.megatron.export import megatron_arguments
from meshwright.planner import rules
from meshwright.planner.answer.assemble import Skeleton, build_plan
from meshwright.planner.answer.current import with_current
from meshwright.planner.answer.differences import differences
from meshwright.planner.engine.arrangements import Arrangement
from meshwright.planner.search import plan
from meshwright.specs.batch import CellKeys
from meshwright.specs.cluster import ClusterSpec, NetworkLevel, Pool
from meshwright.specs.target import RecomputeMode

from .cost_cases import H100
from .planner_cases import request, small_model, workload


def level(span, bandwidth, kind="infiniband"):
    return NetworkLevel(name=f"to {span}", kind=kind, span=span, bandwidth_bytes_per_s=bandwidth, latency_s=5e-6)


def nodes_of(per_node, nodes, outer=10e9, inner=400e9):
    """Nodes of ``per_node`` GPUs under one switch."""
    levels = (level(per_node, inner, "nvlink"), level(per_node * nodes, outer))
    pool = Pool(name="pool", gpu=H100.name, nodes=nodes, gpus_per_node=per_node, levels=levels)
    return ClusterSpec(name="test", gpus={H100.name: H100}, pools=(pool,))


def keys(tp, ranks):
    return CellKeys(*(np.array([value]) for value in (tp, 1, 1, tp, ranks, 1, 0, 0, 0)))


@pytest.mark.parametrize(("block", "stages", "copies"), [(1, 2, 8), (1, 4, 4), (2, 2, 4), (2, 4, 4), (4, 4, 4)])
def test_levels_join_as_many_ranks_of_a_stage_as_they_hold(block, stages, copies):
    """Against counting: ranks of stage 0 are those with rank // block % stages == 0."""
    ranks = [rank for rank in range(block * stages * copies) if rank // block % stages == 0]
    levels = (level(8, 400e9), level(32, 50e9), level(128, 10e9))
    for whole, part in zip(levels, stage_levels(levels, block, stages), strict=True):
        inside = [sum(rank // whole.span == instance for rank in ranks) for instance in range(1)]
        size = len(ranks)
        assert members_inside(part, size, 1) == min(max(inside), size)
        heads = [rank for rank in ranks if rank % block == 0]  # a data-parallel group
        together = sum(rank < whole.span for rank in heads)
        assert members_inside(part, copies, block) == max(together, 1)


@pytest.mark.parametrize(
    ("block", "stages", "copies"), [(1, 2, 12), (1, 4, 6), (2, 3, 8), (1, 6, 4), (4, 4, 3), (3, 4, 4), (6, 2, 4)]
)
def test_a_send_crosses_what_the_replica_that_lies_worst_crosses(block, stages, copies):
    """Against every replica's blocks by position; the levels take 1, 10 and 100 s to cross and no time a byte."""
    levels = [level(span, 1e30).model_copy(update={"latency_s": cost}) for span, cost in ((4, 1), (8, 10), (48, 100))]
    for one, other in combinations(range(stages), 2):
        firsts = [(copy * stages + one) * block for copy in range(copies)]
        ends = [(copy * stages + other) * block + block - 1 for copy in range(copies)]
        expected = max(
            next(cost for span, cost in ((4, 1), (8, 10), (48, 100)) if first // span == end // span)
            for first, end in zip(firsts, ends, strict=True)
        )
        columns = (np.array([value]) for value in (one * block, (other - one) * block, block))
        found = replica_send_s(levels, np.ones(1), *columns, stages, np.array([copies]))
        assert found[0] == pytest.approx(expected, rel=1e-3)


def test_gradients_cross_nodes_and_sends_stay_inside():
    """4 nodes of 4 GPUs, PP 4, DP 4: in the second order a replica fills a node."""
    cluster = nodes_of(4, 4)
    asked = request(small_model(8), cluster, workload(64, 2048))
    usual = CostModel(asked.model, cluster, asked.workload, asked.target)
    inside = usual.ordered(PIPELINE_INSIDE).over_stages(4)
    at, params, zero = keys(1, 4), np.array([30e6]), np.array([0])
    cells, levels, by = usual.cells(at), cluster.pools[0].levels, usual.multipliers[0]
    tails = [costs.tail(cells, zero, zero, params, 0 * params, 0 * params) for costs in (usual, inside)]
    for tail, stride in zip(tails, (1, 4), strict=True):
        zero1 = collective_s("all_reduce", levels, params * 4, 4, stride)
        assert tail.grad_reduce_s == pytest.approx(by.dp_comm * zero1)
    volume = 2 * asked.model.hidden_size * 2048.0
    sends = [costs.boundary_s(cells, zero, zero, zero, np.array([4]))[0] for costs in (usual, inside)]
    assert sends[0] == pytest.approx(by.pp_comm * p2p_s(levels, volume, 4, 4))
    assert sends[1] == pytest.approx(by.pp_comm * p2p_s(levels[:1], volume, 1, 1))
    assert sends[0] > 10 * sends[1]


def test_two_replicas_a_node_share_its_gradients():
    """8 GPUs a node, TP 2, PP 2: a node has two replicas, so a group of 8 has two members in each of 4 nodes."""
    cluster = nodes_of(8, 4)
    asked = request(small_model(8), cluster)
    usual = CostModel(asked.model, cluster, asked.workload, asked.target)
    inside = usual.ordered(PIPELINE_INSIDE).over_stages(2)
    at, params, zero = keys(2, 16), np.array([30e6]), np.array([0])
    tail = inside.tail(usual.cells(at), zero, zero, params, 0 * params, 0 * params)
    levels = (cluster.pools[0].levels[0].model_copy(update={"span": 4}), cluster.pools[0].levels[1])
    expected = collective_s("all_reduce", levels, params * 4, 8, 2)
    assert tail.grad_reduce_s == pytest.approx(usual.multipliers[0].dp_comm * expected)


def far_apart(gpus_per_node=2, **options):
    """A small model with many micro-batches on two nodes that 1 GB/s joins."""
    model, cluster = small_model(4, vocab=8000), nodes_of(gpus_per_node, 2, outer=1e9)
    return request(model, cluster, workload(512, 1024), **{"top": 1, **options})


def step_s(asked, found):
    return estimate(asked.model, asked.cluster, asked.workload, asked.target, found, asked.memory_headroom).step_time_s


def test_the_search_puts_the_pipeline_inside_a_node_where_that_wins():
    fixed = {"pp": 2, "tp": 1, "vpp": 1, "micro_batch_size": 4, "sharding": "zero1", "recompute": "none"}
    asked = far_apart(fix=fixed)
    best, usual = plan(asked), plan(far_apart(fix=fixed, forbid=("rank_order",)))
    assert best.plan.rank_order == PIPELINE_INSIDE
    assert usual.plan.rank_order == DATA_INSIDE
    assert [stage.groups[0].ranks for stage in best.plan.stages] == [("0", "2"), ("1", "3")]
    assert best.estimate.step_time_s < usual.estimate.step_time_s
    assert best.bound.step_time_s == pytest.approx(best.estimate.step_time_s)
    assert any(PIPELINE_INSIDE in words for words in best.bound.space)
    assert not any(PIPELINE_INSIDE in words for words in usual.bound.space)
    assert step_s(asked, best.plan) == best.estimate.step_time_s
    reason = next(each for each in best.explanation if each.kind == "placement")
    assert reason.data["usual_step_time_s"] == pytest.approx(usual.estimate.step_time_s)


@pytest.mark.parametrize("outer", [1e9, 20e9])
def test_no_order_of_the_same_degrees_is_quicker_than_the_best_plan(outer):
    """Both orders of every split of 4 layers over 2 stages of 2 GPUs, priced one by one."""
    fixed = {"pp": 2, "tp": 1, "vpp": 1, "micro_batch_size": 4, "sharding": "zero1", "recompute": "none"}
    model = small_model(4, vocab=8000)
    asked = request(model, nodes_of(2, 2, outer=outer), workload(64, 1024), top=1, fix=fixed)
    parts = asked.model, asked.cluster, asked.target
    skeleton = Skeleton(1, 1, 1, 1, 2, 1, 4, 8, RecomputeMode(), "zero1")
    times = [
        step_s(asked, build_plan(*parts, block_table(model, asked.workload, asked.target), Arrangement(2, (0,), (2,)),
                                 replace(skeleton, rank_order=order), np.array([0, cut, 6])))
        for order in asked.target.rank_orders
        for cut in (2, 3, 4)
    ]  # fmt: skip
    assert plan(asked).estimate.step_time_s == pytest.approx(min(times), rel=1e-12)


def test_an_export_says_the_order_and_is_read_back():
    found = plan(far_apart(4, fix={"rank_order": PIPELINE_INSIDE, "tp": 2, "pp": 2, "vpp": 1}))
    assert found.plan.rank_order == PIPELINE_INSIDE
    assert [stage.groups[0].ranks for stage in found.plan.stages] == [("0-1", "4-5"), ("2-3", "6-7")]
    assert not rules.violations(
        rules.facts_of_plan(found.plan, found.inputs.model, found.inputs.workload, found.inputs.target)
    )
    flags = [word for group in megatron_arguments(found).values() for flag in group for word in flag]
    assert "--use-tp-pp-dp-mapping" in flags
    back = plan_from_arguments(read_arguments(flags), found.inputs.model, found.inputs.cluster)
    assert back.rank_order == PIPELINE_INSIDE
    assert [stage.groups for stage in back.stages] == [stage.groups for stage in found.plan.stages]


def test_a_plan_in_use_is_told_what_its_order_is_worth():
    fixed = {"pp": 2, "tp": 1, "vpp": 1, "micro_batch_size": 4, "sharding": "zero1", "recompute": "none"}
    usual = plan(far_apart(fix=fixed, forbid=("rank_order",)))
    best = plan(far_apart(fix=fixed))
    found = {each.name: each for each in differences(usual.plan, best.plan)}
    assert (found["rank_order"].ours, found["rank_order"].theirs) == (DATA_INSIDE, PIPELINE_INSIDE)
    compared = with_current(far_apart(fix=fixed, current=usual.plan), best).current
    by_name = {each.name: each for each in compared.differences}
    gained_s = usual.estimate.step_time_s - best.estimate.step_time_s
    assert by_name["rank_order"].worth_s == pytest.approx(gained_s, rel=0.05)


def test_ranks_of_a_stage_that_the_order_does_not_give_are_refused():
    found = plan(far_apart(fix={"rank_order": PIPELINE_INSIDE, "tp": 1, "pp": 2, "vpp": 1})).plan
    other = found.model_copy(update={"rank_order": DATA_INSIDE})
    parts = small_model(4, vocab=8000), workload(512, 1024), far_apart().target
    assert "stage 0 must run on ranks 0-1" in str(rules.violations(rules.facts_of_plan(other, *parts)))
    swapped = found.model_copy(update={"stages": found.stages[::-1]})
    assert "from rank 0 on" in str(rules.violations(rules.facts_of_plan(swapped, *parts)))


def test_unequal_grids_keep_the_usual_order():
    """EP 4 over DP 4: a replica's experts lie on all stages' blocks, which Megatron refuses in the other order."""
    asked = request(small_model(4, experts=4, vocab=8000), nodes_of(4, 2, outer=1e9), workload(512, 1024), top=1)
    fixed = {"pp": 2, "tp": 1, "ep": 4, "etp": 1, "vpp": 1, "micro_batch_size": 4}
    assert plan(asked.model_copy(update={"fix": fixed})).plan.rank_order == DATA_INSIDE
    refused = plan(asked.model_copy(update={"fix": {**fixed, "rank_order": PIPELINE_INSIDE}}))
    assert refused.plan is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fix": {"rank_order": "pp-tp"}}, "has no rank_order 'pp-tp'"),
        ({"fix": {"rank_order": PIPELINE_INSIDE}, "forbid": ("rank_order",)}, "contradicts forbid"),
        ({"fix": {"rank_order": PIPELINE_INSIDE, "sharding": "fsdp"}}, "does not go with"),
    ],
)
def test_what_cannot_be_pinned_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        far_apart(**options)


def test_over_several_pools_the_usual_order_is_the_only_one():
    with pytest.raises(ValueError, match="several pools"):
        request(small_model(), "8xH100+8xA100-80GB", fix={"rank_order": PIPELINE_INSIDE})
