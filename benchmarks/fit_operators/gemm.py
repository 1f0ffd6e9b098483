"""Constants, corrections, layout factors, sustained clocks and sigma of matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.optimize import least_squares
from scipy.sparse.linalg import spsolve

from meshwright.cost_models.efficiency import DERATE_TO
from meshwright.cost_models.gemm import KNOT_STEP, KNOTS, GemmFit, gemm_s

from .data import CHIPS, ELEMENT_BYTES, FOLDER, Chip, Floats, columns, errors, profiles, table

NAMES = ("eff", "overhead_k", "launch_s", "wave_hardness", "tile_exponent", "bandwidth_eff", "sharpness", "throttle")
START = np.array([0.8, 100, 3, 0.5, 0.25, 0.75, 4, 0.1])
LOW = np.array([0.1, 0, 0.2, 0, 0, 0.2, 1.5, 0])
HIGH = np.array([1.2, 1500, 40, 1, 1.2, 1.0, 12, 0.6])
SCALE = np.array([0.1, 100, 1, 0.3, 0.1, 0.1, 1, 0.1])
#: Sizes from which a product counts as a training shape.
LARGE = 1024
#: The correction: second differences and distance from 0 are penalised; residuals beyond HUBER count less; at most
#: BOUND either way. Chosen by cross-validation over (n, k) groups.
SMOOTH, SHRINK, HUBER, BOUND = 1.0, 1.0, 0.15, 0.35
FOLDS = 5


def is_large(rows: pd.DataFrame) -> Floats:
    return (rows[["m", "n", "k"]].min(axis=1) >= LARGE).to_numpy()


def unpack(x: Floats) -> GemmFit:
    values = {name: float(f"{value:.4g}") for name, value in zip(NAMES, x, strict=False)}
    values["launch_s"] = float(f"{x[2] * 1e-6:.4g}")
    return GemmFit(**values)


def cast_s(x: Floats, chip: Chip, rows: pd.DataFrame, size: float) -> Floats | float:
    """Seconds of quantising A inside the measured call, where it could not be measured apart: constants 8 and 9."""
    if len(x) <= len(NAMES):
        return 0.0
    m, k = columns(rows, "m", "k")
    return x[8] * 1e-6 + m * k * (2 + size) / (chip.bandwidth * x[9])


def predict(x: Floats, chip: Chip, dtype: str, rows: pd.DataFrame, fit: GemmFit | None = None) -> Floats:
    size = ELEMENT_BYTES[dtype]
    m, n, k = columns(rows, "m", "n", "k")
    product = gemm_s(fit or unpack(x), chip.peak(dtype), chip.sms, chip.bandwidth, m, n, k, element_bytes=size)
    return product + cast_s(x, chip, rows, size)


def fit_formula(rows: pd.DataFrame, chip: Chip, dtype: str) -> Floats:
    measured = rows["us"].to_numpy() * 1e-6
    weight = np.where(is_large(rows), 1.0, 0.4)
    start, low, high, scale = START, LOW, HIGH, SCALE
    if dtype in ("fp8_block", "nvfp4"):  # these kernels quantise their input in the measured call
        start, low = np.r_[START, 3.0, 0.5], np.r_[LOW, 0.0, 0.2]
        high, scale = np.r_[HIGH, 15.0, 1.0], np.r_[SCALE, 1.0, 0.1]
    result = least_squares(
        lambda x: weight * np.log(predict(x, chip, dtype, rows) / measured),
        start, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3, x_scale=scale, max_nfev=60,
    )  # fmt: skip
    return np.asarray(result.x)


def _design(rows: pd.DataFrame) -> sparse.csr_matrix:
    """[rows, knots] trilinear weights, as :func:`~meshwright.cost_models.gemm.log_correction` reads them."""
    index, weight = [np.zeros(len(rows), int)], [np.ones(len(rows))]
    for knots, size in zip(KNOTS, columns(rows, "m", "n", "k"), strict=True):
        position = np.clip((np.log2(size) - knots[0]) / KNOT_STEP, 0, len(knots) - 1)
        left = np.minimum(position.astype(int), len(knots) - 2)
        right = position - left
        index = [i * len(knots) + left + side for i in index for side in (0, 1)]
        weight = [w * (right if side else 1 - right) for w in weight for side in (0, 1)]
    where = (np.tile(np.arange(len(rows)), 8), np.concatenate(index))
    return sparse.csr_matrix((np.concatenate(weight), where), shape=(len(rows), int(np.prod([len(k) for k in KNOTS]))))


def _roughness() -> sparse.csr_matrix:
    sizes, out = [len(k) for k in KNOTS], []
    for axis in range(3):
        parts = [sparse.eye(s) for s in sizes]
        shape = (sizes[axis] - 2, sizes[axis])
        parts[axis] = sparse.diags([1.0, -2.0, 1.0], [0, 1, 2], shape=shape, dtype=float)
        out.append(sparse.kron(sparse.kron(parts[0], parts[1]), parts[2]))
    return sparse.csr_matrix(sparse.vstack(out))


def fit_correction(rows: pd.DataFrame, log_residual: Floats) -> Floats:
    """Penalised least squares of log(measured / formula) at the knots, reweighted against outliers."""
    inside = (rows[["m", "n", "k"]] >= [2 ** k[0] for k in KNOTS]).all(axis=1).to_numpy()
    design, rough = _design(rows[inside]), _roughness()
    target = log_residual[inside]
    base = np.where(is_large(rows[inside]), 1.0, 0.5)
    weight, out = base, np.zeros(design.shape[1])
    for _ in range(4):
        left = design.T @ sparse.diags(weight) @ design + SMOOTH * rough.T @ rough + SHRINK * sparse.eye(len(out))
        out = spsolve(sparse.csc_matrix(left), design.T @ (weight * target))
        off = np.abs(target - design @ out)
        weight = base * np.minimum(1.0, HUBER / np.maximum(off, 1e-9))
    return np.asarray(np.clip(out, -BOUND, BOUND))


def _corrected(x: Floats, chip: Chip, dtype: str, rows: pd.DataFrame, correction: Floats) -> Floats:
    return predict(x, chip, dtype, rows, replace(unpack(x), correction=correction))


def _residual(x: Floats, chip: Chip, dtype: str, rows: pd.DataFrame) -> Floats:
    """log of the measured over the formula's bare product."""
    size = ELEMENT_BYTES[dtype]
    bare = predict(x, chip, dtype, rows) - cast_s(x, chip, rows, size)
    measured = rows["us"].to_numpy() * 1e-6 - cast_s(x, chip, rows, size)
    return np.asarray(np.log(np.clip(measured / bare, 0.3, 3.0)))


