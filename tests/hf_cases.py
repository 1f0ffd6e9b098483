"""The published configurations in tests/data and the counts that transformers made of them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "hf_configs"


def config(name: str) -> dict[str, Any]:
    """A fresh copy of a published configuration."""
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def config_names() -> list[str]:
    """All published configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


@lru_cache
def oracle(name: str) -> Any:
    """A file of counts."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
