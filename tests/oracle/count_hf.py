"""Count parameters with transformers' own code on the meta device.

``python tests/oracle/count_hf.py FOLDER`` (with transformers 5.24.0 and torch installed) writes

- ``active_param_oracle.json``: for each file in tests/data/hf_configs the class that AutoModelForCausalLM picks, total
  and active parameters (``configs``); active ones are all parameters but those of routed experts, and top_k /
  num_experts of these. ``wholes`` has the whole model where the class above is the text model alone, and files that
  transformers reads once their old names are replaced;
- ``class_param_oracle.json``: configurations that transformers itself writes, of every family that specs.hf reads,
  with variants, and their counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
ORACLE = Path(__file__).parents[1] / "data" / "param_oracle.json"
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")

#: Variants that switch on what the class defaults leave off.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8, "head_dim": 96}],
    "smollm3": [{}, {"attention_bias": True, "mlp_bias": True}],
    "seed_oss": [{}, {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}],
    "granite": [{}, {"attention_bias": True, "mlp_bias": True}],
    "arcee": [{}, {"attention_bias": True, "mlp_bias": True}],
    "helium": [{}, {"attention_bias": True, "mlp_bias": True}],
    "ernie4_5": [{}, {"use_bias": True}],
    "mistral": [{}],
    "phi3": [{}],
    "qwen2": [{}, {"use_sliding_window": True, "max_window_layers": 3}],
    "qwen3": [{}, {"attention_bias": True}],
    "olmo2": [{}, {"attention_bias": True}],
    "olmo3": [{}],
    "cohere": [{}, {"use_qk_norm": True, "attention_bias": True}],
    "cohere2": [{}, {"attention_bias": True}],
    "glm": [{}, {"attention_bias": False}],
    "glm4": [{}, {"attention_bias": True}],
    "nemotron": [{"num_key_value_heads": 8}, {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True}],
    "starcoder2": [{}, {"use_bias": False}],
    "mixtral": [{}],
    "olmoe": [{}, {"attention_bias": True}],
    "phimoe": [{}, {"attention_bias": True, "lm_head_bias": True}],
    "qwen2_moe": [{}, {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}, {"qkv_bias": False}],
    "qwen3_moe": [{}, {"mlp_only_layers": [0]}, {"attention_bias": True}],
    "gpt_oss": [{}, {"attention_bias": False}],
    "minimax_m2": [{}, {"use_qk_norm": False}],
    "glm4_moe": [{"head_dim": 128}, {"head_dim": 128, "use_qk_norm": True, "attention_bias": True}],
    "dots1": [
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "attention_bias": True},
    ],
    "deepseek_v2": [{"num_experts_per_tok": 6}, {"num_experts_per_tok": 6, "mlp_bias": True, "q_lora_rank": None}],
    "deepseek_v3": [{}, {"q_lora_rank": None, "attention_bias": True}],
    "deepseek_v32": [{}, {"attention_bias": True}],
    "glm_moe_dsa": [{}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"attention_bias": True}],
    "glm4_moe_lite": [{}, {"attention_bias": True}],
    "minicpm3": [{}, {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}, {"mlp_bias": True}],
    "qwen3_next": [{}, {"decoder_sparse_step": 2}, {"attention_bias": True}],
    "qwen3_5_text": [{}, {"attention_bias": True}],
    "qwen3_5_moe_text": [{}],
    "kimi_linear": [{}, {"q_lora_rank": 512, "attention_bias": True}],
    "gemma": [{}, {"attention_bias": True}],
    "gemma2": [{}, {"attention_bias": True}],
    "gemma3_text": [{}, {"attention_bias": True}],
    "gemma4_text": [
        {"hidden_size_per_layer_input": 0},
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 704,
        },
        {"hidden_size_per_layer_input": 0, "attention_bias": True, "attention_k_eq_v": True},
    ],
    "nemotron_h": [
        {"num_experts_per_tok": 2},
        {"use_bias": True, "mlp_bias": True, "attention_bias": True, "use_conv_bias": False},
        {"mlp_bias": True, "moe_latent_size": 512},
    ],
    "gpt2": [{}, {"n_inner": 1000}],
    "gptj": [{}, {"n_inner": 100}],
    "gpt_neox": [{}, {"attention_bias": False}],
    "falcon": [
        {},
        {"bias": True, "parallel_attn": False, "multi_query": False},
        {"new_decoder_architecture": True, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8},
        {
            "new_decoder_architecture": True,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_ln_in_parallel_attn": 1,
        },
    ],
    "dbrx": [{"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4}, "ffn_config": {"hidden_size": 2048}}],
    "mllama_text_model": [{}],
    "llama4_text": [{}, {"interleave_moe_layer_step": 3, "attention_bias": True}],
    "gemma3": [{}, {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": True}}],
    "gemma4": [{"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}}],
    "llava": [
        {},
        {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
        {"multimodal_projector_bias": False},
        {"vision_feature_layer": [-2, -5]},
    ],
    "llama4": [{}, {"vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336}}],
    "mllama": [
        {},
        {"vision_config": {"model_type": "mllama_vision_model", "attention_heads": 8, "num_global_layers": 3}},
    ],
    "qwen2_5_vl": [{}],
    "qwen3_vl": [{}],
    "qwen3_vl_moe": [{}, {"vision_config": {"model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [3]}}],
    "qwen3_5": [{}],
    "qwen3_5_moe": [{}],
    "kimi_k25": [{}],
    "step3p7": [
        {},
        {"text_config": {"model_type": "step3p5", "attention_bias": True, "mlp_bias": True}, "projector_bias": True},
    ],
    "internlm3": [{}, {"qkv_bias": True, "bias": True}],
    "cwm": [{}],
}


def build(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory, shared tensors shared."""
    with torch.device("meta"):
        model = cls(config)
    model.tie_weights()
    return model


