"""Level-by-level 1F1B equals the event replay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models import schedules
from meshwright.cost_models.schedules.wavefront import finish_times_s


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pp=st.integers(1, 7), m=st.integers(1, 20), number=st.integers(1, 4))
def test_every_stage_ends_when_the_replay_says(seed, pp, m, number):
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((2, number, pp)) + 0.1
    send = rng.random((number, pp - 1)) * rng.integers(0, 2)
    finish = finish_times_s(forward, backward, send, m)
    for row in range(number):
        timeline = schedules.get("1f1b").simulate(forward[row][:, None], backward[row][:, None], send[row], m)
        assert finish[row] == pytest.approx(timeline.finish_s, rel=1e-12)


def test_equal_stages_take_the_textbook_time():
    finish = finish_times_s(np.ones((1, 4)), np.full((1, 4), 2.0), np.zeros((1, 3)), 10)
    assert finish.max() == (10 + 4 - 1) * 3


def test_candidates_beyond_one_block_of_memory_are_all_done(monkeypatch):
    monkeypatch.setattr("meshwright.cost_models.schedules.wavefront.MAX_CELLS", 100)
    forward = np.arange(1.0, 13.0).reshape(6, 2)
    whole = finish_times_s(forward, forward, np.zeros((6, 1)), 8)
    assert whole[5] == pytest.approx(finish_times_s(forward[5:], forward[5:], np.zeros((1, 1)), 8)[0])
    assert (np.diff(whole.max(axis=1)) > 0).all()


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved", 2)])
def test_long_steps_go_on_at_the_pace_of_the_busiest_stage(monkeypatch, name, vpp):
    """Replaying only the first micro-batches gives the same as replaying all."""
    rng = np.random.default_rng(3)
    forward, backward = rng.integers(1, 9, size=(2, 4, vpp)).astype(float)
    send = np.array([0.5, 0.25, 1.0])
    schedule = schedules.get(name)
    whole = schedule.simulate(forward, backward, send, 400)
    monkeypatch.setattr("meshwright.cost_models.schedules.base.MAX_REPLAYED", 101)
    short = schedule.simulate(forward, backward, send, 400)
    assert short.finish_s == pytest.approx(whole.finish_s, rel=1e-12)
    assert short.busy_s == pytest.approx(whole.busy_s, rel=1e-12)
    assert short.idle_s == pytest.approx(whole.idle_s, rel=1e-9)
    if vpp == 1:
        finish = finish_times_s(forward[:, 0][None], backward[:, 0][None], send[None], 400)
        assert finish[0] == pytest.approx(whole.finish_s, rel=1e-12)