def fit_all() -> tuple[dict[str, dict[str, Any]], dict[str, list[int]], dict[str, Any]]:
    """(constants by family and precision, corrections by ``family/precision``, errors by the same)."""
    rows = table("gemm")
    constants: dict[str, dict[str, Any]] = {}
    tables: dict[str, list[int]] = {}
    report: dict[str, Any] = {}
    for (gpu, dtype), own in rows.groupby(["gpu", "dtype"]):
        chip = CHIPS.get(str(gpu))
        if chip is None or not chip.peak(str(dtype)):
            continue
        dtype, own = str(dtype), own.reset_index(drop=True)
        x = fit_formula(own.sample(min(2000, len(own)), random_state=0), chip, dtype)
        measured, large = own["us"].to_numpy() * 1e-6, is_large(own)
        plain = predict(x, chip, dtype, own)
        group = own.groupby(["n", "k"]).ngroup().to_numpy() % FOLDS
        unseen, residual = np.zeros(len(own)), _residual(x, chip, dtype, own)
        for fold in range(FOLDS):
            seen = group != fold
            correction = fit_correction(own[seen], residual[seen])
            unseen[~seen] = _corrected(x, chip, dtype, own[~seen], correction)
        before, after = errors(plain[large], measured[large]), errors(unseen[large], measured[large])
        key = f"{chip.family}/{dtype}"
        report[key] = {
            "formula": {"large": before, "all": errors(plain, measured)},
            "corrected, unseen (n, k)": {"large": after, "all": errors(unseen, measured)},
        }
        fit = unpack(x)
        constants.setdefault(chip.family, {})[dtype] = {name: getattr(fit, name) for name in NAMES}
        if after["median"] < 1.1 * before["median"] and after["p95"] < 1.05 * before["p95"]:
            tables[key] = [round(1000 * float(c)) for c in fit_correction(own, residual)]
        else:
            after = before
        report[key]["sigma"] = after["sigma"]
    return constants, tables, report


def fit_sustained() -> dict[str, dict[str, float]]:
    """Speed of large products at a long run's clocks, by family and precision: mean over four octaves of FLOP from
    where the clock has settled. Longer calls throttle within the burst already, and the formula knows that."""
    rows = pd.read_csv(FOLDER / "sustained.csv")
    out: dict[str, dict[str, float]] = {}
    for (gpu, dtype), own in rows.groupby(["gpu", "dtype"]):
        chip = CHIPS[str(gpu)]
        if dtype == "fp8_block":
            continue  # GB200's is slower at all sizes alike (0.82 even where no power is drawn): another kernel
        first = DERATE_TO + np.log2(chip.peak(str(dtype)) / chip.peak("bf16"))
        here = own[(own.log2_flops >= first) & (own.log2_flops < first + 4)]
        share = float(np.average(here.speed, weights=here.rows))
        out.setdefault(chip.family, {})[str(dtype)] = round(min(share, 1.0), 3)
    return out


def fit_layouts(constants: dict[str, dict[str, Any]], tables: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Measured over formula rate by layout on SimuMax's hosts, relative to its forward layout (TN)."""
    rows = profiles()
    rows = rows[(rows.op == "matmul") & (rows.source_repo == "MooreThreads/SimuMax")]
    rows = rows[is_large(rows)]
    out: dict[str, dict[str, float]] = {}
    for gpu, chip in (("B200", CHIPS["b200_sxm"]), ("A100-80GB-PCIe", CHIPS["a100_sxm"])):
        own = rows[rows.gpu == gpu]
        m, n, k, rate = columns(own, "m", "n", "k", "tflops")
        correction = np.array(tables[f"{chip.family}/bf16"]) / 1000 if f"{chip.family}/bf16" in tables else None
        fit = GemmFit(**constants[chip.family]["bf16"], correction=correction)
        bandwidth = chip.bandwidth if gpu == "B200" else 1935e9
        speed = {}
        for layout, output in (("TN", 2.0), ("NN", 2.0), ("NT", 8.0)):
            here = (own.layout == layout).to_numpy() & ((layout != "NT") | (own.output == "fp32")).to_numpy()
            formula = gemm_s(fit, chip.peak("bf16"), chip.sms, bandwidth, m, n, k, output_bytes=output)
            speed[layout] = float(np.median((formula * rate * 1e12 / (2 * m * n * k))[here]))
        out[chip.family] = {
            "host": round(speed["TN"], 3),
            "input_gradient": round(speed["NN"] / speed["TN"], 3),
            "weight_gradient": round(speed["NT"] / speed["TN"], 3),
        }
    return out
