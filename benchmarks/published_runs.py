"""Read published training runs (CSV and model JSON) and price them: what fit_interval.py and sanity checks need."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cost_models.estimate import estimate
from meshwright.specs.attention import MLAAttention, SoftmaxAttention
from meshwright.specs.cluster_io import load_cluster
from meshwright.specs.estimate import Estimate
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import MTP, LayerKind, ModelSpec
from meshwright.specs.plan import Chunk, Degrees, Group, Options, Plan, Stage, collapse_blocks, format_range
from meshwright.specs.target import RecomputeMode, Target
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "": "fp16", "fp8": "fp8", "fp8-cs": "fp8", "fp8-ds": "fp8",
              "mxfp8": "mxfp8", "nvfp4": "nvfp4"}  # fmt: skip
CLUSTERS = {"H100-SXM-80GB": "H100-SXM", "A100-SXM-80GB": "A100-SXM-80GB", "A100-SXM-40GB": "A100-SXM-40GB",
            "B200-180GB": "B200", "GB200-186GB": "GB200-NVL72", "GB300-279GB": "GB300-NVL72"}  # fmt: skip
FRAMEWORKS = ("NeMo", "Megatron-Bridge", "Megatron-LM", "Megatron-LM 0.14 + TE 2.11", "Megatron-DeepSpeed")


class UnsupportedError(ValueError):
    """A row that this reader cannot turn into a plan."""


@dataclass(frozen=True)
class Priced:
    """A published row with its estimate; ``error`` = predicted / measured step time - 1."""

    row: dict[str, str]
    moe: bool
    measured_s: float
    estimate: Estimate

    @property
    def error(self) -> float:
        return self.estimate.step_time_s / self.measured_s - 1


def model_of(data: dict[str, Any], name: str) -> ModelSpec:
    """A ModelSpec from Megatron's names; MLA, GQA, dense and MoE layers."""
    if data.get("hybrid_pattern") or data.get("linear_num_key_heads") or data.get("linear_attention_freq"):
        raise UnsupportedError("hybrid layers")
    heads = data["num_attention_heads"]
    gated = bool(data.get("gated_linear_unit"))
    attention: Any
    if data.get("mla"):
        attention = MLAAttention(
            num_heads=heads,
            q_lora_rank=data.get("q_lora_rank"),
            kv_lora_rank=data["kv_lora_rank"],
            qk_nope_head_dim=data["qk_head_dim"],
            qk_rope_head_dim=data["qk_pos_emb_head_dim"],
            v_head_dim=data["v_head_dim"],
        )
    else:
        attention = SoftmaxAttention(
            num_heads=heads,
            num_kv_heads=data.get("num_query_groups") or heads,
            head_dim=data.get("kv_channels") or data["hidden_size"] // heads,
        )
    dense = LayerKind(
        attention=attention, feed_forward=DenseFFN(intermediate_size=data["ffn_hidden_size"], gated=gated)
    )
    kinds, pattern = [dense], [0] * data["num_layers"]
    if data.get("num_experts"):
        moe = MoEFFN(
            num_experts=data["num_experts"],
            top_k=data["topk"],
            expert_intermediate_size=data["moe_ffn_hidden_size"],
            gated=gated,
            shared_intermediate_size=data.get("shared_expert_intermediate_size") or 0,
            latent_size=data.get("moe_latent_size"),
        )
        kinds.append(LayerKind(attention=attention, feed_forward=moe))
        pattern = list(data.get("moe_layers") or [1] * data["num_layers"])[: data["num_layers"]]
    used = sorted(set(pattern))
    mtp = MTP(num_layers=data["mtp_num_layers"], layer=kinds[pattern[-1]]) if data.get("mtp_num_layers") else None
    return ModelSpec(
        name=name,
        family="megatron",
        hidden_size=data["hidden_size"],
        vocab_size=data.get("vocab_size") or 51200,
        kinds=tuple(kinds[i] for i in used),
        pattern=tuple(used.index(i) for i in pattern),
        tied_embeddings=bool(data.get("tied_embeddings")),
        mtp=mtp,
    )


