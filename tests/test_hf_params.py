"""Parameter counts of published configurations against transformers' own models, and by hand where it has none."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.specs.hf import model_from_config, supported_families
from meshwright.specs.model import ModelSpec

from .hf_cases import config, config_names, oracle

COUNTED = oracle("active_param_oracle")
CLASSES = oracle("class_param_oracle")["classes"]


def read(name: str) -> ModelSpec:
    return model_from_config(config(name), name)


def test_every_published_configuration_is_read() -> None:
    names = config_names()
    assert len(names) == 56
    for name in names:
        assert read(name).num_layers > 0


@pytest.mark.parametrize("name", sorted(oracle("param_oracle")["models"]))
def test_total_and_active_parameters_equal_the_oracle(name: str) -> None:
    model = read(name)
    assert model.total_params == oracle("param_oracle")["models"][name]["params"]
    assert model.active_params == COUNTED["configs"][name]["active"]


@pytest.mark.parametrize("name", sorted(COUNTED["wholes"]))
def test_whole_models_and_old_names_equal_the_oracle(name: str) -> None:
    model = read(name)
    tower = model.whole_params - model.total_params
    assert (model.whole_params, model.active_params + tower) == (
        COUNTED["wholes"][name]["params"],
        COUNTED["wholes"][name]["active"],
    )


@pytest.mark.parametrize(
    "case", CLASSES, ids=[f"{case['config']['model_type']}-{index}" for index, case in enumerate(CLASSES)]
)
def test_configurations_that_transformers_writes(case: dict[str, Any]) -> None:
    model = model_from_config(case["config"], "case")
    tower = model.whole_params - model.total_params
    assert (model.whole_params, model.active_params + tower) == (case["params"], case["active"])


def test_every_family_has_a_case() -> None:
    seen = {case["config"]["model_type"] for case in CLASSES}
    for name in config_names():
        data = config(name)
        seen |= {part.get("model_type") for part in (data, data.get("text_config") or {})}
    # Parts of a wrapper that is tested whole; names that share a builder with a tested one; Qwen v1, tested by hand.
    seen |= {"qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text", "step3p5", "RefinedWeb", "qwen"}
    assert set(supported_families()) - seen == set()


def test_counts_by_hand_where_transformers_has_no_class() -> None:
    # Published with the checkpoint: the number of parameters in its safetensors index.
    assert read("llama-nemotron-super-49b").total_params == 49_867_145_216

    # DeepSeek-VL2-tiny: multi-head attention, 1 dense and 11 sparse layers of width 1280.
    attention, norms = 4 * 1280**2, 2 * 1280
    sparse = 64 * 1280 + 64 * 3 * 1280 * 896 + 3 * 1280 * 2 * 896
    text = 2 * 129280 * 1280 + 1280 + 12 * (attention + norms) + 3 * 1280 * 6848 + 11 * sparse
    model = read("deepseek-vl2-tiny")
    assert model.text_params == text
    # SigLIP so400m: 27 layers, positions of 27x27 patches of 14, pooling; then 2x2 patches -> 1280 -> 1280.
    layer = 4 * (1152**2 + 1152) + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    pool = 1152 + 4 * (1152**2 + 1152) + 2 * 1152 + 2 * 1152 * 4304 + 4304 + 1152
    vision = 27 * layer + 3 * 14 * 14 * 1152 + 1152 + 729 * 1152 + 2 * 1152 + pool
    projector = 4 * 1152 * 1280 + 1280 + 1280**2 + 1280 + 2 * 1280
    assert model.total_params == text + vision + projector


def test_kimi_k3_by_hand() -> None:
    h, heads = 7168, 96
    wide = heads * 128
    kda = 4 * h * wide + h * 128 + 128 * wide + h * heads  # q, k, v, gate; decay; beta
    kda += wide + heads + 3 * wide * 4 + 128 + wide * h  # dt bias, A, convolutions, norm, output
    mla = h * 1536 + 1536 + 1536 * heads * 192 + h * 576 + 512 + 512 * heads * 256 + 2 * heads * 128 * h
    moe = h * 896 + 2 * h * 3584 + 3584 + 896 * 3 * 3584 * 3072 + 3 * h * 2 * 3072
    text = 2 * 163840 * h + h + 93 * 2 * h + 69 * kda + 24 * mla + 3 * h * 33792 + 92 * moe
    assert read("kimi-k3").text_params == text


def test_qwen_v1_has_half_the_stated_width() -> None:
    # Qwen-7B: config.json states 22016, the model's own code builds two maps of 11008 to and one from.
    data = {
        "model_type": "qwen",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "no_bias": True,
        "tie_word_embeddings": False,
    }
    assert model_from_config(data, "qwen-7b").total_params == 7_721_324_544


def test_mtp_is_counted_apart_as_megatron_builds_it() -> None:
    # Megatron-LM's own GPTModel of DeepSeek-V3 with one MTP layer has 683,563,151,360 parameters; it holds a second
    # copy of the embedding (129280 x 7168) for the MTP layer.
    model = read("deepseek-v3")
    assert model.mtp_params > 0
    assert model.total_params + model.mtp_params + 129280 * 7168 == 683_563_151_360
