"""Models, clusters and plans that the cost-model tests share, built by hand so that expected values stay plain."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.cost_models.cells import CostModel
from meshwright.cost_models.multipliers import NEUTRAL
from meshwright.specs.attention import MLAAttention, SoftmaxAttention
from meshwright.specs.batch import CellKeys
from meshwright.specs.cluster import ClusterSpec, GpuType, NetworkLevel, Pool
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.plan import Chunk, Degrees, Group, Options, Plan, Stage, collapse_blocks, format_range
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.workload import Workload

NONE = RecomputeMode()
FULL = RecomputeMode(granularity="full", method="uniform", num_layers=1)

H100 = GpuType(
    name="H100-SXM-80GB",
    vendor="nvidia",
    memory_bytes=80 * 2**30,
    usable_memory_bytes=79 * 2**30,
    memory_bandwidth_bytes_per_s=3352e9,
    peak_flops={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12},
    num_sms=132,
    compute_capability=9.0,
)
V100 = GpuType(
    name="V100-SXM2-32GB",
    vendor="nvidia",
    memory_bytes=32 * 2**30,
    usable_memory_bytes=31 * 2**30,
    memory_bandwidth_bytes_per_s=900e9,
    peak_flops={"fp16": 125e12},
    num_sms=80,
    compute_capability=7.0,
)


def target(*modes: RecomputeMode, **changes: object) -> Target:
    """A Megatron-like target; by default no recompute and full recompute."""
    data: dict[str, object] = {
        "name": "test@1",
        "framework": "test",
        "version": "1",
        "verified": "code",
        "rules": "megatron",
        "schedules": ("1f1b", "interleaved"),
        "sharding": ("none", "zero1", "fsdp"),
        "recompute": modes or (NONE, FULL),
        "rank_orders": ("tp-cp-ep-dp-pp",),
    }
    return Target.model_validate({**data, **changes})


def cluster(nodes: int, gpu: GpuType = H100, name: str = "pool") -> ClusterSpec:
    """``nodes`` of 8 GPUs: 450 GB/s NVLink inside, one 50 GB/s port a GPU between."""
    return ClusterSpec(name="test", gpus={gpu.name: gpu}, pools=(pool(nodes, gpu, name),))


def pool(nodes: int, gpu: GpuType = H100, name: str = "pool") -> Pool:
    levels = [NetworkLevel(name="nvlink", kind="nvlink", span=8, bandwidth_bytes_per_s=450e9, latency_s=1e-6)]
    if nodes > 1:
        levels.append(
            NetworkLevel(name="ib", kind="infiniband", span=8 * nodes, bandwidth_bytes_per_s=50e9, latency_s=5e-6)
        )
    return Pool(name=name, gpu=gpu.name, nodes=nodes, gpus_per_node=8, levels=tuple(levels))


def dense(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, gated: bool = True) -> ModelSpec:
    attention = SoftmaxAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads)
    kind = LayerKind(attention=attention, feed_forward=DenseFFN(intermediate_size=ffn, gated=gated))
    return ModelSpec(
        name="dense", family="llama", hidden_size=hidden, vocab_size=vocab, kinds=(kind,), pattern=(0,) * layers
    )


def llama_70b() -> ModelSpec:
    return dense(80, 8192, 64, 8, 28672, 128256)


def mla_moe(
    layers: int, hidden: int, heads: int, experts: int, top_k: int, expert_ffn: int, shared: int, vocab: int
) -> ModelSpec:
    """DeepSeek-like: every layer MLA and MoE."""
    attention = MLAAttention(
        num_heads=heads, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    moe = MoEFFN(num_experts=experts, top_k=top_k, expert_intermediate_size=expert_ffn, shared_intermediate_size=shared)
    return ModelSpec(
        name="mla-moe",
        family="deepseek",
        hidden_size=hidden,
        vocab_size=vocab,
        kinds=(LayerKind(attention=attention, feed_forward=moe),),
        pattern=(0,) * layers,
    )


def workload(batch: int = 64, seq: int = 4096, **changes: object) -> Workload:
    return Workload.model_validate({"global_batch_size": batch, "seq_length": seq, **changes})


def keys(*rows: tuple[int, int, int, int, int, int, int, int]) -> CellKeys:
    """Rows of (tp, cp, ep, etp, stage_ranks, micro_batch_size, recompute, sharding) of a stage among several."""
    return CellKeys(*np.array([(*row, 0) for row in rows], dtype=np.int64).T)


def plan(
    model: ModelSpec,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    dp: int = 1,
    vpp: int = 1,
    mbs: int = 1,
    m: int = 1,
    recompute: RecomputeMode = NONE,
    sharding: str = "zero1",
    split: list[int] | None = None,
    pools: list[str] | None = None,
    gpu: str = H100.name,
    overlap: bool = True,
) -> Plan:
    """Layers over ``pp * vpp`` chunks (even unless ``split``), the embedding in the first, the head in the last."""
    chunks = pp * vpp
    sizes = split or [model.num_layers // chunks + (q < model.num_layers % chunks) for q in range(chunks)]
    blocks: list[list[tuple[str, int]]] = []
    for q, size in enumerate(sizes):
        first = sum(sizes[:q])
        blocks.append([("decoder", i) for i in range(first, first + size)])
    blocks[0].insert(0, ("embed", 0))
    blocks[-1].append(("head", 0))
    ranks = tp * cp * dp
    degrees = Degrees(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=ranks // (ep * etp))
    stages = tuple(
        Stage(
            chunks=tuple(Chunk(order=v * pp + p, blocks=collapse_blocks(blocks[v * pp + p])) for v in range(vpp)),
            degrees=degrees,
            micro_batch_size=mbs,
            recompute=recompute,
            sharding=sharding,
            groups=(
                Group(
                    pool=pools[p] if pools else "pool",
                    gpu=gpu,
                    ranks=(format_range(p * ranks, (p + 1) * ranks - 1),),
                    micro_batches=m,
                ),
            ),
        )
        for p in range(pp)
    )
    return Plan(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=degrees.edp,
        vpp=vpp,
        micro_batch_size=mbs,
        num_microbatches=m,
        schedule="interleaved" if vpp > 1 else "1f1b",
        sharding=sharding,
        recompute=recompute,
        stages=stages,
        options=Options(sequence_parallel=tp > 1, overlap_grad_reduce=overlap, overlap_param_gather=overlap),
    )


def physics(model: ModelSpec, on: ClusterSpec, work: Workload, aim: Target, **options: Any) -> CostModel:
    """The cost model without learned corrections: what can be worked out by hand."""
    return CostModel(model, on, work, aim, multipliers=(NEUTRAL,) * len(on.pools), **options)
