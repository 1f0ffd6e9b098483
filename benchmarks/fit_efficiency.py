"""Fit the GEMM and attention constants of cost_models/data/efficiency.json on measured operators.

    python -m benchmarks.fit_efficiency OPDB_DIR      (needs pyarrow, pandas and scipy)

OPDB_DIR holds gemm.parquet and attention_ctx.parquet distilled from github.com/ai-dynamo/aiconfigurator
(Apache-2.0, measured by NVIDIA). Prints JSON of constants with the median and 95th percentile error on all rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from meshwright.cost_models.efficiency import AttentionFit, GemmFit
from meshwright.cost_models.operators import attention_rate, gemm_s

#: Dense peaks in FLOP/s, bandwidth in bytes/s, SMs: the datasheet values the constants are relative to.
GPUS: dict[str, tuple[float, float, float, float, int]] = {
    "a100_sxm": (312e12, 0, 0, 2039e9, 108),
    "h100_sxm": (989e12, 1979e12, 0, 3352e9, 132),
    "h200_sxm": (989e12, 1979e12, 0, 4800e9, 132),
    "b200_sxm": (2250e12, 4500e12, 9000e12, 8000e9, 148),
    "b300_sxm": (2250e12, 4500e12, 13500e12, 8000e9, 148),
    "gb200": (2450e12, 4900e12, 9800e12, 8000e9, 152),
    "gb300": (2450e12, 4900e12, 14700e12, 8000e9, 152),
    "l40s": (362e12, 733e12, 0, 864e9, 142),
}
SAMPLE = 2000
GEMM_KEYS = ("eff", "overhead_k", "launch_us", "wave_hardness", "tile_exponent", "bandwidth_eff")


def _errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    error = np.abs(predicted / measured - 1)
    return {"median": round(float(np.median(error)), 3), "p95": round(float(np.quantile(error, 0.95)), 3)}


def fit_gemm(rows: pd.DataFrame, peak: float, bandwidth: float, sms: int, size: float) -> dict[str, Any]:
    measured = rows["target_us"].to_numpy() * 1e-6
    m, n, k = (rows[c].to_numpy(float) for c in "mnk")

    def predict(x: np.ndarray, index: np.ndarray) -> np.ndarray:
        fit = GemmFit(x[0], x[1], x[2] * 1e-6, x[3], x[4], x[5])
        return gemm_s(fit, peak, sms, bandwidth, m[index], n[index], k[index], element_bytes=size)

    # Training shapes: many tokens, wide layers. Small ones count less.
    weight = np.where((m >= 1024) & (n >= 512) & (k >= 512), 1.0, 0.15)
    index = np.random.default_rng(0).choice(len(rows), min(SAMPLE, len(rows)), replace=False)
    start = np.array([0.8, 100, 3.0, 0.5, 0.25, 0.75])
    bounds = ([0.2, 0, 0.2, 0, 0, 0.2], [1.0, 1500, 40, 1, 1, 1.0])
    result = least_squares(
        lambda x: weight[index] * np.log(predict(x, index) / measured[index]),
        start,
        bounds=bounds,
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
        x_scale=np.array([0.1, 100, 1, 0.3, 0.1, 0.1]),
    )
    everything = np.arange(len(rows))
    train = weight == 1.0
    predicted = predict(result.x, everything)
    out = dict(zip(GEMM_KEYS, (round(float(v), 4) for v in result.x), strict=True))
    return {**out, "training_shapes": _errors(predicted[train], measured[train]), "all": _errors(predicted, measured)}


def fit_attention(rows: pd.DataFrame, peak: float, sms: int) -> dict[str, Any]:
    rows = rows[(rows.seq >= 1024) & (rows.head_dim == 128)]
    measured = rows["latency_us"].to_numpy() * 1e-6
    batch, seq, heads = (rows[c].to_numpy(float) for c in ("batch", "seq", "heads"))
    flops = batch * heads * seq**2 * 2 * 128

    def predict(x: np.ndarray) -> np.ndarray:
        fit = AttentionFit(x[0], x[1], x[2] * 1e-6, 1.0)
        return flops / (peak * attention_rate(fit, sms, seq, batch * heads)) + fit.launch_s

    result = least_squares(
        lambda x: np.log(predict(x) / measured),
        [0.6, 1500, 10],
        bounds=([0.1, 0, 0], [1.0, 6000, 60]),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=[0.1, 1000, 10],
    )
    out = dict(zip(("eff", "half_length", "launch_us"), (round(float(v), 4) for v in result.x), strict=True))
    return {**out, "rows": len(rows), "errors": _errors(predict(result.x), measured)}


def main(folder: Path) -> None:
    gemm = pd.read_parquet(folder / "gemm.parquet")
    attention = pd.read_parquet(folder / "attention_ctx.parquet")
    out: dict[str, Any] = {}
    for gpu, (bf16, fp8, fp4, bandwidth, sms) in GPUS.items():
        out[gpu] = {}
        for dtype, peak, size in (
            ("bfloat16", bf16, 2.0),
            ("fp8", fp8, 1.0),
            ("fp8_block", fp8, 1.0),
            ("nvfp4", fp4, 0.5625),
        ):
            rows = gemm[(gemm.gpu == gpu) & (gemm.dtype == dtype) & (gemm["mode"] == "burst") & (gemm.m >= 128)].copy()
            if not peak or len(rows) < 500:
                continue
            rows["target_us"] = rows["lat_med_us"].fillna(rows["latency_us"])
            if dtype == "fp8":
                rows["target_us"] = rows["latency_us"] - rows["quant_us"].fillna(0.0)
            rows = rows[rows.target_us > 0]
            out[gpu][dtype] = fit_gemm(rows, peak, bandwidth, sms, size)
        causal = attention[
            (attention.gpu == gpu)
            & attention.causal
            & (attention.dtype == "bfloat16")
            & (attention.window == 0)
            & (attention.kv_dtype == "bfloat16")
        ]
        for kernel, rows in causal.groupby("kernel"):
            if (rows.head_dim == 128).sum() >= 200:
                out[gpu][f"attention {kernel}"] = fit_attention(rows, bf16, sms)
    json.dump(out, sys.stdout, indent=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
