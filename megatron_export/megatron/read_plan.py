"""The plan that an argument list spells: stages, chunks, groups, options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

from meshwright.planner.answer.assemble import devices_in
from meshwright.planner.rules import Facts, Layout
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import (
    Chunk,
    CpComm,
    Degrees,
    Devices,
    GraphScope,
    Group,
    Hsdp,
    HsdpSharding,
    Options,
    Plan,
    Sharding,
    Stage,
    collapse_blocks,
    format_range,
)
from meshwright.specs.target import OffloadModule, RecomputeMode, RecomputeModule

from .arguments import MegatronArguments
from .derived import parse_layout
from .interpret import facts_from_arguments
from .plan_flags import even_layout

_SHARDING: dict[str, Sharding] = {
    "no_shard": "none",
    "optim": "zero1",
    "optim_grads": "zero2",
    "optim_grads_params": "fsdp",
}


def plan_from_arguments(
    args: MegatronArguments, model: ModelSpec, cluster: ClusterSpec, world_size: int | None = None
) -> Plan:
    """The plan on the first ``world_size`` GPUs of the cluster (default: all), pools and nodes in its order.

    Raises :class:`SpecError` where the arguments describe no plan (check the rules first for the reasons).
    """
    world = cluster.num_gpus if world_size is None else world_size
    if not 1 <= world <= cluster.num_gpus:
        raise SpecError(Fault("/world_size", f"must be from 1 to the cluster's {cluster.num_gpus} GPUs, got {world}"))
    facts = facts_from_arguments(args, world)
    layout = layout_of_arguments(args, facts, model.mtp.num_layers if model.mtp else 0)
    degrees = Degrees(tp=facts.tp, cp=facts.cp, dp=facts.dp, ep=facts.ep, etp=facts.etp, edp=facts.edp)
    if facts.tp * facts.cp * facts.dp * facts.pp != world:
        raise SpecError(Fault("/world_size", f"{world} is not divisible by TP x PP x CP"))
    recompute, sharding = recompute_of(args), sharding_of(args, facts)
    micro_batch, micro_batches = int(facts.micro_batch_size), int(facts.num_microbatches)
    per_stage = world // facts.pp
    stages = tuple(
        Stage(
            chunks=tuple(
                Chunk(
                    order=virtual * facts.pp + stage,
                    blocks=collapse_blocks(layout.blocks()[virtual * facts.pp + stage]),
                )
                for virtual in range(facts.vpp)
            ),
            degrees=degrees,
            micro_batch_size=micro_batch,
            recompute=recompute,
            sharding=sharding,
            groups=groups_of(cluster, _stage_ranks(facts, stage, per_stage), micro_batches),
        )
        for stage in range(facts.pp)
    )
    return Plan(
        tp=facts.tp,
        pp=facts.pp,
        cp=facts.cp,
        ep=facts.ep,
        etp=facts.etp,
        dp=facts.dp,
        edp=facts.edp,
        vpp=facts.vpp,
        micro_batch_size=micro_batch,
        num_microbatches=micro_batches,
        schedule="interleaved" if facts.vpp > 1 else "1f1b",
        sharding=sharding,
        recompute=recompute,
        stages=stages,
        rank_order=facts.rank_order,
        devices=devices_of(cluster, world),
        options=options_of(args, facts),
    )


def layout_of_arguments(args: MegatronArguments, facts: Facts, mtp_num_layers: int) -> Layout:
    """The layout that the arguments give, in whichever of Megatron's ways."""
    layout, fault = parse_layout(args)
    if fault:
        raise SpecError(Fault("/--pipeline-model-parallel-layout", fault))
    pp, vpp, layers = int(facts.pp), int(facts.vpp), facts.num_layers
    if layout:
        faults = layout.faults(layers, mtp_num_layers, pp)
        if faults:
            raise SpecError(Fault("/--pipeline-model-parallel-layout", text) for text in faults)
        return layout
    if facts.uneven_ends:
        return _chunked(_uneven(facts), pp, vpp, mtp_num_layers)
    if facts.account_for_embedding or facts.account_for_loss:
        if facts.split_layers % (pp * vpp):
            raise SpecError(Fault("/--pipeline-model-parallel-size", f"{facts.split_layers} layers do not divide"))
        counts = [facts.split_layers // (pp * vpp)] * (pp * vpp)
        counts[0] -= facts.account_for_embedding
        counts[-1] -= facts.account_for_loss
        return _with_ends(counts, mtp_num_layers)
    even = even_layout(layers, mtp_num_layers, pp, vpp)
    if even is None:
        raise SpecError(Fault("/--num-layers", f"{layers} layers are not divisible by PP {pp} x virtual stages {vpp}"))
    return even


def recompute_of(args: MegatronArguments) -> RecomputeMode:
    """Which activations the arguments recompute."""
    granularity = "selective" if args["recompute_activations"] else args["recompute_granularity"]
    modules = args["recompute_modules"]
    if args["moe_layer_recompute"]:
        granularity, modules = "selective", [*(modules or []), "moe"]
    if granularity == "full":
        return RecomputeMode(
            granularity="full",
            method=args["recompute_method"] or "uniform",
            num_layers=args["recompute_num_layers"] or 1,
        )
    if granularity == "selective":
        return RecomputeMode(
            granularity="selective", modules=cast(tuple[RecomputeModule, ...], tuple(modules or ["core_attn"]))
        )
    return RecomputeMode()


def sharding_of(args: MegatronArguments, facts: Facts) -> Sharding:
    """Data-parallel sharding level."""
    instances = args["num_distributed_optimizer_instances"]
    if args["use_torch_fsdp2"]:
        return "fsdp"
    if args["use_megatron_fsdp"]:
        strategy = args["data_parallel_sharding_strategy"]
        if instances > 1 and strategy == "optim_grads_params":
            return Hsdp(hsdp=HsdpSharding(replicate=instances, shard=max(int(facts.dp * facts.cp) // instances, 1)))
        return _SHARDING[strategy]
    return "zero1" if args["use_distributed_optimizer"] else "none"


def options_of(args: MegatronArguments, facts: Facts) -> Options:
    """The switches that a plan keeps."""
    fsdp_instances = args["use_megatron_fsdp"] and args["data_parallel_sharding_strategy"] == "optim_grads_params"
    comm = facts.cp_comm_type[0]
    return Options(
        sequence_parallel=bool(facts.sequence_parallel),
        overlap_grad_reduce=bool(facts.overlap_grad_reduce),
        overlap_param_gather=bool(facts.overlap_param_gather),
        tp_comm_overlap=facts.tp_comm_overlap,
        overlap_p2p=facts.overlap_p2p and bool(facts.vpp > 1),
        dispatcher=facts.dispatcher if facts.is_moe else None,  # type: ignore[arg-type]
        ep_comm_overlap=facts.moe_a2a_overlap,
        delay_wgrad=facts.delay_wgrad,
        moe_shared_expert_overlap=facts.shared_expert_overlap and facts.is_moe,
        grad_bucket_params=args["ddp_bucket_size"],
        cp_comm_type=comm if facts.cp > 1 and comm in get_args(CpComm) else None,  # type: ignore[arg-type]
        cp_a2a_size=facts.hierarchical_cp_sizes[0] if facts.cp > 1 and facts.hierarchical_cp_sizes else None,
        cuda_graph=facts.cuda_graph != "none",
        cuda_graph_scope=tuple(scope for scope in get_args(GraphScope) if scope in facts.cuda_graph_modules),
        fused_cross_entropy=args["cross_entropy_loss_fusion"],
        grouped_gemm=facts.grouped_gemm,
        dist_opt_instances=1 if fsdp_instances else facts.dist_opt_instances,
        activation_offload_layers=args["cpu_offloading_num_layers"],
        activation_offload_modules=tuple(
            name for name in get_args(OffloadModule) if facts.fine_grained_offload and name in facts.offload_modules
        ),
        optimizer_offload_fraction=args["optimizer_offload_fraction"] if args["optimizer_cpu_offload"] else 0.0,
        optimizer_offload_overlap=args["optimizer_cpu_offload"] and args["overlap_cpu_optimizer_d2h_h2d"],
        vp_group_size=int(facts.group) if facts.vpp > 1 else None,
    )


def groups_of(cluster: ClusterSpec, ranks: Sequence[int], micro_batches: int) -> tuple[Group, ...]:
    """Ranks of a stage by pool, numbered over the cluster's pools in order."""
    out = []
    first = 0
    for pool in cluster.pools:
        mine = [rank for rank in ranks if first <= rank < first + pool.num_gpus]
        if mine:
            out.append(Group(pool=pool.name, gpu=pool.gpu, ranks=_runs(mine), micro_batches=micro_batches))
        first += pool.num_gpus
    return tuple(out)


def devices_of(cluster: ClusterSpec, world: int) -> tuple[Devices, ...]:
    """Ranks to nodes, pool by pool; one entry a node where hosts are known."""
    out: list[Devices] = []
    first = 0
    for pool in cluster.pools:
        count = min(pool.num_gpus, world - first)
        if count <= 0:
            break
        out += devices_in(pool, first, count)
        first += count
    return tuple(out)


def _stage_ranks(facts: Facts, stage: int, per_stage: int) -> list[int]:
    """Ranks of a stage: one run when PP is the slowest axis, strided by a replica when DP is."""
    if facts.rank_order.endswith("pp"):
        return list(range(stage * per_stage, (stage + 1) * per_stage))
    inner = int(facts.tp * facts.cp)
    replica = inner * int(facts.pp)
    return [copy * replica + stage * inner + rank for copy in range(int(facts.dp)) for rank in range(inner)]


def _uneven(facts: Facts) -> list[int]:
    """Layers of each stage where the first or last has a count of its own."""
    layers, stages = facts.middle
    if stages < 0 or (stages and layers % stages) or bool(layers) != bool(stages) or layers < 0:
        raise SpecError(
            Fault("/--decoder-first-pipeline-num-layers", f"{layers} layers do not fill {stages} middle stages")
        )
    counts = [layers // stages] * stages if stages else []
    if facts.first_stage_layers is not None:
        counts.insert(0, facts.first_stage_layers)
    if facts.last_stage_layers is not None:
        counts.append(facts.last_stage_layers)
    return counts


def _chunked(stages: list[int], pp: int, vpp: int, mtp_num_layers: int) -> Layout:
    if any(count % vpp for count in stages):
        raise SpecError(
            Fault("/--num-virtual-stages-per-pipeline-rank", f"stages of {stages} layers do not divide by {vpp}")
        )
    return _with_ends([stages[stage] // vpp for _ in range(vpp) for stage in range(pp)], mtp_num_layers)


def _with_ends(counts: list[int], mtp_num_layers: int) -> Layout:
    chunks = ["t" * count for count in counts]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * mtp_num_layers + "L"
    return Layout(tuple(chunks))


def _runs(ranks: Sequence[int]) -> tuple[str, ...]:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return tuple(format_range(first, last) for first, last in runs)
