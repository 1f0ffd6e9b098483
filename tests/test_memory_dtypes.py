"""Dtypes of a workload by hand: what they hold, what the optimizer moves, what travels."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost_models import memory
from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.collectives import collective_s
from meshwright.cost_models.multipliers import NEUTRAL
from meshwright.cost_models.operators import device
from meshwright.cost_models.protocol import Tail
from meshwright.cost_models.tail import STEP_OVERHEAD_S

from .cost_cases import H100, cluster, dense, keys, target, workload

#: Bytes by hand of a parameter's (weights, gradients, optimizer state), and what its update moves: gradient read,
#: main copy and moments read and written, parameter written (and read where it is the main copy).
DTYPES = [
    ({}, [2, 4, 12], 4 + 24 + 2),
    ({"params_dtype": "fp32", "precision": "fp32"}, [4, 4, 8], 4 + 16 + 8),
    ({"gradient_dtype": "bf16"}, [2, 2, 12], 2 + 24 + 2),
    ({"gradient_dtype": "bf16", "main_gradient_dtype": "fp32"}, [2, 4, 12], 4 + 24 + 2),
    ({"main_params_dtype": "fp16", "params_dtype": "bf16"}, [2, 4, 10], 4 + 20 + 2),
    ({"main_params_dtype": "bf16"}, [2, 4, 8], 4 + 16 + 4),
    ({"moments_dtype": "bf16"}, [2, 4, 8], 4 + 16 + 2),
    ({"moments_dtype": "fp8"}, [2, 4, 6], 4 + 12 + 2),
    ({"optimizer": "sgd", "moments_dtype": "bf16"}, [2, 4, 6], 4 + 12 + 2),
]


@pytest.mark.parametrize(("changes", "held", "moved"), DTYPES)
def test_every_dtype_counts_in_memory_and_in_the_update(changes: dict[str, str], held: list[int], moved: int) -> None:
    one, work = np.array([1.0]), workload(**changes)
    assert [float(x[0]) for x in memory.static_bytes(one, one, one, "none", work)] == held
    assert memory.update_bytes_per_param(work) == moved


def tail_of_1e9(ranks: int, changes: dict[str, str]) -> Tail:
    """The tail of 1e9 parameters on each of ``ranks`` replicas, nothing sharded or hidden."""
    model = dense(8, 2048, 16, 16, 8192, 32000)
    costs = CostModel(model, cluster(1), workload(**changes), target(overlap_grad_reduce=False), multipliers=(NEUTRAL,))
    cells, zero = costs.cells(keys((1, 1, 1, 1, ranks, 1, 0, 0))), np.array([0])
    return costs.tail(cells, zero, zero, np.array([1e9]), np.array([0.0]), np.array([0.0]))


@pytest.mark.parametrize(("changes", "held", "moved"), DTYPES)
def test_the_optimizer_step_moves_the_bytes_of_the_dtypes(changes: dict[str, str], held: list[int], moved: int) -> None:
    """1e9 parameters on one rank: the update, and four more passes over the buffer that adds gradients up."""
    tail, on = tail_of_1e9(1, changes), device(H100, workload(**changes).precision)
    rate = H100.memory_bandwidth_bytes_per_s * on.fit.optimizer
    assert float(tail.optimizer_s[0]) == pytest.approx(1e9 * (moved + 4 * held[1]) / rate + STEP_OVERHEAD_S)


@pytest.mark.parametrize(
    ("changes", "reduced"),
    [
        ({}, 4),
        ({"gradient_dtype": "bf16"}, 2),
        ({"gradient_dtype": "bf16", "main_gradient_dtype": "fp32"}, 2),
    ],
)
def test_gradients_travel_in_the_dtype_of_the_reduction(changes: dict[str, str], reduced: int) -> None:
    tail = tail_of_1e9(8, changes)
    expected = float(collective_s("all_reduce", cluster(1).pools[0].levels, reduced * 1e9, 8, 1))
    assert float(tail.grad_reduce_s[0]) == pytest.approx(expected)
