"""Options beyond those of every candidate: priced right, found where they win, left out where they may not be."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import collective_s
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.offload import C2C, HOST_MEMORY_BANDWIDTH, PCIE5
from meshwright.planner import rules
from meshwright.planner.engine.host_memory import OffloadedOptimizer, may_offload_activations
from meshwright.planner.engine.widen import BOTH_SPACE, OFFLOAD_FRACTIONS, searched
from meshwright.planner.search import plan
from meshwright.specs.batch import CellKeys
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import Hsdp, HsdpSharding

from .planner_cases import request, small_model, workload

WAVES = ("fsdp", "zero2", "hsdp", "dist_opt_instances", "offload", "cp_comm_type")


def costs_of(asked, *names):
    target = asked.target.model_copy(update={"sharding": names})
    return CostModel(asked.model, asked.cluster, asked.workload, target)


def keys(sharding, ranks=16):
    return CellKeys(*(np.array([value]) for value in (1, 1, 1, 1, ranks, 1, 0, sharding, 1)))


def priced(asked, found):
    return estimate(asked.model, asked.cluster, asked.workload, asked.target, found, asked.memory_headroom)


def illegal(asked, found):
    return rules.violations(rules.facts_of_plan(found, asked.model, asked.workload, asked.target))


def with_options(found, **options):
    return found.model_copy(update={"options": found.options.model_copy(update=options)})


def test_instances_of_the_optimizer_scatter_inside_and_reduce_the_shards_across():
    """16 ranks in 2 instances: of P parameters, fp32 gradients are scattered over 8 neighbours, P / 8 of them are then
    added up over 2 instances, and bf16 parameters are gathered over the 8; nothing hides under no backward."""
    asked = request(small_model(), "2x8xH100")
    costs = costs_of(asked, "zero1", "zero1:2")
    params, zero = np.array([30e6]), np.array([0])
    tail = costs.tail(costs.cells(keys(1)), zero, zero, params, 0 * params, 0 * params)
    levels, factor = asked.cluster.pools[0].levels, costs.multipliers[0].dp_comm
    scatter = collective_s("reduce_scatter", levels, params * 4, 8, 1)
    across = collective_s("all_reduce", levels, params * 4 / 8, 2, 8)
    assert tail.grad_reduce_s == pytest.approx(factor * (scatter + across))
    assert tail.param_gather_s == pytest.approx(factor * collective_s("all_gather", levels, params * 2, 8, 1))
    one = costs.tail(costs.cells(keys(0)), zero, zero, params, 0 * params, 0 * params)
    assert one.param_gather_s > tail.param_gather_s
    assert costs.cells(keys(1)).static_bytes.sum() > costs.cells(keys(0)).static_bytes.sum()


def test_hybrid_sharding_gathers_inside_a_node_and_adds_up_replicas_once():
    asked = request(small_model(), "2x8xH100")
    costs = costs_of(asked, "fsdp", "hsdp:2", "hsdp:16")
    inside = [costs.cells(keys(k)).forward_terms_s[..., -1].sum() for k in range(3)]
    assert inside[0] > inside[1] > inside[2] == 0.0  # over the wire, over NVLink, not at all
    params, zero = np.array([30e6]), np.array([0])
    tails = [costs.tail(costs.cells(keys(k)), zero, zero, params, 0 * params, 0 * params) for k in range(3)]
    assert tails[0].grad_reduce_s == 0.0
    levels, factor = asked.cluster.pools[0].levels, costs.multipliers[0].dp_comm
    for tail, replicas in ((tails[1], 2), (tails[2], 16)):
        shard = 16 // replicas
        across = collective_s("all_reduce", levels, params * 4 / shard, replicas, shard)
        assert tail.grad_reduce_s == pytest.approx(factor * across)
        assert tail.param_gather_s == 0.0


def test_the_host_updates_its_share_beside_its_transfers():
    """25 % of 1e9 parameters over 16 ranks: 28 bytes of each pass the host's memory, 4 the link; memory is slower."""
    asked = request(small_model(), "2x8xH100")
    costs = costs_of(asked, "zero1")
    lighter = OffloadedOptimizer(costs, 0.25)
    params, zero = np.array([1e9]), np.array([0])
    cells = lighter.cells(keys(0))
    assert cells.static_bytes_by[..., 2] == pytest.approx(0.75 * costs.cells(keys(0)).static_bytes_by[..., 2])
    host = 0.25 * 1e9 / 16 * max(28 / HOST_MEMORY_BANDWIDTH, 4 / PCIE5)
    tail = lighter.tail(cells, zero, zero, params, 0 * params, 0 * params)
    device = CostModel(asked.model, asked.cluster, asked.workload, costs.target, host_optimizer=0.25)
    rest = device.tail(cells, zero, zero, params, 0 * params, 0 * params)
    assert tail.optimizer_s == pytest.approx(rest.optimizer_s + host)
    assert C2C > PCIE5


