"""``ExpertLoad``: how many tokens each expert gets, measured or by Zipf's law."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
from typing import Any, Self

from pydantic import Field, model_validator

from .base import Document
from .errors import Fault, SpecError
from .fields import NonNegative

_ZIPF = re.compile(r"zipf:(\d+(?:\.\d+)?)")
#: Beyond this exponent the hottest of two experts gets over 97 % of the tokens: a typing error.
MAX_EXPONENT = 5.0
#: More MoE layers or experts than any model has.
MOST = 100_000


class ExpertLoad(Document):
    """Tokens of every expert in each MoE layer, in any common unit; one row stands for all MoE layers.

    ``source`` says where they come from. Every layer needs tokens; an expert may have none.
    """

    layers: tuple[tuple[NonNegative, ...], ...] = Field(min_length=1, max_length=MOST)
    source: str

    @model_validator(mode="after")
    def _complete(self) -> Self:
        sizes = {len(layer) for layer in self.layers}
        if len(sizes) > 1 or min(sizes) < 1:
            raise ValueError(f"layers must name the same number of experts each, got {sorted(sizes)}")
        if any(sum(layer) <= 0 for layer in self.layers):
            raise ValueError("every layer needs at least one token")
        return self

    @property
    def num_experts(self) -> int:
        return len(self.layers[0])


def zipf_load(exponent: float, num_experts: int) -> ExpertLoad:
    """Zipf's law: the k-th hottest expert gets tokens in proportion to ``k ** -exponent``.

    Which expert is hot is not known from the law; hot and cold ones are taken in one fixed order that looks random
    (that of the SHA-256 digests of their indices).
    """
    order = sorted(range(num_experts), key=lambda expert: hashlib.sha256(str(expert).encode()).digest())
    tokens = [0.0] * num_experts
    for rank, expert in enumerate(order, start=1):
        tokens[expert] = rank**-exponent
    return ExpertLoad(layers=(tuple(tokens),), source=f"zipf:{exponent:g}")


def expert_load_from_data(value: Any, num_experts: int, moe_layers: int) -> ExpertLoad:
    """A load from ``zipf:S``, a list of tokens by expert, or one such list a MoE layer.

    Raises :class:`SpecError` where it is none of these, or does not fit a model of ``num_experts`` experts in each of
    ``moe_layers`` layers.
    """
    if not num_experts:
        raise SpecError(Fault("", "is given, but the model has no experts; leave it out"))
    if isinstance(value, str):
        match = _ZIPF.fullmatch(value.strip().lower())
        if not match or float(match[1]) > MAX_EXPONENT:
            raise SpecError(
                Fault("", f"must be zipf:S with S from 0 to {MAX_EXPONENT:g}, or tokens by expert, got {value[:60]!r}")
            )
        return zipf_load(float(match[1]), num_experts)
    if not isinstance(value, list) or not value:
        raise SpecError(Fault("", "must be zipf:S, a list of tokens by expert, or one such list a MoE layer"))
    rows = value if isinstance(value[0], list) else [value]
    faults = []
    for index, row in enumerate(rows):
        pointer = f"/{index}" if rows is value else ""
        if not isinstance(row, list):
            faults.append(Fault(pointer, "must be a list of tokens by expert"))
        elif len(row) != num_experts:
            faults.append(Fault(pointer, f"names {len(row)} experts; the model has {num_experts}"))
        else:
            faults += [
                Fault(f"{pointer}/{expert}", "must be a number of tokens, at least 0")
                for expert, tokens in enumerate(row)
                if isinstance(tokens, bool)
                or not isinstance(tokens, int | float)
                or not math.isfinite(tokens)
                or tokens < 0
            ]
    if len(rows) not in (1, moe_layers):
        faults.append(Fault("", f"has {len(rows)} layers; give 1 or the model's {moe_layers} MoE layers"))
    if faults:
        raise SpecError(faults)
    layers = [[float(tokens) for tokens in row] for row in rows]
    return ExpertLoad.parse({"layers": layers, "source": "histogram"})


def read_load_text(text: str) -> Any:
    """The value in a file: JSON (a list, a list of lists, or ``{"tokens": ...}``), or CSV with columns ``expert`` and
    ``tokens`` and, where layers differ, ``layer``. Raises :class:`SpecError` for anything else."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise SpecError(Fault("", f"is no JSON: {error}")) from None
        return data.get("tokens", data) if isinstance(data, dict) else data
    return _from_csv(text)


def _from_csv(text: str) -> list[list[float]]:
    reader = csv.DictReader(io.StringIO(text))
    columns = [(name or "").strip().lower() for name in reader.fieldnames or ()]
    if not {"expert", "tokens"} <= set(columns):
        raise SpecError(Fault("", "must be JSON, or CSV with the columns expert and tokens (and layer)"))
    reader.fieldnames = columns
    table: dict[int, dict[int, float]] = {}
    for line, row in enumerate(reader, start=2):
        try:
            layer, expert, tokens = int(row.get("layer") or 0), int(row["expert"]), float(row["tokens"])
        except (TypeError, ValueError):
            raise SpecError(Fault("", f"line {line} must hold whole layer and expert and a number of tokens")) from None
        if not 0 <= expert < MOST or not 0 <= layer < MOST:
            raise SpecError(Fault("", f"line {line}: experts and layers count from 0 to {MOST - 1}"))
        if expert in table.setdefault(layer, {}):
            raise SpecError(Fault("", f"line {line}: expert {expert} of layer {layer} is given twice"))
        table[layer][expert] = tokens
    if not table:
        raise SpecError(Fault("", "holds no line of tokens"))
    experts = 1 + max(max(row) for row in table.values())
    return [[table[layer].get(expert, 0.0) for expert in range(experts)] for layer in sorted(table)]
