"""Our searches over other planners' cost models: their published figures, brute force, and the stored plan files."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import galvatron, nest, sailor
from benchmarks.peers.data import HERE, NEST, SAILOR
from benchmarks.peers.galvatron_model import GalvatronModel, Strategy
from benchmarks.peers.nest_model import AS_PUBLISHED, UNITS_FIXED, WITH_ADAM, Mode, NestProblem, Plan
from benchmarks.peers.sailor_score import Chain, chains_of, closed_form_s, finish_s, score
from benchmarks.peers.sailor_tables import SailorTables
from meshwright.planner.partition import StageTables, split_1f1b
from meshwright.profiler.importers import read


@pytest.fixture(scope="module")
def tables() -> SailorTables:
    profile = read("sailor", SAILOR).profile
    assert profile is not None
    return SailorTables(profile)


# Sailor


def small_example() -> dict[str, Any]:
    path = Path(__file__).parent / "data" / "hetero_example" / "plan_sailor.json"
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return plan


def test_the_small_example_takes_what_it_is_published_to_take(tables: SailorTables) -> None:
    """Four V100 and four A100: 2.786 s of pipeline with blocking sends and 0.795 s of all-reduce, 3.581 s in all."""
    chains, _, batch = chains_of(small_example(), tables)
    assert max(finish_s(chains[0], 64 // (4 * batch), blocking=True)) == pytest.approx(2.7862458599999997, rel=1e-8)
    assert 1 / score(small_example(), tables, 64).blocking_events_per_s == pytest.approx(3.581355308053374, rel=1e-8)


def test_one_micro_batch_through_two_stages_by_hand() -> None:
    chain = Chain((), (1.0, 2.0), (3.0, 4.0), (0.5,))
    assert finish_s(chain, 1, blocking=False) == [1 + 0.5 + 2 + 4 + 0.5 + 3, 1 + 0.5 + 2 + 4]
    assert closed_form_s(chain, 1) == 1 + 2 + 3 + 4 + 2 * 0.5
    # Two: the second forward waits for nothing, its backward for stage 1, which is busy from 1.5 to 13.5.
    assert max(finish_s(chain, 2, blocking=False)) == 1.5 + 2 * (2 + 4) + 0.5 + 3
    assert closed_form_s(chain, 2) == closed_form_s(chain, 1) + 2 + 4 + 2 * 0.5


@pytest.mark.parametrize("case", sailor.CASES, ids=lambda case: case.trace)
def test_stored_sailor_plans_reach_what_was_promised(case: sailor.Case, tables: SailorTables) -> None:
    plan = json.loads((HERE / case.plan_file).read_text(encoding="utf-8"))
    found = score(plan, tables, sailor.GLOBAL_BATCH)
    assert found.too_full == ()
    for rate in (found.events_per_s, found.blocking_events_per_s, found.closed_form_per_s):
        assert rate >= case.best_known_per_s - 5e-5  # published to four digits


def test_the_search_finds_the_stored_plan_with_sailors_costs(tables: SailorTables) -> None:
    case = sailor.CASES[0]
    found = sailor.solve(case)
    assert found.plan == json.loads((HERE / case.plan_file).read_text(encoding="utf-8"))
    assert found.score.events_per_s == pytest.approx(0.0884, abs=5e-5)  # the best known plan under this event model
    # The search's own step ends with the stage whose reduction ends last, after blocking sends: two implementations of
    # the same schedule agree.
    chains, layers, batch = chains_of(found.plan, tables)
    ends = finish_s(chains[0], sailor.GLOBAL_BATCH // (16 * batch), blocking=True)
    params = [
        tables.params(m.gpu, 1, batch)[list(held)].sum() for m, held in zip(chains[0].machines, layers, strict=True)
    ]
    reduce_s = [tables.reduce_s((m,) * 16, float(p)) for m, p in zip(chains[0].machines, params, strict=True)]
    assert found.search_step_s == pytest.approx(max(map(sum, zip(ends, reduce_s, strict=True))), rel=1e-9)


def test_sailor_plans_that_are_no_pipeline_are_refused(tables: SailorTables) -> None:
    plan = small_example()
    plan["pipeline_list"][0]["layers_per_stage"][1].pop()
    with pytest.raises(ValueError, match="layers 0 to 25 in order"):
        score(plan, tables, 64)
    with pytest.raises(ValueError, match="no multiple"):
        score(small_example(), tables, 66)


def test_a_stage_that_is_too_full_is_told(tables: SailorTables) -> None:
    """26 layers on a V100: 407M parameters are 9.8 GB, and 24 x 361 MB + 843 MB of activations more than the rest."""
    machines = [[[[["V100-16", 1, "us-central1-a"]], 1]] * 4]
    pipeline = {"num_stages": 1, "layers_per_stage": [list(range(26))], "dp": [4], "tmp_per_stage": machines}
    assert score({"mbs": 1, "pipeline_list": [pipeline]}, tables, 64).too_full == (0,)


# NEST


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


def test_the_planners_partition_finds_nests_longest_stage() -> None:
    """With very many micro-batches the 1F1B bound is the longest stage alone: the planner's own split agrees."""
    problem = NestProblem(NEST / "h100_spineLeaf__mixtral_mbs1.json", 1024)
    chain, stages, many = problem.chains[1], 8, 2**40
    busy = np.empty((1, stages, chain.layers))
    room = np.empty((1, stages))
    send = np.zeros((1, stages))
    edge = float(chain.received_bytes[1, 2])
    own = np.arange(chain.layers)
    for index in range(stages):
        after = stages - 1 - index
        forward, backward = chain.forward[own, own + 1], chain.backward[own, own + 1]
        busy[0, index] = forward + backward * (2 if after else 1)
        received = edge if index else 0.0
        send[0, index] = float(problem.receive_s(np.array(received), after, problem.width))
        room[0, index] = problem.memory_bytes - after * received
    held = 2 * chain.parameter_bytes[own, own + 1] + chain.activation_bytes[own, own + 1]
    nothing = np.zeros((1, stages, chain.layers))
    split = split_1f1b(
        StageTables(
            busy_s=busy,
            bytes_=np.broadcast_to(held, busy.shape).copy(),
            transient_bytes=np.zeros((1, chain.layers)),
            capacity_bytes=room,
            send_s=send,
            micro_batches=np.array([many]),
            counted=np.ones(chain.layers),
            leading=np.array([0]),
            extra_busy_s=nothing,
            extra_bytes=nothing,
            extra_transient_bytes=np.zeros((1, chain.layers)),
        )
    )
    plan, _ = problem.solve()
    assert plan.stages == stages
    longest = max(
        float(problem.stage_s(1, stages - 1 - i)[pair])
        for i, pair in enumerate(zip(plan.cuts, plan.cuts[1:], strict=False))
    )
    assert split.bound_s[0] / many == pytest.approx(longest, rel=1e-9)


