"""The two files of a backtest: a table of runs and the models it names. A file that cannot be used is a SpecError."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.files import read_bytes, read_document

from .rows import number

#: Far above any table of runs (a million rows); a larger file is the wrong file.
MAX_BYTES = 500_000_000
#: Without these nothing can be priced; a list in one item names columns of which one is enough.
NEEDED = (("model",), ("gpu_type", "gpu", "gpu_types"), ("num_gpus",), ("seq_len",), ("global_batch",))
#: Cells that hold a whole number or nothing.
COUNTS = ("num_gpus", "gpus_per_node", "seq_len", "micro_batch", "global_batch", "tp", "pp", "cp", "vp", "ep", "etp",
          "dp")  # fmt: skip
#: How tables spell "not stated".
BLANK = frozenset({"", "0", "-", "?", "n/a", "na", "nan", "none", "null", "unknown"})
#: No run comes near; a larger number is a typing error, and pricing would take for ever.
LARGEST = {"pp": 1024, "vp": 1024, "num_gpus": 10_000_000, "gpus_per_node": 100_000}
LARGEST_COUNT, LARGEST_LAYERS = 1_000_000_000, 4000
#: Columns of a model that hold a whole number or nothing.
NESTED_REPEAT = re.compile(r"\*\s*\d+\s*\*|\)\s*\*")
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
         "vocab_size", "num_experts", "topk", "moe_ffn_hidden_size", "mtp_num_layers")  # fmt: skip
#: Under this key DictReader would lose cells beyond the header; here they mark a row as shifted.
EXTRA = "\0extra"


def read_runs(path: str | os.PathLike[str], pointer: str = "/runs") -> list[dict[str, str]]:
    """The rows of a CSV file (``.csv`` or ``.csv.gz``) as text by column, in order. A byte order mark, either line end
    and blank lines are read.

    Raises :class:`SpecError` at ``pointer`` where the file is missing, no regular file, too large, not UTF-8, no CSV,
    without rows, names a column twice, or lacks a column without which nothing can be priced. Cells beyond the header
    are kept under :data:`EXTRA`.
    """

    def refuse(message: str) -> SpecError:
        return SpecError(Fault(pointer, message))

    place = Path(path)
    try:
        if place.is_dir():
            raise refuse(f"{path} is a directory; give a CSV file")
        if place.exists() and not place.is_file():
            raise refuse(f"{path} is not a regular file")
        if place.stat().st_size > MAX_BYTES:
            raise refuse(f"{path} has {place.stat().st_size} bytes; at most {MAX_BYTES} are read, so split it")
        text = read_bytes(place, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"{path} is not UTF-8 text (byte {error.start})") from None
    except FileNotFoundError:
        raise refuse(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise refuse(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        header = [name.strip() for name in next((line for line in reader if any(line)), [])]
        if not header:
            raise refuse(f"{path} is empty; its first line must name the columns")
        _check_header(header, str(path), pointer)
        rows = [_row(header, cells) for cells in reader if any(cells)]
    except csv.Error as error:
        raise refuse(f"{path} is not CSV: {error} at line {reader.line_num}") from None
    if not rows:
        raise refuse(f"{path} holds no rows below its header")
    return rows


def _check_header(header: list[str], path: str, pointer: str) -> None:
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise SpecError(Fault(pointer, f"{path} has two columns {twice[0][:60]!r}; leave one out"))
    missing = [" or ".join(names[:2]) for names in NEEDED if not any(name in header for name in names)]
    if missing:
        raise SpecError(Fault(pointer, f"{path} lacks the columns {', '.join(missing)}"))


def _row(header: list[str], cells: list[str]) -> dict[str, str]:
    row = {name: cell for name, cell in zip(header, cells + [""] * (len(header) - len(cells)), strict=False) if name}
    extra = [cell for cell in cells[len(header) :] if cell.strip()]
    return row | ({EXTRA: ",".join(extra)} if extra else {})


def read_models(path: str | os.PathLike[str], pointer: str = "/models") -> dict[str, Any]:
    """Architectures by name. An entry may be broken: that is told by the rows that use it."""
    try:
        data = read_document(path)
    except SpecError as error:
        raise SpecError(Fault(pointer + f.pointer, f.message, f.alternatives) for f in error.faults) from None
    if not isinstance(data, dict) or not data:
        raise SpecError(Fault(pointer, f"{path} must be a JSON object of architectures by model name"))
    return {str(name): value for name, value in data.items()}


def row_fault(row: Mapping[str, str], models: Mapping[str, Any]) -> str:
    """Why a row cannot be priced as it stands, or an empty text: cells that are no counts, absurd sizes, a shifted row,
    a broken model. What is left out is no fault."""
    if EXTRA in row:
        return f"the row has more cells than the header names: {row[EXTRA][:60]!r}"
    for name in COUNTS:
        text = (row.get(name) or "").strip()
        if text.lower() in BLANK:
            continue
        value, largest = number(text), LARGEST.get(name, LARGEST_COUNT)
        if value is None or value != round(value):
            return f"{name} is {text[:40]!r}, no whole number from 1"
        if value > largest:
            return f"{name} is {text[:40]}, above {largest}"
    name = (row.get("model") or "").strip()
    if name not in models:
        return ""  # pricing tells, as a table may describe its models itself
    if not isinstance(models[name], dict):
        return f"model {name[:60]} is no object in the models file"
    try:
        overrides = json.loads((row.get("model_overrides") or "").strip() or "{}")
    except (ValueError, RecursionError):
        return "model_overrides is no JSON"
    if not isinstance(overrides, dict):
        return "model_overrides is no JSON object"
    return _model_fault(name[:60], {**models[name], **overrides})


def _model_fault(name: str, model: Mapping[str, Any]) -> str:
    """What would make an architecture absurdly large; other faults are told when it is read."""
    for key in SIZES:
        value = model.get(key)
        wrong = isinstance(value, bool | str) or (isinstance(value, int | float) and not 0 <= value <= LARGEST_COUNT)
        if wrong:
            return f"model {name} has {key} {str(value)[:40]!r}, no whole number"
    layers = model.get("num_layers")
    if isinstance(layers, int | float) and layers > LARGEST_LAYERS:
        return f"model {name} has {layers} layers, above {LARGEST_LAYERS}"
    for key in ("hybrid_pattern", "moe_layers", "csa_compress_ratios"):
        value = model.get(key)
        if isinstance(value, str | list) and len(value) > LARGEST_LAYERS:
            return f"model {name} has {len(value)} entries in {key}, above {LARGEST_LAYERS}"
        if isinstance(value, str) and NESTED_REPEAT.search(value):
            return f"model {name} repeats repeats in {key}"
    return ""


def is_moe(row: Mapping[str, str], models: Mapping[str, Any]) -> bool:
    """Whether the row's model has experts."""
    model = models.get((row.get("model") or "").strip())
    return isinstance(model, dict) and bool(model.get("num_experts"))


def is_judged(row: Mapping[str, str]) -> bool:
    """Whether a row counts as evidence: pretraining of quality A or B, as far as the table says."""
    task, quality = (row.get("task") or "").strip(), (row.get("quality") or "").strip()
    return task in ("", "pretrain") and quality in ("", "A", "B", "ok")
