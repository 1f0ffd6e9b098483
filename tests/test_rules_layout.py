"""Pipeline layout strings: grammar, shortest form, and what Megatron refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.rules import Layout, LayoutError


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("Et*3|t|tL", ["Ettt", "t", "tL"]),
        ("Et*3|(tt|)*3,m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
        ("E|(t*2|)*2tL", ["E", "tt", "tt", "tL"]),
        ("EttL", ["EttL"]),
        ("Et||tL", ["Et", "", "tL"]),
        ("E,(t|)*2,L", ["Et", "t", "L"]),
    ],
)
def test_parse(text, chunks):
    assert Layout.parse(text).chunks == tuple(chunks)


def test_format_joins_runs_and_repeats():
    assert Layout(("E" + "t" * 14, *["t" * 22] * 3, "t" * 22 + "L")).format() == "Et*14|(t*22|)*3t*22L"
    assert Layout(("Ettt", *["tt"] * 29, "m", "L")).format() == "Et*3|(tt|)*29m|L"


@given(st.lists(st.text("Etm L".replace(" ", ""), max_size=6), min_size=1, max_size=12))
def test_format_parses_back_to_the_same_chunks(chunks):
    layout = Layout(tuple(chunks))
    assert Layout.parse(layout.format()) == layout


@pytest.mark.parametrize("text", ["Ex|L", "Et*2 |L", "E(t|(t|)*2)*2L", "t*99999999999|"])
def test_wrong_characters_and_absurd_lengths(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "pp", "mtp", "words"),
    [
        ("Ett|ttL", 2, 0, ""),
        ("Ett|ttmL", 2, 1, ""),
        ("Ett|tt|m|L", 4, 1, ""),
        ("Ett|ttL", 4, 0, "not a multiple of PP 4"),
        ("tt|ttL", 2, 0, "start with the embedding"),
        ("Ett|tt", 2, 0, "end with the loss"),
        ("Ett|ELtt|L", 3, 0, "once"),
        ("Ett|tL", 2, 0, "3 decoder layers t, the model has 4"),
        ("Ett|ttL", 2, 1, "0 MTP layers m, the model has 1"),
        ("Ettm|ttL", 2, 1, "after every decoder layer"),
        ("Ett|tt|m|mL", 4, 2, "in one stage chunk"),
        ("Ettt|tm|L|", 2, 1, "last virtual stage"),
    ],
)
def test_faults_of_a_four_layer_model(text, pp, mtp, words):
    found = Layout.parse(text).faults(4, mtp, pp)
    assert bool(found) == bool(words)
    assert any(words in item for item in found) or not words


def test_chunk_i_is_stage_i_mod_pp():
    layout = Layout.parse("Et|tt|ttt|L")
    assert [layout.at(stage, virtual, 2) for stage in (0, 1) for virtual in (0, 1)] == ["Et", "ttt", "tt", "L"]
