"""Configurations that nest the text model beside a vision tower."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import towers
from .decoder import Decoder
from .defaults import TRANSFORMERS, class_defaults
from .fields import Fields
from .registry import builder_of, family, model_type_of


@dataclass(frozen=True)
class Wrapper:
    """Where a multimodal configuration keeps its parts.

    ``vision_type`` is the model type whose class defaults fill the vision part.
    """

    text_type: str
    tower: towers.Tower
    vision_type: str
    text_field: str = "text_config"


_WRAPPERS = {
    "gemma3": Wrapper("gemma3_text", towers.gemma3, "siglip_vision_model"),
    "gemma4": Wrapper("gemma4_text", towers.gemma4, "gemma4_vision"),
    "llava": Wrapper("llama", towers.llava, "clip_vision_model"),
    "llama4": Wrapper("llama4_text", towers.llama4, "llama4_vision_model"),
    "mllama": Wrapper("mllama_text_model", towers.mllama, "mllama_vision_model"),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", towers.qwen2_5_vl, "qwen2_5_vl_vision"),
    "qwen3_vl": Wrapper("qwen3_vl_text", towers.qwen3_vl, "qwen3_vl_vision"),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text", towers.qwen3_vl, "qwen3_vl_moe_vision"),
    "qwen3_5": Wrapper("qwen3_5_text", towers.qwen3_vl, "qwen3_5_vision"),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", towers.qwen3_vl, "qwen3_5_moe_vision"),
    "kimi_k25": Wrapper("deepseek_v3", towers.kimi, "kimi_k25_vision"),
    "kimi_k3": Wrapper("kimi_linear", towers.kimi, ""),
    "deepseek_vl_v2": Wrapper("deepseek_v2", towers.deepseek_vl2, "", text_field="language_config"),
    "step3p7": Wrapper("step3p5", towers.step, "step3p5_vision"),
}
#: Families whose causal-language-model class in transformers is the text model (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).
_TEXT_CLASSES = {"llama4", "mllama", "qwen3_5", "qwen3_5_moe"}
#: Older spelling of the vision part's own type that keeps its class defaults.
_VISION_TYPES = {"siglip_vision_model", "clip_vision_model"}


@family(*_WRAPPERS)
def multimodal(fields: Fields) -> Decoder:
    """A vision tower on the first stage and the text model behind it."""
    wrapper = _WRAPPERS[fields.model_type]
    text = _text(fields, wrapper)
    decoder = builder_of(text.model_type)(text)
    if not fields.has("vision_config") and fields.model_type != "step3p7":
        fields.report.assume("no vision tower: the configuration has no vision_config")
        return decoder
    part = fields.child("vision_config")
    fields.settle()
    vision_type = part.model_type if part.model_type in _VISION_TYPES else wrapper.vision_type
    part = Fields(part.data, fields.report, part.pointer, vision_type, nested=True)
    if fields.model_type == "step3p7" and not part.data:
        fields.report.assume(f"vision_config: default of Step3p7VisionConfig in {TRANSFORMERS}")
    # A tower is built from stand-ins where a field is wrong, so its numbers count only after settling.
    vision = wrapper.tower(part, fields, decoder.hidden_size)
    fields.settle()
    return replace(decoder, vision=vision.model_copy(update={"in_total": fields.model_type not in _TEXT_CLASSES}))


def _text(fields: Fields, wrapper: Wrapper) -> Fields:
    """The reader of the text model, with the embeddings tied or not as the whole says."""
    if fields.model_type == "step3p7" and not fields.has(wrapper.text_field):
        return _flat_step(fields)
    part = fields.child(wrapper.text_field, required=True)
    fields.settle()
    model_type = model_type_of(part.data, fields.report, part.pointer, fallback=wrapper.text_type)
    data = dict(part.data)
    if fields.has("tie_word_embeddings") or (
        "tie_word_embeddings" not in data and "tie_word_embeddings" in fields.defaults
    ):
        data["tie_word_embeddings"] = fields.flag("tie_word_embeddings")
    return Fields(data, fields.report, part.pointer, model_type, nested=True)


#: Fields of a flat Step-3.7 configuration that say how layers run but change no parameter of the class default.
_STEP_LAYOUT = (
    "layer_types",
    "sliding_window",
    "num_nextn_predict_layers",
    "max_position_embeddings",
)


def _flat_step(fields: Fields) -> Fields:
    """A Step-3.7 configuration without ``text_config``: Hugging Face's class reads no size outside it, so the text
    model has the class's default sizes. The layers' layout is taken from the top level; each stated size that
    differs from what is built is named."""
    class_name, defaults = class_defaults("step3p5")
    report = fields.report
    report.assume(f"text_config: default of {class_name} in {TRANSFORMERS}, which reads no size from the top level")
    for name, default in defaults.items():
        stated = fields.data.get(name)
        if name not in _STEP_LAYOUT and isinstance(stated, int | bool) and default is not None and stated != default:
            report.assume(f"{name} = {default}: the stated {stated} is not read by Step3p7Config outside text_config")
    data = {name: fields.data[name] for name in _STEP_LAYOUT if name in fields.data}
    return Fields(data, report, fields.pointer, "step3p5", nested=True)
