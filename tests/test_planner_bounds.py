"""Lower bounds stay below what plans take, whatever the order of pools and the memory."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.engine.explore import Search
from meshwright.planner.engine.splits import split_plain, split_virtual
from meshwright.planner.errors import IllegalPlan
from meshwright.planner.request import PlanRequest
from meshwright.planner.search import plan
from meshwright.planner.single import estimate_degrees
from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.model_io import load_model

from .planner_cases import request, small_model, workload


def two_kinds(dense_width: int, expert_width: int) -> ModelSpec:
    """Two dense layers, then three with experts, as far apart in memory and time as the widths make them."""
    attention = SoftmaxAttention(num_heads=8, num_kv_heads=4, head_dim=128)
    dense = DenseFFN(intermediate_size=1024 * dense_width)
    moe = MoEFFN(num_experts=4, top_k=2, expert_intermediate_size=1024 * expert_width)
    return ModelSpec(
        name="two-kinds",
        family="llama",
        hidden_size=1024,
        vocab_size=1000,
        kinds=(LayerKind(attention=attention, feed_forward=dense), LayerKind(attention=attention, feed_forward=moe)),
        pattern=(0, 0, 1, 1, 1),
        max_position_embeddings=65536,
    )


@pytest.mark.parametrize(
    "asked",
    [
        request(small_model(8), "1x1xH100-SXM+1x1xA100-SXM-80GB", workload(1, 4096)),
        request(small_model(8), "1x2xA100-SXM-80GB+1x4xT4", workload(8, 2048, precision="fp16")),
        request(small_model(9, experts=4), "8xH100", workload(32, 2048)),
        request(two_kinds(16, 1), "1x4xA100-SXM-80GB", workload(8, 4096)),
        request(small_model(6, vocab=250_000), "1x6xA100-SXM-80GB", workload(6, 1024)),
    ],
    ids=["slow-pool-first", "three-to-one", "moe", "two-kinds", "big-head"],
)
def test_the_first_bound_of_every_candidate_is_below_its_step_time(asked: PlanRequest) -> None:
    search = Search(asked)
    search.price_whole_pools()
    checked = 0
    for priced in search.result.priced:
        least = priced.least_step_s()
        for candidate in range(0, len(priced), max(1, len(priced) // 40)):
            one = np.array([candidate])
            if priced.batch.vpp[candidate] > 1:
                cuts = split_virtual(priced, one)
            else:
                cuts, _ = split_plain(priced, one, ignore_memory=True)
            step_s = priced.step_s(candidate, cuts)[0]
            assert least[candidate] <= step_s * (1 + 1e-9)
            assert priced.bound_s(one, priced.sums(one, cuts, np.array([0])))[0] <= step_s * (1 + 1e-9)
            checked += 1
    assert checked > 10


def test_more_recomputed_layers_are_tried_where_they_allow_a_better_split() -> None:
    """With dense layers of much memory and expert layers of much time, fewest recomputed layers need not be best."""
    free = request(two_kinds(16, 1), "1x2xA100-SXM-80GB", workload(8, 16384), fix={"pp": 2}, forbid=("vpp",))
    roomy = plan(free)
    assert roomy.estimate is not None
    need = max(stage.reserved_bytes / stage.limit_bytes for stage in roomy.estimate.stages)
    for share in np.linspace(0.9, 0.5, 9):
        asked = free.model_copy(update={"memory_headroom": round(1 - float(share) * need, 4)})
        answer = plan(asked)
        if answer.plan is None or answer.bound is None:
            continue
        for layers in range(1, 6):
            for size in (1, 2):
                try:
                    other = estimate_degrees(
                        asked, {"pp": 2, "micro_batch_size": size, "recompute": f"full:block:{layers}"}
                    )
                except IllegalPlan:
                    continue
                assert other.estimate is not None
                if other.estimate.fits:
                    assert other.estimate.step_time_s >= answer.bound.step_time_s * (1 - 1e-9)


def test_an_improved_interleaved_plan_is_not_slower_than_its_even_split() -> None:
    degrees = {"tp": 1, "pp": 4, "cp": 2, "vpp": 5, "micro_batch_size": 1}
    clusters = "4x8xH100-SXM+4x8xA100-SXM-80GB"
    asked = request(load_model("llama-2-13b"), clusters, workload(64, 4096), fix=degrees)
    answer, even = plan(asked), estimate_degrees(asked, degrees)
    assert answer.estimate is not None
    assert even.estimate is not None
    assert answer.estimate.step_time_s < even.estimate.step_time_s
