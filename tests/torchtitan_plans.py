"""Plan documents, tiny models and random configurations for tests of torchtitan."""

from __future__ import annotations

import random
from typing import Any

from meshwright.megatron_export.torchtitan.shapes import Shape, model_of
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.document import PlanDocument
from meshwright.specs.model import ModelSpec
from meshwright.specs.targets import load_target

from .megatron_plans import document

DENSE = model_of(
    Shape(family="llama3", dim=64, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=160, vocab_size=512),
    "tiny-dense",
)
QWEN = model_of(
    Shape(
        family="qwen3", dim=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=512, qk_norm=True,
        moe_hidden_dim=96, num_experts=8, top_k=2,
    ),
    "tiny-qwen-moe",
)  # fmt: skip
LATENT = model_of(
    Shape(
        family="deepseek_v3", dim=64, n_layers=5, n_heads=4, vocab_size=512, hidden_dim=128, moe_hidden_dim=64,
        num_experts=8, top_k=2, n_dense_layers=1, num_shared_experts=1, score_func="sigmoid", q_lora_rank=32,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    ),
    "tiny-latent",
)  # fmt: skip


def titan(target: str, model: ModelSpec, cluster: str = "8xH100", **choices: Any) -> PlanDocument:
    """A plan over the whole cluster for a torchtitan target, with its defaults of sharding and expert grid."""
    choices.setdefault("sharding", "zero1" if choices.get("pp", 1) > 1 else "fsdp")
    choices.setdefault("etp", 1 if choices.get("ep", 1) > 1 else choices.get("tp", 1))
    made = document(model, load_cluster(cluster), **choices)
    inputs = made.inputs.model_copy(update={"target": load_target(target)})
    options = dict(made.plan.options) if made.plan else {}
    if choices.get("cp", 1) > 1:
        options["cp_comm_type"] = "allgather"
    assert made.plan
    plan = made.plan.model_copy(update={"options": made.plan.options.model_copy(update=options)})
    return made.model_copy(update={"inputs": inputs, "plan": plan})


#: (name, model, choices) of plans of every kind: on 8 GPUs unless a cluster is named.
PLANS: tuple[tuple[str, ModelSpec, dict[str, Any]], ...] = (
    ("fsdp", DENSE, {}),
    ("tp", DENSE, {"tp": 2}),
    ("pp uneven", DENSE, {"pp": 2, "tp": 2, "layers": [1, 4]}),
    ("virtual stages", DENSE, {"pp": 2, "vpp": 2, "layers": [1, 2, 1, 1], "micro_batches": 4}),
    ("cp", DENSE, {"cp": 2, "tp": 2}),
    ("hsdp", DENSE, {"sharding": {"hsdp": {"replicate": 2, "shard": 4}}}),
    ("hsdp cp", DENSE, {"cp": 2, "sharding": {"hsdp": {"replicate": 2, "shard": 4}}}),
    ("full recompute", DENSE, {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}),
    ("ep", QWEN, {"ep": 4}),
    ("ep tp", QWEN, {"ep": 4, "tp": 2}),
    ("latent ep", LATENT, {"ep": 2, "pp": 2, "layers": [2, 3]}),
    ("latent ep tp", LATENT, {"ep": 8, "tp": 2}),
    ("latent cp", LATENT, {"cp": 2, "ep": 4}),
)

_SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe", "Interleaved1f1b", "1F2B")


def random_configuration(number: int, seed: int) -> tuple[str, int]:
    """TOML of a preset on a number of ranks, about half of them illegal in ways that show before the first step."""
    draw = random.Random(seed * 100_003 + number)
    family = draw.choice(["llama3"] * 4 + ["deepseek_v3"] * 3 + ["qwen3"])
    flavor = "debugmodel_moe" if family == "qwen3" and draw.random() < 0.5 else "debugmodel"
    if family == "deepseek_v3" and draw.random() < 0.15:
        flavor = "debugmodel_flex_attn"
    world = draw.choice([4, 8, 8, 16])

    def degree(*chances: int) -> int:
        return draw.choice(chances)

    tp, pp, cp = degree(1, 1, 2), degree(1, 1, 2, 2, 2, 4), degree(1, 1, 1, 2)
    replicate, shard = degree(1, 1, 1, 2), draw.choice([-1] * 9 + [1, 2, 3])
    ep = degree(1, 2, 4) if family == "deepseek_v3" or flavor == "debugmodel_moe" else 1
    etp = degree(1, 1, 1, 2) if ep > 1 else 1
    dp = max(replicate * (shard if shard > 0 else world // (replicate * cp * tp * pp)), 1)
    local = degree(1, 2, 4, 4, 6, 8, 8, 8)
    lines = [
        "[model]",
        f'name = "{family}"',
        f'flavor = "{flavor}"',
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {draw.choice([-1, local * dp, 2 * local * dp] * 4 + [local * dp + 1])}",
        f"seq_len = {draw.choice([64] * 12 + [60, 63])}",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {shard}",
        f"tensor_parallel_degree = {tp}",
        f"context_parallel_degree = {cp}",
        f"pipeline_parallel_degree = {pp}",
        f"expert_parallel_degree = {ep}",
        f"expert_tensor_parallel_degree = {etp}",
        f'pipeline_parallel_schedule = "{draw.choice(_SCHEDULES[: 5 if draw.random() < 0.2 else 2])}"',
        f"pipeline_parallel_microbatch_size = {draw.choice([1] * 8 + [2])}",
    ]
    if draw.random() < 0.2:
        lines.append(f"pipeline_parallel_layers_per_stage = {degree(1, 2, 3, 4)}")
    if draw.random() < 0.2:
        lines.append(f"pipeline_parallel_first_stage_less_layers = {degree(0, 2, 4)}")
    if draw.random() < 0.1:
        lines.append(f"enable_async_tensor_parallel = {draw.choice(['true', 'false'])}")
    if draw.random() < 0.05:
        lines.append("tensor_parallel = 2")
    return "\n".join(lines) + "\n", world
