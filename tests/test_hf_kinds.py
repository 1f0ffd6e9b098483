"""Per-layer kinds of published configurations, worked out from the files by hand."""

from __future__ import annotations

import pytest

from meshwright.specs.attention import LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.hf import model_from_config
from meshwright.specs.model import ModelSpec

from .hf_cases import config


def read(name: str) -> ModelSpec:
    return model_from_config(config(name), name)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-2-7b", {"mha+dense": 32}),
        ("llama-3.1-70b", {"gqa+dense": 80}),
        ("falcon-7b", {"mqa+dense": 32}),
        ("mistral-7b", {"gqa+dense": 32}),
        ("gemma-2-9b", {"sliding-gqa+dense": 21, "gqa+dense": 21}),
        ("gemma-3-1b", {"sliding-mqa+dense": 22, "mqa+dense": 4}),
        ("gemma-3-27b", {"sliding-gqa+dense": 52, "gqa+dense": 10}),
        ("gemma-4-26b-a4b", {"sliding-gqa+moe": 25, "gqa+moe": 5}),
        ("gpt-oss-120b", {"sliding-gqa+moe": 18, "gqa+moe": 18}),
        ("deepseek-v3", {"mla+dense": 3, "mla+moe": 58}),
        ("deepseek-v3.2", {"mla-sparse+dense": 3, "mla-sparse+moe": 58}),
        ("deepseek-vl2-tiny", {"mha+dense": 1, "mha+moe": 11}),
        ("glm-4.5-air", {"gqa+dense": 1, "gqa+moe": 45}),
        ("kimi-k2", {"mla+dense": 1, "mla+moe": 60}),
        ("kimi-k3", {"kda+dense": 1, "kda+moe": 68, "mla+moe": 24}),
        ("minicpm3-4b", {"mla+dense": 62}),
        ("qwen3-next-80b-a3b", {"gated-delta-net+moe": 36, "gqa+moe": 12}),
        ("qwen3.8-2.4t-a95b", {"gated-delta-net+moe": 69, "gqa+moe": 23}),
        ("nemotron-3-nano-30b-a3b", {"mamba2": 23, "moe": 23, "gqa": 6}),
        ("nemotron-3-ultra-550b-a55b", {"mamba2": 48, "moe": 48, "gqa": 12}),
        ("llama-nemotron-super-49b", {"gqa+dense": 49, "dense": 31}),
        ("llama-3.2-11b-vision", {"gqa+dense": 32, "cross-gqa+dense": 8}),
        ("llama-4-maverick-17b-128e", {"sliding-gqa+dense": 24, "sliding-gqa+moe": 12, "gqa+moe": 12}),
        ("step-3.7-flash", {"gqa+dense": 1, "sliding-gqa+dense": 2, "sliding-gqa+moe": 31, "gqa+moe": 11}),
    ],
)
def test_layers_by_kind(name: str, kinds: dict[str, int]) -> None:
    assert read(name).layers_by_kind() == kinds


def test_order_of_layers() -> None:
    maverick = read("llama-4-maverick-17b-128e")
    assert [isinstance(layer.feed_forward, MoEFFN) for layer in maverick.layers] == [False, True] * 24
    hybrid = read("qwen3-next-80b-a3b")
    assert [isinstance(layer.attention, LinearAttention) for layer in hybrid.layers] == [True, True, True, False] * 12
    nano = read("nemotron-3-nano-30b-a3b")
    letters = {MambaMixer: "M", SoftmaxAttention: "*", MoEFFN: "E"}
    spelled = "".join(letters[type(layer.attention or layer.feed_forward)] for layer in nano.layers)
    assert spelled == config("nemotron-3-nano-30b-a3b")["hybrid_override_pattern"]
    vision = read("llama-3.2-11b-vision")
    crossed = [
        i for i, x in enumerate(vision.layers) if isinstance(x.attention, SoftmaxAttention) and x.attention.cross
    ]
    assert crossed == [3, 8, 13, 18, 23, 28, 33, 38]
    glm = read("glm-5.2")
    attention = [layer.attention for layer in glm.layers]
    assert all(isinstance(each, MLAAttention) and each.top_k == 2048 for each in attention)
    own = ["full" if isinstance(each, MLAAttention) and each.indexer else "shared" for each in attention]
    assert own == config("glm-5.2")["indexer_types"]


def test_head_sizes_that_do_not_follow_from_the_hidden_size() -> None:
    for name, heads, kv_heads, head_dim in (
        ("glm-4.5-air", 96, 8, 128),
        ("qwen3-0.6b", 16, 8, 128),
        ("gpt-oss-120b", 64, 8, 64),
        ("falcon-7b", 71, 1, 64),
    ):
        attention = read(name).layers[0].attention
        assert isinstance(attention, SoftmaxAttention)
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (heads, kv_heads, head_dim)
    glm = read("glm-5").layers[0].attention  # its head_dim of 64 is the rotary part alone
    assert isinstance(glm, MLAAttention)
    assert (glm.qk_head_dim, glm.v_head_dim, glm.q_lora_rank) == (256, 256, 2048)
    gemma = {layer.attention.head_dim for layer in read("gemma-4-26b-a4b").layers if layer.attention}  # type: ignore[union-attr]
    assert gemma == {256, 512}


