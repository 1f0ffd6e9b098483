"""Clusters from whatever a user has: shorthand, a YAML or JSON file, or plain data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .cluster import ClusterSpec
from .cluster_shorthand import FORMS, parse_shorthand
from .errors import Fault, SpecError
from .imported import Imported, is_imported

_SUFFIXES = (".yaml", ".yml", ".json")


def load_cluster(text: str) -> ClusterSpec:
    """The cluster that ``text`` names: shorthand such as ``64xH100`` or the path of a YAML or JSON file.

    Text with a path separator or a YAML or JSON suffix is a path; other text is shorthand, or a path if such a file
    exists. Forms: :mod:`meshwright.specs.cluster_shorthand`, :mod:`meshwright.specs.cluster_file`. Raises
    :class:`SpecError` with one fault per wrong field.
    """
    text = text.strip()
    if os.sep in text or text.lower().endswith(_SUFFIXES):
        return _load_file(text)
    try:
        return parse_shorthand(text)
    except SpecError:
        if _exists(text):
            return _load_file(text)
        raise


def cluster_from_data(data: Any) -> ClusterSpec:
    """The cluster that plain data describes: shorthand (text is never taken as a path), the friendly form of
    :mod:`meshwright.specs.cluster_file`, or a full :class:`ClusterSpec` document. Raises :class:`SpecError`."""
    if isinstance(data, str):
        return parse_shorthand(data)
    if not isinstance(data, dict):
        what = f"must be shorthand or an object with pools, got {type(data).__name__}"
        raise SpecError(Fault("", what, FORMS))
    if is_imported(data):
        return _imported_cluster(data)
    if _is_document(data):
        return ClusterSpec.parse(data)
    from .cluster_file import cluster_from_form

    return cluster_from_form(data)


def _imported_cluster(data: dict[str, Any]) -> ClusterSpec:
    """The cluster of what ``meshwright import`` has written."""
    cluster = Imported.parse(data).cluster
    if cluster is None:
        raise SpecError(Fault("/cluster", "is null: the file holds an imported profile and no cluster"))
    return cluster


def _load_file(path: str) -> ClusterSpec:
    from .files import read_document

    data = read_document(path)
    if isinstance(data, str):
        raise SpecError(Fault("", f"{path!r} holds text, not a cluster; it must be an object with pools"))
    return cluster_from_data(data)


def _exists(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):
        return False


def _is_document(data: dict[str, Any]) -> bool:
    """Whether the fields are those of a :class:`ClusterSpec` document rather than the friendly form's."""
    pools, gpus = data.get("pools"), data.get("gpus")
    levels = [
        level
        for pool in (pools if isinstance(pools, list | tuple) else ())
        if isinstance(pool, dict) and isinstance(pool.get("levels"), list | tuple)
        for level in pool["levels"]
    ]
    types = list(gpus.values()) if isinstance(gpus, dict) else []
    full = ("bandwidth_bytes_per_s", "latency_s", "memory_bytes", "usable_memory_bytes")
    return any(isinstance(item, dict) and any(field in item for field in full) for item in [*levels, *types])
