"""The comparison with published recipes: one real question, and verdicts on made ones."""

from __future__ import annotations

import pytest

from benchmarks import published_recipes
from benchmarks.published_recipes import TARGET, Answer, answered, because, missing, page, questions
from meshwright.specs.targets import load_target


@pytest.fixture(scope="module")
def question() -> tuple[str, list[published_recipes.Case]]:
    rows, models = published_recipes.published()
    few = [row for row in rows if row["model"] == "LLAMA3_8B" and row["num_gpus"] == "8" and row["gpu"] == "H100"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_recipes, "published", lambda: (few, models))
        found = questions(load_target(TARGET))
    assert found
    return next(iter(sorted(found.items())))


def test_our_plan_is_as_fast_as_a_published_recipe(question: tuple[str, list[published_recipes.Case]]) -> None:
    answer = answered(*question, load_target(TARGET))
    assert answer.legal >= 1
    assert answer.ours_s is not None
    assert not answer.fails
    assert answer.runs[0] in page([answer]) or answer.model in page([answer])


def made(**values: object) -> Answer:
    inputs = {"model": "m", "gpu": "g", "num_gpus": 8, "batch": 8, "seq_length": 8, "precision": "bf16"}
    return Answer(key="k", runs=["r"], legal=1, fitting=1, **inputs, **values)  # type: ignore[arg-type]


def test_verdicts() -> None:
    slower = made(recipe_s=1.0, plain_s=1.0, ours_s=1.2, differs={"micro_batch_size": [32, 16], "options.x": [1, 2]})
    assert slower.fails
    assert missing(slower) == "space: micro_batch_size 32 (ours 16)"
    options = made(recipe_s=1.0, plain_s=1.3, ours_s=1.25, options_worth_s={"tp_comm_overlap": 0.25})
    assert missing(options) == "options: tp_comm_overlap (20.0%)"
    offload = {"options.activation_offload_layers": [40, 0], "micro_batch_size": [2, 1]}
    roomy = made(recipe_s=1.0, plain_s=1.0, plain_fits=False, ours_s=1.1, differs=offload)
    assert missing(roomy) == "memory: options.activation_offload_layers 40"
    equal = made(recipe_s=1.0, plain_s=1.0, ours_s=1.0)
    assert not equal.fails
    assert missing(equal) == because(equal) == ""
    faster = made(recipe_s=1.2, plain_s=1.2, ours_s=1.0, why="tp 8 -> 1: less the pipeline bubble 20%")
    assert faster.speedup == pytest.approx(1.2)
    assert because(faster) == faster.why
    no_plan = made(recipe_s=1.0, plain_s=1.0)
    assert no_plan.fails
    text = page([slower, options, equal, faster, no_plan])
    assert "| 5 | 5 | 2 | 3 | 1 |" in text
