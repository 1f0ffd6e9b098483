"""Quantities as people type and read them at the doors: ``30s``, ``2m``, ``5%``, ``15T``."""

from __future__ import annotations

import re

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


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


def count(text: str) -> float:
    """``15T``, ``300B``, ``1.5M`` or ``2000`` as a number; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgbt])?", text.strip().lower())
    if not match:
        raise ValueError(f"must be a number such as 15T, 300B or 1000000, got {text[:60]!r}")
    return float(match[1]) * _COUNTS[match[2] or ""]


def seconds(value: float) -> str:
    """A duration with a unit that suits it."""
    if value >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"
