"""NEST's cases: the published steps of its binary, brute force, and the planner's partition with its costs."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import nest
from benchmarks.peers.data import NEST
from benchmarks.peers.nest_model import AS_PUBLISHED, UNITS_FIXED, WITH_ADAM, Mode, NestProblem, Plan
from benchmarks.peers.nest_partition import solve_by_partition


def test_nest_example_returns_what_nest_returned() -> None:
    plan, step = NestProblem(NEST / "example.json").solve()
    assert plan == Plan(tp=2, dp=4, cuts=(0, 5))
    assert step == pytest.approx(416.01192813299895, rel=1e-14)


@pytest.mark.parametrize(
    ("file", "devices", "step"),
    [
        ("h100_spineLeaf__mixtral_mbs1.json", 128, "29796.4"),
        ("h100_spineLeaf__mixtral_mbs1.json", 1024, "4419.16"),
        ("tpuv4_fatTree__megatronbert_mbs1.json", 64, "2433.88"),
        ("tpuv4_fatTree__megatronbert_mbs1.json", 512, "304.265"),
    ],
)
def test_nest_steps_are_those_of_its_binary(file: str, devices: int, step: str) -> None:
    """Published steps on the same inputs, to all six digits."""
    assert f"{NestProblem(NEST / file, devices).solve()[1]:.6g}" == step


def test_nest_plan_loses_once_units_are_right() -> None:
    """Published: 1.078 on 1,024 H100 with the units fixed, 1.069 with recomputation at a forward's price as well."""
    file = NEST / "h100_spineLeaf__mixtral_mbs1.json"
    plan, _ = NestProblem(file, 1024).solve()
    for mode, gain in ((Mode(seconds=True), 1.078), (UNITS_FIXED, 1.069)):
        problem = NestProblem(file, 1024, mode)
        assert problem.step_s(plan) / problem.solve()[1] == pytest.approx(gain, abs=5e-4)
    assert not np.isfinite(NestProblem(file, 1024, WITH_ADAM).step_s(plan))


def random_input(path: Path, seed: int) -> Path:
    """A chain of four to six layers on eight devices, tight in memory."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(4, 7))

    def chain(tp: int) -> list[dict[str, Any]]:
        return [
            {
                "id": index - 1,
                "parameterSize": float(rng.integers(1, 9)) * 1e8 / tp,
                "activationSize": float(rng.integers(1, 9)) * 1e8,
                "optimalLatencyFw": float(rng.uniform(1, 5)) / tp,
                "optimalLatencyBw": float(rng.uniform(2, 9)) / tp,
            }
            for index in range(layers)
        ]

    edges = [
        {"sourceId": index - 1, "destId": index, "communicationCost": float(rng.integers(1, 9)) * 1e8}
        for index in range(layers - 1)
    ]
    data = {
        "ep_degree": 1,
        "sp_enabled": False,
        "cp_degree": 1,
        "maxMemoryPerDevice": float(rng.uniform(1.5e9, 6e9)),
        "bws": [1e9, 1e8, 4e8],
        "latency_per_level": [0.01, 0.02, 0.03],
        "devices_per_level": [2, 2, 2],
        "mbsInBatch": float(rng.integers(4, 20)),
        "activationRecomputation": bool(seed % 2),
        "nodes": {str(tp): chain(tp) for tp in (1, 2)},
        "edges": {str(tp): edges for tp in (1, 2)},
    }
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", [AS_PUBLISHED, UNITS_FIXED, WITH_ADAM], ids=["own", "units", "adam"])
def test_the_dynamic_programme_agrees_with_all_plans(tmp_path: Path, seed: int, mode: Mode) -> None:
    problem = NestProblem(random_input(tmp_path / "in.json", seed), mode=mode)
    plans = [
        Plan(tp, dp, (0, *cuts, problem.chains[tp].layers))
        for tp in problem.chains
        for stages in range(1, problem.chains[tp].layers + 1)
        for cuts in combinations(range(1, problem.chains[tp].layers), stages - 1)
        for dp in range(1, 9)
    ]
    best = min(problem.step_s(plan) for plan in plans)
    if not np.isfinite(best):
        with pytest.raises(ValueError, match="nothing fits"):
            problem.solve()
        return
    plan, step = problem.solve()
    assert step == pytest.approx(best, rel=1e-12)
    assert problem.step_s(plan) == pytest.approx(step, rel=1e-12)


@pytest.mark.parametrize("case", nest.CASES[:3], ids=lambda case: case.name)
@pytest.mark.parametrize("mode", [AS_PUBLISHED, WITH_ADAM], ids=["own", "adam"])
def test_the_planners_partition_finds_nests_plans(case: nest.Case, mode: Mode) -> None:
    """The partition leaves the first stage's all-reduce out of its choice between equal splits: 0.01% of a step."""
    problem = NestProblem(NEST / case.file, 256, mode)
    (exact, step), (found, other) = problem.solve(), solve_by_partition(problem)
    assert (found.stages, found.tp, found.dp) == (exact.stages, exact.tp, exact.dp)
    assert step <= other * (1 + 1e-12)
    assert other == pytest.approx(step, rel=1e-2 if mode.adam else 1e-4)


@pytest.mark.parametrize("case", nest.CASES, ids=lambda case: case.name)
def test_nest_cases_are_quick_and_never_worse(case: nest.Case) -> None:
    """Equal in NEST's own model (1% of its binary's step where layer times differ), never worse with units right."""
    for devices in {64, 1024, *case.published}:
        found = nest.solve(case, devices)
        assert found.cpu_s < 2
        assert found.units >= 1 - 1e-12
        assert found.edges >= 1 - 1e-12
        if devices in case.published:
            assert found.step == pytest.approx(case.published[devices], rel=1e-2 if "TPU" in case.name else 1e-5)


def test_nest_loses_on_every_number_of_h100() -> None:
    gains = [nest.solve(nest.CASES[0], devices).units for devices in nest.DEVICES]
    assert min(gains) > 1.002
    assert max(gains) == gains[-1] > 1.06
