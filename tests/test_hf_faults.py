"""Wrong configurations: one clear fault each, at the field that is wrong, and never another exception."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.hf import model_from_config, supported_families

from .hf_cases import config, config_names

MISSING = object()


def faults(data: Any) -> tuple[Fault, ...]:
    with pytest.raises(SpecError) as caught:
        model_from_config(data, "model")
    return caught.value.faults


def changed(name: str, **changes: Any) -> dict[str, Any]:
    data = config(name) | changes
    return {key: value for key, value in data.items() if value is not MISSING}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama-3.1-8b", "hidden_size"),
        ("llama-3.1-8b", "num_hidden_layers"),
        ("llama-3.1-8b", "num_attention_heads"),
        ("llama-3.1-8b", "intermediate_size"),
        ("llama-3.1-8b", "vocab_size"),
        ("mixtral-8x7b", "num_local_experts"),
        ("mixtral-8x7b", "num_experts_per_tok"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "moe_intermediate_size"),
        ("qwen3-next-80b-a3b", "shared_expert_intermediate_size"),
        ("nemotron-3-nano-30b-a3b", "mamba_num_heads"),
        ("nemotron-3-ultra-550b-a55b", "layers_block_type"),
        ("llama-nemotron-super-49b", "block_configs"),
        ("gemma-3-27b", "text_config"),
        ("gpt2", "n_embd"),
        ("chatglm3-6b", "padded_vocab_size"),
        ("dbrx-132b", "ffn_config"),
    ],
)
def test_a_missing_field_is_named(name: str, field: str) -> None:
    (fault,) = faults(changed(name, **{field: MISSING}))
    assert fault.pointer == f"/{field}"
    assert "is required" in fault.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "at least 1"),
        (-4096, "at least 1"),
        ("4096", "must be an integer, got '4096'"),
        (4096.0, "must be an integer"),
        (True, "must be an integer, got true"),
        (None, "must be an integer, got null"),
        ([4096], "must be an integer"),
        ({}, "must be an integer"),
        (float("nan"), "must be an integer, got nan"),
        (float("inf"), "must be an integer, got inf"),
        (10**13, "at most 1000000000"),
        (10**400, "at most 1000000000"),
    ],
)
def test_a_wrong_size_is_one_fault(value: Any, words: str) -> None:
    (fault,) = faults(changed("llama-3.1-8b", hidden_size=value))
    assert fault.pointer == "/hidden_size"
    assert words in fault.message
    assert len(fault.message) < 200


def test_all_faults_are_found_at_once() -> None:
    data = changed("llama-3.1-8b", hidden_size=-1, vocab_size="many", mlp_bias=3, num_hidden_layers=MISSING)
    assert {fault.pointer for fault in faults(data)} == {
        "/hidden_size",
        "/vocab_size",
        "/mlp_bias",
        "/num_hidden_layers",
    }


@pytest.mark.parametrize(
    ("name", "changes", "pointer", "words"),
    [
        ("llama-3.1-8b", {"num_attention_heads": 33}, "/num_attention_heads", "do not divide the hidden size 4096"),
        ("llama-3.1-8b", {"num_key_value_heads": 5}, "/num_key_value_heads", "do not divide 32 attention heads"),
        ("llama-3.1-8b", {"tie_word_embeddings": "no"}, "/tie_word_embeddings", "must be true or false, got 'no'"),
        ("llama-3.1-8b", {"tie_word_embeddings": None}, "/tie_word_embeddings", "must be true or false, got null"),
        ("llama-3.1-8b", {"num_hidden_layers": 10**6}, "/num_hidden_layers", "at most 10000"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "/num_experts_per_tok", "9 experts a token, but there are 8"),
        ("deepseek-v3", {"n_group": 7}, "/n_group", "do not divide 256 experts"),
        ("gpt-oss-120b", {"layer_types": ["full_attention"]}, "/layer_types", "has 1 entries, but the model has 36"),
        ("gpt-oss-120b", {"layer_types": "full"}, "/layer_types", "must be a list"),
        ("gpt-oss-120b", {"layer_types": ["fast"] + ["full_attention"] * 35}, "/layer_types/0", "'fast' is not known"),
        ("gpt-oss-120b", {"sliding_window": None}, "/sliding_window", "is required"),
        (
            "nemotron-3-nano-30b-a3b",
            {"hybrid_override_pattern": "MEX"},
            "/hybrid_override_pattern",
            "'X' at position 2",
        ),
        ("nemotron-3-nano-30b-a3b", {"num_hidden_layers": 51}, "/num_hidden_layers", "has 52 layers"),
        ("gemma-3-27b", {"text_config": [1]}, "/text_config", "must be an object"),
        ("gemma-3-27b", {"vision_config": 3}, "/vision_config", "must be an object"),
        ("kimi-k2", {"model_type": 7}, "/model_type", "must be a string"),
        ("qwen3-8b", {"torch_dtype": 16}, "/torch_dtype", "must be a string"),
    ],
)
def test_contradictions(name: str, changes: dict[str, Any], pointer: str, words: str) -> None:
    (fault,) = faults(changed(name, **changes))
    assert fault.pointer == pointer
    assert words in fault.message


def test_a_nested_fault_has_a_nested_pointer() -> None:
    data = config("gemma-3-27b")
    data["text_config"]["hidden_size"] = "wide"
    data["vision_config"]["patch_size"] = 0
    assert [fault.pointer for fault in faults(data)] == ["/text_config/hidden_size"]
    del data["text_config"]["hidden_size"]
    assert [fault.pointer for fault in faults(data)] == ["/vision_config/patch_size"]


def test_an_unknown_family_lists_the_supported_ones() -> None:
    (fault,) = faults({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    assert fault.pointer == "/model_type"
    assert "'bert' is not a supported model family" in fault.message
    assert fault.alternatives == supported_families()
    assert {"llama", "deepseek_v3", "nemotron_h"} <= set(fault.alternatives)


def test_the_architecture_stands_in_for_a_missing_model_type() -> None:
    data = config("qwen3-30b-a3b")
    expected = model_from_config(data, "m")
    del data["model_type"]
    model = model_from_config(data, "m")
    assert model.kinds == expected.kinds
    assert "model_type = qwen3_moe: from the architecture Qwen3MoeForCausalLM" in model.assumptions
    (fault,) = faults({"hidden_size": 1})
    assert fault.pointer == "/model_type"
    assert "is required" in fault.message


@pytest.mark.parametrize("data", [None, [], "llama", 7])
def test_a_configuration_is_an_object(data: Any) -> None:
    (fault,) = faults(data)
    assert "must be a JSON object" in fault.message


def test_absurd_totals_are_refused() -> None:
    (fault,) = faults(changed("llama-3.1-8b", hidden_size=10**9, num_attention_heads=10, num_key_value_heads=1))
    assert "parameters, which is too many" in fault.message


BAD_VALUES: tuple[Any, ...] = (None, -1, 0, 10**13, float("nan"), 1.5, "abc", True, [], [None], {}, {"a": 1}, MISSING)


def fields_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = list(enumerate(value))[:1]
    for key, child in children:
        yield (*path, key)
        yield from fields_of(child, (*path, key))


def spoil(data: Any, path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    if value is MISSING:
        del data[path[-1]]
    else:
        data[path[-1]] = value


def outcome(data: Any, name: str) -> tuple[Fault, ...]:
    """The faults of a configuration; none where it can be read. Any other exception passes through."""
    try:
        model_from_config(data, name)
    except SpecError as error:
        return error.faults or (Fault("", ""),)
    return ()


@pytest.mark.parametrize("name", config_names())
def test_any_spoiled_field_is_read_or_reported(name: str) -> None:
    """Each field takes a bad value in turn: a fault at or below that field, or beside it, but no other exception."""
    choose = random.Random(name)
    for path in fields_of(config(name)):
        data = config(name)
        spoil(data, path, choose.choice(BAD_VALUES))
        assert all(fault.message and len(fault.message) < 300 for fault in outcome(data, name)), path
