"""The programme over GPU types against every order, number of stages and split of small random instances."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest

from meshwright.cost_models.schedules.wavefront import finish_times_s
from meshwright.planner.mixed.partition import TypeTables, best_split, layouts


def instance(seed):
    """Random blocks (embedding, layers of one to three kinds, head), pools, memory from loose to tight."""
    draw = np.random.default_rng(seed)
    layers, pools = int(draw.integers(3, 7)), int(draw.integers(1, 4))
    kinds = draw.uniform(0.5, 2.0, (pools, int(draw.integers(1, 4))))
    of = np.sort(draw.integers(0, kinds.shape[1], layers))
    speed = draw.uniform(1.0, 3.0, (pools, 1))
    forward = np.concatenate([draw.uniform(0, 0.3, (pools, 1)), kinds[:, of], draw.uniform(0, 2, (pools, 1))], axis=1)
    forward = forward * speed
    backward = forward * draw.uniform(1.5, 2.5)
    kept = np.concatenate([[0.1], draw.uniform(0.5, 1.5, kinds.shape[1])[of], [0.5]])
    static = np.concatenate([[2.0], draw.uniform(0.5, 1.5, kinds.shape[1])[of], [2.0]])
    counted = np.array([0.0] + [1.0] * layers + [0.0])
    across = draw.uniform(0.0, 1.5, (pools, pools))
    return TypeTables(
        busy_s=forward + backward,
        backward_s=backward,
        static_bytes=static,
        activation_bytes=kept,
        transient_bytes=draw.uniform(0, 0.3, layers + 2),
        capacity_bytes=draw.uniform(4, 25, pools),
        inside_s=draw.uniform(0.0, 0.2, pools),
        across_s=(across + across.T) / 2,
        closing_s=np.cumsum(draw.uniform(0, 0.5, (pools, layers + 2, layers + 3)), axis=2),
        micro_batches=int(draw.integers(1, 9)),
        counted=counted,
        leading=int(draw.integers(0, 3)),
        extra_busy_s=forward * counted,
        extra_activation_bytes=-0.8 * kept * counted,
        extra_transient_bytes=0.5 * counted,
    )


def splits(tables, stages):
    """Every cut of [embedding, layers, head] with a layer in each stage."""
    size = len(tables.counted)
    for inner in combinations(range(2, size - 1), stages - 1):
        yield (0, *inner, size)


def stage_of(tables, pool, a, b):
    """(forward, backward, static, activations, transient) of blocks a..b-1 on a pool, by adding up one by one."""
    forward = backward = static = kept = 0.0
    peak, left = 0.0, tables.leading
    for i in range(a, b):
        redone = bool(tables.counted[i]) and left > 0
        left -= redone
        more = tables.extra_busy_s[pool, i] if redone else 0.0
        forward += tables.busy_s[pool, i] - tables.backward_s[pool, i]
        backward += tables.backward_s[pool, i] + more
        static += tables.static_bytes[i]
        kept += tables.activation_bytes[i] + (tables.extra_activation_bytes[i] if redone else 0.0)
        peak = max(peak, tables.transient_bytes[i], tables.extra_transient_bytes[i] if redone else 0.0)
    return forward, backward, static, kept, peak


def step_s(tables, pools, cuts):
    """The step by events with the first stage's closing seconds; inf where a stage does not fit."""
    m, p = tables.micro_batches, len(pools)
    stages = [stage_of(tables, g, a, b) for g, a, b in zip(pools, cuts, cuts[1:], strict=False)]
    for i, (g, (_, _, static, kept, peak)) in enumerate(zip(pools, stages, strict=True)):
        if static + min(p - i, m) * kept + peak > tables.capacity_bytes[g]:
            return np.inf
    sends = [tables.inside_s[g] if g == h else tables.across_s[g, h] for g, h in pairwise(pools)]
    forward, backward = (np.array([[s[k] for s in stages]]) for k in (0, 1))
    end = finish_times_s(forward, backward, np.array([sends]).reshape(1, p - 1), m)
    return float(end.max()) + tables.closing_s[pools[0], p, cuts[1]]


def every_layout(tables, most):
    for count in range(1, len(most) + 1):
        for order in permutations(range(len(most)), count):
            for counts in product(*(range(1, most[g] + 1) for g in order)):
                if sum(counts) <= tables.counted.sum():
                    yield order, counts


@pytest.mark.parametrize("seed", range(60))
def test_no_layout_beats_its_bound_and_best_split_meets_memory(seed):
    tables = instance(seed)
    pools = len(tables.busy_s)
    most = tuple(int(k) for k in np.random.default_rng(seed + 1000).integers(1, 4, pools))
    allowed = np.ones([k + 1 for k in most], dtype=bool)
    found = {
        (part.order, tuple(counts)): value
        for part in layouts(tables, most, np.inf, allowed)
        for counts, value in zip(part.counts.tolist(), part.value_s.tolist(), strict=True)
    }
    seen = 0
    for order, counts in every_layout(tables, most):
        stages = tuple(g for g, k in zip(order, counts, strict=True) for _ in range(k))
        exact = min((step_s(tables, stages, cuts) for cuts in splits(tables, len(stages))), default=np.inf)
        value = found.get((order, counts), np.inf)  # what never fits is not given
        assert value <= exact * (1 + 1e-12)
        assert np.isfinite(value) == np.isfinite(exact)  # fits in the programme where some split fits
        if np.isfinite(exact):
            cuts, bound = best_split(tables, stages)
            assert bound >= value * (1 - 1e-12)  # its rest is that of its own choices, not the least of all
            reached = step_s(tables, stages, cuts.tolist())
            assert np.isfinite(reached)
            assert reached >= exact * (1 - 1e-12)
            seen += 1
    assert seen or not np.isfinite(list(found.values())).any()


def test_equal_stages_are_exact():
    """Six equal layers on three equal stages: (M + P - 1) t = (5 + 2) * 2 * 3 s."""
    one = np.ones((1, 6))
    tables = TypeTables(
        busy_s=3 * one, backward_s=2 * one, static_bytes=one[0], activation_bytes=one[0], transient_bytes=0 * one[0],
        capacity_bytes=np.array([100.0]), inside_s=np.zeros(1), across_s=np.zeros((1, 1)),
        closing_s=np.zeros((1, 4, 7)), micro_batches=5, counted=one[0], leading=0,
        extra_busy_s=one, extra_activation_bytes=-one[0], extra_transient_bytes=0 * one[0],
    )  # fmt: skip
    cuts, bound = best_split(tables, (0, 0, 0))
    assert cuts.tolist() == [0, 2, 4, 6]
    assert bound == pytest.approx(42.0)


def test_only_allowed_numbers_of_stages_are_given():
    tables = instance(5)
    pools = len(tables.busy_s)
    allowed = np.zeros([3] * pools, dtype=bool)
    allowed[(1,) * pools] = True
    found = [tuple(c) for part in layouts(tables, (2,) * pools, np.inf, allowed) for c in part.counts.tolist()]
    assert found
    assert set(found) == {(1,) * pools}
