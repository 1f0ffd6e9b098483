"""One rule serves arrays and scalars: the bulk filter and the check of a whole plan give the same verdict."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.planner.rules import bulk_legal, facts_of_plan, violations
from meshwright.specs.batch import CandidateBatch
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.model_io import load_model
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from .megatron_plans import document

TARGET = load_target("megatron@0.19")


def candidates(count: int, ranks: int, seed: int) -> CandidateBatch:
    """Random candidates on ``ranks`` GPUs whose dense grid divides; everything else may be wrong."""
    rng = np.random.default_rng(seed)
    rows = []
    while len(rows) < count:
        tp, pp, cp, ep, etp, vpp, micro = (int(2 ** rng.integers(0, 4)) for _ in range(7))
        tp = 3 if rng.random() < 0.1 and ranks % 3 == 0 else tp
        if ranks % (tp * pp * cp) or (ranks // pp) % (ep * etp):
            continue
        dp = ranks // (tp * pp * cp)
        count_micro = int(rng.integers(1, 12))
        recompute, sharding = rng.integers(0, len(TARGET.recompute)), rng.integers(0, len(TARGET.sharding))
        rows.append((tp, pp, cp, ep, etp, dp, vpp, micro, count_micro, recompute, sharding))
    columns = np.array(rows, dtype=np.int64).T
    names = (
        "tp",
        "pp",
        "cp",
        "ep",
        "etp",
        "dp",
        "vpp",
        "micro_batch_size",
        "num_microbatches",
        "recompute",
        "sharding",
    )
    return CandidateBatch(**dict(zip(names, columns, strict=True)))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_bulk_and_single_agree(name):
    model, cluster = load_model(name), load_cluster("48xH100")
    batch = candidates(60, 48, seed=len(name))
    legal = 0
    for row in range(len(batch)):
        one = batch.take(np.array([row]))
        value = {field: int(getattr(one, field)[0]) for field in batch.__dataclass_fields__}
        doc = document(
            model,
            cluster,
            tp=value["tp"],
            pp=value["pp"],
            cp=value["cp"],
            ep=value["ep"],
            etp=value["etp"],
            vpp=value["vpp"],
            micro_batch_size=value["micro_batch_size"],
            micro_batches=value["num_microbatches"],
            sharding=TARGET.sharding[value["sharding"]],
            recompute=TARGET.recompute[value["recompute"]],
        )
        work = doc.inputs.workload
        mask, rejected = bulk_legal(one, model, work, TARGET)
        broken = violations(facts_of_plan(doc.plan, model, work, TARGET))
        assert bool(mask[0]) == (not broken), (value, rejected, broken)
        assert sum(rejected.values()) == (not mask[0])
        legal += bool(mask[0])
    assert 0 < legal < len(batch)


def test_refusals_are_counted_once_each_by_the_first_rule():
    model = load_model("llama-3.1-8b")
    batch = candidates(500, 48, seed=1)
    mask, rejected = bulk_legal(batch, model, Workload(global_batch_size=48, seq_length=4096), TARGET)
    assert sum(rejected.values()) == int((~mask).sum())
    for tp in (3, 6):
        assert not mask[batch.tp == tp].any()  # 32 heads


def test_an_empty_batch_is_no_error():
    empty = candidates(1, 48, seed=1).take(np.array([], dtype=np.int64))
    mask, rejected = bulk_legal(empty, load_model("llama-3.1-8b"), Workload(global_batch_size=8, seq_length=64), TARGET)
    assert mask.shape == (0,)
    assert rejected == {}
