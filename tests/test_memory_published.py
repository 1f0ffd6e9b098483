"""Predicted memory against published runs: allocated peaks, and configurations that ran out of memory."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cost_models.backtest.price import Priced, price

DATA = Path(__file__).parent / "data"
COLUMNS = ("interconnect", "gpu", "notes", "quality", "etp", "cp", "ep", "vp", "sequence_parallel", "model_overrides")


@cache
def models() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "published_models.json").read_text())
    return found


@cache
def errors() -> dict[str, tuple[str, float]]:
    """(task, predicted over measured peak allocated, less one) by run, on the rank that the source read."""
    out = {}
    with (DATA / "published_peaks.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            priced = price({**dict.fromkeys(COLUMNS, ""), **row}, models())
            assert priced.estimate is not None, priced.reason
            stages = priced.estimate.stages
            by_rank = {"first": stages[0].allocated_bytes, "last": stages[-1].allocated_bytes}
            predicted = by_rank.get(row["rank"], max(stage.allocated_bytes for stage in stages))
            out[row["id"]] = row["task"], predicted / float(row["peak_bytes"]) - 1
    return out


def test_allocated_peaks_of_training_runs_within_four_percent_on_average() -> None:
    training = [error for task, error in errors().values() if task in ("pretrain", "sft")]
    assert len(training) == 14
    assert np.abs(training).mean() <= 0.04
    assert np.median(np.abs(training)) <= 0.025


def test_functional_runs_within_a_tenth_on_average() -> None:
    """Tests of Megatron-LM and convergence runs, whose settings are only partly known."""
    functional = [error for task, error in errors().values() if task == "pretrain-functional"]
    assert len(functional) == 8
    assert np.abs(functional).mean() <= 0.10


@pytest.mark.parametrize("run", ["simumax-0005", "simumax-0006", "simumax-0007", "simumax-0008"])
def test_shortened_deepseek_models_on_b200(run: str) -> None:
    """Stated in full: model, plan, precision, loss. The closed form promises 1%."""
    assert errors()[run][1] == pytest.approx(0, abs=0.01)


@cache
def cases() -> dict[str, tuple[str, Priced]]:
    out = {}
    for line in (DATA / "out_of_memory.jsonl").read_text().splitlines():
        case = json.loads(line)
        known = models() | ({case["model"]: case["architecture"]} if "architecture" in case else {})
        text = {name: value for name, value in case.items() if isinstance(value, str)}
        blank = dict.fromkeys((*COLUMNS, "id", "release", "tp", "pp", "dp", "other_flags", "gpus_per_node"), "")
        out[case["id"]] = case["verdict"], price({**blank, **text}, known)
    return out


def test_most_configurations_that_ran_out_of_memory_are_said_not_to_fit() -> None:
    """The rest are named: five whose like ran at 95% of the card, and three that miss something."""
    wrong = {
        name for name, (verdict, p) in cases().items() if verdict == "oom" and (p.estimate is None or p.estimate.fits)
    }
    at_the_edge = {f"titan-run{number}" for number in (199, 285, 325, 331, 335)}
    assert wrong == at_the_edge | {"titan-run374", "titan-run382", "u001-ep8"}
    usable = [name for name, (verdict, _) in cases().items() if verdict == "oom" and name not in at_the_edge]
    assert 1 - len(wrong - at_the_edge) / len(usable) >= 0.85


def test_neighbours_that_ran_are_said_to_fit() -> None:
    verdicts = {name: p.estimate.fits for name, (v, p) in cases().items() if v == "fits" and p.estimate}
    assert verdicts == {"u001-ep1": True, "u018-16x20k": False, "u109-cp4": True}
