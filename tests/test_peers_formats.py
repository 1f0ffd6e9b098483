"""Plans in the formats of other planners: one plan in five formats, and refusals of what a format cannot say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api.cli import run
from meshwright.api.exports import export_files
from meshwright.megatron_export.peers import PEER_EXPORTERS
from meshwright.megatron_export.peers.nest import nest_plan
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError

from .peer_cases import example, mixed_cluster, stage

EXAMPLE = Path(__file__).parent / "data" / "hetero_example"


def only_file(document: PlanDocument, target: str) -> Any:
    (text,) = export_files(document, target).values()
    return yaml.safe_load(text)  # JSON is YAML


def test_sailor_metis_and_flashflex_files_are_those_of_the_example() -> None:
    for name in ("sailor", "metis", "flashflex"):
        expected = json.loads((EXAMPLE / f"plan_{name}.json").read_text(encoding="utf-8"))
        expected.pop("note", None)
        assert only_file(example(), name) == expected


def test_flagscale_settings_are_those_of_the_example() -> None:
    expected = yaml.safe_load((EXAMPLE / "plan_flagscale.yaml").read_text(encoding="utf-8"))["hetero"]
    names = {"V100-16": "V100-SXM2-16GB", "A100-40": "A100-SXM-40GB"}
    expected["hetero_device_types"] = [names[gpu] for gpu in expected["hetero_device_types"]]
    assert only_file(example(), "flagscale") == {"hetero": expected}


def test_megatron_layout_is_that_of_the_example() -> None:
    text = (EXAMPLE / "plan_megatron.txt").read_text(encoding="utf-8")
    layout = text.split('layout "')[1].split('"')[0]
    arguments = export_files(example())["train_args.sh"]
    found = re.search(r"--pipeline-model-parallel-layout '([^']*)'", arguments)
    assert found is not None
    assert re.sub(r"t\*(\d+)", lambda match: "t" * int(match[1]), found[1]) == layout


def one_type(**changes: Any) -> PlanDocument:
    """The example on the A100 alone: one stage of two-way tensor parallelism, twelve of the layers recomputed."""
    cluster = mixed_cluster()
    pool = next(i for i, p in enumerate(cluster.pools) if "A100" in p.gpu)
    only = stage(cluster, pool, ["embed", "decoder:0-23", "head"], 0)
    only |= {
        "degrees": {"tp": 2, "dp": 2, "etp": 2, "edp": 2},
        "recompute": {"granularity": "full", "method": "block", "num_layers": 12},
    }
    only["groups"][0]["micro_batches"] = 32
    plain = {
        "tp": 2,
        "pp": 1,
        "etp": 2,
        "dp": 2,
        "edp": 2,
        "num_microbatches": 32,
        "recompute": only["recompute"],
        "stages": [only],
        "devices": [{"ranks": "0-3", "pool": cluster.pools[pool].name, "nodes": "0"}],
    }
    return example(**(plain | changes))


def test_galvatron_strategy_has_an_entry_a_layer() -> None:
    data = only_file(one_type(), "galvatron")
    assert data["pp_deg"] == 1
    assert data["pp_division"] == "24"
    assert data["tp_sizes_enc"] == ",".join(["2"] * 24)
    assert data["checkpoint"] == ",".join(["1"] * 12 + ["0"] * 12)
    assert (data["global_bsz"], data["chunks"], data["world_size"]) == (64, 32, 4)
    assert (data["default_dp_type"], data["vtp"], data["vsp"]) == ("ddp", 2, 0)


def test_nest_stages_count_the_embedding_as_minus_one() -> None:
    plan = nest_plan(one_type())
    assert plan["stages"] == [{"devicesForStage": 2, "nodes": [-1, *range(24)]}]
    assert (plan["tensorParallelDegree"], plan["dataParallelDegree"]) == (2, 2)


@pytest.mark.parametrize(
    ("target", "document", "field"),
    [
        ("sailor", one_type, "recompute"),
        ("metis", one_type, "recompute"),
        ("flashflex", one_type, "recompute"),
        ("galvatron", example, "GPU types"),
        ("nest", example, "GPU types"),
    ],
)
def test_what_a_format_cannot_say_is_refused(target: str, document: Any, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        PEER_EXPORTERS[target](document())
    message = str(caught.value)
    assert field in message
    assert f"which {target} plans cannot say" in message


def test_sharded_optimizers_are_refused_where_the_format_has_none() -> None:
    document = example()
    assert document.plan is not None
    stages = [each.model_copy(update={"sharding": "zero1"}) for each in document.plan.stages]
    sharded = document.model_copy(update={"plan": document.plan.model_copy(update={"stages": tuple(stages)})})
    for target in ("sailor", "metis", "flashflex"):
        with pytest.raises(SpecError, match="zero1"):
            PEER_EXPORTERS[target](sharded)


def test_a_document_without_a_plan_is_refused() -> None:
    empty = example().model_copy(update={"plan": None, "status": "infeasible"})
    for writer in PEER_EXPORTERS.values():
        with pytest.raises(SpecError, match="nothing to export"):
            writer(empty)


def test_export_writes_a_peers_file(tmp_path: Path) -> None:
    document = tmp_path / "plan.json"
    document.write_text(json.dumps(example().to_json()), encoding="utf-8")
    assert run(["export", str(document), "--target", "metis", "-o", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "plan_metis.json").read_text(encoding="utf-8"))
    assert written["layer_partition"] == [0, 7, 26]
    assert run(["export", str(document), "--target", "galvatron", "-o", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()