def test_nest_cases_are_quick_and_never_worse() -> None:
    found = nest.solve(nest.CASES[0], 64)
    assert found.cpu_s < 1
    assert found.units >= 1 - 1e-12
    assert found.edges >= 1 - 1e-12


# Galvatron


@pytest.fixture(scope="module")
def models() -> dict[int, GalvatronModel]:
    profile = read("galvatron", galvatron.GALVATRON).profile
    assert profile is not None
    return {nodes: GalvatronModel(profile, nodes, 8, galvatron.HIDDEN) for nodes in (1, 2, 8)}


#: Plans that Galvatron's own search returned: (case, chunks, layers, rest, seconds a step, megabytes), as published.
PUBLISHED = [
    (
        "A",
        1,
        ((Strategy(1, False, True, True), 20), (Strategy(1, False, True, False), 12)),
        Strategy(2, True, True),
        1.0860,
        36757,
    ),
    (
        "B",
        1,
        ((Strategy(1, False, True, True), 23), (Strategy(1, False, False, True), 9)),
        Strategy(4, True, True),
        4.1808,
        38581,
    ),
    ("D", 4, ((Strategy(4, False, False, False), 32),), Strategy(2, False, False), 2.1084, 38871),
    (
        "E",
        1,
        ((Strategy(1, False, False, True), 19), (Strategy(1, False, False, False), 13)),
        Strategy(4, True, True),
        1.0527,
        38865,
    ),
]


