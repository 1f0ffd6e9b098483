"""Constants of grouped products (the experts of a mixture): how much the rate falls with few tokens an expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from meshwright.cost_models.gemm import GemmFit, gemm_s

from .data import CHIPS, ELEMENT_BYTES, Chip, Floats, columns, errors, profiles, table

NAMES = ("eff", "overhead_k", "wave_hardness", "tile_exponent", "bandwidth_eff", "sharpness")
#: Folds of whole model configurations (hidden, expert and top-k sizes).
FOLDS = 4
#: Tokens an expert from which a row counts as a training shape.
LARGE = 128


def unpack(x: Floats, dense: dict[str, float], group_s: float = 0.0) -> GemmFit:
    """The launch and the throttling of long calls are those of a plain product."""
    ratio, *rest = (float(f"{v:.4g}") for v in x[: len(NAMES)])
    values = dict(zip(NAMES[1:], rest, strict=True))
    eff = float(f"{ratio * dense['eff']:.4g}")
    return GemmFit(eff=eff, launch_s=dense["launch_s"], throttle=dense["throttle"], group_s=group_s, **values)


def shipped(fit: GemmFit) -> dict[str, float]:
    return {name: getattr(fit, name) for name in (*NAMES, "launch_s", "throttle", "group_s")}


def _layer_s(x: Floats, dense: dict[str, float], chip: Chip, dtype: str, rows: pd.DataFrame) -> Floats:
    """A whole measured MoE layer: both grouped products, routing and launches, and the traffic of permutation and
    activation at a fitted multiple of one pass."""
    tokens, hidden, inter, top_k, experts, tp, ep = columns(
        rows, "num_tokens", "hidden", "inter", "topk", "num_experts", "moe_tp", "moe_ep"
    )
    each, groups, width = tokens * top_k / experts, experts / ep, inter / tp
    fit, size, peak = unpack(x, dense), ELEMENT_BYTES[dtype], chip.peak(dtype)
    up = gemm_s(fit, peak, chip.sms, chip.bandwidth, each, 2 * width, hidden, groups, size)
    down = gemm_s(fit, peak, chip.sms, chip.bandwidth, each, hidden, width, groups, size)
    moved = each * groups * (4 * hidden + 6 * width)
    return up + down + x[6] * 1e-6 + x[7] * moved / chip.bandwidth


def _fit_layer(rows: pd.DataFrame, dense: dict[str, float], chip: Chip, dtype: str) -> Floats:
    measured = rows["us"].to_numpy() * 1e-6
    result = least_squares(
        lambda x: np.log(_layer_s(x, dense, chip, dtype, rows) / measured),
        [0.9, 100, 0.7, 0.3, 0.7, 3, 20, 2],
        # A grouped kernel is no faster than a plain product; permutation reaches half of the bandwidth or less.
        bounds=([0.1, 0, 0, 0, 0.2, 1.2, 0, 1.0], [1.0, 1500, 1, 1.2, 1, 12, 100, 5.0]),
        loss="soft_l1", f_scale=0.1, diff_step=1e-3, x_scale=[0.1, 100, 0.3, 0.2, 0.1, 1, 10, 0.5], max_nfev=50,
    )  # fmt: skip
    return np.asarray(result.x)


def fit_inference(gemm: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(constants by family and precision, errors) from whole MoE layers (aiconfigurator)."""
    constants: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {}
    for (gpu, dtype), own in table("moe").groupby(["gpu", "dtype"]):
        chip, dtype = CHIPS.get(str(gpu)), str(dtype)
        if chip is None or not chip.peak(dtype) or str(gpu) == "a100_sxm":
            continue  # the A100 table holds one un-tuned Triton kernel, 4 times off any formula
        dense = gemm[chip.family][dtype]
        own = own.reset_index(drop=True)
        measured = own["us"].to_numpy() * 1e-6
        group = own.groupby(["hidden", "inter", "topk", "num_experts"]).ngroup().to_numpy() % FOLDS
        unseen = np.zeros(len(own))
        for fold in range(FOLDS):
            x = _fit_layer(own[group != fold], dense, chip, dtype)
            unseen[group == fold] = _layer_s(x, dense, chip, dtype, own[group == fold])
        x = _fit_layer(own, dense, chip, dtype)
        each = own.num_tokens * own.topk / own.num_experts
        large = (each >= LARGE).to_numpy()
        constants.setdefault(chip.family, {})[dtype] = shipped(unpack(x, dense))
        report[f"{chip.family}/{dtype}"] = {
            "fitted": errors(_layer_s(x, dense, chip, dtype, own), measured),
            "unseen model": {"large": errors(unseen[large], measured[large]), "all": errors(unseen, measured)},
            "rest": [round(float(v), 2) for v in x[6:]],
        }
    return constants, report


