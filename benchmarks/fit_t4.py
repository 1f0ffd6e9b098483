"""Fit the T4's rates on runs on T4 alone.

    python benchmarks/fit_t4.py benchmarks/data/mixed_runs.csv.gz benchmarks/data/published_models.json.gz

No operator profile of the T4 is public, so its share of the peak (products, attention and streaming alike) and the rate
of its PCIe all-reduce come from whole runs. Prints the factors by which the shipped times would have to grow: 1 means
that they fit. Runs on mixed types are never read.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np

from meshwright.cost_models.backtest.inputs import read_models
from meshwright.cost_models.backtest.mixed import mixed_case, mixed_run
from meshwright.cost_models.backtest.price import price_case
from meshwright.cost_models.backtest.rows import read_rows
from meshwright.cost_models.multipliers import Multipliers

FACTORS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.6)


def main(runs: Path, models: Path) -> None:
    known = read_models(models)
    cases = []
    for row in read_rows(runs):
        if row["gpu_types"] == "T4-16" and row["status"] == "ok":
            run = mixed_run(row)
            cases.append((mixed_case(run, known), run.measured_s or np.nan))
    found = []
    for compute, link in product(FACTORS, FACTORS):
        factors = Multipliers(gemm=compute, head=compute, attention=compute, memory_bound=compute, tp_comm=link)
        errors = [abs(price_case(case, factors).step_time_s / measured - 1) for case, measured in cases]
        found.append((float(np.mean(errors)), float(np.median(errors)), compute, link))
    for mean, median, compute, link in sorted(found)[:3]:
        print(f"{len(cases)} runs: compute x {compute}, all-reduce x {link}: mean {mean:.1%}, median {median:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