@pytest.mark.parametrize(("name", "chunks", "layers", "rest", "seconds", "megabytes"), PUBLISHED)
def test_galvatron_plans_cost_what_galvatron_says(
    models: dict[int, GalvatronModel],
    name: str,
    chunks: int,
    layers: tuple[tuple[Strategy, int], ...],
    rest: Strategy,
    seconds: float,
    megabytes: float,
) -> None:
    case = next(case for case in galvatron.CASES if case.name == name)
    model = models[case.nodes]
    costs = [(model.layer(way, case.batch, chunks), count) for way, count in layers]
    end = model.rest(rest, case.batch, chunks)
    step = galvatron.step_ms(
        np.array(sum(cost.compute_ms * count for cost, count in costs)),
        np.array(sum(cost.synced_ms * count for cost, count in costs)),
        np.array(end.compute_ms),
        chunks,
    )
    assert float(step) / 1e3 == pytest.approx(seconds, abs=5.5e-5)
    used = sum(cost.memory_mb * count for cost, count in costs) + end.memory_mb
    used += max(model.buffer_mb(way, case.batch, chunks) for way, _ in [*layers, (rest, 1)])
    assert used + 1024 + galvatron.reserve_mb(case.memory_gb) == pytest.approx(megabytes, abs=1.5)


@pytest.mark.parametrize("case", galvatron.CASES, ids=lambda case: case.name)
def test_galvatron_cases_are_matched_in_two_cpu_seconds(case: galvatron.Case) -> None:
    found = galvatron.solve(case)
    assert case.batch / found.step_s >= case.published_per_s - 0.0051 - 0.05 * (case.published_per_s > 100)
    assert found.memory_mb <= case.memory_gb * 1024
    assert found.cpu_s < 2
    assert sum(count for _, count in found.layers) == galvatron.LAYERS
    plan = json.loads((HERE / f"galvatron_plan_{case.name.lower()}.json").read_text(encoding="utf-8"))
    assert plan["chunks"] == found.chunks
    assert plan["checkpoint"].split(",").count("1") == sum(count for way, count in found.layers if way.recompute)


def test_replicas_that_do_not_divide_a_micro_batch_are_refused(models: dict[int, GalvatronModel]) -> None:
    """24 samples in 4 micro-batches are 6 on 4 replicas: floored to 1 each in Galvatron's own search."""
    with pytest.raises(ValueError, match="no multiple"):
        models[1].layer(Strategy(2, False, False), 24, 4)
    assert Strategy(2, False, False) not in galvatron.strategies(models[1], 24, 4, True)


def test_the_mix_is_the_best_of_all_pairs(models: dict[int, GalvatronModel]) -> None:
    """A loop over every pair, count and rest of case A finds no faster plan."""
    model, case = models[1], galvatron.CASES[0]
    room = case.memory_gb * 1024 - galvatron.reserve_mb(case.memory_gb) - 1024
    best = np.inf
    ways = galvatron.strategies(model, case.batch, 1, True)
    costs = {way: model.layer(way, case.batch, 1) for way in ways}
    for end in galvatron.strategies(model, case.batch, 1, False):
        rest = model.rest(end, case.batch, 1)
        for a, b in combinations(ways, 2):
            buffer = max(model.buffer_mb(way, case.batch, 1) for way in (a, b, end))
            for count in range(0, 33, 4):
                used = count * costs[a].memory_mb + (32 - count) * costs[b].memory_mb + rest.memory_mb + buffer
                if used <= room:
                    compute = count * costs[a].compute_ms + (32 - count) * costs[b].compute_ms
                    synced = count * costs[a].synced_ms + (32 - count) * costs[b].synced_ms
                    best = min(best, max(compute + rest.compute_ms, synced))
    found = galvatron.solve(case)
    assert found.step_s * 1e3 <= best * (1 + galvatron.TOLERANCE)
