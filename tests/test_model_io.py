"""Models from presets, files and folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.specs.errors import SpecError
from meshwright.specs.hf import model_from_config
from meshwright.specs.model_io import list_presets, load_model, load_preset, model_from_data
from meshwright.specs.model_presets import preset_index

from .hf_cases import CONFIGS, config


def message(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_model(text)
    assert len(caught.value.faults) == 1
    return str(caught.value)


def test_a_config_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("qwen3-8b")), encoding="utf-8")
    from_folder, from_file = load_model(str(folder)), load_model(str(folder / "config.json"))
    assert from_folder == from_file
    assert from_folder.name == "my-model"
    assert load_model(str(CONFIGS / "qwen3-8b.json")).name == "qwen3-8b"


@pytest.mark.parametrize(
    "name", ["llama-3.1-70b", "deepseek-v3", "nemotron-3-ultra-550b-a55b", "gemma-3-27b", "kimi-k3"]
)
def test_a_model_spec_survives_its_file(name: str, tmp_path: Path) -> None:
    model = model_from_config(config(name), name)
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(model.to_json()), encoding="utf-8")
    read = load_model(str(path))
    assert read == model
    assert read.digest() == model.digest()
    assert (read.total_params, read.active_params) == (model.total_params, model.active_params)


def test_a_wrong_model_spec_names_its_field() -> None:
    data: dict[str, Any] = load_preset("mixtral-8x7b").to_json()
    data["kinds"][0]["feed_forward"]["num_experts"] = -8
    with pytest.raises(SpecError) as caught:
        model_from_data(data, "x")
    assert [fault.pointer.endswith("/feed_forward/moe/num_experts") for fault in caught.value.faults] == [True]


def test_what_is_no_model_file(tmp_path: Path) -> None:
    assert "is a folder without a config.json" in message(str(tmp_path))
    assert "there is no file" in message(str(tmp_path / "absent.json"))
    cases: dict[str, tuple[bytes, str]] = {
        "cut.json": (b'{"model_type": "llama",\n "hidden_size": 40', "line 2, column"),
        "list.json": (b"[1, 2]", "holds no JSON object"),
        "nan.json": (b'{"hidden_size": NaN}', "NaN, which is not a number of JSON"),
        "infinite.json": (b'{"hidden_size": -Infinity}', "-Infinity, which is not a number of JSON"),
        "deep.json": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        "latin.json": ('{"name": "é"}'.encode("latin-1"), "is not UTF-8"),
        "big.json": (b" " * 10_000_000, "at most 5000000 are read"),
        "empty.json": (b"", "is not valid JSON"),
        "twice.json": (b'{"hidden_size": 1, "hidden_size": 2}', "twice"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        assert words in message(str(tmp_path / name)), name
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in message(str(tmp_path / "pipe"))


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 5000, "~/none.json", "../../none", "meta-llama/"])
def test_text_that_names_nothing(text: str) -> None:
    assert len(message(text)) < 3000


def test_near_matches_of_an_unknown_preset() -> None:
    with pytest.raises(SpecError) as caught:
        load_preset("llama-3.1-71b")
    (fault,) = caught.value.faults
    assert fault.message == "there is no model preset 'llama-3.1-71b'"
    assert fault.alternatives[0] == "llama-3.1-70b"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "llama-nemotron-super-49b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("gpt3", "gpt3-175b"),
        ("Kimi-K2-Instruct", "kimi-k2"),
    ],
)
def test_names_of_presets(text: str, name: str) -> None:
    assert load_model(text).name == name


def test_no_name_means_two_presets() -> None:
    names = [text for name, entry in preset_index().items() for text in (name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert list_presets() == sorted(list_presets())
    assert all(entry.source for entry in preset_index().values())


#: Parameters as published with the checkpoints (safetensors index) or, for GPT-3, 174.6 billion in its paper's table.
PUBLISHED = {
    "dbrx": 131_596_523_520,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-4b": 4_300_079_472,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-xl": 1_557_611_200,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "llama-65b": 65_285_660_672,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-large-123b": 122_610_069_504,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-4b": 4_022_468_096,
    "qwen3-coder-480b-a35b": 480_154_875_392,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_have_the_published_size(name: str) -> None:
    assert load_preset(name).total_params == PUBLISHED[name]


def test_gpt3_has_the_size_of_its_paper() -> None:
    assert load_preset("gpt3-175b").total_params == pytest.approx(174.6e9, rel=1e-4)
    assert load_preset("gpt3-6.7b").total_params == pytest.approx(6.7e9, rel=0.01)


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_loads(name: str) -> None:
    model = load_preset(name)
    assert model.name == name
    assert model_from_data(model.to_json(), "x") == model


def test_reading_models_needs_no_learning_library() -> None:
    program = (
        "import sys\n"
        "from meshwright.specs.model_io import load_model\n"
        "load_model('deepseek-v3')\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'ortools', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
