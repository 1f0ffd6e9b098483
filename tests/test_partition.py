"""The dynamic programme against brute force over every split."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.engine.partition import StageTables, split_1f1b, split_chunks, splits_by_bound


def bound(busy, send, count):
    """``max_i( sum_{j<i} t_j + M t_i )``, written as the sentence says."""
    spans = [b + s for b, s in zip(busy, send, strict=True)]
    return max(sum(spans[:i]) + count * spans[i] for i in range(len(spans)))


def all_splits(size, stages):
    for inner in combinations(range(1, size), stages - 1):
        yield (0, *inner, size)


def leading_of(tables, row, a, b):
    """The recomputed blocks of a stage: its first ``leading`` counted ones, and what lies before them."""
    left, end = int(tables.leading[row]), a
    for block in range(a, b):
        if left == 0:
            break
        left -= int(tables.counted[block])
        end = block + 1
    return slice(a, end)


def stage_cost(tables, row, stage, a, b):
    """(busy seconds, bytes) of a stage, block by block."""
    lead = leading_of(tables, row, a, b)
    busy = tables.busy_s[row, stage, a:b].sum() + tables.extra_busy_s[row, stage, lead].sum()
    held = tables.bytes_[row, stage, a:b].sum() + tables.extra_bytes[row, stage, lead].sum()
    peak = max([*tables.transient_bytes[row, a:b], *tables.extra_transient_bytes[row, lead]])
    return busy, held + peak


def brute_force(tables, row=0):
    stages, size = tables.busy_s.shape[1:]
    best = np.inf
    for cuts in all_splits(size, stages):
        spans = list(pairwise(cuts))
        if any(tables.counted[a:b].sum() < 1 for a, b in spans):
            continue
        busy, need = zip(*(stage_cost(tables, row, i, a, b) for i, (a, b) in enumerate(spans)), strict=True)
        if any(n > c for n, c in zip(need, tables.capacity_bytes[row], strict=True)):
            continue
        best = min(best, bound(busy, tables.send_s[row], int(tables.micro_batches[row])))
    return best


def no_recompute(stages, size):
    nothing = np.zeros((1, stages, size))
    return {
        "leading": np.zeros(1, dtype=int),
        "extra_busy_s": nothing,
        "extra_bytes": nothing,
        "extra_transient_bytes": np.zeros((1, size)),
    }


def random_tables(seed, stages, size, tight):
    rng = np.random.default_rng(seed)
    speed = rng.choice([1.0, 2.5], size=(2, stages, 1))
    memory = rng.integers(1, 10, size=(2, stages, size)).astype(float)
    counted = np.ones(size)
    counted[0] = counted[-1] = 0.0
    busy = rng.integers(1, 9, size=(2, 1, size)) * speed
    return StageTables(
        busy_s=busy,
        bytes_=memory,
        transient_bytes=rng.integers(0, 4, size=(2, size)).astype(float),
        capacity_bytes=memory.sum(axis=-1) * (0.5 if tight else 2.0),
        send_s=rng.random((2, stages)),
        micro_batches=rng.integers(1, 12, size=2),
        counted=counted,
        leading=rng.integers(0, 4, size=2),
        extra_busy_s=np.round(busy * 0.25) * counted,
        extra_bytes=-np.floor(memory * 0.5) * counted,
        extra_transient_bytes=rng.integers(0, 6, size=(2, size)) * counted,
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), stages=st.integers(1, 4), size=st.integers(6, 9), tight=st.booleans())
def test_the_split_is_as_good_as_the_best_of_all_splits(seed, stages, size, tight):
    tables = random_tables(seed, stages, size, tight)
    split = split_1f1b(tables)
    for row in range(2):
        expected = brute_force(tables, row)
        assert split.bound_s[row] == pytest.approx(expected, rel=1e-12)
        if np.isfinite(expected):
            cuts = split.cuts[row]
            assert cuts[0] == 0
            assert cuts[-1] == size
            busy = [stage_cost(tables, row, i, a, b)[0] for i, (a, b) in enumerate(pairwise(cuts))]
            assert bound(busy, tables.send_s[row], int(tables.micro_batches[row])) == pytest.approx(expected, rel=1e-12)
            for i, (a, b) in enumerate(pairwise(cuts)):
                assert tables.counted[a:b].sum() >= 1
                assert stage_cost(tables, row, i, a, b)[1] <= tables.capacity_bytes[row, i]


def test_a_width_that_holds_the_best_split_changes_nothing():
    tables = random_tables(7, 3, 9, tight=False)
    assert np.array_equal(split_1f1b(tables).bound_s, split_1f1b(tables, width=7).bound_s)


def test_equal_layers_on_equal_stages_are_split_evenly():
    tables = StageTables(
        busy_s=np.ones((1, 4, 8)),
        bytes_=np.ones((1, 4, 8)),
        transient_bytes=np.zeros((1, 8)),
        capacity_bytes=np.full((1, 4), 8.0),
        send_s=np.zeros((1, 4)),
        micro_batches=np.array([16]),
        counted=np.ones(8),
        **no_recompute(4, 8),
    )
    split = split_1f1b(tables)
    assert split.cuts[0].tolist() == [0, 2, 4, 6, 8]
    assert split.bound_s[0] == (16 + 3) * 2


def test_a_slow_pool_gets_fewer_layers():
    busy = np.ones((1, 2, 12))
    busy[0, 0] = 3.0  # three times slower: 3 of 12 layers balance 9 on the fast stage
    tables = StageTables(
        busy_s=busy,
        bytes_=np.ones((1, 2, 12)),
        transient_bytes=np.zeros((1, 12)),
        capacity_bytes=np.full((1, 2), 12.0),
        send_s=np.zeros((1, 2)),
        micro_batches=np.array([1000]),
        counted=np.ones(12),
        **no_recompute(2, 12),
    )
    assert split_1f1b(tables).cuts[0].tolist() == [0, 3, 12]


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(1, 4), virtual=st.integers(2, 3), layers=st.integers(12, 20))
def test_virtual_chunks_hold_every_layer_once_and_none_is_empty(stages, virtual, layers):
    counted = np.concatenate([[0.0], np.ones(layers), [0.0]])
    busy = np.concatenate([[0.1], np.ones(layers), [1.5]])[None, None].repeat(stages, axis=1)
    cuts = split_chunks(busy, virtual, counted)[0]
    assert cuts[0] == 0
    assert cuts[-1] == layers + 2
    assert len(cuts) == stages * virtual + 1
    assert all(counted[a:b].sum() >= 1 for a, b in pairwise(cuts))


def test_virtual_chunks_are_even_where_layers_divide():
    busy = np.ones((1, 2, 8))
    assert split_chunks(busy, 2, np.ones(8))[0].tolist() == [0, 2, 4, 6, 8]


def test_more_chunks_than_layers_is_refused():
    with pytest.raises(ValueError, match="need as many decoder layers"):
        split_chunks(np.ones((1, 2, 3)), 2, np.ones(3))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), stages=st.integers(1, 4), size=st.integers(6, 8), tight=st.booleans())
def test_a_search_without_patience_gives_up_with_a_bound_of_the_rest(seed, stages, size, tight):
    tables = random_tables(seed, stages, size, tight)
    one = StageTables(**{name: value[:1] if name != "counted" else value for name, value in vars(tables).items()})
    whole = [b for b, _ in splits_by_bound(one)]
    short = list(splits_by_bound(one, patience=size))
    given = [b for b, cuts in short if cuts is not None]
    assert given == whole[: len(given)]
    if len(given) < len(whole):
        assert short[-1][1] is None
        assert short[-1][0] <= whole[len(given)] * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), stages=st.integers(1, 4), size=st.integers(6, 8), tight=st.booleans())
def test_splits_come_in_rising_order_and_none_is_missing(seed, stages, size, tight):
    tables = random_tables(seed, stages, size, tight)
    one = StageTables(**{name: value[:1] if name != "counted" else value for name, value in vars(tables).items()})
    found = list(splits_by_bound(one))
    bounds = [b for b, _ in found]
    assert bounds == sorted(bounds)
    fitting = set()
    for cuts in all_splits(size, stages):
        spans = list(pairwise(cuts))
        need = [stage_cost(one, 0, i, a, b)[1] for i, (a, b) in enumerate(spans)]
        if all(one.counted[a:b].sum() >= 1 for a, b in spans) and (need <= one.capacity_bytes[0]).all():
            fitting.add(cuts)
    assert {tuple(int(c) for c in cuts) for _, cuts in found} == fitting
    assert len(found) == len(fitting)
    for value, cuts in found:
        busy = [stage_cost(one, 0, i, a, b)[0] for i, (a, b) in enumerate(pairwise(cuts))]
        assert value == pytest.approx(bound(busy, one.send_s[0], int(one.micro_batches[0])), rel=1e-12)