def fit_training(
    gemm: dict[str, dict[str, Any]], hosts: dict[str, float]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(constants by family, errors) from SimuMax's grouped products, forward and both gradients.

    ``hosts`` is the speed of plain products on the same host over the burst rate that the other constants stand for.
    """
    rows = profiles()
    rows = rows[(rows.op == "group_matmul") & (rows.source_repo == "MooreThreads/SimuMax")]
    constants: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {}
    for gpu, chip in (("B200", CHIPS["b200_sxm"]), ("A100-80GB-PCIe", CHIPS["a100_sxm"])):
        own = rows[rows.gpu == gpu].reset_index(drop=True)
        m, n, k, groups, rate = columns(own, "m", "n", "k", "groups_or_batch", "tflops")
        weight, inward = (own.stage == "bwd_grad_w").to_numpy(), (own.stage == "bwd_grad_act").to_numpy()
        # Each shape of the weight gradient is listed twice: into the fp32 main gradient, then into 16 bit.
        second = own.duplicated(["stage", "groups_or_batch", "m", "n", "k"]).to_numpy()
        sizes = (
            np.where(weight, n, m),
            np.where(weight | inward, k, n),
            np.where(weight, m, np.where(inward, n, k)),
        )
        measured = 2 * m * n * k * groups / rate / 1e12
        dense, peak = gemm[chip.family]["bf16"], chip.peak("bf16") * hosts[chip.family]
        bandwidth = chip.bandwidth if gpu == "B200" else 1935e9

        def predict(x: Floats, part: Floats) -> Floats:
            fit = unpack(x, dense, group_s=x[6] * 1e-6)  # noqa: B023
            out = np.zeros(int(part.sum()))
            for output, which in ((2.0, ~weight), (8.0, weight & ~second), (4.0, weight & second)):  # noqa: B023
                here = which[part]
                args = [s[part][here] for s in sizes]  # noqa: B023
                out[here] = gemm_s(fit, peak, chip.sms, bandwidth, *args, groups[part][here], 2.0, output)  # noqa: B023
            return out

        def fitted(part: Floats) -> Floats:
            result = least_squares(
                lambda x: np.log(predict(x, part) / measured[part]),  # noqa: B023
                [0.9, 100, 0.5, 0.3, 0.7, 2, 1],
                bounds=([0.1, 0, 0, 0, 0.2, 1.2, 0], [1.0, 1500, 1, 1.2, 1, 12, 10]),
                loss="soft_l1", f_scale=0.1, diff_step=1e-3, x_scale=[0.1, 100, 0.3, 0.2, 0.1, 1, 1],
            )  # fmt: skip
            return np.asarray(result.x)

        everything = np.ones(len(own), dtype=bool)
        x = fitted(everything)
        model = own.groupby(["groups_or_batch", "m"]).ngroup().to_numpy() % FOLDS
        unseen = np.zeros(len(own))
        for fold in range(FOLDS):
            if (model != fold).any() and (model == fold).any():
                unseen[model == fold] = predict(fitted(model != fold), model == fold)
        constants[chip.family] = shipped(unpack(x, dense, group_s=float(f"{x[6] * 1e-6:.4g}")))
        seen = unseen > 0
        report[f"{chip.family}/bf16 training"] = {
            "fitted": errors(predict(x, everything), measured),
            "unseen expert count": errors(unseen[seen], measured[seen]),
        }
    return constants, report
