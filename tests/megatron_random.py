"""Random legal plans over random models, clusters and releases of Megatron, for its own code to judge."""

from __future__ import annotations

import random
from typing import Any

from meshwright.megatron_export.megatron import export_megatron
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import SpecError
from meshwright.specs.model_io import list_presets, load_model
from meshwright.specs.target import RecomputeMode

from .megatron_plans import document

CLUSTERS = ("8xH100", "16xA100-80GB", "32xH200", "64xH100", "4x8xA100-80GB+4x8xH100-SXM", "72xGB200-NVL72", "16xL40S")
RECOMPUTE = (
    RecomputeMode(),
    RecomputeMode(granularity="selective", modules=("layernorm",)),
    RecomputeMode(granularity="selective", modules=("mlp",)),
    RecomputeMode(granularity="selective", modules=("layernorm", "moe_act")),
    RecomputeMode(granularity="full", method="uniform", num_layers=1),
    RecomputeMode(granularity="full", method="block", num_layers=2),
)


def random_plan(number: int, versions: tuple[str, ...]) -> tuple[str, PlanDocument]:
    """Plan ``number``: drawn until the rules allow its export."""
    rng = random.Random(77_000_003 * (number + 1))
    for _ in range(1000):
        model = load_model(rng.choice(list_presets()))
        cluster = load_cluster(rng.choice(CLUSTERS))
        try:
            doc = document(model, cluster, **_choices(rng, model, cluster.num_gpus), target=rng.choice(versions))
            export_megatron(doc)
        except (SpecError, _UnfitError):
            continue
        return f"{number}: {model.name} on {cluster.name} for {doc.inputs.target.name}", doc
    raise AssertionError(f"no legal plan for number {number}")


class _UnfitError(Exception):
    """The numbers drawn do not make a plan."""


def _choices(rng: random.Random, model: Any, world: int) -> dict[str, Any]:
    """Arguments of :func:`document`; degrees divide the world, layers are split anyhow."""
    pick = rng.choice
    tp, cp, pp, vpp = pick([1, 1, 2, 4, 8]), pick([1, 1, 1, 2, 4]), pick([1, 2, 3, 4, 8]), pick([1, 1, 2, 3])
    vpp = vpp if pp > 1 else 1
    if world % (tp * cp * pp):
        raise _UnfitError
    stage = world // pp
    etp = pick([1, 1, tp]) if model.is_moe else tp
    ep = pick([size for size in (1, 2, 4, 8, 16) if stage % (etp * size) == 0]) if model.is_moe else 1
    if stage % (etp * ep):
        raise _UnfitError
    chunks = pp * vpp
    layers = None
    if rng.random() < 0.6:
        if rng.random() < 0.5:  # any split, empty stages too
            cuts = sorted(rng.choices(range(model.num_layers + 1), k=chunks - 1))
        else:  # as even as can be, but for the ends
            taken = pick([0, 1, 2])
            inner = range(1, chunks)
            cuts = [min(model.num_layers, max(0, model.num_layers * i // chunks - taken)) for i in inner]
        layers = [end - start for start, end in zip([0, *cuts], [*cuts, model.num_layers], strict=True)]
    sharding = pick(["none", "zero1", "zero1", "zero2", "fsdp"])
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    if rng.random() < 0.2 and tp > 1:
        options["tp_comm_overlap"] = True
    if rng.random() < 0.3 and ep > 1:
        options["ep_comm_overlap"] = True
    if rng.random() < 0.3 and model.is_moe:
        options["dispatcher"] = pick(["allgather", "alltoall", "flex"])
    if rng.random() < 0.3:
        options["moe_shared_expert_overlap"] = True
    if rng.random() < 0.3 and cp > 1:
        options["cp_comm_type"] = pick(["allgather", "a2a", "p2p"])
    if rng.random() < 0.2:
        options |= {"cuda_graph": True, "cuda_graph_scope": pick([(), ("attn",)])}
    if rng.random() < 0.2:
        options["grad_bucket_params"] = 100_000_000
    workload: dict[str, Any] = {"precision": pick(["bf16", "bf16", "bf16", "fp8", "fp16"])}
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "vpp": vpp,
        "layers": layers,
        "micro_batch_size": pick([1, 2, 4]),
        "micro_batches": pick([None, pp * pick([1, 2, 3]), 2 * pp + 1]),
        "seq_length": pick([1024, 2048, 4096]),
        "sharding": sharding,
        "recompute": pick(RECOMPUTE),
        "options": options,
        "workload": workload,
        "rank_order": pick(["tp-cp-ep-dp-pp"] * 3 + ["tp-cp-ep-pp-dp"]),
    }
