"""Faults of our own: a short id that is the same for the same place in the code."""

from __future__ import annotations

import hashlib
import traceback
from pathlib import Path


def incident_of(error: BaseException) -> str:
    """Eight hexadecimal digits from the exception's type and the file, function and line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f"{Path(last.filename).name}:{last.name}:{last.lineno}" if last else ""
    return hashlib.sha256(f"{type(error).__name__} {place}".encode()).hexdigest()[:8]
