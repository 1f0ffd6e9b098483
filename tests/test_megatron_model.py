"""Parameters of every stage and process groups of every rank, against the model and the groups that Megatron builds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from meshwright.cost_models.block_memory import stored_params
from meshwright.cost_models.blocks import block_kinds
from meshwright.cost_models.local import Local
from meshwright.specs.batch import CellKeys
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import load_model
from meshwright.specs.plan import expand_blocks, parse_range

from .megatron_exports import request_of
from .megatron_plans import document

PYTHON = os.environ.get("MESHWRIGHT_MEGATRON_PYTHON")
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_MEGATRON_PYTHON names no python with megatron-core"),
]
SCRIPTS = Path(__file__).parent.parent / ".ci/megatron"


def ask(script, requests):
    done = subprocess.run(
        [str(PYTHON), str(SCRIPTS / script)],
        input="\n".join(map(json.dumps, requests)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def parameters_by_kind(doc):
    """What the cost model takes a rank of every stage to hold: split over TP, whole on each rank, experts."""
    model, workload, target = doc.inputs.model, doc.inputs.workload, doc.inputs.target
    plan = doc.plan
    of_block = {block: kind for kind, instances in block_kinds(model, workload) for block in instances}
    stages = []
    for stage in plan.stages:
        degrees = stage.degrees
        columns = (degrees.tp, degrees.cp, degrees.ep, degrees.etp, degrees.tp * degrees.cp * degrees.dp)
        keys = CellKeys(*(np.array([value]) for value in (*columns, stage.micro_batch_size, 0, 0, int(plan.pp == 1))))
        at = Local(model, workload, target, keys)
        found = {"dense": 0.0, "replicated": 0.0, "expert": 0.0}
        for chunk in stage.chunks:
            for block in expand_blocks(chunk.blocks):
                kind = of_block[block]
                shared, expert = (float(values[0]) for values in stored_params(kind, at))
                whole = float(at.numel(w for w in kind.weights if w.split == "replicated" and not w.expert)[0])
                found["expert"] += expert
                found["replicated"] += whole
                found["dense"] += shared - whole
        stages.append({name: int(value) for name, value in found.items()})
    return stages


MODELS = [
    ("llama-3-70b", "64xH100", {"tp": 4, "pp": 4, "vpp": 4}),
    ("mixtral-8x7b", "64xH100", {"tp": 2, "pp": 4, "vpp": 2, "ep": 8, "etp": 1}),
    ("qwen3-30b-a3b", "64xH100", {"tp": 2, "pp": 4, "cp": 2, "ep": 8, "etp": 1, "layers": [13, 12, 12, 11]}),
    ("gpt-3-175b", "64xH100", {"tp": 8, "pp": 8, "seq_length": 2048}),
    ("deepseek-v3", "512xH100", {"tp": 2, "pp": 16, "ep": 32, "etp": 1}),
    ("llama-3.2-1b", "16xH100", {"tp": 4, "pp": 2}),  # tied embeddings: a second copy in the last stage
]


def test_parameters_of_every_stage_are_those_of_the_built_model():
    docs = [document(load_model(name), load_cluster(cluster), **choices) for name, cluster, choices in MODELS]
    counts = ask("count.py", [request_of(doc, name) for doc, (name, *_) in zip(docs, MODELS, strict=True)])
    for doc, answer in zip(docs, counts, strict=True):
        built = [{kind: stage[kind] for kind in ("dense", "replicated", "expert")} for stage in answer["stages"]]
        assert parameters_by_kind(doc) == built, answer["name"]
        layers = [
            [[index for kind, index in expand_blocks(chunk.blocks) if kind == "decoder"] for chunk in stage.chunks]
            for stage in doc.plan.stages
        ]
        assert [stage["layers"] for stage in answer["stages"]] == layers


def groups_of(plan):
    """Who forms each process group, from the stages and device map of a plan: ranks that share every other index.

    The ranks of a stage count TP first, then CP, then DP (experts: ETP, EP, expert DP), as the documents define them.
    """
    shape = plan.stages[0].degrees
    dense, expert = {}, {}
    for number, stage in enumerate(plan.stages):
        ranks = [rank for group in stage.groups for text in group.ranks for rank in parse_range(text)]
        for place, rank in enumerate(ranks):
            tp, rest = place % shape.tp, place // shape.tp
            dense[rank] = {"tp": tp, "cp": rest % shape.cp, "dp": rest // shape.cp, "pp": number}
            etp, rest = place % shape.etp, place // shape.etp
            expert[rank] = {"tp": etp, "ep": rest % shape.ep, "dp": rest // shape.ep, "pp": number}
    return {
        grid: {
            axes: sorted(_together(indices, axes.split("-")))
            for axes in (
                ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp")
                if grid == "dense"
                else ("ep", "tp", "tp-ep", "tp-ep-pp", "dp")
            )
        }
        for grid, indices in (("dense", dense), ("expert", expert))
    }


def _together(indices, axes):
    groups = {}
    for rank, place in sorted(indices.items()):
        fixed = tuple(value for axis, value in place.items() if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    return groups.values()


GRIDS = [
    ("mixtral-8x7b", "8xH100", {"tp": 2, "pp": 2, "ep": 4, "etp": 1}, False),
    ("mixtral-8x7b", "8xH100", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, True),
    ("mixtral-8x7b", "64xH100", {"tp": 2, "pp": 4, "cp": 2, "ep": 8, "etp": 1}, False),
    ("mixtral-8x7b", "64xH100", {"tp": 2, "pp": 4, "cp": 2, "ep": 4, "etp": 1}, True),
    ("deepseek-v3", "1024xH100", {"tp": 4, "pp": 8, "cp": 2, "ep": 32, "etp": 1}, False),
    ("qwen3-30b-a3b", "1024xH100", {"tp": 4, "pp": 8, "cp": 2, "ep": 8, "etp": 1}, True),
]


def test_process_groups_of_every_rank_are_megatrons():
    docs, requests = [], []
    for name, cluster, choices, replicas_first in GRIDS:
        order = {"rank_order": "tp-cp-ep-pp-dp"} if replicas_first else {}
        doc = document(load_model(name), load_cluster(cluster), **choices, **order)
        docs.append(doc)
        # The real groups of every rank take 0.2 s a rank at 1024: there the generator of ranks stands for them, which
        # the smaller worlds show to be the same.
        requests.append(request_of(doc, name) | {"every_rank": doc.plan.num_ranks <= 64})
    for doc, answer in zip(docs, ask("groups.py", requests), strict=True):
        ours = groups_of(doc.plan)
        assert answer["generator"] == {
            grid: {axes: [list(group) for group in groups] for axes, groups in kinds.items()}
            for grid, kinds in ours.items()
        }
        assert len(answer["ranks"]) == (doc.plan.num_ranks if doc.plan.num_ranks <= 64 else 0)
        for rank, groups in enumerate(answer["ranks"]):
            for name, members in groups.items():
                grid, axes = name.split(":")
                assert members in ours[grid][axes], (rank, name)
                assert rank in members, (rank, name)
