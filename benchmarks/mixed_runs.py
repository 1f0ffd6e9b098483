"""Step times of runs on mixed and old GPUs against predictions.

    python benchmarks/mixed_runs.py benchmarks/data/mixed_runs.csv.gz benchmarks/data/published_models.json.gz

Prints, by source and by whether a run mixes GPU types, the errors and rank correlations of our prediction and of the
source's own. Nothing is fitted on runs that mix types. The second table multiplies the host's time for a call by one
factor a source, fitted on its runs on one GPU type.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.cost_models.backtest.inputs import read_models
from meshwright.cost_models.backtest.mixed import is_mixed_types
from meshwright.cost_models.backtest.plans import Case
from meshwright.cost_models.backtest.price import price, price_case
from meshwright.cost_models.backtest.ranks import spearman
from meshwright.cost_models.backtest.rows import number, read_rows
from meshwright.cost_models.multipliers import NEUTRAL, Multipliers

HOST_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0)


@dataclass(frozen=True)
class Compared:
    """A measured run with our prediction and the source's, seconds."""

    source: str
    mixed: bool
    case: Case
    measured_s: float
    ours_s: float
    theirs_s: float


def read(runs: Path, models: Path) -> tuple[list[Compared], Counter[str]]:
    """The measured runs that can be priced, and why the others cannot. Rows that copy another one are left out."""
    known = read_models(models)
    out: list[Compared] = []
    reasons: Counter[str] = Counter()
    for row in read_rows(runs):
        measured = number(row["measured_iter_time_s"])
        if row["quality"] in ("suspect", "failed"):
            reasons[f"{row['quality']} row"] += 1
            continue
        priced = price(row, known, NEUTRAL)  # without what is learned from published runs
        if priced.step_time_s is None or priced.case is None or measured is None:
            reasons[priced.reason or "no time measured"] += 1
            continue
        theirs = number(row["source_predicted_iter_time_s"]) or float("nan")
        source = row["source_repo"].split("/")[-1]
        out.append(Compared(source, is_mixed_types(row), priced.case, measured, priced.step_time_s, theirs))
    return out, reasons


def line(label: str, predicted: Sequence[float], measured: Sequence[float]) -> str:
    error = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    bias = np.mean(np.asarray(predicted) / np.asarray(measured) - 1)
    rank = spearman(predicted, measured)
    return (
        f"{label:32s} n {len(error):3d}  median {np.median(error):6.1%}  mean {error.mean():6.1%}  "
        f"bias {bias:+6.1%}  Spearman {rank:5.2f}"
    )


def table(compared: list[Compared]) -> None:
    for source in dict.fromkeys(c.source for c in compared):
        for mixed in (False, True, None):
            some = [c for c in compared if c.source == source and mixed in (None, c.mixed)]
            if not some:
                continue
            name = f"{source} {'all' if mixed is None else 'mixed' if mixed else 'one type'}"
            measured = [c.measured_s for c in some]
            print(line(f"{name}: ours", [c.ours_s for c in some], measured))
            print(line(f"{name}: its own", [c.theirs_s for c in some], measured))


def with_host(compared: list[Compared]) -> list[Compared]:
    """Priced again with the host factor that fits the source's runs on one GPU type: the smallest whose mean error
    is within half a per cent of the best."""
    out = []
    for source in dict.fromkeys(c.source for c in compared):
        mine = [c for c in compared if c.source == source]
        alone = [c for c in mine if not c.mixed]

        def error(factor: float, runs: list[Compared] = alone) -> float:
            by = Multipliers(host=factor)
            return float(np.mean([abs(price_case(c.case, by).step_time_s / c.measured_s - 1) for c in runs]))

        errors = {factor: error(factor) for factor in HOST_FACTORS} if alone else {1.0: 0.0}
        best = min(factor for factor, found in errors.items() if found <= min(errors.values()) + 0.005)
        print(f"{source}: host x {best} from {len(alone)} runs on one GPU type")
        out += [
            Compared(c.source, c.mixed, c.case, c.measured_s,
                     price_case(c.case, Multipliers(host=best)).step_time_s, c.theirs_s)
            for c in mine
        ]  # fmt: skip
    return out


def main(runs: Path, models: Path) -> None:
    compared, reasons = read(runs, models)
    table(compared)
    print("\nwith the host's time for a call fitted on runs on one GPU type")
    table(with_host(compared))
    print("\nnot priced")
    for reason, count in reasons.most_common():
        print(f"{count:4d}  {reason}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
