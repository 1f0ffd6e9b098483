"""torchtitan 0.3 and later: a Python module whose function ``plan`` returns the trainer's configuration."""

from __future__ import annotations

from typing import Any

from ..launch.shell import plain
from .settings import Settings
from .shapes import Shape

_MODULE = '''\
"""{title}: configuration for torchtitan {version}.

Start: python -m torchtitan.train --module plan_config --config plan, with this folder on PYTHONPATH. With MOCK_DATA=0
it reads the data set and the tokenizer named below instead of random tokens.
"""

import os
from dataclasses import dataclass

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import {policy_imports}
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
{imports}from torchtitan.trainer import Trainer

MOCK_DATA = os.environ.get("MOCK_DATA", "1") != "0"


class NullTokenizer(BaseTokenizer):
    """No text is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()
        self.eos_id = 0

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return {vocab}


class MockData(BaseDataLoader):
    """Random tokens of one data-parallel rank, the same in every run."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len={seq_length}, local_batch_size={micro_batch}, **kwargs):
        self.dp_rank, self.shape = dp_rank, (local_batch_size, seq_len + 1)

    def __iter__(self):
        generator = torch.Generator().manual_seed(1234 + self.dp_rank)
        while True:
            tokens = torch.randint({vocab}, self.shape, generator=generator)
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1).contiguous()
            yield {{"input": tokens[:, :-1].contiguous(), "positions": positions}}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {{}}

    def load_state_dict(self, state_dict):
        pass


def model_spec():
    """The model of the plan."""
{model}

def plan() -> Trainer.Config:
    """What torchtitan trains, as planned."""
    return Trainer.Config(
        model_spec=model_spec(),
        hf_assets_path="./tokenizer",
        tokenizer=NullTokenizer.Config() if MOCK_DATA else HuggingFaceTokenizer.Config(),
        dataloader=MockData.Config() if MOCK_DATA else HuggingFaceTextDataLoader.Config(dataset="c4"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size={vocab})),
        optimizer=default_adamw(lr=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
{sections}
    )
'''
_POLICIES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def module_of(
    settings: Settings, shape: Shape, preset: str | None, title: str, version: str, batch: tuple[int, int]
) -> str:
    """``plan_config.py``; ``batch`` is micro-batch size and sequence length."""
    imports, model = _model(shape, preset)
    mode = settings["activation_checkpoint"]["mode"]
    sections = [
        _call("training", "TrainingConfig", settings["training"]),
        _call("parallelism", "ParallelismConfig", settings["parallelism"]),
        f"        activation_checkpoint={_POLICIES[mode]},",
        _call("compile", "CompileConfig", settings["compile"]),
    ]
    return _MODULE.format(
        title=plain(title).replace('"', "'").replace("\\", "/"),
        version=version,
        policy_imports="FullAC" if mode == "full" else "SelectiveAC",
        imports=imports,
        vocab=shape.vocab_size,
        seq_length=batch[1],
        micro_batch=batch[0],
        model=model,
        sections="\n".join(sections),
    )


def _call(field: str, name: str, values: dict[str, Any]) -> str:
    body = "".join(f"            {key}={_value(value)},\n" for key, value in values.items())
    return f"        {field}={name}(\n{body}        ),"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"                {item!r},\n" for item in value) + "            ]"
    return repr(value)


def _model(shape: Shape, preset: str | None) -> tuple[str, str]:
    """Imports and the body of ``model_spec``: a preset, or the family's own builders at the model's sizes."""
    family = f"torchtitan.models.{shape.family}"
    if preset:
        return f"from {family} import model_registry\n", f'    return model_registry("{preset}")\n'
    kind = {"llama3": "Llama3Model", "qwen3": "Qwen3Model", "deepseek_v3": "DeepSeekV3Model"}[shape.family]
    rope = "CosSinRoPE" if shape.family == "qwen3" else "ComplexRoPE"
    imports = (
        f"from torchtitan.models.common import {', '.join(sorted(['Embedding', 'Linear', 'RMSNorm', rope]))}\n"
        f"from torchtitan.models import {shape.family} as family\n"
        f"from {family}.model import {kind}\n"
    )
    builder, arguments = _layers(shape)
    lines = [f"rope = {rope}.Config(dim={_rotary(shape)}, max_seq_len=131072, theta=500000.0)"]
    lines += [f"layers = family.{builder}("]
    lines += [f"    {key}={value!r}," for key, value in arguments.items()]
    lines += ['    attn_backend="flex",', "    rope=rope,", ")"]
    linear = "family._LINEAR_INIT" if shape.family == "qwen3" else f"family._output_linear_init({shape.dim})"
    embedding = "family._EMBEDDING_SKIP_INIT" if shape.tied else "family._EMBEDDING_INIT"
    sizes = f"num_embeddings={shape.vocab_size}, embedding_dim={shape.dim}, param_init={embedding}"
    flavor = "debugmodel"
    lines += [
        f"model = {kind}.Config(",
        f"    dim={shape.dim},",
        f"    vocab_size={shape.vocab_size},",
        *(["    enable_weight_tying=True,"] if shape.tied else []),
        f"    tok_embeddings=Embedding.Config({sizes}),",
        f"    norm=RMSNorm.Config(normalized_shape={shape.dim}, param_init=family._NORM_INIT),",
        f"    lm_head=Linear.Config(in_features={shape.dim}, out_features={shape.vocab_size}, param_init={linear}),",
        "    layers=layers,",
        ")",
        f'spec = family.model_registry("{flavor}")',
        'spec.flavor, spec.model = "plan", model',
        "return spec",
    ]
    return imports, "".join(f"    {line}\n" for line in lines)


def _rotary(shape: Shape) -> int:
    return shape.qk_rope_head_dim or shape.head_dim


def _layers(shape: Shape) -> tuple[str, dict[str, Any]]:
    """The family's function that builds layers, and its sizes (0.3.0, models/*/__init__.py)."""
    common = {"n_layers": shape.n_layers, "dim": shape.dim, "n_heads": shape.n_heads}
    if shape.family == "llama3":
        return "_build_llama3_layers", {**common, "n_kv_heads": shape.n_kv_heads, "hidden_dim": shape.hidden_dim}
    if shape.family == "qwen3":
        heads = {**common, "n_kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim}
        if not shape.num_experts:
            return "_build_qwen3_layers", {**heads, "hidden_dim": shape.hidden_dim}
        experts = {"num_experts": shape.num_experts, "top_k": shape.top_k, "moe_comm_backend": "standard"}
        return "_build_qwen3_moe_layers", {**heads, "moe_hidden_dim": shape.moe_hidden_dim, **experts}
    return "_build_dsv3_layers", {
        **common,
        "n_dense_layers": shape.n_dense_layers if shape.num_experts else shape.n_layers,
        "q_lora_rank": shape.q_lora_rank,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "mscale": 1.0,
        "dense_hidden_dim": shape.hidden_dim or shape.moe_hidden_dim,
        "moe_hidden_dim": shape.moe_hidden_dim or 1,
        "num_experts": shape.num_experts or 1,
        "num_shared_experts": shape.num_shared_experts,
        "router_top_k": shape.top_k or 1,
        "router_score_func": shape.score_func,
        "router_num_expert_groups": shape.num_expert_groups,
        "router_num_limited_groups": shape.num_limited_groups,
        "router_route_norm": True,
        "moe_comm_backend": "standard",
        "non_blocking_capacity_factor": None,
    }
