"""Sizes of torchtitan's models: those of a ``ModelSpec``, those of its presets, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.planner.rules.torchtitan_models import PYTHON_CONFIG, held_by
from meshwright.specs.attention import Attention, MLAAttention, SoftmaxAttention
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.feed_forward import DenseFFN, FeedForward, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model in torchtitan's words; 0 where a family has no such size."""

    family: str
    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int = 0
    head_dim: int = 0
    hidden_dim: int = 0
    tied: bool = False
    qk_norm: bool = False
    moe_hidden_dim: int = 0
    num_experts: int = 0
    top_k: int = 0
    n_dense_layers: int = 0
    num_shared_experts: int = 0
    score_func: str = "softmax"
    num_expert_groups: int | None = None
    num_limited_groups: int | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0


def _llama(dim: int, layers: int, heads: int, kv: int, width: int, vocab: int = 128256, tied: bool = False) -> Shape:
    return Shape(
        family="llama3", dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv, head_dim=dim // heads,
        hidden_dim=width, vocab_size=vocab, tied=tied,
    )  # fmt: skip


def _qwen(dim: int, layers: int, heads: int, kv: int, width: int, tied: bool = False, vocab: int = 151936) -> Shape:
    return Shape(
        family="qwen3", dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv, head_dim=128, hidden_dim=width,
        vocab_size=vocab, tied=tied, qk_norm=True,
    )  # fmt: skip


def _qwen_moe(dim: int, layers: int, heads: int, kv: int, width: int, experts: int, vocab: int = 151936) -> Shape:
    return Shape(
        family="qwen3", dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv, head_dim=128, moe_hidden_dim=width,
        vocab_size=vocab, qk_norm=True, num_experts=experts, top_k=8,
    )  # fmt: skip


