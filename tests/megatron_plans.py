"""Plan documents built by hand for export tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.megatron_export.megatron.read_plan import devices_of, groups_of
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import Inputs, PlanDocument
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Chunk, Degrees, Options, Plan, Sharding, Stage
from meshwright.specs.target import RecomputeMode
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload


def document(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    vpp: int = 1,
    layers: Sequence[int] | None = None,
    micro_batch_size: int = 1,
    micro_batches: int | None = None,
    seq_length: int = 4096,
    sharding: Sharding = "zero1",
    recompute: RecomputeMode | None = None,
    options: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    rank_order: str = "tp-cp-ep-dp-pp",
    target: str = "megatron@0.19",
) -> PlanDocument:
    """A plan over the whole cluster. ``layers`` of each chunk along the pipeline; default: as even as can be."""
    world = cluster.num_gpus
    per_stage = world // pp
    dp = per_stage // (tp * cp)
    count = micro_batches or 2 * pp
    chunks = pp * vpp
    if layers is None:
        layers = [model.num_layers * (i + 1) // chunks - model.num_layers * i // chunks for i in range(chunks)]
    work = Workload.parse(
        {"global_batch_size": micro_batch_size * dp * count, "seq_length": seq_length, **(workload or {})}
    )
    mtp = model.mtp.num_layers if model.mtp and work.mtp else 0
    mode = recompute or RecomputeMode()
    degrees = Degrees(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=per_stage // (ep * etp))
    first, blocks = 0, []
    for index, size in enumerate(layers):
        names = ["embed"] if index == 0 else []
        if size:
            names.append(f"decoder:{first}-{first + size - 1}" if size > 1 else f"decoder:{first}")
        if index == chunks - 1:
            names += [f"mtp:0-{mtp - 1}" if mtp > 1 else "mtp:0"] * bool(mtp) + ["head"]
        blocks.append(tuple(names))
        first += size

    def stage_ranks(stage: int) -> list[int]:
        if rank_order.endswith("pp"):
            return list(range(stage * per_stage, (stage + 1) * per_stage))
        replica = tp * cp
        return [(d * pp + stage) * replica + place for d in range(dp) for place in range(replica)]

    stages = tuple(
        Stage(
            chunks=tuple(Chunk(order=v * pp + p, blocks=blocks[v * pp + p]) for v in range(vpp)),
            degrees=degrees,
            micro_batch_size=micro_batch_size,
            recompute=mode,
            sharding=sharding,
            groups=groups_of(cluster, stage_ranks(p), count),
        )
        for p in range(pp)
    )
    chosen = {
        "sequence_parallel": tp > 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": sharding != "none",
        "overlap_p2p": vpp > 1,
        "dispatcher": "alltoall" if model.is_moe else None,
        "cp_comm_type": "p2p" if cp > 1 else None,
        "grouped_gemm": model.is_moe,
        "vp_group_size": pp if vpp > 1 else None,
    } | (options or {})
    plan = Plan(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=degrees.edp,
        vpp=vpp,
        micro_batch_size=micro_batch_size,
        num_microbatches=count,
        schedule="interleaved" if vpp > 1 else "1f1b",
        sharding=sharding,
        recompute=mode,
        stages=stages,
        devices=devices_of(cluster, world),
        rank_order=rank_order,
        options=Options.parse(chosen),
    )
    inputs = Inputs(model=model, cluster=cluster, workload=work, target=load_target(target))
    return PlanDocument(status="feasible", inputs=inputs, plan=plan)
