"""Quantities as people write them: ``400 Gbit/s``, ``80 GiB``, ``5 us``, ``989 TFLOP/s``; plain numbers in base units.

Each function takes a number or text and returns a float in bytes, bytes/s, seconds or FLOP/s; ValueError says what
would be right. Bits and bytes are told apart by case (``Gb`` is bits, ``GB`` is bytes), so the case must be given.
"""

from __future__ import annotations

import math
import re
from typing import Any

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?)"
_PREFIX = r"(Ki|Mi|Gi|Ti|[kKMGTPE]?)"
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "μs": 1e6, "ns": 1e9}


def size_bytes(value: Any) -> float:
    """Bytes of ``80 GB`` (decimal), ``80 GiB`` (binary) or a number of bytes."""
    return _scaled(value, r"B(?:ytes?)?", 1.0, "a size such as 80 GiB or 80 GB")


def bandwidth_bytes_per_s(value: Any) -> float:
    """Bytes/s of ``450 GB/s``, ``400 Gbit/s``, ``400 Gb/s``, ``400 Gbps`` or a number of bytes/s."""
    wanted = "a bandwidth such as 450 GB/s or 400 Gbit/s"
    if isinstance(value, str) and re.search(r"(?:bit/?s|b/s|bps)\s*$", value):
        return _scaled(value, r"(?:bit/s|bits/s|b/s|bps)", 1 / 8, wanted)
    return _scaled(value, r"(?:B/s|Bps|bytes/s)", 1.0, wanted)


def rate_flops(value: Any) -> float:
    """FLOP/s of ``989 TFLOP/s``, ``989 TFLOPS`` or a number of FLOP/s."""
    return _scaled(value, r"(?:FLOP/s|FLOPs/s|FLOPS|flop/s|FLOPs)", 1.0, "a rate such as 989 TFLOP/s")


def duration_s(value: Any) -> float:
    """Seconds of ``5 us``, ``1.5 ms`` or a number of seconds; zero is allowed."""
    wanted = "a time such as 5 us"
    if isinstance(value, str):
        match = re.fullmatch(rf"{_NUMBER}\s*(s|ms|us|µs|μs|ns)", value.strip())
        if not match:
            raise ValueError(f"must be {wanted}")
        return float(match[1]) / _PER_SECOND[match[2]]
    return _plain(value, wanted)


def _scaled(value: Any, unit: str, factor: float, wanted: str) -> float:
    if isinstance(value, str):
        match = re.fullmatch(rf"{_NUMBER}\s*{_PREFIX}{unit}", value.strip())
        if not match:
            raise ValueError(f"must be {wanted}")
        number = float(match[1]) * {**_DECIMAL, **_BINARY}[match[2]] * factor
    else:
        number = _plain(value, wanted)
    if not 0 < number < math.inf:
        raise ValueError(f"must be {wanted}, above 0")
    return number


def _plain(value: Any, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be {wanted}, or a plain number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"must be {wanted}, finite and not negative")
    return number
