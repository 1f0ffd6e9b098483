"""Which builder reads which ``model_type``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .decoder import Decoder
from .fields import Fields, Report

Builder = Callable[[Fields], Decoder]
_BUILDERS: dict[str, Builder] = {}
_ARCHITECTURE_SUFFIX = re.compile(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel|Model)$")


def family(*model_types: str) -> Callable[[Builder], Builder]:
    """Register a builder for the given model types."""

    def register(builder: Builder) -> Builder:
        for model_type in model_types:
            _BUILDERS[model_type] = builder
        return builder

    return register


def supported() -> tuple[str, ...]:
    """All model types that can be read, sorted."""
    return tuple(sorted(_BUILDERS, key=str.lower))


def builder_of(model_type: str) -> Builder:
    """The builder of a supported model type."""
    return _BUILDERS[model_type]


def model_type_of(data: Mapping[str, Any], report: Report, pointer: str = "", fallback: str = "") -> str:
    """The supported model type of a configuration, by ``model_type``, else by ``architectures``, else ``fallback``.

    Raises :class:`SpecError` through the report where it is missing, malformed or not supported.
    """
    fields = Fields(data, report, pointer)
    stated = fields.text("model_type")
    names = _architectures(fields)
    fields.settle()
    if stated in _BUILDERS:
        return stated
    for name in names:
        plain = _plain(_ARCHITECTURE_SUFFIX.sub("", name))
        for model_type in _BUILDERS:
            if _plain(model_type) == plain:
                fields.derived("model_type", model_type, f"from the architecture {name}")
                return model_type
    if fallback and not stated:
        fields.derived("model_type", fallback, "the default of the model that contains it")
        return fallback
    if stated or names:
        what = f"{stated!r} is" if stated else f"the architecture {names[0]!r} is"
        fields.fault("model_type", f"{what[:80]} not a supported model family", supported())
    else:
        fields.fault("model_type", "is required: the Hugging Face model type, such as llama or deepseek_v3")
    fields.settle()
    raise AssertionError("unreachable: a fault was recorded")


def _architectures(fields: Fields) -> list[str]:
    names = fields.items("architectures") or []
    for index, name in enumerate(names):
        if not isinstance(name, str):
            fields.fault(f"architectures/{index}", "must be a string")
    return [name for name in names if isinstance(name, str)]


def _plain(text: str) -> str:
    return re.sub(r"[_\-.]", "", text).lower()
