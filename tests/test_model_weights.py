"""Shapes and tensor-parallel splits of the weights, as Megatron-LM lays them out."""

from __future__ import annotations

from meshwright.specs.model_io import load_preset
from meshwright.specs.weights import Weight, count


def weights(preset: str, layer: int) -> dict[str, Weight]:
    model = load_preset(preset)
    return {weight.name: weight for weight in model.layers[layer].weights(model.hidden_size)}


def shape(weight: Weight) -> tuple[int, int, str, int]:
    return weight.inputs, weight.outputs, weight.split, weight.units


def test_grouped_query_attention_and_gated_network() -> None:
    found = weights("llama-3.1-70b", 0)
    assert shape(found["q"]) == (8192, 8192, "column", 64)
    assert shape(found["k"]) == (8192, 1024, "column", 8)
    assert shape(found["v"]) == (8192, 1024, "column", 8)
    assert shape(found["o"]) == (8192, 8192, "row", 64)
    assert {found[name].fuse for name in "qkv"} == {"qkv"}
    assert shape(found["up"])[:3] == shape(found["gate"])[:3] == (8192, 28672, "column")
    assert shape(found["down"])[:3] == (28672, 8192, "row")
    assert found["norms"].numel == 2 * 8192
    assert not found["norms"].matmul


def test_latent_attention_keeps_its_down_projections_whole() -> None:
    found = weights("deepseek-v3", 10)
    assert shape(found["q_down"])[:3] == (7168, 1536, "replicated")
    assert shape(found["kv_down"])[:3] == (7168, 512 + 64, "replicated")
    assert shape(found["q_up"]) == (1536, 128 * 192, "column", 128)
    assert shape(found["kv_up"]) == (512, 128 * 256, "column", 128)
    assert shape(found["o"]) == (128 * 128, 7168, "row", 128)
    assert shape(found["router"])[:3] == (7168, 256, "replicated")
    routed = found["up"]
    assert (routed.inputs, routed.outputs, routed.split, routed.copies, routed.expert) == (
        7168,
        2048,
        "column",
        256,
        True,
    )
    assert not found["shared_up"].expert
    assert shape(found["shared_up"])[:3] == (7168, 2048, "column")


def test_expert_weights_are_what_idles() -> None:
    model = load_preset("mixtral-8x7b")
    layer = model.layers[0]
    idle = count(layer.weights(4096)) - layer.active_parameters(4096)
    assert idle == 6 * 3 * 4096 * 14336
    assert model.total_params - model.active_params == 32 * idle


def test_experts_at_a_latent_width() -> None:
    model = load_preset("nemotron-3-ultra-550b-a55b")
    found = {w.name: w for w in next(x for x in model.layers if x.feed_forward).weights(8192)}
    assert shape(found["latent_down"])[:3] == (8192, 2048, "replicated")
    assert shape(found["latent_up"])[:3] == (2048, 8192, "replicated")
    assert shape(found["up"])[:3] == (2048, 5120, "column")
    assert shape(found["router"])[:2] == (8192, 512)
    assert shape(found["shared_up"])[:2] == (8192, 10240)
    assert "gate" not in found


def test_mamba_and_linear_attention() -> None:
    mamba = weights("nemotron-3-nano-30b-a3b", 0)
    # z and x of 64 heads of 64, B and C of 8 groups of 128, one dt a head.
    assert shape(mamba["in"]) == (2688, 2 * 4096 + 2 * 8 * 128 + 64, "column", 8)
    assert shape(mamba["o"]) == (4096, 2688, "row", 64)
    assert not mamba["conv"].matmul
    linear = weights("qwen3-next-80b-a3b", 0)
    assert shape(linear["qkvz"]) == (2048, 2 * 16 * 128 + 2 * 32 * 128, "column", 16)
    assert shape(linear["ba"]) == (2048, 2 * 32, "column", 16)
    kda = weights("kimi-k3", 1)
    assert shape(kda["qkv"]) == (7168, 3 * 96 * 128, "column", 96)
    assert shape(kda["decay_down"])[:3] == (7168, 128, "replicated")


def test_gates_and_special_layers() -> None:
    hybrid = weights("qwen3-next-80b-a3b", 3)
    assert shape(hybrid["q"]) == (2048, 2 * 16 * 256, "column", 16)  # query and output gate
    assert shape(hybrid["o"])[:2] == (16 * 256, 2048)
    gemma = weights("gemma-4-26b-a4b", 5)
    assert "v" not in gemma  # keys are values in its full-attention layers
    assert shape(gemma["k"]) == (2816, 2 * 512, "column", 2)


def test_embedding_and_head() -> None:
    model = load_preset("llama-3.2-1b")
    (embedding,) = model.embedding_weights()
    head = {weight.name: weight for weight in model.head_weights()}["head"]
    assert (embedding.numel, embedding.matmul) == (128256 * 2048, False)
    assert shape(head)[:3] == (2048, 128256, "column")
    assert model.tied_embeddings
    layers = sum(count(layer.weights(2048)) for layer in model.layers)
    assert model.total_params == layers + 128256 * 2048 + 2048
