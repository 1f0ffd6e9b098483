"""Small models and clusters whose whole space can be listed."""

from __future__ import annotations

from meshwright.planner.request import PlanRequest
from meshwright.specs.attention import SoftmaxAttention
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload, workload_from_options


def small_model(layers: int = 4, hidden: int = 1024, heads: int = 8, experts: int = 0, vocab: int = 32000) -> ModelSpec:
    """A Llama-like model, or a Mixtral-like one with ``experts``."""
    attention = SoftmaxAttention(num_heads=heads, num_kv_heads=heads // 2, head_dim=hidden // heads)
    dense = DenseFFN(intermediate_size=4 * hidden)
    moe = MoEFFN(num_experts=experts, top_k=2, expert_intermediate_size=2 * hidden) if experts else None
    return ModelSpec(
        name="small",
        family="llama",
        hidden_size=hidden,
        vocab_size=vocab,
        kinds=(LayerKind(attention=attention, feed_forward=moe or dense),),
        pattern=(0,) * layers,
        max_position_embeddings=8192,
    )


def workload(batch: int = 16, seq: int = 2048, **options: object) -> Workload:
    return workload_from_options({"global_batch_size": batch, "seq_length": seq, **options})


def request(
    model: ModelSpec, cluster: str | ClusterSpec, work: Workload | None = None, **options: object
) -> PlanRequest:
    return PlanRequest(
        model=model,
        cluster=load_cluster(cluster) if isinstance(cluster, str) else cluster,
        workload=work or workload(),
        target=load_target("megatron@0.19"),
        **options,
    )
