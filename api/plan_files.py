"""Plan documents in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError

from .files import read_text
from .strict_json import parse_json

#: Fields of every plan document; two of them tell one, even damaged, from a model's configuration.
_OURS = ("schema_version", "status", "inputs", "plan", "estimate")


def read_plan_file(path: str) -> PlanDocument | None:
    """The plan document in a JSON file, or None where ``path`` names none (a preset, a model's configuration).

    :class:`SpecError` for a damaged plan document.
    """
    if path != "-" and not Path(path).is_file():
        return None
    text = read_text(path, "/document")
    try:
        data = parse_json(text)
    except SpecError as error:
        if sum(f'"{field}"' in text for field in _OURS) >= 2:
            raise _in_document(error) from None
        return None
    return plan_document(data) if isinstance(data, dict) and sum(field in data for field in _OURS) >= 2 else None


def _in_document(error: SpecError) -> SpecError:
    return SpecError(Fault("/document" + f.pointer, f.message, f.alternatives) for f in error.faults)


def require_plan_file(path: str) -> PlanDocument:
    """The plan document in a JSON file; :class:`SpecError` where it is none."""
    try:
        return plan_document(parse_json(read_text(path)), "")
    except SpecError as error:
        raise _in_document(error) from None


def plan_document(data: Any, pointer: str = "/document") -> PlanDocument:
    """A plan document from JSON data; a missing or newer ``schema_version`` is named first."""
    if not isinstance(data, dict):
        raise SpecError(Fault(pointer, "must be a plan document, a JSON object"))
    if data.get("schema_version") != 1:
        raise SpecError(Fault(f"{pointer}/schema_version", "must be 1; this is no plan document of this version"))
    return PlanDocument.parse(data, pointer)
