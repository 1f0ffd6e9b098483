"""Vision encoders with their projectors: exact parameter counts and the shapes that price them.

Each function reads the vision part of a configuration and takes the whole one, where settings of the projector are, and
the width of the text model. The counts follow the modules of the model's class in transformers 5.24.0, or of its own
code where transformers has none.
"""

from __future__ import annotations

from collections.abc import Callable

from ..model import VisionTower
from .fields import MAX_LAYERS, Fields

Tower = Callable[[Fields, Fields, int], VisionTower]


def block_parameters(
    hidden: int, intermediate: int, *, bias: bool = True, norm_bias: bool = True, gated: bool = False
) -> int:
    """Parameters of an encoder layer: four projections, two or three network maps, two norms."""
    attention = 4 * hidden * hidden + (4 * hidden if bias else 0)
    maps = 3 if gated else 2
    network = maps * hidden * intermediate + ((maps - 1) * intermediate + hidden if bias else 0)
    return attention + network + 2 * hidden * (2 if norm_bias else 1)


def linear(inputs: int, outputs: int, bias: bool = True) -> int:
    """Parameters of a linear map."""
    return inputs * outputs + (outputs if bias else 0)


def _patches(fields: Fields) -> tuple[int, int]:
    """Patch size and the number of patches of an image."""
    image, patch = fields.size("image_size", maximum=100_000), fields.size("patch_size", maximum=10_000)
    if image < patch and not fields.report.faults:
        fields.fault("image_size", f"must be at least the patch size {patch}, got {image}")
    return patch, max(1, image // patch) ** 2


def _encoder(fields: Fields, *layer_names: str) -> tuple[int, int, int, int]:
    """Hidden size, network width, layers and heads by their usual names."""
    return (
        fields.size("hidden_size"),
        fields.size("intermediate_size"),
        fields.size(*(layer_names or ("num_hidden_layers",)), maximum=MAX_LAYERS),
        fields.size("num_attention_heads", "num_heads", "attention_heads"),
    )


def _encoder_of(fields: Fields) -> tuple[VisionTower, int]:
    """SigLIP or CLIP without a projector, and its patches."""
    hidden, width, layers, heads = _encoder(fields)
    channels = fields.setting("num_channels", maximum=1000)
    patch, patches = _patches(fields)
    total = layers * block_parameters(hidden, width) + channels * patch * patch * hidden + 2 * hidden
    if fields.model_type == "clip_vision_model":
        total += hidden + (patches + 1) * hidden + 2 * hidden  # class token, positions, first norm
    else:
        total += hidden + patches * hidden  # bias of the patch embedding, positions
        if fields.flag("vision_use_head", absent=True):
            total += hidden + 4 * linear(hidden, hidden) + 2 * hidden + linear(hidden, width) + linear(width, hidden)
    tower = VisionTower(
        num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads, parameters=total
    )
    return tower, patches


def gemma3(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """SigLIP, average pooling, a norm and one map."""
    tower, _ = _encoder_of(fields)
    projector = tower.hidden_size * text_width + tower.hidden_size
    tokens = whole.optional("mm_tokens_per_image")
    return tower.model_copy(update={"parameters": tower.parameters + projector, "tokens_per_image": tokens})


def llava(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """CLIP or SigLIP and a network of two maps, from one or more of the encoder's layers."""
    tower, patches = _encoder_of(fields)
    bias = whole.flag("multimodal_projector_bias")
    levels = whole.data.get("vision_feature_layer")
    features = tower.hidden_size * (len(levels) if isinstance(levels, list) else 1)
    projector = linear(features, text_width, bias) + linear(text_width, text_width, bias)
    return tower.model_copy(update={"parameters": tower.parameters + projector, "tokens_per_image": patches})


def gemma4(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """Gemma 4's encoder: gated networks, four norms a layer, norms on heads, positions by row and column."""
    hidden, width, layers, heads = _encoder(fields)
    head_dim, kv_heads = fields.size("head_dim"), fields.size("num_key_value_heads")
    patch, positions = fields.size("patch_size", maximum=10_000), fields.size("position_embedding_size")
    bias = fields.flag("attention_bias")
    query, kv = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * kv + (query + 2 * kv + hidden if bias else 0) + 2 * head_dim
    layer = attention + 3 * hidden * width + 4 * hidden
    total = layers * layer + 2 * positions * hidden + 3 * patch * patch * hidden + hidden * text_width
    return VisionTower(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        gated=True,
        parameters=total,
        tokens_per_image=whole.optional("vision_soft_tokens_per_image"),
    )


def qwen3_vl(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """Qwen3-VL and Qwen3.5: learned positions, a merger of 2x2 patches, one more merger for each deep-stack level."""
    hidden, width, layers, heads = _encoder(fields, "depth")
    patch, merge = fields.size("patch_size", maximum=10_000), fields.size("spatial_merge_size", maximum=1000)
    temporal, channels = fields.size("temporal_patch_size", maximum=1000), fields.size("in_channels", maximum=1000)
    out = fields.size("out_hidden_size")
    positions = fields.size("num_position_embeddings")
    levels = fields.integers("deepstack_visual_indexes", maximum=MAX_LAYERS)
    if levels is None:
        levels = (8, 16, 24) if fields.model_type.startswith("qwen3_vl") else ()
    merged = hidden * merge * merge
    merger = linear(merged, merged) + linear(merged, out)
    total = (
        layers * block_parameters(hidden, width)
        + linear(channels * temporal * patch * patch, hidden)
        + positions * hidden
        + merger
        + 2 * hidden
        + len(levels) * (merger + 2 * merged)
    )
    return VisionTower(
        num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads, parameters=total
    )


def qwen2_5_vl(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """Qwen2.5-VL: gated networks, RMS norms, a merger."""
    hidden, width, layers, heads = _encoder(fields, "depth")
    patch, merge = fields.size("patch_size", maximum=10_000), fields.size("spatial_merge_size", maximum=1000)
    temporal = fields.size("temporal_patch_size", maximum=1000)
    channels = fields.size("in_channels", "in_chans", maximum=1000)
    out = fields.size("out_hidden_size")
    merged = hidden * merge * merge
    total = (
        layers * block_parameters(hidden, width, norm_bias=False, gated=True)
        + channels * temporal * patch * patch * hidden
        + hidden
        + linear(merged, merged)
        + linear(merged, out)
    )
    return VisionTower(
        num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads, gated=True, parameters=total
    )


def kimi(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """MoonViT of Kimi K2.5 and K3 and its patch merger."""
    hidden = fields.size("vt_hidden_size", "hidden_size")
    width = fields.size("vt_intermediate_size", "intermediate_size")
    layers = fields.size("vt_num_hidden_layers", "num_hidden_layers", maximum=MAX_LAYERS)
    heads = fields.size("vt_num_attention_heads", "num_attention_heads")
    patch = fields.size("patch_size", maximum=10_000)
    rows = fields.size("init_pos_emb_height", "pos_emb_height", maximum=100_000)
    columns = fields.size("init_pos_emb_width", "pos_emb_width", maximum=100_000)
    kernel = fields.integers("merge_kernel_size", minimum=1, maximum=1000) or (2, 2)
    query = fields.stated("qkv_hidden_size", minimum=1) or hidden
    attention_bias, bias = fields.flag("attn_bias", absent=True), fields.flag("linear_bias", absent=True)
    patch_bias = fields.flag("patch_embed_proj_bias", absent=True)
    norm_type = fields.text("norm_type", absent="layernorm")
    if norm_type not in ("layernorm", "rmsnorm"):
        fields.fault("norm_type", f"{norm_type[:40]!r} is not known", ("layernorm", "rmsnorm"))
    norm = hidden * (1 if norm_type == "rmsnorm" else 2)
    attention = 4 * hidden * query + (3 * query + hidden if attention_bias else 0)
    network = linear(hidden, width, bias) + linear(width, hidden, bias)
    merged = hidden
    for size in kernel:
        merged *= size
    if fields.text("mm_projector_type") == "patchmergerv2":
        fields.report.assume("vision_config.mm_projector_type: patchmergerv2 is counted like Kimi K2.5's patch merger")
    total = (
        layers * (attention + network + 2 * norm)
        + linear(3 * patch * patch, hidden, patch_bias)
        + rows * columns * hidden
        + 2 * norm
        + linear(merged, merged)
        + linear(merged, text_width)
    )
    return VisionTower(
        num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads, parameters=total
    )


def llama4(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """Llama 4's encoder, pixel shuffle with a network of two maps, and the projector."""
    hidden, width, layers, heads = _encoder(fields)
    channels = fields.size("num_channels", maximum=1000)
    patch, patches = _patches(fields)
    shuffle_in, shuffle_out = fields.size("projector_input_dim"), fields.size("projector_output_dim")
    out = fields.size("vision_output_dim")
    ratio = fields.number("pixel_shuffle_ratio", maximum=1.0)
    bias = fields.flag("multi_modal_projector_bias")
    total = (
        layers * block_parameters(hidden, width)
        + channels * patch * patch * hidden
        + hidden
        + (patches + 1) * hidden
        + 4 * hidden
        + width * shuffle_in
        + shuffle_out * shuffle_out
        + linear(out, text_width, bias)
    )
    return VisionTower(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        parameters=total,
        tokens_per_image=max(1, round(patches * ratio * ratio)),
    )


def mllama(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """Llama 3.2 Vision: two encoders in a row, gated positions by aspect ratio and tile, and the projector."""
    hidden, width, layers, heads = _encoder(fields)
    global_layers = fields.size("num_global_layers", maximum=MAX_LAYERS)
    channels, tiles = fields.size("num_channels", maximum=1000), fields.size("max_num_tiles", maximum=1000)
    patch, patches = _patches(fields)
    out = fields.size("vision_output_dim")
    ratios = fields.items("supported_aspect_ratios")
    num_ratios = (8 if ratios is None else len(ratios)) + 1  # and one for "no image"
    tokens = patches + 1
    # The projections of attention have no bias, those of the network do.
    layer = block_parameters(hidden, width) - 4 * hidden
    total = (
        layers * layer
        + global_layers * (layer + 2)
        + channels * patch * patch * hidden
        + hidden
        + 1
        + tokens * hidden
        + num_ratios * tiles * tokens * hidden
        + 2 * (num_ratios * tiles * hidden + 1)
        + 4 * hidden
        + linear(out, text_width)
    )
    return VisionTower(
        num_layers=layers + global_layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        parameters=total,
        tokens_per_image=tiles * tokens,
    )


def step(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """Step-3.7: scaled residuals, two strided convolutions that halve the grid and double the width, one map."""
    hidden = fields.size("hidden_size", "width")
    layers = fields.size("num_hidden_layers", "layers", maximum=MAX_LAYERS)
    heads = fields.size("num_attention_heads", "heads")
    ratio = fields.number("mlp_ratio", maximum=1000.0)
    channels = fields.size("num_channels", maximum=1000)
    patch, patches = _patches(fields)
    width = max(1, int(hidden * ratio))
    convolution = 9  # a 3x3 kernel
    total = (
        layers * (block_parameters(hidden, width) + 2 * hidden)
        + channels * patch * patch * hidden
        + patches * hidden
        + 2 * hidden
        + linear(convolution * hidden, 2 * hidden)
        + linear(convolution * 2 * hidden, 4 * hidden)
        + linear(4 * hidden, text_width, whole.flag("projector_bias"))
    )
    return VisionTower(
        num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads, parameters=total
    )


def deepseek_vl2(fields: Fields, whole: Fields, text_width: int) -> VisionTower:
    """SigLIP as DeepSeek-VL2's own code builds it (attention pooling included), a patch merger, two separators.

    Defaults are those of ``VisionEncoderConfig`` there: 384 pixels, 16 heads.
    """
    hidden, layers = fields.size("width"), fields.size("layers", maximum=MAX_LAYERS)
    ratio = fields.number("mlp_ratio", maximum=1000.0)
    patch = fields.size("patch_size", maximum=10_000)
    image, heads = fields.stated("image_size"), fields.stated("heads")
    if not image:
        image = 384
        fields.derived("image_size", image, "default of VisionEncoderConfig in DeepSeek-VL2's own code")
    if not heads:
        heads = 16
        fields.derived("heads", heads, "default of VisionEncoderConfig in DeepSeek-VL2's own code")
    width = max(1, int(hidden * ratio))
    patches = max(1, image // patch) ** 2
    pooling = hidden + 4 * linear(hidden, hidden) + 2 * hidden + linear(hidden, width) + linear(width, hidden)
    projector = linear(4 * hidden, text_width) + linear(text_width, text_width)
    total = (
        layers * block_parameters(hidden, width)
        + linear(3 * patch * patch, hidden)
        + patches * hidden
        + 2 * hidden
        + pooling
        + projector
        + 2 * text_width
    )
    return VisionTower(
        num_layers=layers, hidden_size=hidden, intermediate_size=width, num_heads=heads, parameters=total
    )