def tight(asked, share):
    """The request with the headroom at which ``share`` of what its best plan takes is left, every option allowed."""
    figures = plan(asked.model_copy(update={"forbid": (*asked.forbid, *WAVES)})).estimate
    need = max(stage.reserved_bytes / stage.limit_bytes for stage in figures.stages)
    return asked.model_copy(update={"memory_headroom": 1 - share * need, "allow": ("all_options",)})


def test_activations_go_to_the_host_where_nothing_fits_otherwise_as_few_layers_as_do():
    one = request(small_model(layers=6), "1x1xH100", workload(4, 4096), forbid=("recompute", "fsdp"))
    asked = tight(one.model_copy(update={"fix": {"mbs": 2}}), 0.97)
    assert plan(asked.model_copy(update={"forbid": (*asked.forbid, "offload")})).status == "infeasible"
    answer = plan(asked)
    found = answer.plan
    layers, away = found.options.activation_offload_layers, found.options.optimizer_offload_fraction
    assert layers + away > 0
    assert answer.estimate.fits
    assert not illegal(asked, found)
    whole = with_options(found, activation_offload_layers=0, optimizer_offload_fraction=0.0)
    steps = []
    for count in range(1, 6):
        other = priced(asked, with_options(whole, activation_offload_layers=count))
        steps += [other.step_time_s] if other.fits else []
    for fraction in OFFLOAD_FRACTIONS:
        options = {"optimizer_offload_fraction": fraction, "optimizer_offload_overlap": True}
        other = priced(asked, with_options(whole, **options))
        steps += [other.step_time_s] if other.fits else []
    assert answer.estimate.step_time_s == pytest.approx(min(steps), rel=1e-9)


def test_a_small_host_takes_no_optimizer():
    fix, forbid = {"pp": 2, "vpp": 1, "mbs": 1}, ("fsdp", "zero2", "recompute")
    asked = tight(request(small_model(layers=6), "1x2xH100", workload(4, 1024), fix=fix, forbid=forbid), 0.8)
    answer = plan(asked)
    assert answer.plan.options.optimizer_offload_fraction > 0
    pool = asked.cluster.pools[0].model_copy(update={"host_memory_bytes": 1_000_000})
    cramped = asked.model_copy(update={"cluster": asked.cluster.model_copy(update={"pools": (pool,)})})
    without = plan(cramped)
    assert without.plan is None or without.plan.options.optimizer_offload_fraction == 0


@pytest.mark.parametrize("network", ["2x8xH100", "1x8xH100"])
def test_the_exchange_of_context_parallelism_is_the_quickest_legal_one(network):
    asked = request(
        small_model(layers=4, heads=16),
        network,
        workload(2, 16384),
        fix={"cp": 8, "tp": 1, "pp": 1, "vpp": 1},
        forbid=("offload", "fsdp", "zero2", "dist_opt_instances"),
    )
    answer = plan(asked)
    steps = {}
    for kind, inner in (("p2p", None), ("a2a", None), ("allgather", None), ("a2a+p2p", 2), ("a2a+p2p", 4)):
        other = with_options(answer.plan, cp_comm_type=kind, cp_a2a_size=inner)
        if not illegal(asked, other):
            steps[kind, inner] = priced(asked, other).step_time_s
    assert len(steps) > 2
    assert answer.estimate.step_time_s == pytest.approx(min(steps.values()), rel=1e-9)
    kept = plan(asked.model_copy(update={"forbid": (*asked.forbid, "cp_comm_type")}))
    assert kept.plan.options.cp_comm_type == "p2p"
    assert kept.estimate.step_time_s >= answer.estimate.step_time_s


