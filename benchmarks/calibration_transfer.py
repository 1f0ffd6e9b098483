"""How far the factor of one measured run carries, and the file cost_models/data/calibration.json that follows.

    python -m benchmarks.calibration_transfer RUNS.csv MODELS.json [--write]

Every judged run is priced under seven common factors of compute and host terms; between them its step time is
interpolated. Then some runs are taken as anchors and others are predicted with their factor at several weights: runs of
the same model and release, of the same model and another release, and of other models of the same stack, GPU, precision
class and kind. Groups weigh the same, however many runs they have. The shipped corrections are left out: they were
fitted on these runs, so that what remains on top of them is smaller here than on a user's own runs.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.cost_models.backtest.anchors import COMPUTE
from meshwright.cost_models.backtest.bulk import setting_of
from meshwright.cost_models.backtest.inputs import is_judged, read_models, read_runs
from meshwright.cost_models.backtest.price import price
from meshwright.cost_models.backtest.rows import measured_s
from meshwright.cost_models.multipliers import Multipliers

FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEVEL = 0.8
#: Rows of one table of 926 runs of one server that are kept, so that it does not take most of the time.
MOST_OF_A_SOURCE = 250
OUT = Path(__file__).parents[1] / "cost_models" / "data" / "calibration.json"


@dataclass(frozen=True)
class Point:
    """A run: its cell, release and model; logarithms of its step at FACTORS, of its measured step, of its factor."""

    cell: Hashable
    release: str
    model: str
    steps: np.ndarray
    measured: float

    @property
    def factor(self) -> float:
        return float(np.interp(self.measured, self.steps, np.log(FACTORS)))

    def error(self, factor: float) -> float:
        """Logarithm of predicted over measured under a factor (its logarithm)."""
        return float(np.interp(factor, np.log(FACTORS), self.steps)) - self.measured


def points(runs: str, models: str) -> list[Point]:
    """The judged runs of a table that can be priced."""
    rows, known, taken = read_runs(runs), read_models(models), defaultdict(int)
    random.Random(0).shuffle(rows)
    out = []
    for row in rows:
        measured = measured_s(row)
        taken[row.get("source_repo")] += 1
        if not is_judged(row) or not measured or taken[row.get("source_repo")] > MOST_OF_A_SOURCE:
            continue
        priced = [price(row, known, Multipliers.bounded(dict.fromkeys(COMPUTE, factor))) for factor in FACTORS]
        setting = setting_of(priced[0].case) if priced[0].case else None
        if setting is None:
            continue
        steps = np.log([item.step_time_s for item in priced])
        out.append(Point(setting.cell, setting.release or "", setting.shape, steps, float(np.log(measured))))
    return out


def grouped(items: Iterable[Point], key: Callable[[Point], Hashable]) -> list[list[Point]]:
    """Points that share a key."""
    found: dict[Hashable, list[Point]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return list(found.values())


def transfer(name: str, groups: list[list[tuple[float, list[Point]]]]) -> float:
    """Print the error of each weight over groups of (factor, runs it is used for); returns the 80% size at the best."""
    best = (np.inf, 0.0, 0.0)
    for weight in WEIGHTS:
        sizes = [np.array([abs(p.error(weight * f)) for f, used in group for p in used]) for group in groups]
        median = float(np.mean([np.median(np.expm1(size)) for size in sizes]))
        mean = float(np.mean([np.mean(np.expm1(size)) for size in sizes]))
        each = np.concatenate([np.quantile(size, np.linspace(0.02, 0.98, 25)) for size in sizes])
        width = float(np.quantile(each, LEVEL))
        print(f"{name:34s} weight {weight:4.2f}: median {median:6.1%} mean {mean:6.1%} {LEVEL:.0%} within {width:.3f}"
              f" ({len(groups)} groups)")  # fmt: skip
        best = min(best, (mean, weight, width))
    return best[2]


def main(arguments: list[str]) -> None:
    found = points(arguments[0], arguments[1])
    draw = random.Random(1)
    cell_model = grouped(found, lambda p: (p.cell, p.model))
    exact = []
    for group in grouped(found, lambda p: (p.cell, p.model, p.release)):
        if len(group) > 1:
            chosen = [draw.randrange(len(group)) for _ in range(20)]
            exact.append([(group[i].factor, [p for j, p in enumerate(group) if j != i]) for i in chosen])
    widths = {"model and release": transfer("same model and release, 1 run", exact)}
    other = []
    for group in cell_model:
        releases = grouped(group, lambda p: p.release)
        if len(releases) > 1:
            other.append([(draw.choice(a).factor, [p for b in releases if b is not a for p in b])
                          for a in releases for _ in range(5)])  # fmt: skip
    widths["model"] = transfer("same model, other release, 1 run", other)
    cells: dict[Hashable, list[list[Point]]] = defaultdict(list)
    for group in cell_model:
        cells[group[0].cell].append(group)
    one = [[(draw.choice(a).factor, [p for b in models if b is not a for p in b]) for a in models]
           for models in cells.values() if len(models) > 1]  # fmt: skip
    transfer("other model, from 1 model", one)
    many = [[(float(np.median([np.median([p.factor for p in a]) for a in models if a is not b])), b) for b in models]
            for models in cells.values() if len(models) > 2]  # fmt: skip
    widths["stack"] = transfer("other model, from 2 or more models", many)
    if "--write" in arguments:
        data = {
            "level": LEVEL,
            "log_half_width": {name: round(width, 3) for name, width in widths.items()},
            "runs": len(found),
            "source": "80% of |log(predicted / measured)| of published runs predicted with the factor of others "
            "(benchmarks/calibration_transfer.py)",
        }
        OUT.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
