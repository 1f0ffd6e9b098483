"""Model FLOPs of a step: what the mathematics needs, whatever the plan."""

from __future__ import annotations

from functools import lru_cache

from meshwright.specs.attention import LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.weights import Weight
from meshwright.specs.workload import Workload

from .mixer_time import SCAN_FLOPS
from .operators import seen_keys


def matmul_flops_per_token(weights: tuple[Weight, ...], top_k: int = 0) -> float:
    """Forward FLOPs a token of the linear maps, routed experts counted ``top_k`` of their copies."""
    return float(sum(2 * w.inputs * w.outputs * (top_k if w.expert else w.copies) for w in weights if w.matmul))


def mixer_flops_per_token(layer: LayerKind, seq_length: int) -> float:
    """Forward FLOPs a token of the scores and values (causal at half), or of the scan, of a layer."""
    mixer = layer.attention
    if isinstance(mixer, SoftmaxAttention):
        keys = float(seq_length) if mixer.cross else seen_keys(seq_length, mixer.window)
        return 2.0 * mixer.num_heads * keys * 2 * mixer.head_dim
    if isinstance(mixer, MLAAttention):
        keys = seen_keys(seq_length, None, mixer.indexer.top_k if mixer.indexer else None)
        flops = 2.0 * mixer.num_heads * keys * (mixer.qk_head_dim + mixer.v_head_dim)
        if mixer.indexer:
            flops += 2.0 * mixer.indexer.num_heads * seen_keys(seq_length, None) * mixer.indexer.head_dim
        return flops
    if isinstance(mixer, LinearAttention):
        return SCAN_FLOPS * mixer.num_value_heads * mixer.key_head_dim * mixer.value_head_dim
    if isinstance(mixer, MambaMixer):
        return SCAN_FLOPS * mixer.num_heads * mixer.head_dim * mixer.state_size
    return 0.0


def layer_flops_per_token(layer: LayerKind, hidden_size: int, seq_length: int) -> tuple[float, float]:
    """(linear maps, mixer) forward FLOPs a token of one layer."""
    top_k = getattr(layer.feed_forward, "top_k", 0)
    return matmul_flops_per_token(layer.weights(hidden_size), top_k), mixer_flops_per_token(layer, seq_length)


def model_flops(model: ModelSpec, workload: Workload) -> float:
    """FLOPs of one step: forward, input gradient, weight gradient of what is trained; attention causal at half, no
    recomputation, vocabulary unpadded, vision tower left out (its tokens are not part of the workload).

    Weight gradients of frozen parts, and of everything but the adapters under LoRA, are not counted.
    """
    per_token = _flops_per_token(model, workload.task == "lora", workload.frozen, workload.mtp, workload.seq_length)
    return per_token * workload.tokens_per_step


@lru_cache(maxsize=32)
def _flops_per_token(model: ModelSpec, lora: bool, frozen: tuple[str, ...], with_mtp: bool, seq: int) -> float:
    def passes(part: str) -> float:
        return 2.0 if lora or part in frozen else 3.0

    hidden = model.hidden_size
    per_kind = []
    for kind in model.kinds:
        linear, mixer = layer_flops_per_token(kind, hidden, seq)
        per_kind.append(passes("decoder") * linear + 3.0 * mixer)
    per_token = sum(per_kind[index] for index in model.pattern)
    head = matmul_flops_per_token(model.head_weights())
    per_token += passes("head") * head
    if with_mtp and model.mtp:
        linear, mixer = layer_flops_per_token(model.mtp.layer, hidden, seq)
        linear += 2.0 * 2 * hidden * hidden
        each = passes("decoder") * linear + 3.0 * mixer + passes("head") * head
        per_token += model.mtp.num_layers * each
    return per_token
