"""Activation peaks from the order of events: counted by hand, against the timeline, and AMD's measured order."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.cost_models import schedules
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.estimate import estimate
from meshwright.specs.estimate import Estimate
from meshwright.specs.schedules import ScheduleName

from .cost_cases import cluster, dense, keys, plan, target, workload
from .schedule_cases import BW, B, Case, F, W, cases, scheduled


def test_zb_h1_on_two_stages_counted_by_hand() -> None:
    """Stage 0 runs F0 F1 B0 W0 B1 W1, most after F1: two whole activations. Stage 1 runs F0 B0 F1 B1 W0 W1, most after
    F1: one whole and one stash."""
    schedule = schedules.get("zb-h1")
    assert schedule.orders(2, 1, 2) == (
        ((F, 0, 0), (F, 0, 1), (B, 0, 0), (W, 0, 0), (B, 0, 1), (W, 0, 1)),
        ((F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1), (W, 0, 0), (W, 0, 1)),
    )
    kept, stash = np.full((2, 1), 10.0), np.full((2, 1), 7.0)
    assert schedules.activation_peak_bytes(schedule, kept, stash, 2).tolist() == [20.0, 17.0]


@pytest.mark.parametrize(
    ("name", "vpp", "held"),
    [
        ("1f1b", 1, [4, 3, 2, 1]),
        ("gpipe", 1, [12, 12, 12, 12]),
        ("zb-h1", 1, [4, 3, 2, 1]),
        ("looped-bfs", 2, [24, 24, 24, 24]),
        ("dualpipe", 2, [5, 5, 5, 5]),
        ("zb-v", 2, [8, 8, 8, 8]),
        ("dualpipe-v", 2, [9, 9, 9, 9]),
    ],
)
def test_chunks_in_flight_are_those_of_the_papers(name: str, vpp: int, held: list[int]) -> None:
    """p - i under 1F1B and ZB-H1; p + 1 under DualPipe, 2p + 1 folded; all under GPipe; 2p under ZB-V."""
    counts = schedules.get(name).in_flight(4, vpp, 12)
    assert counts.shape == (4, vpp)
    assert counts.sum(axis=1).tolist() == held


@pytest.mark.parametrize("pp", [4, 6, 8, 12, 16])
def test_v_half_and_v_min_hold_about_a_half_and_a_third(pp: int) -> None:
    """Of 2p chunk passes that 1F1B's first stage and ZB-V hold, weight gradients not yet done included."""
    ones = np.ones((pp, 2))
    half, least = (
        schedules.activation_peak_bytes(schedules.get(name), ones, ones, 3 * pp) for name in ("v-half", "v-min")
    )
    assert half.max() <= pp + 2
    assert least.max() <= np.ceil(2 * pp / 3) + 2
    assert schedules.activation_peak_bytes(schedules.get("zb-v"), ones, ones, 3 * pp).max() == 2 * pp


@settings(max_examples=80, deadline=None)
@given(cases())
def test_the_peak_is_that_of_the_timeline(case: Case) -> None:
    """Add and take bytes along the events of every stage."""
    schedule = schedules.get(case.name)
    rng = np.random.default_rng(case.m)
    kept, stash = rng.integers(1, 100, size=(2, case.pp, case.vpp)).astype(float)
    line = schedule.simulate(
        case.forward + 0.25, case.backward + 0.5, case.send, case.m, keep_events=True, weight_s=case.weight + 0.25
    )
    now: dict[int, float] = defaultdict(float)
    peak: dict[int, float] = defaultdict(float)
    for event in sorted(line.events, key=lambda event: event.start_s):
        k, s = kept[event.stage, event.chunk], stash[event.stage, event.chunk]
        now[event.stage] += {F: k, BW: -k, B: s - k, W: -s}[event.kind]
        peak[event.stage] = max(peak[event.stage], now[event.stage])
    assert all(abs(left) < 1e-9 for left in now.values())
    found = schedules.activation_peak_bytes(schedule, kept, stash, case.m)
    assert found.tolist() == pytest.approx([peak[stage] for stage in range(case.pp)])


def test_weight_gradients_wait_for_all_that_a_layer_kept_but_the_softmax_statistics() -> None:
    """Inputs and output gradients of the four GEMMs of a dense layer in bf16: 8h + 4ad + 4gd + 6f bytes a token."""
    hidden, heads, groups, ffn, tokens = 4096, 32, 8, 14336, 4096
    model = dense(2, hidden, heads, groups, ffn, 32000)
    costs = CostModel(model, cluster(1), workload(8), target())
    cells = costs.cells(keys((1, 1, 1, 1, 8, 1, 0, 1), (2, 1, 1, 1, 8, 1, 0, 1)))
    layer = 1  # embedding, decoder layer, head
    width = hidden // heads
    per_token = 8 * hidden + 4 * heads * width + 4 * groups * width + 6 * ffn
    assert cells.weight_stash_bytes[0, layer] == tokens * per_token
    assert cells.weight_stash_bytes[1, layer] == tokens * per_token / 2
    assert cells.activation_bytes[0, layer] - cells.weight_stash_bytes[0, layer] == 4 * heads * tokens
    head = len(costs.blocks.kinds) - 1
    assert cells.weight_stash_bytes[0, head] == 2 * tokens * (hidden + 32000)
    assert cells.weight_stash_bytes[0, 0] == 0  # a look-up has no product


#: Llama2-7B on eight MI300X, one stage each, bf16: tokens/s/GPU and peak GB as AMD measured them (AMD-AGI/Primus,
#: docs_deprecated/tech_blogs/primus_pipeline/primus_pipeline.md). Micro-batches are not stated: 64 here.
AMD: dict[ScheduleName, tuple[int, int, float]] = {
    "1f1b": (1, 10057, 16.3),
    "interleaved": (2, 10974, 21.4),
    "zb-v": (2, 11347, 18.1),
    "v-half": (2, 10894, 14.1),
    "v-min": (2, 8897, 11.9),
}


@pytest.fixture(scope="module")
def amd() -> dict[ScheduleName, Estimate]:
    model = dense(32, 4096, 32, 32, 11008, 32000)
    return {
        name: estimate(model, cluster(1), workload(64), target(), scheduled(plan(model, pp=8, vpp=vpp, m=64), name))
        for name, (vpp, _, _) in AMD.items()
    }


def test_memory_is_ordered_as_amd_measured_it(amd: dict[ScheduleName, Estimate]) -> None:
    peak = {name: max(stage.allocated_bytes for stage in found.stages) for name, found in amd.items()}
    assert sorted(peak, key=peak.__getitem__) == sorted(AMD, key=lambda name: AMD[name][2])
    held = {name: max(stage.breakdown_bytes["activations"] for stage in found.stages) for name, found in amd.items()}
    assert sorted(held, key=held.__getitem__) == sorted(AMD, key=lambda name: AMD[name][2])


def test_speed_is_ordered_as_amd_measured_it_but_for_one_close_pair(amd: dict[ScheduleName, Estimate]) -> None:
    """Nine of ten pairs. Interleaved beats V-Half by 0.7% there; here the two are within 1% the other way around."""
    for a, (_, fast, _) in AMD.items():
        for b, (_, slow, _) in AMD.items():
            if fast > slow and (a, b) != ("interleaved", "v-half"):
                assert amd[a].tokens_per_s_per_gpu > amd[b].tokens_per_s_per_gpu, (a, b)
    close = amd["interleaved"].tokens_per_s_per_gpu / amd["v-half"].tokens_per_s_per_gpu
    assert close == pytest.approx(1.0, abs=0.01)
