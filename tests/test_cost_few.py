"""What is remembered for few cells is what many cells are priced at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost_models.collectives import collective_s, contention
from meshwright.cost_models.few import FEW, few_columns
from meshwright.cost_models.operators import device, linear_s, matmul_s

from .cost_cases import H100, V100, pool

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
groups = st.tuples(
    st.sampled_from([0.0, 1e3, 3e6, 1e9]), st.sampled_from([1, 2, 8, 16, 32]), st.sampled_from([1, 2, 8])
)


@given(st.sampled_from(OPS), st.lists(groups, min_size=1, max_size=6))
def test_few_collectives_are_rows_of_many(op: str, rows: list[tuple[float, int, int]]) -> None:
    levels = pool(32).levels
    volume, size, stride = (np.array(column) for column in zip(*rows, strict=True))
    times = FEW // len(rows) + 1
    few = collective_s(op, levels, volume, size, stride)  # type: ignore[arg-type]
    many = collective_s(op, levels, *(np.tile(x, times) for x in (volume, size, stride)))  # type: ignore[arg-type]
    assert few == pytest.approx(many[: len(rows)], rel=1e-13)
    each = [float(collective_s(op, levels, *row)) for row in rows]  # type: ignore[arg-type]
    assert each == pytest.approx(few, rel=1e-13)
    lost = contention(op, levels, np.tile(size, times), np.tile(stride, times))  # type: ignore[arg-type]
    assert contention(op, levels, size, stride) == pytest.approx(lost[: len(rows)])  # type: ignore[arg-type]


@given(
    st.sampled_from([64.0, 4096.0]), st.sampled_from([512.0, 7168.0]), st.sampled_from([1.0, 32.0]), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_a_linear_map_is_its_three_products(tokens: float, width: float, groups: float, low: bool, many: bool) -> None:
    on, grouped = device(H100, "fp8"), groups > 1
    cells = FEW + 1 if many else 2
    t, i, o, g = (np.full(cells, x) for x in (tokens, width, 2048.0, groups))
    forward, backward, weight = linear_s(on, t, i, o, g, low, grouped)
    assert forward == pytest.approx(matmul_s(on, t, o, i, g, low, grouped), rel=1e-13)
    assert backward == pytest.approx(matmul_s(on, t, i, o, g, low, grouped), rel=1e-13)
    assert weight == pytest.approx(matmul_s(on, o, i, t, g, low, grouped, "weight_gradient"), rel=1e-13)


def test_a_remembered_answer_cannot_be_changed() -> None:
    levels, ones = pool(4).levels, np.ones(1)
    first = collective_s("all_gather", levels, 1e8 * ones, 8, 1)
    first += 1.0
    assert collective_s("all_gather", levels, 1e8 * ones, 8, 1) == pytest.approx(first - 1.0)


def test_a_missing_precision_takes_for_ever() -> None:
    one = np.full(1, 128.0)
    assert np.isinf(np.stack(linear_s(device(V100, "bf16"), one, one, one, np.ones(1)))).all()


def test_columns_broadcast() -> None:
    assert few_columns(np.ones((2, 1)), np.arange(3), 5) == ((2, 3), ((1.0,) * 6, (0, 1, 2) * 2, (5,) * 6))
    assert few_columns(2.5, np.array([3])) == ((1,), ((2.5,), (3,)))
    assert few_columns(2.5, 3) == ((), ((2.5,), (3,)))
    assert few_columns(np.zeros(FEW), np.zeros(())) is not None
    assert few_columns(np.zeros(FEW + 1), np.zeros(())) is None
