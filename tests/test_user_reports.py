"""Reports by users of Megatron that its code refuses: ours names the same rule, and the answer they got is legal.

Each line of the data has the report's facts (``inputs``, ``right_answer``), an argument line that states them (numbers
that a report leaves out are the model's own), the rules to name, and ``fix``: flags that make it legal.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.megatron_export.megatron import check_arguments

REPORTS = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "user_reports.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("report", REPORTS, ids=[report["id"] for report in REPORTS])
def test_a_refused_configuration_names_its_rule_and_the_right_answer_is_legal(report):
    found = check_arguments(report["args"], report["world_size"], version=report["version"])
    assert [item.rule.removeprefix("megatron.") for item in found] == report["rules"]
    if report["fix"]:  # repeated flags: the last counts
        fixed = f"{report['args']} {report['fix']}"
        assert check_arguments(fixed, report["world_size"], version=report["version"]) == []


def test_the_same_heads_are_legal_since_copies_of_them_came():
    (report,) = (report for report in REPORTS if report["rules"] == ["T2o"])
    assert check_arguments(report["args"], report["world_size"], version="0.16") == []


def test_more_gpus_are_the_answer_where_no_flag_is():
    (report,) = (report for report in REPORTS if not report["fix"])
    found = check_arguments(report["args"], report["world_size"], version=report["version"])
    # TP x PP = 12 and EP x PP = 48: 48 GPUs hold both, as the report says.
    assert all("world_size=48" in item.alternatives for item in found)
    assert check_arguments(report["args"].replace("size 32", "size 24", 1), 48, version=report["version"]) == []
