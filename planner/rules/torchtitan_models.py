"""Which model of torchtitan holds a model, and what none of them can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.specs.attention import MLAAttention, SoftmaxAttention
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.workload import Workload

#: Versions of torchtitan from which its Python configurations hold.
PYTHON_CONFIG = (0, 3)
#: Model folders of torchtitan that exports are written for, plainest first.
FAMILIES = ("llama3", "qwen3", "deepseek_v3")


@dataclass(frozen=True)
class Held:
    """``family`` of torchtitan that holds a model; ``faults`` name what it cannot, empty if it can."""

    family: str
    faults: tuple[str, ...] = ()


def held_by(model: ModelSpec, version: tuple[int, ...]) -> Held:
    """The first family that holds ``model`` in a version, or the one with the fewest faults."""
    found = [Held(name, tuple(dict.fromkeys(_faults(name, model, version)))) for name in FAMILIES]
    return min(found, key=lambda held: len(held.faults))


def pipelines(family: str, version: tuple[int, ...]) -> bool:
    """Whether a family has a pipelining function (qwen3 and gpt_oss have none before 0.3: models/qwen3/__init__.py)."""
    return version >= PYTHON_CONFIG or family not in ("qwen3", "gpt_oss")


def inexpressible(model: ModelSpec, workload: Workload, version: tuple[int, ...]) -> tuple[str, ...]:
    """What torchtitan cannot hold of a model and a workload, by name."""
    return (*held_by(model, version).faults, *_numerics(workload))


def _numerics(workload: Workload) -> Iterator[str]:
    if workload.task == "lora":
        yield "LoRA adapters"
    if workload.frozen:
        yield "frozen modules " + ", ".join(workload.frozen)
    if workload.mtp:
        yield "multi-token prediction"
    if workload.precision not in ("bf16", "fp32"):
        yield f"precision {workload.precision} (exports write bf16 or fp32; torchao's converters are left to the user)"
    if workload.gradient_dtype != "fp32":
        yield f"gradients reduced in {workload.gradient_dtype} (training.mixed_precision_reduce is float32)"
    if workload.main_params_dtype != "fp32" or workload.moments_dtype != "fp32":
        yield "main parameters or moments below fp32"
    if workload.optimizer != "adam":
        yield f"optimizer {workload.optimizer}"
    if workload.dropout:
        yield "dropout"
    if workload.moe_capacity_factor is not None:
        yield "a capacity factor of experts"


def _faults(family: str, model: ModelSpec, version: tuple[int, ...]) -> Iterator[str]:
    if model.vision:
        yield "a vision tower"
    if model.norm != "RMSNorm" or any(kind.norm_bias for kind in model.kinds) or model.final_norm_bias:
        yield f"norm {model.norm}, or norms with biases (RMSNorm)"
    if model.activation != "silu":
        yield f"activation {model.activation} (SwiGLU)"
    if model.head_bias or model.extra_parameters:
        yield "parameters outside of embedding, layers and head"
    if model.learned_positions or not model.rotary:
        yield "positions other than rotary"
    if model.tied_embeddings and (family == "deepseek_v3" or (family == "llama3" and version < PYTHON_CONFIG)):
        yield f"tied embeddings in {family}"
    kinds = [model.kinds[index] for index in model.pattern]
    norms = {kind.attention.qk_norm for kind in kinds if isinstance(kind.attention, SoftmaxAttention)}
    if family == "qwen3" and version >= PYTHON_CONFIG and norms != {"head"}:
        yield "qwen3 without query-key norms"
    for kind in dict.fromkeys(kinds):
        yield from _layer(family, kind, model.hidden_size)
    if len({kind.attention for kind in kinds}) > 1:
        yield "attention of different shapes in one model"
    yield from _feed_forwards(family, [kind.feed_forward for kind in kinds if kind.feed_forward])


def _layer(family: str, kind: LayerKind, hidden_size: int) -> Iterator[str]:
    if kind.attention is None or kind.feed_forward is None or kind.norms != 2 or kind.extra_parameters:
        yield "layers other than attention and feed-forward with one norm each"
        return
    mixer, ffn = kind.attention, kind.feed_forward
    if family == "deepseek_v3":
        if not isinstance(mixer, MLAAttention):
            yield f"{mixer.variant} attention in deepseek_v3"
        elif mixer.bias or mixer.output_gate or mixer.top_k:
            yield "biases, gates or sparse keys in latent attention"
    elif not isinstance(mixer, SoftmaxAttention):
        yield f"{mixer.variant} attention in {family}"
    else:
        if mixer.window or mixer.qkv_bias or mixer.out_bias or mixer.output_gate or mixer.head_gate:
            yield "sliding windows, biases or gates in attention"
        if mixer.sinks or mixer.key_is_value or mixer.cross or mixer.qk_norm == "full":
            yield "sinks, shared or cross keys, or query-key norms over all heads"
        if family == "llama3" and mixer.qk_norm != "none":
            yield "query-key norms in llama3"
        if family == "llama3" and mixer.num_heads * mixer.head_dim != hidden_size:
            yield f"heads of {mixer.head_dim} that do not add up to the hidden size, in llama3"
    if not ffn.gated or ffn.bias:
        yield "feed-forward networks without gate or with bias"
    if isinstance(ffn, MoEFFN):
        if ffn.router_bias or ffn.shared_bias or ffn.shared_gate or ffn.latent_size:
            yield "biases, gates or latents of experts"
        if family == "qwen3" and (ffn.shared_intermediate_size or ffn.expert_score_bias):
            yield "shared experts or score biases in qwen3"
        if ffn.shared_intermediate_size % ffn.expert_intermediate_size:
            yield "shared experts of another width than the routed ones"


def _feed_forwards(family: str, ffns: list[DenseFFN | MoEFFN]) -> Iterator[str]:
    if len({ffn for ffn in ffns if isinstance(ffn, DenseFFN)}) > 1:
        yield "dense layers of different widths"
    if len({ffn for ffn in ffns if isinstance(ffn, MoEFFN)}) > 1:
        yield "different mixtures of experts in one model"
    moe = [isinstance(ffn, MoEFFN) for ffn in ffns]
    if family == "llama3" and any(moe):
        yield "experts in llama3"
    if family == "qwen3" and any(moe) and not all(moe):
        yield "dense layers beside experts in qwen3"
    if family == "deepseek_v3" and moe != sorted(moe):
        yield "dense layers after layers of experts"
