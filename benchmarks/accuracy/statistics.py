"""Left-out predictions and the statistics of their errors."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: What was left out of the fit that a prediction comes from, in the order of the page.
SCHEMES = ("group", "architecture", "gpu", "hidden", "anchor", "shipped")
#: A group of fewer runs says little.
FEWEST, WEAK = 3, 0.20
#: The source of the grid of models over which scheme ``hidden`` is told, and the GPUs of a node of it.
GRID, NODE = "VIA-Research/vTrain", 8
#: Families by a piece of the model's name, first match.
FAMILIES = (
    ("gpt-oss", "gpt-oss"), ("mixtral", "Mixtral"), ("deepseek", "DeepSeek"), ("moonlight", "DeepSeek"),
    ("nemotron", "Nemotron"), ("llama", "Llama"), ("qwen", "Qwen"), ("mpt", "MPT"), ("opt-", "OPT"), ("gpt", "GPT"),
    ("mt-nlg", "GPT"), ("calculon", "GPT"), ("moe", "GPT with experts"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measured run and its prediction under one scheme. Times in seconds; ``level`` is what the interval promises."""

    id: str
    source_repo: str
    framework: str
    release: str
    model: str
    group: str
    gpu_type: str
    precision: str
    kind: str
    num_gpus: int
    scheme: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    level: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True)
class Errors:
    """Of predicted over measured less one: ``mean``, ``median`` and ``p90`` (linear between ranks) of the size,
    ``bias`` the signed median; ``inside`` is the share of measured times within the interval. Shares, not per cent."""

    n: int
    mean: float
    median: float
    p90: float
    bias: float
    inside: float


def read_left_out(path: Path) -> list[Row]:
    """The predictions in a CSV file; other columns than those of :class:`Row` are left aside."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="", encoding="utf-8") as file:
        return [
            Row(
                id=row["id"], source_repo=row["source_repo"], framework=framework_of(row["framework"]),
                release=row["release"], model=row["model"], group=row["group"], gpu_type=row["gpu_type"],
                precision=row["precision"], kind=row["kind"], num_gpus=int(float(row["num_gpus"])),
                scheme=row["scheme"], measured_s=float(row["measured_s"]), predicted_s=float(row["predicted_s"]),
                low_s=float(row["low_s"]), high_s=float(row["high_s"]), level=float(row["level"]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def framework_of(name: str) -> str:
    """A framework without what its source says of the mode: ``Alpa (JAX/XLA), inter-op only`` is ``Alpa``."""
    return re.split(r" \(|, ", name)[0]


def family_of(model: str) -> str:
    """The family of models that a name belongs to, else ``other``."""
    return next((family for piece, family in FAMILIES if piece in model.lower()), "other")


def precision_of(precision: str) -> str:
    """Precision without the flavour of 8-bit scaling; vTrain, which states none, runs in fp16."""
    low = precision.lower()
    if low.startswith(("fp8", "mxfp8")):
        return "mxfp8" if low.startswith("mx") else "fp8"
    return low or "fp16 (not stated)"


def errors_of(rows: Sequence[Row]) -> Errors:
    """Statistics of at least one row."""
    error = np.array([row.error for row in rows])
    size = np.abs(error)
    return Errors(
        n=len(rows),
        mean=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        bias=float(np.median(error)),
        inside=float(np.mean([row.inside for row in rows])),
    )


def by(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by key, in the order of the keys."""
    out: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        out.setdefault(key(row), []).append(row)
    return dict(sorted(out.items()))


def of_scheme(rows: Iterable[Row], scheme: str) -> list[Row]:
    """The rows of a scheme; of ``hidden`` those of :data:`GRID`, as the others are left out by group there."""
    return [row for row in rows if row.scheme == scheme and (scheme != "hidden" or row.source_repo == GRID)]


def nodes_of(row: Row) -> str:
    """Whether a run of :data:`GRID` spans nodes."""
    return "several nodes" if row.num_gpus > NODE else "one node"


def median_of_groups(rows: Sequence[Row]) -> float:
    """The median over groups (architecture x GPU type) of the group's median error size: each counts once."""
    return float(np.median([errors_of(members).median for members in by(rows, lambda row: (row.group,)).values()]))


def weak_groups(rows: Sequence[Row]) -> list[tuple[str, str, Errors]]:
    """(group, frameworks, errors) of groups of :data:`FEWEST` runs with a median error above :data:`WEAK`, worst
    first."""
    out = []
    for (group,), members in by(rows, lambda row: (row.group,)).items():
        errors = errors_of(members)
        if errors.n >= FEWEST and errors.median > WEAK:
            out.append((group, ", ".join(sorted({row.framework for row in members})), errors))
    return sorted(out, key=lambda item: (-item[2].median, item[0]))