def recompute_of(text: str) -> RecomputeMode:
    """The ``recompute`` column; unknown modules are left out."""
    if text.startswith("full"):
        return RecomputeMode(granularity="full", method="uniform", num_layers=1)
    known = ("moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "core_attn")
    modules = [m for m in text.partition(":")[2].split("+") if m in known]
    return RecomputeMode(granularity="selective", modules=tuple(modules)) if modules else RecomputeMode()


def even_plan(model: ModelSpec, row: dict[str, str], workload: Workload, pool: str, gpu: str) -> Plan:
    """Layers spread evenly over the chunks, the remainder on the first; embedding, MTP and head at the ends."""

    def number(name: str, default: int = 1) -> int:
        return int(float(row[name])) if row.get(name) else default

    tp, pp, cp, vp, ep = (number(name) for name in ("tp", "pp", "cp", "vp", "ep"))
    world = int(row["num_gpus"])
    if world % (tp * pp * cp):
        raise UnsupportedError("degrees do not divide the GPUs")
    stage_ranks, dp = world // pp, world // (tp * pp * cp)
    etp = number("etp", 1 if ep > 1 else tp)
    if stage_ranks % (etp * ep):
        raise UnsupportedError("expert grid does not divide the stage")
    mbs = number("micro_batch")
    if workload.global_batch_size % (mbs * dp):
        raise UnsupportedError("batch does not divide")
    m = workload.global_batch_size // (mbs * dp)
    if vp > 1 and (pp == 1 or m % pp):
        raise UnsupportedError("interleaving does not fit the micro-batches")
    layers, chunks = model.num_layers, pp * vp
    sizes = [layers // chunks + (1 if q < layers % chunks else 0) for q in range(chunks)]
    bounds = [sum(sizes[:q]) for q in range(chunks + 1)]
    blocks: list[list[tuple[str, int]]] = [
        [("decoder", i) for i in range(bounds[q], bounds[q + 1])] for q in range(chunks)
    ]
    blocks[0].insert(0, ("embed", 0))
    if workload.mtp and model.mtp:
        blocks[-1] += [("mtp", i) for i in range(model.mtp.num_layers)]
    blocks[-1].append(("head", 0))
    flags = row.get("other_flags", "")
    degrees = Degrees(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=stage_ranks // (etp * ep))
    recompute = recompute_of(row.get("recompute", ""))
    sharding = row["sharding"] if row.get("sharding") in ("none", "zero1", "zero2", "zero3", "fsdp") else "zero1"
    stages = tuple(
        Stage(
            chunks=tuple(Chunk(order=v * pp + p, blocks=collapse_blocks(blocks[v * pp + p])) for v in range(vp)),
            degrees=degrees, micro_batch_size=mbs, recompute=recompute, sharding=sharding,
            groups=(Group(pool=pool, gpu=gpu, ranks=(format_range(p * stage_ranks, (p + 1) * stage_ranks - 1),),
                          micro_batches=m),),
        )
        for p in range(pp)
    )  # fmt: skip
    options = Options(
        sequence_parallel=tp > 1,
        overlap_grad_reduce="overlap_grad_reduce=False" not in flags,
        overlap_param_gather="overlap_param_gather=False" not in flags,
        tp_comm_overlap="tp_comm_overlap=True" in flags,
        dispatcher="flex" if "flex" in flags else "alltoall",
    )
    return Plan(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=degrees.edp,
        vpp=vp,
        micro_batch_size=mbs,
        num_microbatches=m,
        schedule="interleaved" if vp > 1 else "1f1b",
        sharding=sharding,
        recompute=recompute,
        stages=stages,
        options=options,
    )


def price(row: dict[str, str], models: dict[str, Any], target: Target) -> Priced:
    """Price one row; :class:`UnsupportedError` where it lacks what a plan needs."""
    data = models.get(row["model"])
    if not data or row["gpu_type"] not in CLUSTERS or row["precision"] not in PRECISIONS or not row["global_batch"]:
        raise UnsupportedError("model, GPU, precision or batch unknown")
    data = {**data, **(json.loads(row["model_overrides"]) if row["model_overrides"] else {})}
    model = model_of(data, row["model"])
    precision = PRECISIONS[row["precision"]]
    if not row["micro_batch"]:
        raise UnsupportedError("micro-batch not stated")
    if row["precision"] == "" and row["framework"] != "Megatron-DeepSpeed":
        raise UnsupportedError("precision not stated")
    bf16_gradients = "grad_reduce=bf16" in row["other_flags"] or "grad_sync_dtype=bf16" in row["other_flags"]
    workload = Workload(
        global_batch_size=int(row["global_batch"]), seq_length=int(row["seq_len"]), precision=precision,
        params_dtype="fp16" if precision == "fp16" else "bf16",
        gradient_dtype="bf16" if bf16_gradients else "fp32", mtp=model.mtp is not None,
    )  # fmt: skip
    cluster = load_cluster(f"{row['num_gpus']}x{CLUSTERS[row['gpu_type']]}")
    plan = even_plan(model, row, workload, cluster.pools[0].name, cluster.pools[0].gpu)
    result = estimate(model, cluster, workload, target, plan)
    tokens = workload.tokens_per_step / int(row["num_gpus"])
    measured = float(row["step_time_s"]) if row["step_time_s"] else tokens / float(row["tokens_per_s_per_gpu"])
    return Priced(row, model.is_moe, measured, result)


def priced_runs(runs: Path, models: Path) -> Iterator[Priced | tuple[dict[str, str], str]]:
    """Every pretraining row of quality A or B of a Megatron framework: priced, or with the reason why not."""
    known, target = json.loads(models.read_text()), load_target("megatron@0.19")
    with runs.open() as file:
        for row in csv.DictReader(file):
            if row["task"] != "pretrain" or row["quality"] not in "AB" or row["framework"] not in FRAMEWORKS:
                continue
            try:
                yield price(row, known, target)
            except (ValueError, KeyError, TypeError) as error:
                yield row, f"{type(error).__name__}: {error}"
