"""How well predicted memory agrees with published runs: peaks by framework and kind, and what is said to fit.

    python -m benchmarks.memory_accuracy RUNS.csv MODELS.json [--failed CASES.jsonl] [--rows]

The published ones are ``published_runs.csv.gz`` and ``published_models.json.gz`` in ``benchmarks/data``. Runs have the
columns of ``meshwright.cost_models.backtest.rows``; ``rank`` says whether the peak is that of the ``first`` or ``last``
rank, blank if of the fullest. A run that ran must fit; ``--failed`` takes rows of the same columns, one JSON object a
line, whose ``verdict`` is ``oom`` (must not fit) or ``fits``; ``architecture`` brings a model that MODELS.json has not.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cost_models import memory
from meshwright.cost_models.backtest.inputs import read_models
from meshwright.cost_models.backtest.price import Priced, price
from meshwright.cost_models.backtest.rows import number, read_rows
from meshwright.specs.estimate import StageEstimate

PLAN_COLUMNS = (("n", "num_gpus"), ("tp", "tp"), ("pp", "pp"), ("vp", "vp"), ("cp", "cp"), ("ep", "ep"),
                ("b", "micro_batch"), ("s", "seq_len"))  # fmt: skip
RAN_TASKS, QUALITIES = ("pretrain", "sft", "lora"), ("A", "B")


@dataclass(frozen=True)
class Peak:
    """A measured peak and its prediction, bytes, both of ``kind``."""

    id: str
    framework: str
    gpu: str
    task: str
    kind: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def stage_measured(priced: Priced) -> StageEstimate:
    """The stage that the source read: the last or first rank's where the row says so, else the fullest."""
    assert priced.estimate is not None
    stages = priced.estimate.stages
    ends = {"first": stages[0], "last": stages[-1]}
    return ends.get(priced.row["rank"]) or max(stages, key=lambda stage: stage.allocated_bytes)


def peaks_of(priced: Priced) -> list[Peak]:
    """What a run states: its peak, and torch's reserved bytes where it has both. Reserved excludes the context."""
    stage, row, out = stage_measured(priced), priced.row, []

    def add(kind: str, measured: float | None, predicted: float) -> None:
        if measured:
            out.append(Peak(row["id"], row["framework"], row["gpu_type"], row["task"], kind, measured, predicted))

    reserved = stage.allocated_bytes / memory.ALLOCATED_OVER_RESERVED
    kind = row["peak_kind"]
    of_kind = {"allocated": float(stage.allocated_bytes), "reserved": reserved}
    add(kind, number(row["peak_bytes"]), of_kind.get(kind, float(stage.reserved_bytes)))
    add("reserved", number(row.get("peak_reserved_bytes", "")), reserved)
    return out


def plan_stated(priced: Priced) -> bool:
    """Whether the source states micro-batch, recomputation and layout, without which its memory is a guess."""
    row = priced.row
    return bool(row["micro_batch"] and row["recompute"] and (row["tp"] or row["pp"] or row["sharding"]))


def summary(name: str, peaks: list[Peak]) -> str:
    errors = np.array([peak.error for peak in peaks])
    size = np.abs(errors)
    return (
        f"{name:58s} {len(errors):4d}  mean |e| {100 * size.mean():5.1f}%  median {100 * np.median(size):5.1f}%  "
        f"worst {100 * size.max():5.1f}%  bias {100 * errors.mean():+5.1f}%"
    )


def report_peaks(peaks: list[Peak], rows: bool) -> None:
    groups: dict[tuple[str, str, str], list[Peak]] = defaultdict(list)
    for peak in peaks:
        functional = " functional" if "functional" in peak.task else ""
        groups[peak.kind, "(all)" + functional, ""].append(peak)
        groups[peak.kind, peak.framework, peak.gpu + functional].append(peak)
    for kind, framework, gpu in sorted(groups):
        members = groups[kind, framework, gpu]
        print(summary(f"{kind:10s} {framework[:30]:30s} {gpu}", members))
        if rows and gpu:
            for peak in members:
                print(f"    {peak.id:16s} {peak.measured / 1e9:8.2f} GB {100 * peak.error:+6.1f}%")


