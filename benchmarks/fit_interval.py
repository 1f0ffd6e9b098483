"""Compare estimates with published runs and fit the interval of cost_models/data/interval.json.

    python -m benchmarks.fit_interval RUNS.csv MODELS.json [--write]

Prints errors by framework, model family, GPU and precision. The interval is the central 80% of measured / predicted
over the rows of current frameworks, each group (architecture x GPU) weighing the same.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from benchmarks.published_runs import Priced, priced_runs

LEVEL = 0.8
#: Stacks that are not what any target runs today: kept in the table, left out of the fit.
OLD_FRAMEWORKS = ("Megatron-DeepSpeed",)
OUT = Path(__file__).parents[1] / "cost_models" / "data" / "interval.json"


def weighted_quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    """The smallest value with at least ``q`` of the weight at or below it."""
    order = values.argsort()
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(share, q)])


def main(runs: Path, models: Path, write: bool) -> None:
    priced: list[Priced] = []
    refused: Counter[str] = Counter()
    for item in priced_runs(runs, models):
        if isinstance(item, Priced):
            priced.append(item)
        else:
            refused[item[1]] += 1
    groups = defaultdict(list)
    for item in priced:
        key = (item.row["framework"], "moe" if item.moe else "dense", item.row["gpu_type"], item.row["precision"])
        groups[key].append(item)
        if item.row["framework"] not in OLD_FRAMEWORKS:
            groups[("current frameworks", key[1], "", "")].append(item)
    print(f"{'group':64} {'rows':>4} {'median':>7} {'mean':>7} {'p90':>6} {'bias':>6}")
    for key, items in sorted(groups.items()):
        errors = np.array([item.error for item in items])
        size = np.abs(errors)
        print(
            f"{' '.join(key):64} {len(items):4} {np.median(size):7.1%} {size.mean():7.1%} "
            f"{np.quantile(size, 0.9):6.0%} {np.median(errors):+6.0%}"
        )
    for reason, count in refused.most_common(8):
        print(f"not priced: {count} rows: {reason}")
    priced = [item for item in priced if item.row["framework"] not in OLD_FRAMEWORKS]
    ratio = np.array([item.measured_s / item.estimate.step_time_s for item in priced])
    sizes = Counter(item.row["group"] for item in priced)
    weights = np.array([1.0 / sizes[item.row["group"]] for item in priced])
    low, high = (weighted_quantile(ratio, weights, q) for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    result = {
        "level": LEVEL, "low": round(low, 3), "high": round(high, 3), "rows": len(priced), "groups": len(sizes),
        "source": "central 80% of measured over predicted step time of published Megatron and NeMo runs, groups of "
        "architecture and GPU weighing the same (benchmarks/fit_interval.py)",
    }  # fmt: skip
    print(json.dumps(result))
    if write:
        OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--write" in sys.argv)
