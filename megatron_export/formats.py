"""Formats of configurations that people hand in, told apart by their content, and their readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.files import parse_json, parse_yaml

from .accelerate import read_accelerate
from .deepspeed import read_deepspeed
from .megatron.reading import read_megatron
from .reading import Given, Reading
from .torchtitan.reading import read_torchtitan_python, read_torchtitan_toml

#: Longest configuration that is read, in characters.
MAX_CHARACTERS = 1_000_000

#: A configuration as it comes: text, a list of arguments, or data.
Source = str | list[str] | Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A format, its reader, and the target that it is checked for by default."""

    framework: str
    target: str
    read: Callable[[Source, Given], Reading]


def text_of(source: Source) -> str:
    """The text of a configuration that is only ever text."""
    if not isinstance(source, str):
        raise SpecError(Fault("", "must be the text of a configuration file"))
    if len(source) > MAX_CHARACTERS:
        raise SpecError(Fault("", f"is {len(source)} characters long; {MAX_CHARACTERS} are read"))
    return source.lstrip("\ufeff")


def mapping_of(source: Source) -> Mapping[str, Any]:
    """The mapping that JSON or YAML text spells. Raises :class:`SpecError` where there is none."""
    if isinstance(source, Mapping):
        return source
    text = text_of(source)
    value = parse_json(text) if text.lstrip().startswith("{") else parse_yaml(text)
    if not isinstance(value, dict):
        raise SpecError(Fault("", "must be a mapping of field: value"))
    return value


def _megatron(source: Source, given: Given) -> Reading:
    if isinstance(source, Mapping):
        raise SpecError(Fault("", "is no argument line: give it as text"))
    return read_megatron(source, given)


#: Formats by name.
FORMATS: dict[str, Format] = {
    "megatron": Format("megatron", "megatron@0.19", _megatron),
    "torchtitan-toml": Format(
        "torchtitan", "torchtitan@0.2", lambda source, g: read_torchtitan_toml(text_of(source), g)
    ),
    "torchtitan-python": Format(
        "torchtitan", "torchtitan@0.3", lambda source, given: read_torchtitan_python(text_of(source), given)
    ),
    "deepspeed": Format("deepspeed", "deepspeed", lambda source, given: read_deepspeed(mapping_of(source), given)),
    "accelerate": Format("accelerate", "accelerate", lambda source, given: read_accelerate(mapping_of(source), given)),
}

_DEEPSPEED = (
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_ACCELERATE = ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config")
_TOML = re.compile(
    r"^\[(?:job|model|training|parallelism|activation_checkpoint|optimizer|profiling)\]\s*(?:#.*)?$", re.M
)
_PYTHON = re.compile(r"^\s*(?:from|import)\s+torchtitan\b|\bParallelismConfig\(|\bTrainingConfig\(", re.M)
_YAML = re.compile(rf"^(?:{'|'.join(_ACCELERATE)})\s*:", re.M)


def format_of(source: Source) -> str:
    """The format of a configuration by its content; ``megatron`` where it is of no other.

    Raises :class:`SpecError` for a JSON document that is of none.
    """
    if isinstance(source, list):
        return "megatron"
    if isinstance(source, Mapping) or source.lstrip("\ufeff \t\r\n").startswith("{"):
        return _format_of_data(mapping_of(source))
    found = {"torchtitan-toml": _TOML, "torchtitan-python": _PYTHON, "accelerate": _YAML}
    return next((name for name, pattern in found.items() if pattern.search(source)), "megatron")


def _format_of_data(data: Mapping[str, Any]) -> str:
    if any(name in data for name in _ACCELERATE):
        return "accelerate"
    if any(name in data for name in _DEEPSPEED):
        return "deepspeed"
    raise SpecError(Fault("", "is no configuration of a known format; name it", tuple(FORMATS)))
