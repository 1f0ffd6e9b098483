"""The test of interleaved layouts against every split of random small candidates."""

from __future__ import annotations

import os

import numpy as np
import pytest

from meshwright.planner.engine import bounds as bounds_of_splits
from meshwright.planner.engine.bounds import SplitBounds
from meshwright.planner.engine.explore import Search
from meshwright.planner.engine.finalists import all_cuts
from meshwright.planner.engine.open_bound import OpenBound
from meshwright.planner.engine.pricing import PricedBatch
from meshwright.planner.engine.row_bounds import RowBounds
from meshwright.planner.request import PlanRequest
from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.targets import load_target

from .planner_cases import workload

#: Random spaces; ``MESHWRIGHT_SPACES`` asks for more.
SPACES = int(os.environ.get("MESHWRIGHT_SPACES", "24"))
#: Interleaved candidates of a space that are compared.
COMPARED = 4


def interleaved_request(seed: int) -> PlanRequest:
    """Four to eight layers on two to four stages: dense ones, ones with experts, or dense ones before experts."""
    rng = np.random.default_rng(seed)
    gpus = int(rng.choice([2, 2, 3, 4]))
    layers = int(rng.integers(2 * gpus, max(2 * gpus, 6) + 3))
    attention = SoftmaxAttention(num_heads=8, num_kv_heads=4, head_dim=128)
    dense = DenseFFN(intermediate_size=1024 * int(rng.choice([1, 4, 16])))
    moe = MoEFFN(num_experts=4, top_k=2, expert_intermediate_size=1024 * int(rng.choice([1, 4])))
    first = int(rng.choice([0, layers, rng.integers(1, layers)]))
    kinds = [LayerKind(attention=attention, feed_forward=dense), LayerKind(attention=attention, feed_forward=moe)]
    used = sorted({0} if first == layers else {1} if first == 0 else {0, 1})
    return PlanRequest(
        model=ModelSpec(
            name="random",
            family="llama",
            hidden_size=1024,
            vocab_size=int(rng.choice([1000, 128000])),
            kinds=tuple(kinds[k] for k in used),
            pattern=tuple(used.index(int(layer >= first)) for layer in range(layers)),
            max_position_embeddings=65536,
        ),
        cluster=load_cluster(f"1x{gpus}xA100-SXM-80GB"),
        workload=workload(gpus * int(rng.choice([1, 2, 4])), int(rng.choice([1024, 8192]))),
        target=load_target("megatron@0.19"),
        memory_headroom=float(rng.choice([0.05, 0.9, 0.95, 0.97])),
        fix={"sharding": "zero1", "cp": 1, "tp": 1, "pp": gpus, "micro_batch_size": 1},
        work_limit=100_000,
    )


def quickest(priced: PricedBatch, candidate: int, near_even: bool = False) -> dict[int, float]:
    """The least step time over all splits that fit, by the number of recomputed layers; ``near_even``: over those whose
    chunks of a stage differ by at most a layer."""
    stages = priced.arrangement.pp
    cuts = all_cuts(priced.counted, stages * int(priced.batch.vpp[candidate]))
    if near_even:
        lengths = np.diff(np.concatenate([[0.0], np.cumsum(priced.counted)])[cuts], axis=1)
        cuts = cuts[(np.ptp(lengths.reshape(len(cuts), -1, stages), axis=1) <= 1).all(axis=1)]
    index, out = np.full(len(cuts), candidate), {}
    for leading in range(int(priced.counted.sum()) if priced.is_block[candidate] else 1):
        fits = priced.fits(index, cuts, np.full(len(cuts), leading))
        if fits.any():
            out[leading] = float(priced.step_s(candidate, cuts[fits], leading).min())
    return out


@pytest.mark.parametrize("near_even", [False, True])
@pytest.mark.parametrize("seed", range(SPACES))
def test_a_layout_passes_at_the_step_time_of_the_quickest_split(
    seed: int, near_even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds_of_splits, "MOST_RARE", 6 * (seed % 4 < 2))  # kinds counted apart, or as if alike
    search = Search(interleaved_request(seed))
    search.price_whole_pools()
    rng, compared, refused = np.random.default_rng(seed), 0, 0
    for priced in search.result.priced:
        chosen = np.flatnonzero(priced.batch.vpp > 1)
        for candidate in rng.permutation(chosen)[:COMPARED].tolist():
            found = quickest(priced, candidate, near_even)
            bounds = SplitBounds(priced)
            for step_s in found.values():
                same = {leading for leading, value in found.items() if value == pytest.approx(step_s, rel=1e-12)}
                pairs = bounds.pairs(np.array([candidate]), np.array([step_s]))
                rows = RowBounds(priced, pairs, step_s, near_even)
                assert rows.able
                assert same & set(rows.pairs.leading[rows.passes(step_s)].tolist())
                refused += not rows.passes(0.5 * step_s).any()
                compared += 1
    assert refused > 0 or compared == 0


@pytest.mark.parametrize("seed", range(0, SPACES, 2))
def test_the_bound_of_open_candidates_is_below_their_quickest_split(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds_of_splits, "MOST_RARE", 6 * (seed % 4 < 2))  # kinds counted apart, or as if alike
    search = Search(interleaved_request(seed))
    search.price_whole_pools()
    rng, least_s, chosen = np.random.default_rng(seed), np.inf, []
    for priced in search.result.priced:
        index = np.sort(rng.permutation(np.flatnonzero(priced.batch.vpp > 1))[:COMPARED])
        least_s = min([least_s, *(step_s for one in index.tolist() for step_s in quickest(priced, one).values())])
        chosen.append((SplitBounds(priced), index))
    if least_s == np.inf:
        return
    limit_s = 1.3 * least_s
    pairs = [(bounds, bounds.pairs(index, np.full(len(index), limit_s))) for bounds, index in chosen]
    bound_s = OpenBound(pairs, limit_s).bound_s()
    assert 0.5 * least_s < bound_s <= least_s * (1 + 1e-9)
