"""The search against every plan of a small space, each assembled and priced as a whole plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from meshwright.cost_models.blocks import block_table
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.rank_order import PIPELINE_INSIDE
from meshwright.planner import rules
from meshwright.planner.answer.assemble import Skeleton, build_plan
from meshwright.planner.engine.arrangements import Arrangement
from meshwright.planner.engine.partition import split_chunks
from meshwright.planner.engine.pricing import PricedBatch
from meshwright.planner.engine.space import VIRTUAL_STAGES, block_mode
from meshwright.planner.engine.widen import OFFLOAD_FRACTIONS
from meshwright.planner.search import plan
from meshwright.specs.batch import CandidateBatch
from meshwright.specs.cluster import ClusterSpec, NetworkLevel, Pool
from meshwright.specs.target import RecomputeMode

from .cost_cases import H100
from .planner_cases import request, small_model, workload


def divisors(number):
    return [value for value in range(1, number + 1) if number % value == 0]


def placements(cluster):
    """(stage ranks, pools, stages): whole pools in every order, equal stages of one pool each."""
    pools = cluster.pools
    orders = [(0,)] if len(pools) == 1 else [(0,), (1,), (0, 1), (1, 0)]
    for order in orders:
        for ranks in range(1, max(pools[i].num_gpus for i in order) + 1):
            if all(pools[i].num_gpus % ranks == 0 for i in order):
                yield Arrangement(ranks, order, tuple(pools[i].num_gpus // ranks for i in order))


def recompute_modes(asked, layers):
    useful = [m for m in asked.target.recompute if m.granularity != "selective"]
    if not asked.model.is_moe:
        useful += [
            m
            for m in asked.target.recompute
            if m.granularity == "selective" and not {"moe", "moe_act", "mla_up_proj", "shared_experts"} & set(m.modules)
        ]
    else:
        useful += [
            m
            for m in asked.target.recompute
            if m.granularity == "selective" and not {"mlp", "mla_up_proj", "shared_experts"} & set(m.modules)
        ]
    return useful + [
        RecomputeMode(granularity="full", method="block", num_layers=count) for count in range(1, layers + 1)
    ]


def every_plan(asked, blocks):
    model, batch = asked.model, asked.workload.global_batch_size
    size, layers = len(blocks.instances), model.num_layers
    experts = divisors(model.moe.num_experts) if model.moe else [1]
    pools = asked.cluster.pools
    two_orders = len(pools) == 1 and len(pools[0].levels) > 1
    for where in placements(asked.cluster):
        ranks, pp = where.stage_ranks, where.pp
        if pp > layers:
            continue
        for tp in divisors(ranks):
            dp = ranks // tp
            if batch % dp:
                continue
            etps = divisors(ranks) if model.moe else [tp]
            grids = [(ep, etp) for ep in experts for etp in etps if ranks % (ep * etp) == 0]
            for ep, etp in grids:
                for mbs in divisors(batch // dp):
                    if mbs > 16:
                        continue
                    for mode in recompute_modes(asked, layers):
                        for sharding in [level for level in ("zero1", "zero2", "fsdp") if level not in asked.forbid]:
                            for vpp in [v for v in VIRTUAL_STAGES if v == 1 or (pp > 1 and pp * v <= layers)]:
                                skeleton = Skeleton(
                                    tp=tp,
                                    cp=1,
                                    ep=ep,
                                    etp=etp,
                                    dp=dp,
                                    vpp=vpp,
                                    micro_batch_size=mbs,
                                    num_microbatches=batch // dp // mbs,
                                    recompute=mode,
                                    sharding=sharding,
                                )
                                yield where, skeleton, size
                                if two_orders and sharding == "zero1" and pp > 1 and dp > 1:
                                    yield where, replace(skeleton, rank_order=PIPELINE_INSIDE), size


def layer_cuts(size, pp):
    """Every split of [embed, decoder..., head] with a decoder layer in each stage."""
    for inner in combinations(range(2, size - 1), pp - 1):
        yield (0, *inner, size)


def brute_force(asked, offload=0.0):
    """The least step time of all legal plans that fit by degrees and pools, and how many plans were tried."""
    blocks = block_table(asked.model, asked.workload, asked.target)
    best, count = {}, 0
    parts = (asked.model, asked.cluster, asked.workload, asked.target)
    costs = CostModel(*parts)
    for where, skeleton, size in every_plan(asked, blocks):
        cuts = layer_cuts(size, where.pp) if skeleton.vpp == 1 else [virtual_cuts(costs, asked, where, skeleton)]
        for cut in cuts:
            more = {}
            if skeleton.sharding == "zero1" and offload:
                more = {"optimizer_offload_fraction": offload, "optimizer_offload_overlap": True}
            parts_of = asked.model, asked.cluster, asked.target, blocks, where, skeleton, np.array(cut)
            candidate = build_plan(*parts_of, more)
            if rules.violations(rules.facts_of_plan(candidate, asked.model, asked.workload, asked.target)):
                break
            count += 1
            priced = estimate(*parts, candidate, asked.memory_headroom)
            if priced.fits:
                key = degrees_of(candidate)
                best[key] = min(best.get(key, np.inf), priced.step_time_s)
    return best, count


def degrees_of(candidate):
    pools = tuple(stage.groups[0].pool for stage in candidate.stages)
    return (candidate.tp, candidate.pp, candidate.cp, candidate.ep, candidate.etp, candidate.dp, pools)


def virtual_cuts(costs, asked, where, skeleton):
    """The space's one split of an interleaved candidate: near-equal chunk times, whatever is recomputed."""
    mode = skeleton.recompute
    whole = mode.granularity != "selective"
    columns = {name: getattr(skeleton, name) for name in ("tp", "cp", "ep", "etp", "dp", "vpp")}
    columns |= {
        "pp": where.pp,
        "micro_batch_size": skeleton.micro_batch_size,
        "num_microbatches": skeleton.num_microbatches,
        "recompute": block_mode(asked.target) if whole else asked.target.recompute.index(mode),
        "sharding": asked.target.sharding.index(skeleton.sharding),
    }
    one = CandidateBatch(**{name: np.array([value]) for name, value in columns.items()})
    priced = PricedBatch(costs, one, where, asked.target, 0.0)
    return split_chunks(priced.busy_s(np.array([0])), skeleton.vpp, priced.counted)[0]


