"""Every schedule's events against a relaxation of its dependencies, its bound below them, the closed forms."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from meshwright.cost_models import schedules
from meshwright.cost_models.schedules.engine import compile_orders
from meshwright.cost_models.schedules.placement import looped
from meshwright.cost_models.schedules.zb_auto import ZeroBubbleAuto

from .schedule_cases import ALL, BW, JOINED, SPLIT, TWO_CHUNKS, B, Case, F, W, cases, equal, slowest_path


def makespan(case: Case) -> float:
    schedule = schedules.get(case.name)
    return schedule.simulate(case.forward, case.backward, case.send, case.m, weight_s=case.weight).makespan_s


def bound(case: Case) -> float:
    schedule = schedules.get(case.name)
    return float(schedule.bound_s(case.forward, case.backward, case.send, case.m, case.weight))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_events_are_the_longest_path_and_the_bound_is_below(case: Case) -> None:
    assert schedules.get(case.name).legal(case.pp, case.plan_vpp, case.m) is None
    assert makespan(case) == pytest.approx(slowest_path(case), abs=1e-9)
    assert bound(case) <= makespan(case) + 1e-9


@settings(max_examples=60, deadline=None)
@given(cases())
def test_many_at_once_end_when_one_does(case: Case) -> None:
    schedule = schedules.get(case.name)
    scale = np.array([1.0, 0.5, 2.0, 1.25, 3.0])
    uneven = case.forward[None] * scale[:, None, None] + np.arange(5)[:, None, None]
    backward, weight = np.broadcast_to(case.backward, uneven.shape), np.broadcast_to(case.weight, uneven.shape)
    send = scale[:, None] * case.send
    together = schedules.finish_times_s(schedule, uneven, backward, send, case.m, weight)
    for row in range(5):
        alone = schedule.simulate(uneven[row], case.backward, send[row], case.m, weight_s=case.weight)
        np.testing.assert_allclose(together[row], alone.finish_s, rtol=1e-12)
        assert float(schedule.bound_s(uneven, backward, send, case.m, weight)[row]) <= alone.makespan_s + 1e-9


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_stage_does_all_its_work_once(case: Case) -> None:
    orders = schedules.get(case.name).orders(case.pp, case.plan_vpp, case.m)
    for order in orders:
        parts = Counter()
        seen: set[tuple[int, int]] = set()
        for kind, chunk, k in order:
            for part in {F: "F", JOINED: "F", BW: "BW", B: "B", W: "W"}[kind]:
                parts[part, chunk, k] += 1
            if kind in (F, JOINED):
                seen.add((chunk, k))
            else:
                assert (chunk, k) in seen, "a backward before its forward"
        half = range(case.m // 2), range(case.m // 2, case.m)
        expected = {
            (part, chunk, k)
            for part in "FBW"
            for chunk in range(case.vpp)
            for k in (half[chunk] if case.name == "dualpipe" else range(case.m))
        }
        assert set(parts) == expected
        assert set(parts.values()) == {1}


#: F, input gradient and weight gradient of equal stages.
RATIOS = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.1, 0.9), (2.0, 2.5, 1.0), (1.0, 1.7, 0.3)]


@pytest.mark.parametrize(("f", "b", "w"), RATIOS)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 17), (8, 32)])
def test_equal_stages_meet_the_papers_closed_forms(pp: int, m: int, f: float, b: float, w: float) -> None:
    """GPipe (m + p - 1)(F + B + W); breadth-first (m + (p - 1) / v)(F + B + W); ZB-H1 + (p - 1)(F + B - W)."""
    full = f + b + w
    for case, expected in (
        (equal("gpipe", pp, 1, m, f, b, w), (m + pp - 1) * full),
        (equal("looped-bfs", pp, 2, max(m, pp), f / 2, b / 2, w / 2), (max(m, pp) + (pp - 1) / 2) * full),
        (equal("zb-h1", pp, 1, m, f, b, w), m * full + (pp - 1) * (f + b - w)),
    ):
        assert makespan(case) == pytest.approx(expected), case.name
        assert bound(case) == pytest.approx(expected), case.name


@pytest.mark.parametrize("w", [1.0, 0.5])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 18), (8, 32)])
def test_dualpipe_meets_its_closed_form(pp: int, m: int, w: float) -> None:
    """M (F + B) + (P / 2 - 1)(F&B + B - 3 W), F&B = F + B: the DualPipe report, whose figure has F as long as B - W.
    Folded, the same with P for P / 2 and two chunks."""
    full = 1.0 + w
    for case, work, turns in (
        (equal("dualpipe", pp, 2, m, 1.0, 1.0, w), m, pp // 2 - 1),
        (equal("dualpipe-v", pp, 2, m, 1.0, 1.0, w), 2 * m, pp - 1),
    ):
        expected = work * (1 + full) + turns * (1 + 2 * full - 3 * w)
        assert makespan(case) == pytest.approx(expected)
        assert bound(case) == pytest.approx(expected)


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8, 12])
def test_v_shaped_schedules_have_the_bubbles_of_their_paper(pp: int) -> None:
    """ZB-V has none: the last stage begins after p - 1 passes and never waits. V-Half has about half of 1F1B's 6(p - 1)
    passes, V-Min about two thirds (arXiv 2405.15362)."""
    m = 3 * pp
    zb_v, half, least = (makespan(equal(name, pp, 2, m, 1.0, 1.0, 1.0)) - 6 * m for name in ("zb-v", "v-half", "v-min"))
    assert zb_v == pp - 1
    assert half <= 3 * (pp - 1)
    assert half <= least <= 4 * (pp - 1)
    assert bound(equal("zb-v", pp, 2, m, 1.0, 1.0, 1.0)) == 6 * m + pp - 1


@pytest.mark.parametrize(("pp", "m"), [(4, 4), (4, 9), (8, 16), (8, 32)])
def test_the_search_is_never_slower_than_zb_h1_and_keeps_its_limit(pp: int, m: int) -> None:
    """At the FLOPs of a layer (28 : 32 : 24). With ZB-H2's memory the bubble is that of the first forwards alone."""
    h1 = equal("zb-h1", pp, 1, m, 28.0, 32.0, 24.0)
    times = [makespan(h1)]
    for limit in (pp, pp + 1, 2 * pp - 1):
        schedule = ZeroBubbleAuto(limit)
        times.append(schedule.simulate(h1.forward, h1.backward, h1.send, m, weight_s=h1.weight).makespan_s)
        for order in schedule.orders(pp, 1, m):
            held = np.cumsum([{F: 1, B: 0, W: -1}[kind] for kind, _, _ in order])
            assert held.max() <= limit
    assert times == sorted(times, reverse=True)
    assert times[-1] >= 84 * m + 28 * (pp - 1)
    if m >= 2 * pp:
        assert times[-1] < times[0]


