"""Edited plan documents: what contradicts itself or its cluster is refused with the field."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.planner.search import plan
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError

from .planner_cases import request, small_model, workload

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A two-stage interleaved plan on two pools of one node each."""
    work = workload(16, 2048)
    answer = plan(request(small_model(8), "1x4xH100-SXM+1x4xA100-SXM-80GB", work, fix={"pp": 2, "vpp": 2, "tp": 2}))
    assert answer.plan is not None
    return answer.to_json()


def put(*path: str | int, value: object) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        inner: Any = data
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value

    return edit


def test_a_document_of_the_planner_is_read_back_equal(document: dict[str, Any]) -> None:
    assert PlanDocument.parse(document).to_json() == document


GROUP = ("plan", "stages", 0, "groups", 0)


@pytest.mark.parametrize(
    ("edit", "pointer", "words"),
    [
        (put("plan", "tp", value=3), "/plan", "tp is 3"),
        (put("plan", "tp", value=None), "/plan", "tp is None"),
        (put("plan", "tp", value="2"), "/plan/tp", "integer"),
        (put("plan", "ep", value=2), "/plan", "ep is 2"),
        (put("plan", "pp", value=4), "/plan", "pp is 4"),
        (put("plan", "vpp", value=3), "/plan", "vpp is 3"),
        (put("plan", "schedule", value="1f1b"), "/plan", "1f1b does not run 2 chunks"),
        (put("plan", "micro_batch_size", value=16), "/plan", "micro_batch_size is 16"),
        (put(*GROUP, "pool", value="nope"), "/plan/stages/0/groups/0/pool", "no pool"),
        (put(*GROUP, "gpu", value="B200"), "/plan/stages/0/groups/0/gpu", "not B200"),
        (put("plan", "devices", 0, "pool", value="nope"), "/plan/devices/0/pool", "not 'nope'"),
        (put("plan", "devices", 0, "nodes", value="0-7"), "/plan/devices/0/nodes", "nodes 0 to 0"),
        (put("plan", "devices", value=[]), "/plan/devices", "rank 0 is on no device"),
        (put("inputs", "cluster", "pools", 0, "gpus_per_node", value=2), "/plan/stages", "2 GPUs"),
        (put("schema_version", value=2), "/schema_version", "got 2"),
    ],
)
def test_a_contradiction_is_refused_with_its_place(
    document: dict[str, Any], edit: Edit, pointer: str, words: str
) -> None:
    data = copy.deepcopy(document)
    edit(data)
    with pytest.raises(SpecError) as caught:
        PlanDocument.parse(data)
    fault = caught.value.faults[0]
    assert fault.pointer == pointer
    assert words in fault.message
