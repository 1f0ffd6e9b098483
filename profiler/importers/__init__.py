"""Profiles and clusters of other planners, one file a format, read into our nouns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from meshwright.specs.base import faults_of
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.imported import Imported

from . import amp, flashflex, galvatron, metis, nest, sailor
from .options import ImportOptions
from .reading import POINTER

#: What reads each format.
FORMATS: dict[str, Callable[[Path, ImportOptions], Imported]] = {
    "amp": amp.read,
    "flashflex": flashflex.read,
    "galvatron": galvatron.read,
    "metis": metis.read,
    "nest": nest.read,
    "sailor": sailor.read,
}


def read(name: str, path: str | Path, options: ImportOptions = ImportOptions()) -> Imported:  # noqa: B008 - frozen
    """What ``path`` holds in format ``name``; :class:`SpecError` that names file and key where it is not that."""
    reader = FORMATS.get(name)
    if reader is None:
        raise SpecError(Fault("/format", f"{name[:40]!r} is not a format that can be read", tuple(FORMATS)))
    try:
        return reader(Path(path), options)
    except ValidationError as error:  # figures that are numbers, and absurd: a cluster of 1e30 GPUs
        faults = faults_of(error)
        raise SpecError(
            Fault(POINTER, f"{path} gives a wrong {f.pointer.strip('/')}: {f.message}") for f in faults
        ) from None


__all__ = ["FORMATS", "ImportOptions", "read"]
