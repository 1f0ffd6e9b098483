"""Schedules against a longest path over the dependency graph, written without the replay's program orders."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost_models import schedules
from meshwright.cost_models.schedules.base import alive

Node = tuple[str, int, int, int]  # F or B, stage, chunk, micro-batch


def megatron_order(p: int, pp: int, vpp: int, m: int) -> list[Node]:
    """Program order of stage p as Megatron's two functions run it, from their index arithmetic."""
    if vpp == 1:
        warm, total = min(pp - p - 1, m), m

        def forward(k: int) -> Node:
            return ("F", p, 0, k)

        def backward(k: int) -> Node:
            return ("B", p, 0, k)

    else:
        warm, total = min((pp - p - 1) * 2 + (vpp - 1) * pp, m * vpp), m * vpp

        def place(k: int, reverse: bool) -> tuple[int, int]:
            chunk = k % (pp * vpp) // pp
            return (vpp - chunk - 1 if reverse else chunk), k // (pp * vpp) * pp + k % pp

        def forward(k: int) -> Node:
            return ("F", p, *place(k, False))

        def backward(k: int) -> Node:
            return ("B", p, *place(k, True))

    order = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        order += [forward(warm + k), backward(k)]
    return order + [backward(k) for k in range(total - warm, total)]


def longest_path(forward: np.ndarray, backward: np.ndarray, send: np.ndarray, m: int, blocking: bool) -> float:
    """Makespan by relaxing all edges in topological order (Kahn)."""
    pp, vpp = forward.shape
    edges: dict[Node, list[tuple[Node, float]]] = defaultdict(list)
    indegree: dict[Node, int] = defaultdict(int)
    cost: dict[Node, float] = {}
    last = pp * vpp - 1

    def hop(stage: int) -> float:
        return float(send[stage]) if stage < pp - 1 else float(send[-1]) if len(send) == pp else float(send.max())

    def edge(a: Node, b: Node, wait: float) -> None:
        edges[a].append((b, wait))
        indegree[b] += 1

    for p in range(pp):
        order = megatron_order(p, pp, vpp, m)
        for node in order:
            kind, _, chunk, k = node
            q = chunk * pp + p
            cost[node] = float((forward if kind == "F" else backward)[p, chunk])
            if kind == "F" and q < last:
                if blocking:
                    cost[node] += hop(p)
                edge(node, ("F", (q + 1) % pp, (q + 1) // pp, k), 0.0 if blocking else hop(p))
            if kind == "B" and q > 0:
                before = (q - 1) % pp
                if blocking:
                    cost[node] += hop(before)
                edge(node, ("B", before, (q - 1) // pp, k), 0.0 if blocking else hop(before))
            if kind == "F" and q == last:
                edge(node, ("B", p, chunk, k), 0.0)
        for a, b in itertools.pairwise(order):
            edge(a, b, 0.0)
    end = {node: cost[node] for node in cost}
    ready = deque(node for node in cost if indegree[node] == 0)
    done = 0
    while ready:
        node = ready.popleft()
        done += 1
        for after, wait in edges[node]:
            end[after] = max(end[after], end[node] + wait + cost[after])
            indegree[after] -= 1
            if not indegree[after]:
                ready.append(after)
    assert done == len(cost)
    return max(end.values())


seconds = st.floats(0.0, 4.0, allow_nan=False)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    vpp = draw(st.integers(1, 3))
    pp = draw(st.integers(1 if vpp == 1 else 2, 5))
    m = draw(st.integers(1, 9)) if vpp == 1 else pp * draw(st.integers(1, 3))
    values = st.lists(seconds, min_size=pp * vpp, max_size=pp * vpp)
    forward = np.array(draw(values)).reshape(pp, vpp)
    backward = np.array(draw(values)).reshape(pp, vpp)
    send = np.array(draw(st.lists(seconds, min_size=pp - 1, max_size=pp - 1)))
    return forward, backward, send, m


@given(cases())
def test_replay_is_the_longest_path_and_the_bound_is_below_it(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    forward, backward, send, m = case
    pp, vpp = forward.shape
    schedule = schedules.get("1f1b" if vpp == 1 else "interleaved")
    assert schedule.legal(pp, vpp, m) is None
    timeline = schedule.simulate(forward, backward, send, m)
    expected = longest_path(forward, backward, send, m, blocking=vpp == 1) if pp > 1 else None
    if expected is not None:
        assert timeline.makespan_s == pytest.approx(expected, abs=1e-9)
    assert float(schedule.bound_s(forward, backward, send, m)) <= timeline.makespan_s + 1e-9
    assert (timeline.idle_s >= -1e-9).all()
    np.testing.assert_allclose(timeline.busy_s, m * (forward + backward).sum(axis=1))


@pytest.mark.parametrize(("pp", "vpp", "m"), [(1, 1, 3), (4, 1, 2), (4, 1, 16), (8, 1, 64), (4, 2, 8), (8, 4, 24)])
def test_equal_stages_meet_the_textbook_time(pp: int, vpp: int, m: int) -> None:
    """(m + (p - 1)/v) (F + B): the closed form of the 1F1B and interleaving papers, with F = 1, B = 2 a stage."""
    forward = np.full((pp, vpp), 1.0 / vpp)
    schedule = schedules.get("1f1b" if vpp == 1 else "interleaved")
    none = np.zeros(pp - 1)
    expected = 3.0 * (m + (pp - 1) / vpp)
    assert schedule.simulate(forward, 2 * forward, none, m).makespan_s == pytest.approx(expected)
    assert float(schedule.bound_s(forward, 2 * forward, none, m)) == pytest.approx(expected)


def test_bound_takes_many_candidates_at_once() -> None:
    rng = np.random.default_rng(0)
    forward, backward, send = rng.random((7, 4, 1)), rng.random((7, 4, 1)), rng.random((7, 3))
    schedule = schedules.get("1f1b")
    whole = schedule.bound_s(forward, backward, send, 5)
    assert whole.shape == (7,)
    for i in range(7):
        assert whole[i] == pytest.approx(float(schedule.bound_s(forward[i], backward[i], send[i], 5)))


@pytest.mark.parametrize(("pp", "m"), [(1, 4), (4, 1), (4, 3), (4, 12)])
def test_1f1b_holds_min_m_and_the_distance_to_the_end(pp: int, m: int) -> None:
    held = schedules.get("1f1b").in_flight(pp, 1, m)
    assert held[:, 0].tolist() == [min(m, pp - p) for p in range(pp)]


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 2), (4, 2, 4), (4, 2, 16), (4, 3, 12), (8, 4, 32)])
def test_interleaved_peak_follows_from_its_order(pp: int, vpp: int, m: int) -> None:
    """Walk Megatron's order: the peak total is warm-up + 1 (or all), and the counts are those when it is first met."""
    held = schedules.get("interleaved").in_flight(pp, vpp, m)
    for p in range(pp):
        live = [0] * vpp
        best: tuple[int, list[int]] = (0, live)
        for kind, _, chunk, _ in megatron_order(p, pp, vpp, m):
            live[chunk] += 1 if kind == "F" else -1
            if sum(live) > best[0]:
                best = (sum(live), list(live))
        assert held[p].tolist() == best[1]
        assert best[0] == min(m * vpp, 2 * (pp - p - 1) + (vpp - 1) * pp + 1)


def test_mixes_of_live_chunks_are_those_of_the_whole_run() -> None:
    pp, vpp, m = 4, 3, 16
    orders = schedules.get("interleaved").orders(pp, vpp, m)
    weights = np.array([5.0, 1.0, 2.0])
    for p, states in enumerate(schedules.in_flight_states(orders, vpp)):
        every = alive(orders[p], vpp)
        assert (states @ weights).max() == pytest.approx(
            (every[every.sum(axis=1) == every.sum(axis=1).max()] @ weights).max()
        )
        # A mix with fewer live chunks never needs more when chunks weigh the same.
        assert states.sum(axis=1).min() == every.sum(axis=1).max()


@pytest.mark.parametrize(
    ("name", "pp", "vpp", "m", "word"),
    [("1f1b", 4, 2, 8, "interleaved"), ("interleaved", 4, 1, 8, "1f1b"), ("interleaved", 4, 2, 6, "multiple of 4"),
     ("interleaved", 1, 2, 4, "2 pipeline stages")],
)  # fmt: skip
def test_refusals_say_what_would_do(name: str, pp: int, vpp: int, m: int, word: str) -> None:
    reason = schedules.get(name).legal(pp, vpp, m)
    assert reason is not None
    assert word in reason


def test_unknown_schedule_lists_the_known() -> None:
    with pytest.raises(KeyError, match="interleaved"):
        schedules.get("pipedream")


def test_events_fill_the_timeline_without_overlap() -> None:
    rng = np.random.default_rng(1)
    forward, backward = rng.random((3, 2)), rng.random((3, 2))
    timeline = schedules.get("interleaved").simulate(forward, backward, np.full(2, 0.1), 6, keep_events=True)
    assert len(timeline.events) == 2 * 3 * 2 * 6
    for p in range(3):
        own = sorted((e for e in timeline.events if e.stage == p), key=lambda e: e.start_s)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own))
        assert own[-1].end_s == pytest.approx(timeline.finish_s[p])
