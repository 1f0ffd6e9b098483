"""What a model is, as a document."""

from __future__ import annotations

from typing import Any

from meshwright.cost_models.flops import model_flops
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Workload

#: Sequence length that FLOPs a token refer to where none is asked for: attention makes them depend on it.
DEFAULT_SEQ_LENGTH = 4096


def describe_model(model: ModelSpec, seq_length: int | None = None) -> dict[str, Any]:
    """Parameters, layers by kind and training FLOPs a token (forward and backward, causal half) of a model."""
    length = seq_length or min(DEFAULT_SEQ_LENGTH, model.max_position_embeddings or DEFAULT_SEQ_LENGTH)
    flops = model_flops(model, Workload(global_batch_size=1, seq_length=length))
    moe = model.moe
    return {
        "name": model.name,
        "family": model.family,
        "total_params": model.total_params,
        "active_params": model.active_params,
        "text_params": model.text_params,
        "whole_params": model.whole_params,
        "mtp_params": model.mtp_params,
        "num_layers": model.num_layers,
        "layers_by_kind": model.layers_by_kind(),
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "tied_embeddings": model.tied_embeddings,
        "max_position_embeddings": model.max_position_embeddings,
        "num_experts": moe.num_experts if moe else None,
        "experts_per_token": moe.top_k if moe else None,
        "vision_params": model.vision.parameters if model.vision else 0,
        "flops_per_token": flops / length,
        "flops_seq_length": length,
        "assumptions": list(model.assumptions),
    }
