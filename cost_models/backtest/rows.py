"""One measured run as its CSV row states it. Blank cells stay None; what replaces them is decided elsewhere."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class UnsupportedError(ValueError):
    """A run that cannot be priced; the text says why."""


@dataclass(frozen=True)
class Run:
    """A measured run. ``flags`` holds ``other_flags`` by name (a bare word maps to ``"true"``); ``text`` its words in
    lower case. Degrees that the source does not state are None."""

    row: Mapping[str, str]
    id: str
    framework: str
    release: str
    model: str
    gpu: str
    num_gpus: int
    gpus_per_node: int | None
    interconnect: str
    precision: str
    seq_length: int
    global_batch_size: int
    micro_batch_size: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    vpp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    sharding: str
    sequence_parallel: bool | None
    recompute: str
    flags: Mapping[str, str]
    text: str
    task: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def measured_s(self) -> float | None:
        """See :func:`measured_s`."""
        return measured_s(self.row)

    def flag(self, name: str, default: bool) -> bool:
        """A switch of ``flags``: its stated value, else ``default``."""
        value = self.flags.get(name)
        return default if value is None else value.strip().lower() not in ("false", "0", "none", "no")


def number(text: str | None) -> float | None:
    """A positive finite number, else None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def measured_s(row: Mapping[str, str]) -> float | None:
    """Measured step time: stated, from the throughput, or of a mixed-GPU table; None where there is none."""
    stated = number(row.get("step_time_s")) or number(row.get("measured_iter_time_s"))
    rate = number(row.get("tokens_per_s_per_gpu"))
    tokens = [number(row.get(name)) for name in ("global_batch", "seq_len", "num_gpus")]
    if stated or not rate or not all(tokens):
        return stated
    batch, length, gpus = (value or 0.0 for value in tokens)
    return batch * length / (rate * gpus)


def parse_flags(text: str) -> dict[str, str]:
    """``a=1; b;{'c': 2}`` by name."""
    out: dict[str, str] = {}
    for part in re.split(r";", text.strip("{} ")):
        name, equals, value = part.strip().partition("=")
        if not equals and ":" in name:
            name, _, value = name.partition(":")
            equals = ":"
        if name.strip(" '\""):
            out[name.strip(" '\"")] = value.strip() if equals else "true"
    return out


def run_of(row: Mapping[str, str]) -> Run:
    """A run from a row; :class:`UnsupportedError` names the first column without which nothing can be priced."""

    def text(name: str) -> str:
        return (row.get(name) or "").strip()

    def count(name: str) -> int | None:
        value = number(text(name))
        return round(value) if value else None

    def needed(name: str) -> int:
        value = count(name)
        if value is None:
            raise UnsupportedError(f"{name} is not stated")
        return value

    try:
        overrides = json.loads(text("model_overrides") or "{}")
    except json.JSONDecodeError as error:
        raise UnsupportedError("model_overrides is no JSON") from error
    if not isinstance(overrides, dict):
        raise UnsupportedError("model_overrides is no JSON object")
    sequence_parallel = text("sequence_parallel").lower()
    flags = text("other_flags")
    return Run(
        row=row,
        id=text("id"),
        framework=text("framework"),
        release=text("release"),
        model=text("model"),
        gpu=text("gpu_type") or text("gpu"),
        num_gpus=needed("num_gpus"),
        gpus_per_node=count("gpus_per_node"),
        interconnect=text("interconnect"),
        precision=text("precision").lower(),
        seq_length=needed("seq_len"),
        global_batch_size=needed("global_batch"),
        micro_batch_size=count("micro_batch"),
        tp=count("tp"),
        pp=count("pp"),
        cp=count("cp"),
        vpp=count("vp"),
        ep=count("ep"),
        etp=count("etp"),
        dp=count("dp"),
        sharding=text("sharding").lower(),
        sequence_parallel=None if not sequence_parallel else sequence_parallel == "true",
        recompute=text("recompute").lower(),
        flags=parse_flags(flags),
        text=flags.lower(),
        task=text("task") or "pretrain",
        overrides=overrides,
    )


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a CSV file, packed (``.csv.gz``) or not, as dictionaries of text."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {name: value or "" for name, value in row.items() if name is not None}
