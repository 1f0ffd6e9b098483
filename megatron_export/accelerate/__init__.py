"""Configuration files of Hugging Face Accelerate read and judged; the plans that they describe."""

from __future__ import annotations

from .interpret import read_accelerate
from .settings import AccelerateSettings, settings_of

__all__ = ["AccelerateSettings", "read_accelerate", "settings_of"]