def count(model: PreTrainedModel) -> dict[str, Any]:
    """Total and active parameters, each shared tensor once."""
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(p.numel() for p in model.parameters())
    active = total
    if routed:
        config = model.config.get_text_config()
        config = getattr(config, "ffn_config", config)
        top_k = next(getattr(config, name) for name in TOP_K if getattr(config, name, None) is not None)
        num_experts = next(getattr(config, name) for name in NUM_EXPERTS if getattr(config, name, None) is not None)
        if routed * top_k % num_experts:
            raise ArithmeticError(f"{routed} parameters of {num_experts} experts")
        active = total - routed + routed * top_k // num_experts
    return {"class": type(model).__name__, "params": total, "active": active}


def read(name: str) -> dict[str, Any]:
    """A configuration file without its quantization (the training form of the model is counted)."""
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    data.pop("quantization_config", None)
    return data


def configs() -> dict[str, Any]:
    """Every file that has a class, by the class that the oracle names."""
    out = {}
    for name, entry in json.loads(ORACLE.read_text())["models"].items():
        cls = getattr(transformers, entry["class"])
        data = read(name)
        if cls.config_class.model_type != data["model_type"] and not entry["class"].endswith("ConditionalGeneration"):
            data = data.get("text_config", data)
        out[name] = count(build(cls, cls.config_class.from_dict(data)))
    return out


def wholes() -> dict[str, Any]:
    """Whole multimodal models, and files with names that transformers no longer reads."""
    out = {}
    for name in ("llama-3.2-11b-vision", "qwen3.5-397b-a17b"):
        data = read(name)
        cls = getattr(transformers, data["architectures"][0])
        out[name] = count(build(cls, cls.config_class.from_dict(data)))
    falcon = read("falcon-7b")
    renamed = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    falcon = {renamed.get(key, key): value for key, value in falcon.items()} | {"model_type": "falcon"}
    kimi = read("kimi-k2") | {"model_type": "deepseek_v3"}
    dbrx = read("dbrx-132b")
    dbrx["ffn_config"]["ffn_act_fn"] = {"name": "silu"}  # the file has the plain name, which the class refuses
    dbrx["ffn_config"]["hidden_size"] = dbrx["d_model"]
    renamed_files = {"falcon-7b": falcon, "kimi-k2": kimi, "dbrx-132b": dbrx}
    for name in ("glm-4-9b", "chatglm3-6b"):
        renamed_files[name] = as_glm(read(name))
    for name, data in renamed_files.items():
        config = CONFIG_MAPPING[data["model_type"]].from_dict(data)
        cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        out[name] = count(build(cls, config))
    return out


def as_glm(old: dict[str, Any]) -> dict[str, Any]:
    """ChatGLM's own names as those of GlmConfig, which is the same architecture."""
    return {
        "model_type": "glm",
        "pad_token_id": 0,
        "hidden_size": old["hidden_size"],
        "intermediate_size": old["ffn_hidden_size"],
        "num_hidden_layers": old["num_layers"],
        "num_attention_heads": old["num_attention_heads"],
        "num_key_value_heads": old["multi_query_group_num"],
        "head_dim": old["kv_channels"],
        "vocab_size": old["padded_vocab_size"],
        "attention_bias": old["add_qkv_bias"],
    }


def classes() -> list[dict[str, Any]]:
    """Configurations as transformers writes them, with their counts."""
    out = []
    for model_type, variants in VARIANTS.items():
        for changes in variants:
            config = CONFIG_MAPPING[model_type].from_dict({"model_type": model_type, **changes})
            mapping = transformers.AutoModelForImageTextToText._model_mapping
            if type(config) not in mapping:
                mapping = transformers.AutoModelForCausalLM._model_mapping
            cls = mapping[type(config)] if model_type != "mllama_text_model" else transformers.MllamaForCausalLM
            written = json.loads(config.to_json_string(use_diff=False))
            out.append({"config": slim(written), "changes": changes, **count(build(cls, config))})
    return out


def slim(value: Any) -> Any:
    """The configuration without generation settings, which are half of it."""
    if isinstance(value, dict):
        drop = ("_token_id", "_token_index", "dropout", "pdrop", "rope_parameters", "transformers_version", "label")
        kept = {key: slim(item) for key, item in value.items() if not any(part in key for part in drop)}
        base = PreTrainedConfig().to_dict()
        return {
            key: item
            for key, item in kept.items()
            if key in ("model_type", "tie_word_embeddings") or base.get(key, object()) != item
        }
    return value


def main(folder: Path) -> None:
    """Write the two files."""
    source = f"transformers {transformers.__version__} on the meta device; made by tests/oracle/count_hf.py"
    documents = {
        "active_param_oracle.json": {"source": source, "configs": configs(), "wholes": wholes()},
        "class_param_oracle.json": {"source": source, "classes": classes()},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
