"""From a finalist to a ``Plan`` document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from meshwright.cost_models.graphs import scope_of_search
from meshwright.cost_models.overlap import default_overlap
from meshwright.cost_models.protocol import BlockTable
from meshwright.cost_models.rank_order import DATA_INSIDE, stages_inside
from meshwright.specs.batch import IntArray
from meshwright.specs.cluster import ClusterSpec, Pool
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import (
    Chunk,
    Degrees,
    Devices,
    Group,
    Hsdp,
    HsdpSharding,
    Options,
    Plan,
    Sharding,
    ShardingLevel,
    Stage,
    collapse_blocks,
    format_range,
)
from meshwright.specs.target import RecomputeMode, Target

from ..engine.arrangements import Arrangement
from ..engine.live import schedule_name


@dataclass(frozen=True)
class Skeleton:
    """All scalar choices of a plan."""

    tp: int
    cp: int
    ep: int
    etp: int
    dp: int
    vpp: int
    micro_batch_size: int
    num_microbatches: int
    recompute: RecomputeMode
    sharding: ShardingLevel
    replicas: int = 1
    rank_order: str = DATA_INSIDE

    @property
    def level(self) -> Sharding:
        """The sharding as plans say it: full sharding with replicas is hybrid."""
        if self.replicas == 1 or self.sharding != "fsdp":
            return self.sharding
        shard = self.cp * self.dp // self.replicas
        return Hsdp(hsdp=HsdpSharding(replicate=self.replicas, shard=shard))


def sharding_level(name: str) -> ShardingLevel:
    """A target's sharding level as the plan's closed word; ValueError if it is none."""
    for level in get_args(ShardingLevel):
        if level == name:
            return level  # type: ignore[no-any-return]
    raise ValueError(f"{name!r} is not a sharding level")


def build_plan(
    model: ModelSpec,
    cluster: ClusterSpec,
    target: Target,
    blocks: BlockTable,
    arrangement: Arrangement,
    skeleton: Skeleton,
    cuts: IntArray,
    more: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan that runs ``skeleton``: chunk q holds blocks cuts[q]..cuts[q+1]-1 and sits on stage q mod P.

    ``more`` are options beside those that a search always writes.
    """
    pp, vpp, ranks = arrangement.pp, skeleton.vpp, arrangement.stage_ranks
    block = skeleton.tp * skeleton.cp
    degrees = Degrees(
        tp=skeleton.tp,
        cp=skeleton.cp,
        dp=skeleton.dp,
        ep=skeleton.ep,
        etp=skeleton.etp,
        edp=ranks // (skeleton.ep * skeleton.etp),
    )
    stages = []
    for stage, pool_index in enumerate(arrangement.stage_pools):
        pool = cluster.pools[pool_index]
        orders = [stage + pp * chunk for chunk in range(vpp)]
        stages.append(
            Stage(
                chunks=tuple(
                    Chunk(order=q, blocks=collapse_blocks(list(blocks.instances[cuts[q] : cuts[q + 1]])))
                    for q in orders
                ),
                degrees=degrees,
                micro_batch_size=skeleton.micro_batch_size,
                recompute=skeleton.recompute,
                sharding=skeleton.level,
                groups=(
                    Group(
                        pool=pool.name,
                        gpu=pool.gpu,
                        ranks=ranks_of_stage(skeleton.rank_order, stage, pp, block, skeleton.dp),
                        micro_batches=skeleton.num_microbatches,
                    ),
                ),
            )
        )
    return Plan(
        tp=skeleton.tp,
        pp=pp,
        cp=skeleton.cp,
        ep=skeleton.ep,
        etp=skeleton.etp,
        dp=skeleton.dp,
        edp=degrees.edp,
        vpp=vpp,
        micro_batch_size=skeleton.micro_batch_size,
        num_microbatches=skeleton.num_microbatches,
        schedule="interleaved" if schedule_name(vpp) == "interleaved" else "1f1b",
        sharding=skeleton.level,
        recompute=skeleton.recompute,
        stages=tuple(stages),
        rank_order=skeleton.rank_order,
        devices=devices_of(cluster, arrangement),
        options=options_of(model, target, skeleton, pp).model_copy(update=dict(more or {})),
    )


def ranks_of_stage(rank_order: str, stage: int, stages: int, block: int, copies: int) -> tuple[str, ...]:
    """Ranks of a stage in runs: ``copies`` blocks of tp*cp ranks, all in one run, or one in each replica."""
    inside = stages_inside(rank_order, stages)
    if inside == 1 or copies == 1:
        return (format_range(stage * copies * block, (stage + 1) * copies * block - 1),)
    firsts = ((copy * inside + stage) * block for copy in range(copies))
    return tuple(format_range(first, first + block - 1) for first in firsts)


def devices_in(pool: Pool, first: int, ranks: int) -> list[Devices]:
    """So many ranks from ``first`` on to the first nodes of a pool; one entry a node where hosts are known."""
    nodes = -(-ranks // pool.gpus_per_node)
    if pool.hosts is None:
        return [Devices(ranks=format_range(first, first + ranks - 1), pool=pool.name, nodes=format_range(0, nodes - 1))]
    lows = [first + node * pool.gpus_per_node for node in range(nodes)]
    return [
        Devices(
            ranks=format_range(low, min(low + pool.gpus_per_node, first + ranks) - 1),
            pool=pool.name,
            nodes=str(node),
            host=pool.hosts[node],
        )
        for node, low in enumerate(lows)
    ]


def devices_of(cluster: ClusterSpec, arrangement: Arrangement) -> tuple[Devices, ...]:
    """Ranks to nodes, pool by pool in pipeline order; one entry a node where hosts are known."""
    out: list[Devices] = []
    first = 0
    for index, stages in zip(arrangement.pools, arrangement.stages, strict=True):
        pool = cluster.pools[index]
        ranks = stages * arrangement.stage_ranks
        out += devices_in(pool, first, ranks)
        first += ranks
    return tuple(out)


def options_of(model: ModelSpec, target: Target, skeleton: Skeleton, pp: int) -> Options:
    """The target's switches for a skeleton."""
    sharded = skeleton.sharding != "none"
    graphs = "cuda_graph" in target.switches
    overlap = default_overlap(model, target.switches, target.context_exchanges)
    exchange = "ep_comm_overlap" in target.switches and model.is_moe and skeleton.ep > 1
    return Options(
        sequence_parallel=target.sequence_parallel and skeleton.tp > 1,
        overlap_grad_reduce=target.overlap_grad_reduce,
        overlap_param_gather=target.overlap_param_gather and sharded,
        tp_comm_overlap="tp_comm_overlap" in target.switches and target.sequence_parallel and skeleton.tp > 1,
        ep_comm_overlap=exchange,
        delay_wgrad=exchange and "delay_wgrad" in target.switches,
        moe_shared_expert_overlap=overlap.shared_expert,
        cuda_graph=graphs,
        cuda_graph_scope=scope_of_search(model) if graphs else (),
        overlap_p2p=skeleton.vpp > 1,
        dispatcher=target.dispatcher if model.is_moe else None,
        cp_comm_type=overlap.context if skeleton.cp > 1 else None,
        fused_cross_entropy=target.fused_cross_entropy,
        grouped_gemm=target.grouped_gemm and model.is_moe,
        dist_opt_instances=1 if skeleton.sharding == "fsdp" else skeleton.replicas,
        vp_group_size=pp if skeleton.vpp > 1 else None,
    )
