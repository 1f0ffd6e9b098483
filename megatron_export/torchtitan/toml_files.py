"""torchtitan 0.2: ``train.toml`` and the module that it imports."""

from __future__ import annotations

import json
from typing import Any

from ..launch.shell import plain
from .settings import Settings
from .shapes import Shape

#: Dictionary of the flavors and class of the sizes, by family (torchtitan 0.2.2, models/*/__init__.py).
_CLASSES = {
    "llama3": ("llama3_args", "TransformerModelArgs"),
    "qwen3": ("qwen3_args", "Qwen3ModelArgs"),
    "deepseek_v3": ("deepseekv3_args", "DeepSeekV3ModelArgs"),
}
#: Flavor of the sizes that an export brings along.
FLAVOR = "plan"

_MODULE = '''\
"""What train.toml cannot say: {what}, and random tokens to start with.

torchtitan imports this by experimental.custom_import. With MOCK_DATA=0 it reads the data set and the tokenizer that
train.toml names.
"""

import os
from dataclasses import replace

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.{family} import {names}
{imports}from torchtitan.protocols.train_spec import register_train_spec

{flavor}

class MockData(BaseDataLoader):
    """Random tokens of one data-parallel rank, the same in every run."""

    def __init__(self, dp_rank, batch, length, vocab):
        self.dp_rank, self.shape, self.vocab = dp_rank, (batch, length + 1), vocab

    def __iter__(self):
        generator = torch.Generator().manual_seed(1234 + self.dp_rank)
        while True:
            tokens = torch.randint(self.vocab, self.shape, generator=generator)
            yield {{"input": tokens[:, :-1].contiguous()}}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {{}}

    def load_state_dict(self, state_dict):
        pass


def mock_data(dp_world_size, dp_rank, tokenizer, job_config):
    training = job_config.training
    vocab = {args}[job_config.model.flavor].vocab_size
    return MockData(dp_rank, training.local_batch_size, training.seq_len, vocab)


if os.environ.get("MOCK_DATA", "1") != "0":
    spec = replace(get_train_spec(), build_tokenizer_fn=None, build_dataloader_fn=mock_data)
    register_train_spec("{family}", spec)
'''


def toml_of(settings: Settings, shape: Shape, flavor: str, title: str) -> str:
    """``train.toml``: what the plan decides, and placeholders of a run."""
    sections: Settings = {
        "job": {"description": plain(title), "dump_folder": "./outputs"},
        "model": {"name": shape.family, "flavor": flavor, "hf_assets_path": "./tokenizer"},
        "optimizer": {"name": "AdamW", "lr": 1e-4},
        "lr_scheduler": {"warmup_steps": 2},
        "metrics": {"log_freq": 1},
        "checkpoint": {"enable": False},
        "experimental": {"custom_import": "plan_model"},
        **settings,
    }
    sections["training"] = {"dataset": "c4_test", **sections["training"]}
    lines = [
        f"# torchtitan 0.2: {plain(title)}. The plan decides training, parallelism, activation_checkpoint, compile."
    ]
    for section, values in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)


def module_of(shape: Shape, preset: str | None) -> tuple[str, str]:
    """The flavor to name, and the text of the module that brings it along.

    A preset of the same sizes is used as it is; DeepSeek's ask for FlexAttention, which runs under no context
    parallelism, so that theirs is taken with PyTorch's own attention.
    """
    args, kind = _CLASSES[shape.family]
    names, imports, flavor = f"{args}, get_train_spec", "", preset or FLAVOR
    if preset and shape.family != "deepseek_v3":
        text, what = "", "where the data come from"
    elif preset:
        flavor = FLAVOR
        text = f'{args}["{FLAVOR}"] = replace({args}["{preset}"], attn_type="sdpa", attn_mask_type="causal")\n'
        what = "which attention runs"
    else:
        if shape.num_experts:
            imports = "from torchtitan.models.moe import MoEArgs\n"
        imports += f"from torchtitan.models.{shape.family}.model.args import {kind}\n"
        body = "".join(f"    {key}={value},\n" for key, value in _arguments(shape).items())
        text = f'{args}["{FLAVOR}"] = {kind}(\n{body})\n'
        what = "the sizes of the model"
    module = _MODULE.format(
        what=what,
        family=shape.family,
        names=names,
        imports="".join(sorted(imports.splitlines(True))),
        flavor=text,
        args=args,
    )
    return flavor, module


def _arguments(shape: Shape) -> dict[str, str]:
    """Keyword arguments of the family's class of sizes, as Python."""
    out: dict[str, Any] = {
        "dim": shape.dim, "n_layers": shape.n_layers, "n_heads": shape.n_heads, "vocab_size": shape.vocab_size,
    }  # fmt: skip
    if shape.family == "llama3":
        # The width is 8/3 x dim x multiplier, rounded up to a multiple: half a multiple rounds up to one.
        multiplier = round(shape.hidden_dim / 2 / (8 * shape.dim / 3), 6)
        out |= {
            "n_kv_heads": shape.n_kv_heads, "multiple_of": shape.hidden_dim, "ffn_dim_multiplier": multiplier,
            "rope_theta": 500000,
        }  # fmt: skip
    elif shape.family == "qwen3":
        out |= {
            "n_kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim, "qk_norm": shape.qk_norm,
            "hidden_dim": shape.hidden_dim or shape.moe_hidden_dim, "enable_weight_tying": shape.tied,
        }  # fmt: skip
        if shape.num_experts:
            out |= {"moe_enabled": True, "moe_inter_dim": shape.moe_hidden_dim}
    else:
        out |= {
            "inter_dim": shape.hidden_dim or shape.moe_hidden_dim, "moe_inter_dim": shape.moe_hidden_dim or 1,
            "n_dense_layers": shape.n_dense_layers if shape.num_experts else shape.n_layers,
            "q_lora_rank": shape.q_lora_rank, "kv_lora_rank": shape.kv_lora_rank,
            "qk_nope_head_dim": shape.qk_nope_head_dim, "qk_rope_head_dim": shape.qk_rope_head_dim,
            "v_head_dim": shape.v_head_dim,
        }  # fmt: skip
    text = {key: repr(value) for key, value in out.items()}
    if shape.num_experts:
        moe = {
            "num_experts": shape.num_experts, "num_shared_experts": shape.num_shared_experts, "top_k": shape.top_k,
            "score_func": shape.score_func, "route_norm": True, "score_before_experts": False,
            "num_expert_groups": shape.num_expert_groups, "num_limited_groups": shape.num_limited_groups,
        }  # fmt: skip
        text["moe_args"] = "MoEArgs(" + ", ".join(f"{key}={value!r}" for key, value in moe.items()) + ")"
    return text
