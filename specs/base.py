"""The base of every document: frozen, closed, finite, with a canonical digest."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import Fault, SpecError


class Document(BaseModel):
    """Immutable typed data. Unknown fields, NaN and infinities are refused."""

    # Validators are built when first used: a command needs few of all the documents.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )

    @classmethod
    def parse(cls, data: Any, pointer: str = "") -> Self:
        """Validate ``data``; raise :class:`SpecError` with one fault per wrong field, below ``pointer``."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(faults_of(error, pointer)) from None

    def to_json(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """``sha256:`` digest of the canonical JSON (sorted keys, no white space)."""
        return digest_of(self.to_json())


#: Python's containers in pydantic's messages, and what people who write JSON or YAML call them.
_CONTAINER = re.compile(r"\b(tuple|dictionary)(?: or instance of \w+)?(?: to extract fields from)?\b", re.IGNORECASE)
_PLAIN = {"tuple": "list", "dictionary": "object"}


def digest_of(value: Any) -> str:
    """``sha256:`` digest of the canonical JSON form of plain JSON values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def faults_of(error: ValidationError, pointer: str = "") -> list[Fault]:
    """One :class:`Fault` per wrong field of a pydantic error; union branches report only the branch that was meant."""
    faults: dict[tuple[str, str], Fault] = {}
    items = error.errors(include_url=False)
    for item in items:
        depth = len(item["loc"])
        if item["type"] == "too_short" and any(
            len(o["loc"]) > depth and o["loc"][:depth] == item["loc"] for o in items
        ):
            continue  # pydantic drops wrong entries before it counts them; the entries' own faults say it all
        parts = [str(part).replace("~", "~0").replace("/", "~1") for part in item["loc"]]
        where = pointer + "".join(f"/{part}" for part in parts)
        message = item["msg"].removeprefix("Value error, ")
        message = _CONTAINER.sub(lambda match: _PLAIN[match[1].lower()], message)
        value = item.get("input")
        if isinstance(value, str | int | float | bool) and item["type"] != "missing":
            text = repr(value)
            message += f", got {text if len(text) <= 60 else text[:57] + '...'}"
        if item["type"] == "missing":
            message = "is required"
        elif item["type"] == "extra_forbidden":
            message = "is not a known field"
        alternatives: tuple[str, ...] = ()
        if item["type"] == "literal_error":  # pydantic spells the values as 'a', 'b' or 'c'
            alternatives = tuple(re.findall(r"'([^']*)'", item["ctx"]["expected"]))
            message = message.replace(f"Input should be {item['ctx']['expected']}", "is not a valid value")
        faults.setdefault((where, message), Fault(where, message, alternatives))
    return list(faults.values())