def report_verdicts(title: str, verdicts: Verdicts, wanted: bool, rows: bool) -> None:
    """Share of ``verdicts`` (group, run) with the verdict ``wanted``; those without it are listed."""
    total: Counter[str] = Counter(group for group, _ in verdicts)
    right: Counter[str] = Counter(group for group, p in verdicts if p.estimate and p.estimate.fits == wanted)
    print(f"\n{title}: {sum(right.values())} of {sum(total.values())} = {sum(right.values()) / len(verdicts):.2%}")
    for group in sorted(total):
        if right[group] < total[group] or rows:
            print(f"    {group[:50]:50s} {right[group]:4d} of {total[group]:4d}")
    for _, p in verdicts if rows else []:
        if p.estimate and p.estimate.fits != wanted:
            stage = max(p.estimate.stages, key=lambda stage: stage.reserved_bytes / stage.limit_bytes)
            parts = " ".join(f"{k} {v / 1e9:.1f}" for k, v in stage.breakdown_bytes.items())
            row = p.row
            plan = " ".join(f"{name}{row.get(column, '')}" for name, column in PLAN_COLUMNS)
            share = stage.reserved_bytes / stage.limit_bytes
            print(f"    {share:5.2f} {row.get('id', '')} {row['model'][:24]} {row.get('gpu_type', '')} "
                  f"{row['precision']} {plan} {row['recompute']} {row['sharding']} | {parts}")  # fmt: skip


Verdicts = list[tuple[str, Priced]]


def priced_runs(path: Path, models: dict[str, Any]) -> tuple[list[Peak], Verdicts, Verdicts]:
    """Peaks of all runs that state one, and the runs that ran (framework, run): plan stated, and plan guessed."""
    peaks: list[Peak] = []
    stated: Verdicts = []
    guessed: Verdicts = []
    for row in read_rows(path):
        ran = row["task"] in RAN_TASKS and row["quality"] in QUALITIES
        if not ran and not number(row["peak_bytes"]):
            continue
        priced = price(row, models)
        if priced.estimate is None:
            print(f"not priced: {row['id']}: {priced.reason[:100]}")
            continue
        if number(row["peak_bytes"]) and row["quality"] in QUALITIES:
            peaks += peaks_of(priced)
        if ran:
            (stated if plan_stated(priced) else guessed).append((row["framework"], priced))
    return peaks, stated, guessed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--failed", type=Path)
    parser.add_argument("--rows", action="store_true", help="every row, and the parts of wrong verdicts")
    arguments = parser.parse_args()
    models: dict[str, Any] = read_models(arguments.models)
    peaks, stated, guessed = priced_runs(arguments.runs, models)
    report_peaks(peaks, arguments.rows)
    report_verdicts("runs that ran, plan stated, said to fit", stated, True, arguments.rows)
    report_verdicts(
        "runs that ran, micro-batch or recomputation not stated, said to fit", guessed, True, arguments.rows
    )
    if arguments.failed:
        failed = {verdict: verdicts(arguments.failed, models, verdict) for verdict in ("oom", "fits")}
        report_verdicts("runs that ran out of memory, said not to fit", failed["oom"], False, True)
        report_verdicts("their neighbours that ran, said to fit", failed["fits"], True, True)


def verdicts(path: Path, models: dict[str, Any], verdict: str) -> Verdicts:
    """The priced cases of a file with ``verdict``."""
    out = []
    for line in path.read_text().splitlines():
        case = json.loads(line)
        if case["verdict"] == verdict:
            known = models | ({case["model"]: case["architecture"]} if "architecture" in case else {})
            priced = price({**blank(), **{k: v for k, v in case.items() if isinstance(v, str)}}, known)
            if priced.estimate is None:
                print(f"not priced: {case['id']}: {priced.reason}")
            out.append((case["id"], priced))
    return out


def blank() -> dict[str, str]:
    """A row with every column empty."""
    columns = (
        "id framework release model gpu gpu_type num_gpus gpus_per_node interconnect precision seq_len micro_batch"
    )
    more = "global_batch tp pp cp vp ep etp dp sharding sequence_parallel recompute other_flags task model_overrides"
    return dict.fromkeys(f"{columns} {more} quality".split(), "")


if __name__ == "__main__":
    main()
