"""What a GPU type without measurements takes, and how far off it is: each measured type predicted from the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from meshwright.cost_models.gemm import GemmFit, gemm_s
from meshwright.specs.catalog import gpu as catalog_gpu

from .data import CHIPS, ELEMENT_BYTES, Chip, columns, errors, profiles, table
from .gemm import NAMES, is_large

#: Types of one generation lend each other their constants.
GENERATION = {
    "a100": "ampere", "h100": "hopper", "h200": "hopper", "b200": "blackwell", "b300": "blackwell",
    "gb200": "blackwell", "gb300": "blackwell", "l40s": "workstation", "rtx_pro_6000": "workstation",
}  # fmt: skip


def median_constants(fits: list[dict[str, float]], names: tuple[str, ...]) -> dict[str, float]:
    return {name: float(f"{np.median([fit[name] for fit in fits]):.4g}") for name in names}


def _log_ratio(constants: dict[str, float], chip: Chip, dtype: str, rows: pd.DataFrame) -> Any:
    m, n, k = columns(rows, "m", "n", "k")
    size = ELEMENT_BYTES[dtype]
    seconds = gemm_s(GemmFit(**constants), chip.peak(dtype), chip.sms, chip.bandwidth, m, n, k, element_bytes=size)
    if dtype == "nvfp4":  # the measured call casts its input: at half of the bandwidth
        seconds = seconds + m * k * (2 + size) / (0.5 * chip.bandwidth)
    return seconds / (rows["us"].to_numpy() * 1e-6)


def leave_one_out(
    gemm: dict[str, dict[str, Any]],
) -> tuple[dict[str, float], dict[str, dict[str, float]], dict[str, Any]]:
    """(sigma by precision, by generation and precision, errors).

    Constants are medians over the same generation, or over all where it has no other type; sigma is the root mean
    square, over the types, of log(predicted / measured) of their large products.
    """
    rows, report = table("gemm"), {}
    squares: dict[str, list[float]] = {}
    kindred: dict[str, dict[str, list[float]]] = {}
    for gpu, chip in CHIPS.items():
        for dtype in ("bf16", "fp8", "nvfp4"):
            if dtype not in gemm.get(chip.family, {}):
                continue
            others = {f: c[dtype] for f, c in gemm.items() if f != chip.family and dtype in c}
            kin = [c for f, c in others.items() if GENERATION[f] == GENERATION[chip.family]]
            own = rows[(rows.gpu == gpu) & (rows.dtype == dtype)]
            own = own[is_large(own)]
            ratio = _log_ratio(median_constants(kin or list(others.values()), NAMES), chip, dtype, own)
            report[f"{chip.family}/{dtype}"] = {
                **errors(ratio, 1.0),
                "bias": round(float(np.median(np.log(ratio))), 3),
                "from": "its generation" if kin else "all",
            }
            square = float(np.mean(np.log(ratio) ** 2))
            squares.setdefault(dtype, []).append(square)
            if kin:
                kindred.setdefault(GENERATION[chip.family], {}).setdefault(dtype, []).append(square)
    return _sigmas(squares), {generation: _sigmas(own) for generation, own in kindred.items()}, report


def _sigmas(squares: dict[str, list[float]]) -> dict[str, float]:
    return {dtype: round(float(np.sqrt(np.mean(values))), 3) for dtype, values in squares.items()}


#: Older and AMD types: the measured GPU, the catalog's name, the family, and the precision of the rows.
LEVELS = (
    ("V100-16GB", "V100-SXM2-16GB", "volta", "fp16"),
    ("RTX-2080", "RTX-2080", "rtx2080", "fp16"),
    ("Titan-RTX", "Titan-RTX", "turing", "fp16"),
    ("RTX-3090", "RTX-3090", "ampere_rtx", "fp16"),
    ("MI355X", "MI355X", "cdna4", "bf16"),
    ("MI355X", "MI355X", "cdna4", "fp8"),
)


def fit_levels(
    defaults: dict[str, dict[str, float]], given: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(constants by family and precision, errors): the default constants, the peak share fitted to a few products.

    Families in ``given`` have constants from another fit, of which only the errors are taken.
    """
    rows = profiles()
    out: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {}
    for measured_on, name, family, precision in LEVELS:
        own = rows[(rows.gpu == measured_on) & (rows.precision == precision)]
        own = own[own.op.isin(("matmul", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2", "enc-attention-qkv"))]
        gpu = catalog_gpu(name).gpu
        peak = gpu.peak_flops[precision]  # type: ignore[index]
        m, n, k, rate = columns(own, "m", "n", "k", "tflops")
        dtype = "fp8" if precision == "fp8" else "bf16"
        measured = 2 * m * n * k / rate / 1e12

        def predict(eff: float) -> Any:
            own = given.get(family, {}).get(dtype) or {**defaults[dtype], "eff": eff}  # noqa: B023
            fit, size = GemmFit(**own), ELEMENT_BYTES[dtype]  # noqa: B023
            args = (peak, gpu.num_sms, gpu.memory_bandwidth_bytes_per_s, m, n, k)  # noqa: B023
            return gemm_s(fit, *args, element_bytes=size)

        if family in given:
            report[f"{family}/{dtype}"] = errors(predict(1.0), measured)
            continue
        x = least_squares(lambda x: np.log(predict(x[0]) / measured), [0.7], loss="soft_l1", f_scale=0.1).x  # noqa: B023
        out.setdefault(family, {})[dtype] = {**defaults[dtype], "eff": float(f"{x[0]:.3g}")}
        report[f"{family}/{dtype}"] = errors(predict(float(x[0])), measured)
    return out, report
