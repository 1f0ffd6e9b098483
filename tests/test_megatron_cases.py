"""Argument lines whose verdict by Megatron 0.19.2's own code is known: ours must be the same, for the right reason.

The file's ``expect`` is ``ok`` or a piece of Megatron's message; the rule that states the same is named here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.megatron_export.megatron import check_arguments

CASES = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "megatron_cases.jsonl").read_text().splitlines()
]
RULES = {
    "world not divisible": "W1",
    "batch not divisible": "B1",
    "layers % pp": "P1",
    "vpp pp=2 no p2p overlap": "P8",
    "vpp remainder": "P9r",
    "heads % tp": "T1",
    "ffn % tp (late)": "T3",
    "seq % 2cp": "C1",
    "max pos < seq": "C2",
    "CDMC": "T8",
    "selective with method": "R1s",
    "selective bad module": "R2",
    "overlap param gather no distopt": "D1",
    "overlap pg no gr": "D1g",
    "layout + vpp flag": "P2",
    "layout wrong count": "P13",
    "layout no L": "P13",
    "layout bad char": "P11",
    "layout + first": "P6",
    "first/last middle": "P5",
    "first % vpp": "P5v",
    "account emb bad": "P1",
    "etp*ep*pp": "W2",
    "ep without moe": "E1",
    "moe bias etp": "E2",
    "a2a overlap needs vpp": "E11v",
    "delay wgrad needs overlap": "E12",
    "deepep needs flex": "E5",
    "mfsdp ckpt": "D4c",
    "fsdp2 with pp": "D3",
    "tp overlap needs sp": "T7",
    "unknown flag": "A0",
    "cpu offload pp": "R4",
    "fp16+bf16": "D10",
    "moe capacity pad": "E7p",
}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_verdict_is_megatrons_for_the_same_reason(case):
    broken = [item.rule for item in check_arguments(case["args"], case["world_size"], case.get("env"))]
    if case["expect"] == "ok":
        assert broken == []
    else:
        assert f"megatron.{RULES[case['name']]}" in broken


def test_every_refused_case_names_its_rule():
    assert set(RULES) == {case["name"] for case in CASES if case["expect"] != "ok"}