def test_windows() -> None:
    def found(name: str) -> set[int | None]:
        return {layer.attention.window for layer in read(name).layers if isinstance(layer.attention, SoftmaxAttention)}

    assert found("gemma-2-9b") == {4096, None}
    assert found("gpt-oss-120b") == {128, None}
    assert found("starcoder2") == {4096}
    assert found("mistral-7b") == {None}
    assert found("qwen2.5-7b") == {None}  # states a window, and use_sliding_window: false
    assert found("phi-3.5-moe") == {None}  # its window is as long as its longest sequence


def test_experts_under_their_names() -> None:
    for name, num_experts, top_k, width, shared, latent in (
        ("mixtral-8x7b", 8, 2, 14336, 0, None),
        ("deepseek-v3", 256, 8, 2048, 2048, None),
        ("deepseek-v2-lite", 64, 6, 1408, 2 * 1408, None),
        ("qwen3-next-80b-a3b", 512, 10, 512, 512, None),
        ("qwen1.5-moe-a2.7b", 60, 4, 1408, 5632, None),
        ("gemma-4-26b-a4b", 128, 8, 704, 2112, None),
        ("llama-4-maverick-17b-128e", 128, 1, 8192, 8192, None),
        ("dbrx-132b", 16, 4, 10752, 0, None),
        ("step-3.7-flash", 288, 8, 1280, 1280, None),
        ("minimax-m2.5", 256, 8, 1536, 0, None),
        ("nemotron-3-ultra-550b-a55b", 512, 22, 5120, 10240, 2048),
        ("kimi-k3", 896, 16, 3072, 2 * 3072, 3584),
    ):
        moe = read(name).moe
        assert moe is not None
        found = (
            moe.num_experts,
            moe.top_k,
            moe.expert_intermediate_size,
            moe.shared_intermediate_size,
            moe.latent_size,
        )
        assert found == (num_experts, top_k, width, shared, latent), name
    grouped = read("deepseek-v3").moe
    assert grouped is not None
    assert (grouped.num_expert_groups, grouped.top_k_groups, grouped.expert_score_bias) == (8, 4, True)


def test_networks_of_nas_blocks() -> None:
    model = read("llama-nemotron-super-49b")
    widths = [
        layer.feed_forward.intermediate_size for layer in model.layers if isinstance(layer.feed_forward, DenseFFN)
    ]
    # ffn_mult 2.625 and 5.25 of hidden 8192: 2/3 * 2.625 * 8192 = 14336, 2/3 * 5.25 * 8192 = 28672.
    assert widths[:2] == [14336, 28672]
    assert min(widths) == 2816  # ffn_mult 0.5: 2730.67, up to a multiple of 256


def test_mtp_layers() -> None:
    assert {name: model.mtp.num_layers for name in ("deepseek-v3", "glm-4.5-air") if (model := read(name)).mtp} == {
        "deepseek-v3": 1,
        "glm-4.5-air": 1,
    }
    minimax, step, ultra = read("minimax-m2.5").mtp, read("step-3.7-flash").mtp, read("nemotron-3-ultra-550b-a55b").mtp
    assert minimax is not None
    assert minimax.num_layers == 3
    assert step is not None
    assert step.num_layers == 3
    assert ultra is not None
    assert ultra.layer.name == "gqa+moe"
    assert read("kimi-k2").mtp is None  # num_nextn_predict_layers: 0


def test_vision_towers() -> None:
    gemma = read("gemma-3-27b").vision
    assert gemma is not None
    assert (gemma.num_layers, gemma.hidden_size, gemma.num_heads, gemma.tokens_per_image) == (27, 1152, 16, 256)
    llava = read("llava-1.5-7b").vision
    assert llava is not None
    assert llava.tokens_per_image == 24 * 24
    assert read("llama-4-maverick-17b-128e").vision is None
    assert "no vision tower: the configuration has no vision_config" in read("llama-4-maverick-17b-128e").assumptions


def test_what_the_file_does_not_state_is_named() -> None:
    lite = read("deepseek-v2-lite").assumptions
    assert "q_lora_rank = 1536: default of DeepseekV2Config in transformers 5.24.0" in lite
    llava = read("llava-1.5-7b").assumptions
    assert "text_config.hidden_size = 4096: default of LlamaConfig in transformers 5.24.0" in llava
    assert "text_config.num_key_value_heads = 32: num_attention_heads, as it is not stated" in llava
    gemma = read("gemma-3-27b").assumptions
    assert "text_config.vocab_size = 262208: default of Gemma3TextConfig in transformers 5.24.0" in gemma
    step = read("step-3.7-flash").assumptions
    assert any("vocab_size = 128815: the stated 128896 is not read" in text for text in step)
    ultra = read("nemotron-3-ultra-550b-a55b").assumptions
    assert "num_hidden_layers = 108: the length of layers_block_type" in ultra
    assert read("qwen3-8b").assumptions == ()


def test_stored_dtype_is_the_checkpoints() -> None:
    found = {name: read(name).stored_dtype for name in ("gpt-oss-120b", "deepseek-v3", "llama-3.1-8b", "gpt2")}
    assert found == {"gpt-oss-120b": "mxfp4", "deepseek-v3": "fp8", "llama-3.1-8b": "bfloat16", "gpt2": None}
