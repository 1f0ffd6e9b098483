"""Formats of configurations that people hand in, told apart by their content, and their readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.files import parse_json, parse_yaml

from .accelerate import read_accelerate
from .deepspeed import read_deepspeed
from .megatron.reading import read_megatron
from .reading import Given, Reading

#: Longest configuration that is read, in characters.
MAX_CHARACTERS = 1_000_000
_DEEPSPEED = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_ACCELERATE = ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")

Source = str | list[str] | Mapping[str, Any]


def _deepspeed(source: Source, given: Given) -> Reading:
    return read_deepspeed(mapping_of(source), given)


def _accelerate(source: Source, given: Given) -> Reading:
    return read_accelerate(mapping_of(source), given)


def _megatron(source: Source, given: Given) -> Reading:
    if isinstance(source, Mapping):
        raise SpecError(Fault("", "is no argument line: give it as text"))
    return read_megatron(source, given)


#: Reader by format: (text, list of arguments or data, what is said beside it) -> verdict.
FORMATS: dict[str, Callable[[Source, Given], Reading]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}


def format_of(source: Source) -> str:
    """The format of a configuration by its content; ``megatron`` where it is of no other."""
    if isinstance(source, list):
        return "megatron"
    if isinstance(source, Mapping):
        return _format_of_data(source)
    text = source.lstrip("\ufeff \t\r\n")
    if text.startswith("{"):
        return _format_of_data(mapping_of(source))
    return "accelerate" if re.search(rf"^(?:{'|'.join(_ACCELERATE)})\s*:", text, re.M) else "megatron"


def _format_of_data(data: Mapping[str, Any]) -> str:
    if any(name in data for name in _ACCELERATE):
        return "accelerate"
    if any(name in data for name in _DEEPSPEED):
        return "deepspeed"
    raise SpecError(Fault("", "is no configuration of a known format; name it", tuple(FORMATS)))


def mapping_of(source: Source) -> Mapping[str, Any]:
    """The mapping that JSON or YAML text spells. Raises :class:`SpecError` where there is none."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, list):
        raise SpecError(Fault("", "is a list of arguments, which is a format of Megatron"))
    if len(source) > MAX_CHARACTERS:
        raise SpecError(Fault("", f"is {len(source)} characters long; {MAX_CHARACTERS} are read"))
    text = source.lstrip("\ufeff")
    value = parse_json(text) if text.lstrip().startswith("{") else parse_yaml(text)
    if not isinstance(value, dict):
        raise SpecError(Fault("", "must be a mapping of field: value"))
    return value
