"""Sailor's cases: published figures, our event scores by hand, the planner's search with its costs, stored plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import sailor
from benchmarks.peers.data import HERE, SAILOR
from benchmarks.peers.sailor_score import Chain, Score, chains_of, closed_form_s, finish_s, score
from benchmarks.peers.sailor_tables import SailorTables
from meshwright.profiler.importers import read


@pytest.fixture(scope="module")
def tables() -> SailorTables:
    profile = read("sailor", SAILOR).profile
    assert profile is not None
    return SailorTables(profile)


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
    # A first stage of 9 s: its link counts in the careful form only, against 6 s and two messages of the last stage.
    slow = Chain((), (4.0, 2.0), (5.0, 4.0), (0.5,))
    assert closed_form_s(slow, 2) - closed_form_s(slow, 1) == 9
    assert closed_form_s(slow, 2, careful=True) - closed_form_s(slow, 1, careful=True) == 9 + 2 * 0.5


@pytest.mark.parametrize("case", sailor.CASES, ids=lambda case: case.trace)
def test_stored_sailor_plans_reach_what_was_promised(case: sailor.Case, tables: SailorTables) -> None:
    plan = json.loads((HERE / case.plan_file).read_text(encoding="utf-8"))
    found = score(plan, tables, sailor.GLOBAL_BATCH)
    assert found.too_full == ()
    stored = json.loads((HERE / "sailor_scores.json").read_text(encoding="utf-8"))[case.name]
    assert found == Score(**{**stored, "too_full": ()})
    assert min(found.events_per_s, found.blocking_events_per_s) > case.best_known_per_s
    assert min(found.closed_form_per_s, found.careful_form_per_s) > case.best_known_per_s


def test_the_best_plan_of_the_three_types_has_a_margin_in_every_reading() -> None:
    """The best known one has V100 3, A100 6, GH200 17 layers."""
    scores = json.loads((HERE / "sailor_scores.json").read_text(encoding="utf-8"))[sailor.CASES[1].name]
    assert scores["closed_form_per_s"] > 1.07 * sailor.CASES[1].best_known_per_s
    assert scores["careful_form_per_s"] > 1.015 * sailor.CASES[1].best_known_per_s


def test_plans_near_hold_every_order_and_split_within_two_layers() -> None:
    plans = list(sailor.plans_near(small_example()))
    found = {
        (
            plan["pipeline_list"][0]["tmp_per_stage"][0][0][0][0][0],
            *map(len, plan["pipeline_list"][0]["layers_per_stage"]),
        )
        for plan in plans
    }
    assert len(plans) == 10
    assert found == {
        (gpu, at + by, 26 - at - by) for gpu, at in (("V100-16", 7), ("A100-40", 19)) for by in range(-2, 3)
    }


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
