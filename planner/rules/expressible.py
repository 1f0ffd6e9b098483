"""What Megatron's GPT model, as this project exports it, cannot hold of a model and a workload."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.specs.attention import Attention, LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.workload import Workload

#: (activation, gated) pairs that Megatron's flags name: --swiglu, --quick-geglu, plain GELU, --squared-relu.
ACTIVATIONS = {
    ("silu", True),
    ("quick_gelu", True),
    ("gelu", False),
    ("gelu_new", False),
    ("gelu_pytorch_tanh", False),
    ("gelu_fast", False),
    ("relu2", False),
    ("squared_relu", False),
}


def inexpressible(model: ModelSpec, workload: Workload) -> tuple[str, ...]:
    """Features by name, in the order of the model; empty if the model can be exported."""
    return tuple(dict.fromkeys([*_whole_model(model, workload), *_layers(model)]))


def _whole_model(model: ModelSpec, workload: Workload) -> Iterator[str]:
    if workload.task == "lora":
        yield "LoRA adapters (Megatron-LM's trainer has none)"
    if workload.frozen:
        yield "frozen modules " + ", ".join(workload.frozen)
    if workload.main_params_dtype not in ("fp32", "fp16"):
        yield f"main parameters in {workload.main_params_dtype} (fp32 or fp16)"
    if workload.gradient_dtype not in ("fp32", "bf16") and workload.gradient_dtype != workload.params_dtype:
        yield f"gradients in {workload.gradient_dtype}"
    if model.vision:
        yield "a vision tower"
    if model.head_bias:
        yield "a bias of the output projection"
    if model.extra_parameters:
        yield "parameters outside of embedding, layers and head"
    if model.norm not in ("RMSNorm", "LayerNorm", "LayerNorm1P"):
        yield f"norm {model.norm}"
    if model.norm != "RMSNorm" and not all(kind.norm_bias for kind in model.kinds if kind.norms):
        yield f"{model.norm} without bias"
    if model.mtp and workload.mtp and model.mtp.layer not in model.kinds:
        yield "MTP layers of a kind that the decoder does not have"


def _layers(model: ModelSpec) -> Iterator[str]:
    kinds = [model.kinds[index] for index in sorted(set(model.pattern))]
    for kind in kinds:
        yield from _layer(kind, model.activation)
    dense = {ffn.intermediate_size for kind in kinds if isinstance(ffn := kind.feed_forward, DenseFFN)}
    if len(dense) > 1:
        yield f"dense layers of different widths {sorted(dense)}"
    if len({ffn for kind in kinds if isinstance(ffn := kind.feed_forward, MoEFFN)}) > 1:
        yield "different mixtures of experts in one model"
    softmax = [mixer for kind in kinds if isinstance(mixer := kind.attention, SoftmaxAttention)]
    if len({mixer.model_copy(update={"window": None}) for mixer in softmax}) > 1:
        yield "attention of different shapes in one model"
    if len({mixer.window for mixer in softmax if mixer.window}) > 1:
        yield "sliding windows of different sizes"
    if len({mixer for kind in kinds if isinstance(mixer := kind.attention, MLAAttention)}) > 1:
        yield "latent attention of different shapes in one model"
    if len({type(kind.attention) for kind in kinds} - {LinearAttention}) > 1:
        yield "a mix of attention families"
    if len({_biases(kind) for kind in kinds}) > 1:
        yield "biases in some linear maps only"


def _layer(kind: LayerKind, activation: str) -> Iterator[str]:
    if kind.attention is None or kind.feed_forward is None:
        yield "layers with only attention, only feed-forward or neither"
    elif kind.norms != 2:
        yield f"{kind.norms} norms in a layer"
    if kind.extra_parameters:
        yield "extra parameters in a layer"
    if kind.attention:
        yield from _mixer(kind.attention)
    ffn = kind.feed_forward
    if ffn and (activation, ffn.gated) not in ACTIVATIONS:
        yield f"{'gated ' if ffn.gated else ''}activation {activation}"
    if isinstance(ffn, MoEFFN) and ffn.router_bias != ffn.bias:
        yield "a router bias without expert biases, or the reverse"
    if isinstance(kind.attention, SoftmaxAttention) and ffn and kind.attention.out_bias != ffn.bias:
        yield "biases in some linear maps only"
    if isinstance(kind.attention, SoftmaxAttention) and ffn and ffn.bias and not kind.attention.qkv_bias:
        yield "biases in some linear maps only"


def _mixer(mixer: Attention) -> Iterator[str]:
    if isinstance(mixer, MambaMixer):
        yield "Mamba-2 layers (Megatron's hybrid trainer is not exported)"
    elif isinstance(mixer, LinearAttention):
        if mixer.rule != "gated_delta":
            yield "Kimi Delta Attention"
    elif isinstance(mixer, MLAAttention):
        if mixer.bias:
            yield "biases in latent attention"
        if mixer.output_gate:
            yield "an output gate in latent attention"
        if mixer.top_k and not mixer.indexer:
            yield "sparse attention that shares another layer's indexer"
    else:
        if mixer.cross:
            yield "cross-attention layers"
        if mixer.key_is_value:
            yield "shared key and value projections"
        if mixer.qk_norm == "full":
            yield "query-key norms over all heads"
        if mixer.head_gate:
            yield "a gate per attention head"


def _biases(kind: LayerKind) -> tuple[bool, bool]:
    mixer, ffn = kind.attention, kind.feed_forward
    qkv = isinstance(mixer, SoftmaxAttention) and mixer.qkv_bias
    return bool(qkv), bool(ffn and ffn.bias)
