"""Write defaults.json for specs/hf: scalar class defaults of the configuration classes that specs.hf reads.

Run with transformers==5.24.0 installed: ``python tests/oracle/make_hf_defaults.py specs/hf``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

MODEL_TYPES = [
    "arcee",
    "clip_vision_model",
    "cohere",
    "cohere2",
    "cwm",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gemma4_vision",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "helium",
    "internlm3",
    "kimi_k25",
    "kimi_k25_vision",
    "kimi_linear",
    "llama",
    "llama4",
    "llama4_text",
    "llama4_vision_model",
    "llava",
    "minicpm3",
    "minimax_m2",
    "mistral",
    "mixtral",
    "mllama",
    "mllama_text_model",
    "mllama_vision_model",
    "nemotron",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen2_5_vl_vision",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_moe_vision",
    "qwen3_5_text",
    "qwen3_5_vision",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    "qwen3_vl_moe_vision",
    "qwen3_vl_text",
    "qwen3_vl_vision",
    "seed_oss",
    "siglip_vision_model",
    "smollm3",
    "starcoder2",
    "step3p5",
    "step3p5_vision",
    "step3p7",
]
#: Configuration types that transformers reads with another family's class.
SAME_CLASS = {"kimi_k2": "deepseek_v3"}
#: Fields that say nothing about the shape of a model.
SKIP = ("_token_id", "_token_index", "dropout", "pdrop", "initializer", "_eps", "epsilon", "use_cache", "summary_")


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The class of a model type, also of those that exist only as a part of another (step3p5)."""
    if model_type in CONFIG_MAPPING:
        found: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
        if found.model_type == model_type:
            return found
    for name in dir(transformers):
        if name.endswith("Config"):
            candidate = getattr(transformers, name)
            if isinstance(candidate, type) and getattr(candidate, "model_type", None) == model_type:
                return candidate
    raise LookupError(model_type)


def defaults_of(cls: type[PreTrainedConfig]) -> dict[str, object]:
    """Scalar defaults that the class declares itself or inherits from a model's configuration class."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    out: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        plain = field.default is None or isinstance(field.default, bool | int | float | str)
        if field.name in base or not plain or any(part in field.name for part in SKIP):
            continue
        out[field.name] = field.default
    return dict(sorted(out.items()))


def main(folder: Path) -> None:
    """Write the data file."""
    entries: dict[str, object] = {}
    for model_type in MODEL_TYPES:
        cls = config_class(model_type)
        entries[model_type] = {"class": cls.__name__, "defaults": defaults_of(cls)}
    for name, target in SAME_CLASS.items():
        entries[name] = entries[target]
    for part, cls in CONFIG_MAPPING["dbrx"].sub_configs.items():
        entries[f"dbrx/{part}"] = {"class": cls.__name__, "defaults": defaults_of(cls)}
    document = {
        "source": f"configuration classes of transformers {transformers.__version__} (Apache-2.0); "
        "made by tests/oracle/make_hf_defaults.py",
        "model_types": dict(sorted(entries.items())),
    }
    (folder / "defaults.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
