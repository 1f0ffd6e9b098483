"""Quantities as people type them at the doors: ``30s``, ``2m``, ``5%``."""

from __future__ import annotations

import re

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """Seconds of ``30``, ``30s``, ``500ms``, ``2m`` or ``1h``; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|min|h)?", text.strip())
    if not match:
        raise ValueError(f"must be a duration such as 30s, 2m or 500ms, got {text[:60]!r}")
    return float(match[1]) * _SECONDS[match[2] or ""]


def fraction(text: str) -> float:
    """``5%`` or ``0.05`` as 0.05; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%)?", text.strip())
    if not match:
        raise ValueError(f"must be a share such as 5% or 0.05, got {text[:60]!r}")
    return float(match[1]) / 100 if match[2] else float(match[1])


def integer(text: str) -> int | str:
    """The integer that ``text`` spells, else the text itself, so that validation can name the field it stands in."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,30}", text.strip()) else text
