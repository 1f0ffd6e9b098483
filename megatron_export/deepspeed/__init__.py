"""DeepSpeed configurations read and judged; the plans that they describe."""

from __future__ import annotations

from .interpret import read_deepspeed
from .settings import DeepSpeedSettings, settings_of

__all__ = ["DeepSpeedSettings", "read_deepspeed", "settings_of"]