def test_shardings_and_exchanges_are_tried_together():
    """8 ranks of one stage, CP 2 x DP 4 on two nodes: the best of every sharding under every exchange."""
    asked = request(
        small_model(layers=4, heads=16),
        "4x2xH100",
        workload(4, 16384),
        fix={"cp": 2, "tp": 1, "pp": 1, "vpp": 1, "mbs": 1},
        forbid=("offload", "recompute"),
        allow=("all_options",),
    )
    answer = plan(asked)
    steps = {}
    levels = ("zero1", "zero2", "fsdp", Hsdp(hsdp=HsdpSharding(replicate=4, shard=2)))
    for level, exchange, copies in product(levels, ("p2p", "a2a", "allgather"), (1, 4)):
        stages = tuple(stage.model_copy(update={"sharding": level}) for stage in answer.plan.stages)
        other = answer.plan.model_copy(update={"sharding": level, "stages": stages})
        other = with_options(other, cp_comm_type=exchange, cp_a2a_size=None, dist_opt_instances=copies)
        if (copies == 1 or level == "zero1") and not illegal(asked, other):
            steps[str(level), exchange, copies] = priced(asked, other).step_time_s
    assert len(steps) > 8
    assert answer.estimate.step_time_s == pytest.approx(min(steps.values()), rel=1e-9)
    assert BOTH_SPACE in answer.bound.space


def test_exchange_runs_beside_the_shared_expert_where_there_is_one():
    shared, none = load_model("deepseek-v2-lite"), load_model("qwen3-30b-a3b")
    asked = request(shared, "8xH100", workload(32, 4096), fix={"ep": 8, "pp": 1}, forbid=WAVES)
    answer = plan(asked)
    assert answer.plan.options.moe_shared_expert_overlap
    apart = with_options(answer.plan, moe_shared_expert_overlap=False)
    assert priced(asked, apart).step_time_s > answer.estimate.step_time_s
    without = plan(asked.model_copy(update={"forbid": (*WAVES, "moe_shared_expert_overlap")}))
    assert not without.plan.options.moe_shared_expert_overlap
    other = plan(request(none, "8xH100", workload(32, 4096), fix={"ep": 8, "pp": 1}, forbid=WAVES))
    assert not other.plan.options.moe_shared_expert_overlap


def test_forbidden_features_stay_out_and_never_help():
    asked = tight(request(small_model(layers=4), "2x2xH100", workload(8, 2048)), 0.8)
    free = searched(asked).result
    bare = searched(asked.model_copy(update={"forbid": WAVES})).result
    assert free.best.step_time_s <= bare.best.step_time_s if bare.best else True
    assert free.bound_s <= free.best.step_time_s
    assert not any(each.options or getattr(each.batch.costs, "plan_options", {}) for each in bare.finalists)


def test_wider_plans_of_a_mixed_cluster_are_legal_and_priced_alike():
    asked = tight(
        request(small_model(layers=5), "1x2xA100-80GB+1x2xV100-32GB", workload(4, 1024, precision="fp16")), 0.6
    )
    answer = plan(asked)
    if answer.plan is not None:
        assert not illegal(asked, answer.plan)
        assert answer.estimate.fits
        assert answer.bound.step_time_s <= answer.estimate.step_time_s


def test_the_optimizer_stays_where_megatron_refuses_to_move_it():
    fix, forbid = {"pp": 2, "vpp": 1, "mbs": 1}, ("fsdp", "zero2", "recompute")
    small = workload(4, 1024, precision="fp8", params_dtype="fp8")
    asked = tight(request(small_model(layers=6), "1x2xH100", small, fix=fix, forbid=forbid), 0.8)
    answer = plan(asked)
    assert answer.plan is None or not answer.plan.options.optimizer_offload_fraction
    momentum = request(small_model(layers=6), "1x2xH100", workload(4, 1024, optimizer="sgd"), fix=fix, forbid=forbid)
    assert plan(tight(momentum, 0.8)).plan is None


@pytest.mark.parametrize("cluster", ["1x2xH100", "1x1xH100+1x1xA100-80GB"])
def test_a_pinned_sharding_runs_with_stages(cluster):
    for level in ("none", "zero1"):
        answer = plan(request(small_model(), cluster, fix={"pp": 2, "sharding": level}))
        assert answer.plan is not None
        assert (answer.plan.pp, answer.plan.sharding) == (2, level)


def test_activations_cross_pcie_only_where_allowed():
    fits = request(small_model(), "1x2xH100")
    allowed = fits.model_copy(update={"allow": ("activation_offload",)})
    linked = request(small_model(), "1x2xGB200-NVL72")
    forbidden = linked.model_copy(update={"forbid": ("offload",)})
    assert not may_offload_activations(fits)
    assert may_offload_activations(allowed)
    assert may_offload_activations(linked)
    assert not may_offload_activations(forbidden)