#: Two nodes over 1 GB/s, where a pipeline inside a node wins.
SLOW = ClusterSpec(
    name="slow",
    gpus={H100.name: H100},
    pools=(
        Pool(
            name="pool",
            gpu=H100.name,
            nodes=2,
            gpus_per_node=2,
            levels=(
                NetworkLevel(name="nvlink", kind="nvlink", span=2, bandwidth_bytes_per_s=400e9, latency_s=1e-6),
                NetworkLevel(name="lan", kind="ethernet", span=4, bandwidth_bytes_per_s=1e9, latency_s=2e-5),
            ),
        ),
    ),
)


@pytest.mark.parametrize(
    ("model", "cluster", "work"),
    [
        (small_model(layers=4), "1x2xA100-SXM-80GB", workload(batch=4, seq=1024)),
        (small_model(layers=3, vocab=128000), "1x3xA100-SXM-80GB", workload(batch=6, seq=1024)),
        (small_model(layers=3, experts=4), "1x2xH100-SXM", workload(batch=4, seq=1024)),
        (small_model(layers=5), "1x2xA100-SXM-80GB+1x2xV100-SXM2-32GB", workload(batch=4, seq=1024, precision="fp16")),
    ],
    ids=["dense", "big-vocabulary", "moe", "mixed"],
)
def test_the_search_finds_the_best_of_all_plans(model, cluster, work):
    fewer = (
        ("fsdp", "zero2") if cluster is SLOW or "+" in cluster else ()
    )  # where the space is large enough without them
    asked = request(model, cluster, work, forbid=fewer)
    by_degrees, count = brute_force(asked)
    expected = min(by_degrees.values())
    answer = plan(asked)
    assert count > 20
    assert answer.estimate is not None
    # An interleaved winner is improved beyond the one split that the space holds for it.
    assert answer.estimate.step_time_s <= expected * (1 + 1e-9)
    if answer.plan.vpp == 1:
        assert answer.estimate.step_time_s == pytest.approx(expected, rel=1e-9)
    assert answer.bound is not None
    assert answer.bound.step_time_s <= expected * (1 + 1e-12)
    # The plans beside the best are the next best degrees; only the best is looked at under every split.
    ranked = sorted(by_degrees.values())[1 : asked.top]
    assert len(answer.alternatives) == len(ranked)
    for other, least in zip(answer.alternatives, ranked, strict=True):
        assert by_degrees[degrees_of(other.plan)] <= other.step_time_s * (1 + 1e-9)
        assert other.step_time_s == pytest.approx(least, rel=0.01)


def test_the_pipeline_goes_inside_a_node_where_the_best_of_all_plans_has_it_there():
    model = small_model(layers=2, hidden=512, vocab=2000)
    asked = request(model, SLOW, workload(batch=16, seq=4096), forbid=("fsdp", "zero2"), max={"tp": 1})
    by_degrees, _ = brute_force(asked)
    answer = plan(asked)
    assert answer.plan.rank_order == PIPELINE_INSIDE
    least_s = min(step_s for degrees, step_s in by_degrees.items() if degrees[0] == 1)
    assert answer.estimate.step_time_s == pytest.approx(least_s, rel=1e-9)
    assert answer.bound.gap == 0.0


def test_a_tight_memory_limit_changes_the_winner_and_is_met():
    """Memory squeezed until the fastest plan no longer fits: the answer is the best of those that do."""
    free = request(small_model(layers=2), "1x2xA100-SXM-80GB", workload(batch=4, seq=1024), allow=("all_options",))
    roomy = plan(free)
    assert roomy.estimate is not None
    need = max(stage.reserved_bytes / stage.limit_bytes for stage in roomy.estimate.stages)
    asked = free.model_copy(update={"memory_headroom": 1 - 0.9 * need})
    by_degrees, _ = brute_force(asked)
    for fraction in OFFLOAD_FRACTIONS:
        for key, step_s in brute_force(asked, fraction)[0].items():
            by_degrees[key] = min(by_degrees.get(key, np.inf), step_s)
    answer = plan(asked)
    if not by_degrees:
        assert answer.status == "infeasible"
        return
    expected = min(by_degrees.values())
    assert answer.estimate is not None
    assert answer.estimate.step_time_s == pytest.approx(expected, rel=1e-9)
    assert answer.estimate.step_time_s >= roomy.estimate.step_time_s
    assert all(s.reserved_bytes <= s.limit_bytes * (1 - asked.memory_headroom) for s in answer.estimate.stages)


def test_cuts_of_the_brute_force_hold_a_layer_a_stage():
    for cuts in layer_cuts(6, 3):
        assert all(b - a >= 1 for a, b in pairwise(cuts))
