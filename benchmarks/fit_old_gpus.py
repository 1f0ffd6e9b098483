"""Fit GEMM constants of Volta, Turing and GA102 on operator profiles: ``python benchmarks/fit_old_gpus.py OPS.csv``.

OPS.csv: columns gpu, precision, op, stage, m, k, n, time_us (eth-easl/sailor, Aceso profiles at cf2c8e3c, MIT). Only
the efficiency and the depth that a tile costs are fitted; launch, waves and tiles keep the defaults, since the
profile's own launch overhead hides them. Prints the constants of data/efficiency.json and the median error.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

from meshwright.cost_models.gemm import GemmFit, gemm_s
from meshwright.specs.catalog import gpu
from meshwright.specs.cluster import GpuType

#: Label of the profile -> catalog type. Its RTX-2080 moves 640 GB/s and reaches 60 TFLOP/s: a 2080 Ti.
TYPES = {"V100-16GB": "V100-SXM2-16GB", "RTX-2080": "RTX-2080-Ti", "Titan-RTX": "Titan-RTX", "RTX-3090": "RTX-3090"}
PRECISIONS = {"fp16": ("fp16", 2.0), "fp32": ("fp32", 4.0), "tf32?": ("tf32", 4.0)}


def fit(kind: GpuType, precision: str, size: float, rows: list[dict[str, str]]) -> tuple[GemmFit, float]:
    """The constants with the least median error over ``rows``, and that error."""
    m, n, k, measured = (np.array([float(row[name]) for row in rows]) for name in ("m", "n", "k", "time_us"))
    best: tuple[float, GemmFit] | None = None
    peak = kind.peak_flops[precision]  # type: ignore[index]
    for overhead in (0.0, 50.0, 100.0):  # deeper would price the scores of attention, 64 deep, several times too high
        for eff in np.arange(0.5, 1.201, 0.01):
            constants = GemmFit(round(float(eff), 2), overhead, 4e-6, 0.5, 0.3, 0.75)
            seconds = gemm_s(
                constants, peak, kind.num_sms, kind.memory_bandwidth_bytes_per_s, m, n, k,
                element_bytes=size, output_bytes=size,
            )  # fmt: skip
            error = float(np.median(np.abs(1e6 * seconds / measured - 1)))
            if best is None or error < best[0]:
                best = error, constants
    assert best is not None
    return best[1], best[0]


def main(path: Path) -> None:
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["source_repo"] == "eth-easl/sailor"]
    for label, name in TYPES.items():
        for text, (precision, size) in PRECISIONS.items():
            mine = [
                row
                for row in rows
                if (row["gpu"], row["precision"]) == (label, text)
                and row["n"] and row["k"] and float(row["m"]) >= 1024
                and ("GEMM" in row["op"] or row["op"] in ("enc-attention-qkv", "enc-attention-dense"))
            ]  # fmt: skip
            if mine:
                constants, error = fit(gpu(name).gpu, precision, size, mine)
                print(f"{name:16s} {precision:5s} n {len(mine):3d} median error {100 * error:4.1f}%  {constants}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
