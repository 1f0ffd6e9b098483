"""A small mixed cluster and one plan on it: four A100 and four V100, the V100 first, six and eighteen layers."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.sailor import opt_350m
from meshwright.planner.answer.document import inputs_of
from meshwright.planner.request import PlanRequest
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Plan
from meshwright.specs.targets import load_target
from meshwright.specs.workload import workload_from_options


def mixed_cluster() -> ClusterSpec:
    return load_cluster("1x4xA100-SXM-40GB+1x4xV100-SXM2-16GB")


def stage(cluster: ClusterSpec, pool: int, blocks: list[str], first_rank: int, **changes: Any) -> dict[str, Any]:
    """A stage of four single-GPU replicas on a pool."""
    of = cluster.pools[pool]
    group = {"pool": of.name, "gpu": of.gpu, "ranks": [f"{first_rank}-{first_rank + 3}"], "micro_batches": 16}
    plain = {
        "chunks": [{"order": 0, "blocks": blocks}],
        "degrees": {"dp": 4, "edp": 4},
        "micro_batch_size": 1,
        "recompute": {"granularity": "none"},
        "sharding": "none",
        "groups": [group],
    }
    return plain | changes


def example(**changes: Any) -> PlanDocument:
    """The plan document of the example; ``changes`` replace fields of its plan."""
    cluster = mixed_cluster()
    v100 = next(i for i, pool in enumerate(cluster.pools) if "V100" in pool.gpu)
    last = stage(cluster, 1 - v100, ["decoder:6-23", "head"], 4)
    last["chunks"][0]["order"] = 1
    plan = {
        "tp": 1,
        "pp": 2,
        "cp": 1,
        "ep": 1,
        "etp": 1,
        "dp": 4,
        "edp": 4,
        "vpp": 1,
        "micro_batch_size": 1,
        "num_microbatches": 16,
        "schedule": "1f1b",
        "sharding": "none",
        "recompute": {"granularity": "none"},
        "stages": [stage(cluster, v100, ["embed", "decoder:0-5"], 0), last],
        "devices": [
            {"ranks": "0-3", "pool": cluster.pools[v100].name, "nodes": "0"},
            {"ranks": "4-7", "pool": cluster.pools[1 - v100].name, "nodes": "0"},
        ],
    }
    request = PlanRequest(
        model=opt_350m(),
        cluster=cluster,
        workload=workload_from_options({"global_batch_size": 64, "seq_length": 2048, "precision": "fp32"}),
        target=load_target("megatron@0.19"),
    )
    return PlanDocument(status="feasible", inputs=inputs_of(request), plan=Plan.parse(plan | changes))
