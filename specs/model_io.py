"""A model from what a user names: a preset, a ``config.json`` (or its folder), or a ModelSpec file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import Fault, SpecError
from .files import parse_json, read_text
from .hf import model_from_config
from .model import ModelSpec
from .model_presets import find_preset, list_presets, load_preset, unknown_preset

CONFIG_FILE = "config.json"


def load_model(text: str) -> ModelSpec:
    """The model that ``text`` names: an existing file, else a preset, else a folder with a ``config.json``.

    A file is a Hugging Face configuration or a ModelSpec; its fields tell. Raises :class:`SpecError` for anything
    else, with one fault per fault.
    """
    if not text or "\0" in text:
        raise SpecError(Fault("", "a model is a preset name or the path of a config.json or ModelSpec file"))
    path = Path(text)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
        exists = path.exists()
    except OSError:  # such as a name longer than the file system takes
        is_file = is_folder = exists = False
    if is_file or (exists and not is_folder):
        return _from_file(path)
    if find_preset(text) is not None:
        return load_preset(text)
    if is_folder:
        if not (path / CONFIG_FILE).is_file():
            raise SpecError(Fault("", f"{_short(text)} is a folder without a {CONFIG_FILE}"))
        return _from_file(path / CONFIG_FILE)
    fault = unknown_preset(text)
    if path.suffix.lower() == ".json" or text.startswith((".", "/", "~")):
        fault = Fault("", f"there is no file {_short(text)}")
    raise SpecError(fault)


def model_from_data(data: Mapping[str, Any], name: str) -> ModelSpec:
    """The model in a parsed JSON object: a ModelSpec (it has ``kinds`` and ``pattern``) or a Hugging Face
    configuration, which gets ``name``. Raises :class:`SpecError` with pointers into ``data``."""
    if not isinstance(data, Mapping):
        raise SpecError(Fault("", f"a model must be a JSON object, got {type(data).__name__}"))
    if "kinds" in data or "pattern" in data:
        return ModelSpec.parse(dict(data))
    return model_from_config(data, name)


def _from_file(path: Path) -> ModelSpec:
    data = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise SpecError(Fault("", f"{_short(str(path))} holds no JSON object"))
    name = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem
    return model_from_data(data, name or "model")


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")


__all__ = ["list_presets", "load_model", "load_preset", "model_from_data"]