def _deepseek(dim: int, layers: int, heads: int, vocab: int, widths: tuple[int, int], experts: int, top_k: int,
              q_rank: int = 0, dense: int = 1, shared: int = 2, score: str = "softmax",
              groups: tuple[int, int] | tuple[None, None] = (None, None)) -> Shape:  # fmt: skip
    return Shape(
        family="deepseek_v3", dim=dim, n_layers=layers, n_heads=heads, vocab_size=vocab, hidden_dim=widths[0],
        moe_hidden_dim=widths[1], num_experts=experts, top_k=top_k, n_dense_layers=dense, num_shared_experts=shared,
        score_func=score, num_expert_groups=groups[0], num_limited_groups=groups[1], q_lora_rank=q_rank,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip


#: Sizes of the presets by family and flavor (models/*/__init__.py of the wheels 0.2.2 and 0.3.0).
PRESETS: dict[tuple[str, str], Shape] = {
    ("llama3", "debugmodel"): _llama(256, 6, 16, 16, 768, 2048),
    ("llama3", "1B"): _llama(2048, 16, 32, 8, 8192, tied=True),
    ("llama3", "3B"): _llama(3072, 28, 24, 8, 8192, tied=True),
    ("llama3", "8B"): _llama(4096, 32, 32, 8, 14336),
    ("llama3", "70B"): _llama(8192, 80, 64, 8, 28672),
    ("llama3", "405B"): _llama(16384, 126, 128, 8, 53248),
    ("qwen3", "debugmodel"): _qwen(256, 8, 16, 8, 3072, tied=True, vocab=2048),
    ("qwen3", "0.6B"): _qwen(1024, 28, 16, 8, 3072, tied=True),
    ("qwen3", "1.7B"): _qwen(2048, 28, 16, 8, 6144, tied=True),
    ("qwen3", "4B"): _qwen(2560, 36, 32, 8, 9728, tied=True),
    ("qwen3", "8B"): _qwen(4096, 36, 32, 8, 12288),
    ("qwen3", "14B"): _qwen(5120, 40, 40, 8, 17408),
    ("qwen3", "32B"): _qwen(5120, 64, 64, 8, 25600),
    ("qwen3", "debugmodel_moe"): _qwen_moe(256, 8, 16, 8, 768, 64, vocab=2048),
    ("qwen3", "30B-A3B"): _qwen_moe(2048, 48, 32, 4, 768, 128),
    ("qwen3", "235B-A22B"): _qwen_moe(4096, 94, 64, 4, 1536, 128),
    ("deepseek_v3", "debugmodel"): _deepseek(256, 6, 16, 2048, (1024, 256), 8, 3),
    ("deepseek_v3", "16B"): _deepseek(2048, 27, 16, 102400, (10944, 1408), 64, 6),
    ("deepseek_v3", "236B"): _deepseek(5120, 60, 128, 102400, (12288, 1536), 160, 6, q_rank=1536, groups=(8, 3)),
    ("deepseek_v3", "671B"): _deepseek(
        7168, 61, 128, 129280, (18432, 2048), 256, 8, q_rank=1536, dense=3, shared=1, score="sigmoid", groups=(8, 4)
    ),
}
#: Presets that came with 0.3.
_NEW = {("llama3", "1B"), ("llama3", "3B")}


def shape_of(model: ModelSpec, version: tuple[int, ...]) -> Shape:
    """Sizes of a model that one of torchtitan's families holds."""
    kinds = [model.kinds[index] for index in model.pattern]
    dense = [kind.feed_forward for kind in kinds if isinstance(kind.feed_forward, DenseFFN)]
    moe = next((kind.feed_forward for kind in kinds if isinstance(kind.feed_forward, MoEFFN)), None)
    common = {
        "family": held_by(model, version).family,
        "dim": model.hidden_size,
        "n_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "tied": model.tied_embeddings,
        "hidden_dim": dense[0].intermediate_size if dense else 0,
    }
    mixer = kinds[0].attention
    return Shape(**common, **_attention(mixer), **(_experts(moe, mixer, len(dense)) if moe else {}))  # type: ignore[arg-type]


def _attention(mixer: Attention | None) -> dict[str, object]:
    if isinstance(mixer, MLAAttention):
        return {
            "n_heads": mixer.num_heads,
            "q_lora_rank": mixer.q_lora_rank or 0,
            "kv_lora_rank": mixer.kv_lora_rank,
            "qk_nope_head_dim": mixer.qk_nope_head_dim,
            "qk_rope_head_dim": mixer.qk_rope_head_dim,
            "v_head_dim": mixer.v_head_dim,
        }
    if not isinstance(mixer, SoftmaxAttention):  # the rules let no other through
        raise SpecError(Fault("/inputs/model", "no family of torchtitan has this attention"))
    return {
        "n_heads": mixer.num_heads,
        "n_kv_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "qk_norm": mixer.qk_norm == "head",
    }


def _experts(moe: MoEFFN, mixer: Attention | None, dense: int) -> dict[str, object]:
    latent = isinstance(mixer, MLAAttention)
    return {
        "moe_hidden_dim": moe.expert_intermediate_size,
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "n_dense_layers": dense if latent else 0,
        "num_shared_experts": moe.shared_intermediate_size // moe.expert_intermediate_size,
        "score_func": "sigmoid" if moe.expert_score_bias else "softmax",
        "num_expert_groups": moe.num_expert_groups,
        "num_limited_groups": moe.top_k_groups,
    }


def preset_of(shape: Shape, version: tuple[int, ...]) -> str | None:
    """The flavor of torchtitan that has exactly these sizes."""
    return next(
        (
            flavor
            for (family, flavor), preset in PRESETS.items()
            if preset == shape and ((family, flavor) not in _NEW or version >= PYTHON_CONFIG)
        ),
        None,
    )


def base_flavor(flavor: str) -> tuple[str, str]:
    """``8B_flex`` as ``("8B", "flex")``; the backend is empty where the flavor does not name it."""
    match = re.fullmatch(r"(.+?)_(flex|varlen)(?:_attn)?", flavor)
    return (match[1], match[2]) if match else (flavor, "")


def model_of(shape: Shape, name: str) -> ModelSpec:
    """The model of these sizes."""
    if shape.kv_lora_rank:
        mixer: Attention = MLAAttention(
            num_heads=shape.n_heads,
            q_lora_rank=shape.q_lora_rank or None,
            kv_lora_rank=shape.kv_lora_rank,
            qk_nope_head_dim=shape.qk_nope_head_dim,
            qk_rope_head_dim=shape.qk_rope_head_dim,
            v_head_dim=shape.v_head_dim,
        )
    else:
        mixer = SoftmaxAttention(
            num_heads=shape.n_heads,
            num_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            qk_norm="head" if shape.qk_norm else "none",
        )
    dense = shape.n_layers if not shape.num_experts else shape.n_dense_layers
    widths: list[FeedForward] = [DenseFFN(intermediate_size=shape.hidden_dim)] if dense else []
    if shape.num_experts:
        widths.append(
            MoEFFN(
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                expert_intermediate_size=shape.moe_hidden_dim,
                shared_intermediate_size=shape.num_shared_experts * shape.moe_hidden_dim,
                expert_score_bias=shape.score_func == "sigmoid",
                num_expert_groups=shape.num_expert_groups,
                top_k_groups=shape.num_limited_groups,
            )
        )
    return ModelSpec(
        name=name,
        family=shape.family,
        hidden_size=shape.dim,
        vocab_size=shape.vocab_size,
        kinds=tuple(LayerKind(attention=mixer, feed_forward=ffn) for ffn in widths),
        pattern=(0,) * dense + (len(widths) - 1,) * (shape.n_layers - dense),
        tied_embeddings=shape.tied,
    )
