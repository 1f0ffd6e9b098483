"""``ModelSpec`` from a Hugging Face ``config.json``. Needs no ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..base import faults_of
from ..errors import Fault, SpecError
from ..model import ModelSpec
from . import deepseek, gemma, legacy, linear, llama_like, llama_vision_text, nemotron, softmax_moe, step, wrappers
from .fields import Fields, Report
from .registry import builder_of, model_type_of, supported

#: Modules that register their families when they are imported.
FAMILY_MODULES = (
    deepseek,
    gemma,
    legacy,
    linear,
    llama_like,
    llama_vision_text,
    nemotron,
    softmax_moe,
    step,
    wrappers,
)
#: Beyond this no number of the cost model is exact any more (integers in double precision).
MAX_PARAMETERS = 2**53


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Read a Hugging Face configuration (the parsed ``config.json``).

    Raises :class:`SpecError` with one fault per wrong, missing or contradictory field, with JSON pointers into
    ``config``; a family that is not supported is a fault that lists the supported ones.
    """
    if not isinstance(config, Mapping):
        raise SpecError(Fault("", f"a model configuration must be a JSON object, got {type(config).__name__}"))
    report = Report()
    model_type = model_type_of(config, report)
    fields = Fields(config, report, model_type=model_type)
    dtype = _stored_dtype(fields)
    try:
        decoder = builder_of(model_type)(fields)
        report.settle()
        model = decoder.to_model(name, model_type, dtype, report.assumptions)
    except ValidationError as error:
        # A stand-in for a wrong field can contradict a document's own rule; the recorded fault is the cause.
        raise SpecError(report.faults or faults_of(error)) from None
    if model.total_params > MAX_PARAMETERS:
        raise SpecError(
            Fault("", f"the configuration describes {model.total_params:.2e} parameters, which is too many")
        )
    return model


def _stored_dtype(fields: Fields) -> str | None:
    """Number format of the published checkpoint: its quantization, else its dtype."""
    quantization = fields.data.get("quantization_config")
    if isinstance(quantization, dict) and isinstance(quantization.get("quant_method"), str):
        return str(quantization["quant_method"])
    return fields.text("torch_dtype", "dtype") or None


def supported_families() -> tuple[str, ...]:
    """The model types that :func:`model_from_config` reads."""
    return supported()


__all__ = ["model_from_config", "supported_families"]