@pytest.mark.parametrize("name", ALL)
def test_a_long_step_goes_on_at_its_pace(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rng = np.random.default_rng(5)
    vpp = 2 if name in (*TWO_CHUNKS, "interleaved", "looped-bfs", "dualpipe") else 1
    forward, inputs, weight = rng.integers(1, 9, size=(3, 4, vpp)).astype(float)
    case = Case(name, forward, inputs + weight, weight, np.array([0.5, 0.25, 1.0]), 240)
    whole = makespan(case)
    monkeypatch.setattr("meshwright.cost_models.schedules.base.MAX_REPLAYED", 101)
    # Uneven chunks may settle into a rhythm of several groups of micro-batches; the pace is read over four.
    assert makespan(case) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", SPLIT)
def test_events_say_which_half_of_the_backward_they_are(name: str) -> None:
    case = equal(name, 4, 1 if name.startswith("zb-h1") or name == "zb-auto" else 2, 8, 1.0, 2.0, 0.5)
    line = schedules.get(name).simulate(
        case.forward, case.backward, case.send, case.m, keep_events=True, weight_s=case.weight
    )
    took = {F: 1.0, BW: 2.5, B: 2.0, W: 0.5}
    assert {event.kind for event in line.events} <= set(took)
    assert W in {event.kind for event in line.events}
    for event in line.events:
        assert event.end_s - event.start_s == pytest.approx(took[event.kind])
        assert event.backward == (event.kind != F)
    for stage in range(4):
        own = sorted((e for e in line.events if e.stage == stage), key=lambda e: e.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))
        assert own[-1].end_s == pytest.approx(line.finish_s[stage])
        assert sum(e.end_s - e.start_s for e in own) == pytest.approx(line.busy_s[stage])


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "m", "words"),
    [
        ("zb-v", 4, 1, 8, "2 chunks a stage, got 1"),
        ("gpipe", 4, 2, 8, "1 chunk a stage, got 2"),
        ("looped-bfs", 4, 1, 8, "at least 2 chunks"),
        ("looped-bfs", 1, 2, 8, "at least 2 pipeline stages"),
        ("v-min", 1, 2, 8, "at least 2 pipeline stages"),
        ("dualpipe", 3, 1, 12, "even number of pipeline stages"),
        ("dualpipe", 4, 1, 9, "even number of at least 8 micro-batches, got 9"),
        ("dualpipe-v", 4, 2, 7, "at least 8 micro-batches, got 7"),
        ("zb-h1", 4, 1, 0, "at least one micro-batch"),
    ],
)
def test_refusals_name_what_is_wanted(name: str, pp: int, vpp: int, m: int, words: str) -> None:
    assert words in (schedules.get(name).legal(pp, vpp, m) or "")


def test_orders_that_wait_for_each_other_are_an_error() -> None:
    forward, backward = (F, 0, 0), (BW, 0, 0)
    with pytest.raises(ValueError, match="wait for each other"):
        compile_orders(((backward, forward), (forward, backward)), looped(2, 1))
