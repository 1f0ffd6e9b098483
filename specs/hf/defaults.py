"""Class defaults of Hugging Face configuration classes, as data read from a pinned ``transformers`` release."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

#: The release that ``defaults.json`` was read from (see ``tests/oracle/make_hf_defaults.py``).
TRANSFORMERS = "transformers 5.24.0"


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("defaults.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)["model_types"]
    return table


def class_defaults(model_type: str) -> tuple[str | None, dict[str, Any]]:
    """Name of the configuration class of ``model_type`` and its scalar defaults; (None, {}) where there is none."""
    entry = _table().get(model_type)
    return (entry["class"], entry["defaults"]) if entry else (None, {})
