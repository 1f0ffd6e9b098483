"""Bounds and answers against every split of every candidate: chunks of any length, any number of recomputed layers."""

from __future__ import annotations

import os

import numpy as np
import pytest

from meshwright.planner.engine import bounds as bounds_of_splits
from meshwright.planner.engine.bounds import SplitBounds
from meshwright.planner.engine.explore import Search
from meshwright.planner.engine.finalists import all_cuts
from meshwright.planner.engine.pricing import PricedBatch
from meshwright.planner.request import PlanRequest
from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.targets import load_target

from .planner_cases import workload

#: Random spaces; ``MESHWRIGHT_SPACES`` asks for more.
SPACES = int(os.environ.get("MESHWRIGHT_SPACES", "24"))
CLUSTERS = ("1x2xA100-SXM-80GB", "1x4xH100-SXM", "1x3xA100-SXM-80GB", "2x2xH100-SXM")


def random_request(seed: int) -> PlanRequest:
    """A small model of one or two kinds of layers on two to four GPUs, memory tight in half of the cases."""
    rng = np.random.default_rng(seed)
    hidden, layers = int(rng.choice([512, 1024])), int(rng.integers(3, 6))
    attention = SoftmaxAttention(num_heads=8, num_kv_heads=4, head_dim=hidden // 8)
    dense = DenseFFN(intermediate_size=hidden * int(rng.choice([2, 4, 16])))
    moe = MoEFFN(num_experts=4, top_k=2, expert_intermediate_size=hidden * int(rng.choice([1, 2])))
    kinds = {
        "dense": (LayerKind(attention=attention, feed_forward=dense),),
        "moe": (LayerKind(attention=attention, feed_forward=moe),),
        "both": (
            LayerKind(attention=attention, feed_forward=dense),
            LayerKind(attention=attention, feed_forward=moe),
        ),
    }[str(rng.choice(["dense", "moe", "both"]))]
    model = (
        ModelSpec(
            name="random",
            family="llama",
            hidden_size=hidden,
            vocab_size=int(rng.choice([1000, 32000, 128000])),
            kinds=kinds,
            pattern=tuple(sorted(int(rng.integers(0, len(kinds))) for _ in range(layers))),
            max_position_embeddings=65536,
        )
        if len(kinds) == 1
        else ModelSpec(
            name="random",
            family="llama",
            hidden_size=hidden,
            vocab_size=int(rng.choice([1000, 32000, 128000])),
            kinds=kinds,
            pattern=(0,) * int(rng.integers(1, layers)) + (1,) * (layers - 1),
            max_position_embeddings=65536,
        )
    )
    return PlanRequest(
        model=model,
        cluster=load_cluster(str(rng.choice(CLUSTERS))),
        workload=workload(int(rng.choice([4, 6])), int(rng.choice([1024, 4096])), precision="bf16"),
        target=load_target("megatron@0.19"),
        memory_headroom=float(rng.choice([0.05, 0.9, 0.95, 0.97, 0.98])),
        fix={"sharding": "zero1", "cp": 1},
        work_limit=100_000,
    )


def best_of_every_split(priced: PricedBatch, candidate: int) -> dict[int, float]:
    """The least step time of a candidate over all splits that fit, by the number of recomputed layers."""
    layers = int(priced.counted.sum())
    cuts = all_cuts(priced.counted, priced.arrangement.pp * int(priced.batch.vpp[candidate]))
    index, out = np.full(len(cuts), candidate), {}
    for leading in range(layers + 1 if priced.is_block[candidate] else 1):
        fits = priced.fits(index, cuts, np.full(len(cuts), leading))
        if fits.any():
            out[leading] = float(priced.step_s(candidate, cuts[fits], leading).min())
    return out


# In the last one recomputation is cheaper on the layers that are added to a stage.
@pytest.mark.parametrize("seed", sorted({*range(SPACES), 57}))
def test_no_split_is_quicker_than_the_bounds_and_the_answer_is_the_quickest(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_of_splits, "MOST_RARE", 6 * (seed % 4 < 2))  # kinds counted apart, or as if alike
    search = Search(random_request(seed))
    result = search.run()
    rng, least_s = np.random.default_rng(seed), np.inf
    for priced in result.priced:
        first, bounds = priced.least_step_s(), SplitBounds(priced)
        fill = priced.least_fill()
        for candidate in range(len(priced)):
            found = best_of_every_split(priced, candidate)
            if not found:
                continue
            step_s = min(found.values())
            least_s = min(least_s, step_s)
            assert fill[candidate] <= 1
            assert first[candidate] <= step_s * (1 + 1e-9)
            if rng.random() < 0.3:
                pairs = bounds.pairs(np.array([candidate]), np.array([step_s]))
                quickest = {leading for leading, value in found.items() if value <= step_s * (1 + 1e-9)}
                assert quickest & set(pairs.leading.tolist())
    if result.best is None:
        assert least_s == np.inf
        return
    assert result.bound_s <= least_s * (1 + 1e-9)
    assert result.best.step_time_s == pytest.approx(least_s, rel=1e-9)
