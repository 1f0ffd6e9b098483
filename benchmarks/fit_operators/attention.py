"""Constants of core attention, scans and memory-bound kernels."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from meshwright.cost_models.core_attention import AttentionFit, ScanFit, attention_share, scan_forward_s

from .data import CHIPS, Chip, Floats, columns, errors, profiles, table

#: Length from which a sequence counts as a training shape.
LARGE = 2048
START = np.array([0.4, 0.6, 0.65, 300, 1.0, 2.0, 0.5, 8])
LOW = np.array([0.05, 0.05, 0.05, 0, 0.05, 0.5, 0.1, 0])
HIGH = np.array([1.1, 1.1, 1.1, 2000, 6, 8, 1.0, 40])
SCALE = np.array([0.1, 0.1, 0.1, 100, 0.5, 1, 0.1, 5])
#: Head sizes of MLA in the measured kernels.
LATENT_QK, LATENT_V = 192, 128
#: Families of the generation whose head sizes were measured with the kernels nearest to A100's.
HOPPER = ("h100", "h200")


def unpack(x: Floats) -> AttentionFit:
    v = [float(f"{value:.4g}") for value in x]
    return AttentionFit(
        eff=(v[0], v[1], v[2]), half_keys=v[3], blocks=v[4], blocks_power=v[5], memory_eff=v[6],
        launch_s=float(f"{x[7] * 1e-6:.4g}"), backward_eff=1.0, backward_blocks=v[4], backward_blocks_power=v[5],
    )  # fmt: skip


def forward_s(fit: AttentionFit, chip: Chip, rows: pd.DataFrame) -> Floats:
    """Seconds of causal attention of whole sequences, by (batch, seq, heads, kv_heads, head_dim, window)."""
    batch, length, heads, kv_heads, window = columns(rows, "batch", "seq", "heads", "kv_heads", "window")
    width = np.where(window > 0, np.minimum(window, length), length)
    keys = width - width**2 / (2 * length)
    out = np.zeros(len(rows))
    for dim in rows.head_dim.unique():
        here = (rows.head_dim == dim).to_numpy()
        qk, v = (LATENT_QK, LATENT_V) if dim == LATENT_QK else (dim, dim)
        share, _ = attention_share(fit, chip.sms, length[here], keys[here], (batch * heads)[here], qk)
        work = 2 * batch * heads * length * keys * (qk + v)
        moved = 2 * batch * length * (heads + kv_heads) * (qk + v)
        busy = np.hypot(work[here] / (chip.peak("bf16") * share), moved[here] / (chip.bandwidth * fit.memory_eff))
        out[here] = busy + fit.launch_s
    return out


def narrow_share(hopper: float) -> float:
    """Rate at head size 64 over that at 128 on A100, from the ratio on Hopper.

    A score costs 4 d tensor FLOP and one exponential; the special-function units give 16 of them a clock and SM on both
    (CUDA programming guide, arithmetic throughput), the tensor units 4096 dense 16-bit FLOP on Hopper and 2048 on A100
    (architecture whitepapers). With the two in sequence, the exponentials' share x of the tensor time at 64 obeys
    ratio = (1 + x/2) / (1 + x), and halves with the tensor rate.
    """
    share = (1 - hopper) / (hopper - 0.5) / 2
    return (1 + share / 2) / (1 + share)


def fit_forward() -> tuple[dict[str, dict[str, AttentionFit]], dict[str, Any]]:
    """(constants by kind and family, errors); folds are whole (heads, kv_heads, head_dim) configurations."""
    rows = table("attention")
    rows["kind"] = np.where(rows.head_dim == LATENT_QK, "latent_attention", "attention")
    fits: dict[str, dict[str, AttentionFit]] = {"attention": {}, "latent_attention": {}}
    report: dict[str, Any] = {}
    for (kind, gpu), own in rows.groupby(["kind", "gpu"]):
        chip = CHIPS.get(str(gpu))
        if chip is None:
            continue
        own = own.reset_index(drop=True)
        measured = own["us"].to_numpy() * 1e-6
        weight = np.where((own.seq >= LARGE) & (own.batch <= 8), 1.0, 0.5)

        def fitted(part: Floats) -> Floats:
            result = least_squares(
                lambda x: weight[part] * np.log(forward_s(unpack(x), chip, own[part]) / measured[part]),  # noqa: B023
                START, bounds=(LOW, HIGH), loss="soft_l1", f_scale=0.1, diff_step=1e-3, x_scale=SCALE, max_nfev=60,
            )  # fmt: skip
            return np.asarray(result.x)

        group = own.groupby(["heads", "kv_heads", "head_dim"]).ngroup().to_numpy() % 4
        unseen = np.zeros(len(own))
        for fold in range(4):
            unseen[group == fold] = forward_s(unpack(fitted(group != fold)), chip, own[group == fold])
        fit = unpack(fitted(np.ones(len(own), dtype=bool)))
        if own.head_dim.nunique() == 1:  # one head size measured
            level = fit.eff[1] if kind == "attention" else fit.eff[1] + (fit.eff[2] - fit.eff[1]) * np.log2(1.5)
            fit = replace(fit, eff=(np.nan, float(f"{level:.4g}"), np.nan))
        fits[str(kind)][chip.family] = fit
        large = (own.seq >= LARGE).to_numpy()
        report[f"{kind} {chip.family}, unseen heads"] = {
            "large": errors(unseen[large], measured[large]), "all": errors(unseen, measured),
        }  # fmt: skip
    for kind, by_family in fits.items():
        whole = [f for f in by_family.values() if not np.isnan(f.eff[0])]
        known = [f.eff[0] / f.eff[1] for family, f in by_family.items() if family in HOPPER and not np.isnan(f.eff[0])]
        narrow = narrow_share(float(np.median(known))) if known and kind == "attention" else 1.0
        wide = float(np.median([f.eff[2] / f.eff[1] for f in whole])) if whole else 1.0
        for family, fit in by_family.items():
            if np.isnan(fit.eff[0]):  # A100, at one head size: the others as narrow_share says; MLA has one
                middle = fit.eff[1]
                fits[kind][family] = replace(fit, eff=(round(narrow * middle, 4), middle, round(wide * middle, 4)))
    return fits, report


def fit_training(
    forward: dict[str, dict[str, AttentionFit]],
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Any]]:
    """By kind and family, from SimuMax's training kernels: how both passes fill the chip, backward over forward rate.

    Its FLOP count takes the whole score matrix, of which a causal kernel computes half. The level of its host, fitted
    on the forward pass, is divided out.
    """
    rows = profiles()
    rows = rows[(rows.source_repo == "MooreThreads/SimuMax") & rows.op.isin(("sdp_fwd", "sdp_bwd"))]
    ahead_names = ("blocks", "blocks_power")
    names = ("backward_eff", "backward_blocks", "backward_blocks_power")
    out: dict[str, dict[str, dict[str, float]]] = {"attention": {}, "latent_attention": {}}
    report: dict[str, Any] = {}
    for gpu, chip in (("B200", CHIPS["b200_sxm"]), ("A100-80GB-PCIe", CHIPS["a100_sxm"])):
        for kind, wide in (("attention", False), ("latent_attention", True)):
            own = rows[(rows.gpu == gpu) & (rows.head_dim.str.startswith(str(LATENT_QK)) == wide)]
            seq, heads, rate = columns(own, "seq", "heads", "tflops")
            back, base = (own.op == "sdp_bwd").to_numpy(), forward[kind][chip.family]
            measured = rate * 1e12 / 2 / chip.peak("bf16")

            def shares(x: Floats) -> tuple[Floats, Floats]:
                """x: blocks and power forward; ratio, blocks and power backward."""
                fit = replace(base, **dict(zip((*ahead_names, *names), x, strict=True)))  # noqa: B023
                return attention_share(fit, chip.sms, seq, seq / 2, heads, LATENT_QK if wide else LATENT_V)  # noqa: B023

            def ahead(x: Floats) -> Floats:
                return np.asarray(x[2] * shares(np.r_[x[:2], 1, 1, 1])[0][~back])  # noqa: B023

            first = least_squares(
                lambda x: np.log(ahead(x) / measured[~back]), [1.0, 2.0, 0.9],  # noqa: B023
                bounds=([0.05, 1.0, 0.5], [6, 8, 1.5]), loss="soft_l1", f_scale=0.1,
            ).x  # fmt: skip
            target = measured[back] / first[2]
            second = least_squares(
                lambda x: np.log(shares(np.r_[first[:2], x])[1][back] / target), [0.8, 1.0, 2.0],  # noqa: B023
                bounds=([0.3, 0.02, 1.0], [1.3, 6, 8]), loss="soft_l1", f_scale=0.1,
            ).x  # fmt: skip
            x = np.r_[first[:2], second]
            out[kind][chip.family] = {n: float(f"{v:.3g}") for n, v in zip((*ahead_names, *names), x, strict=True)}
            report[f"{kind} {chip.family}"] = {
                "level over the burst fit": round(float(first[2]), 3),
                "forward": errors(ahead(first), measured[~back]),
                "backward": errors(shares(x)[1][back], target),
            }
    return out, report


def complete(
    forward: dict[str, AttentionFit], training: dict[str, dict[str, float]], blackwell: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Constants by family: Blackwell takes B200's training kernels, A100 its own; others keep their forward pass and
    take the mean backward."""
    backward = [n for n in training["b200"] if n.startswith("backward")]
    mean = {n: float(f"{np.mean([t[n] for t in training.values()]):.3g}") for n in backward}
    out = {}
    for family, fit in forward.items():
        own = training["b200"] if family in blackwell else training.get(family, mean)
        constants = asdict(replace(fit, **own))
        out[family] = {**constants, "eff": list(constants["eff"])}
    return out


def fit_scans() -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Any]]:
    """Constants of the chunked scans that training runs too (flash-linear-attention's Triton kernels)."""
    rows = table("scan")
    out: dict[str, dict[str, dict[str, float]]] = {}
    report: dict[str, Any] = {}
    for name, kernel in (("scan", "chunk_gated_delta_rule"), ("scan_kda", "chunk_kda")):
        for gpu, own in rows[rows.kernel == kernel].groupby("gpu"):
            chip = CHIPS.get(str(gpu))
            if chip is None or (gpu == "h200_sxm" and name == "scan"):
                continue  # H200's gated-delta table lies on two levels, 1.8 times apart: it takes H100's constants
            batch, seq, heads, dim = columns(own, "batch", "seq", "v_heads", "head_dim")
            measured, flops = own["us"].to_numpy() * 1e-6, 6 * batch * seq * heads * dim**2

            def predict(x: Floats) -> Floats:
                fit = ScanFit(x[0], x[1] * 1e-6, x[2] * 1e-6)
                return scan_forward_s(fit, chip.peak("bf16"), chip.sms, flops, batch * heads, seq)  # noqa: B023

            x = least_squares(
                lambda x: np.log(predict(x) / measured), [0.05, 1, 20],  # noqa: B023
                bounds=([0.001, 0, 0], [1, 50, 300]), x_scale=[0.05, 1, 20], loss="soft_l1", f_scale=0.2,
            ).x  # fmt: skip
            fit = ScanFit(float(f"{x[0]:.3g}"), float(f"{x[1] * 1e-6:.3g}"), float(f"{x[2] * 1e-6:.3g}"))
            out.setdefault(chip.family, {})[name] = asdict(fit)
            report[f"{chip.family}/{kernel}"] = errors(predict(x), measured)
    return out, report


def fit_convolutions() -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Bandwidth share of the short causal convolution before a scan, in and out at 16 bit (Dao-AILab/causal-conv1d)."""
    out: dict[str, dict[str, float]] = {}
    report: dict[str, Any] = {}
    for gpu, own in table("convolution").groupby("gpu"):
        chip = CHIPS.get(str(gpu))
        if chip is None:
            continue
        tokens = own.batch.to_numpy(float) * own.seq.to_numpy(float)
        groups, heads, dim, state = columns(own, "k_heads", "v_heads", "head_dim", "d_state")
        moved, measured = 4 * tokens * (heads * dim + 2 * groups * state), own["us"].to_numpy() * 1e-6
        large = moved > 4e8  # smaller ones are read from the caches
        share = float(np.median(moved[large] / measured[large]) / chip.bandwidth)
        out[chip.family] = {"convolution": round(share, 3)}
        report[chip.family] = errors(moved[large] / (share * chip.bandwidth), measured[large])
    return out, report


def fit_streams() -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Bandwidth share and fixed seconds of a memory-bound kernel: a cast of a 16-bit matrix to fp8 with a known scale.

    The share is that of matrices larger than the caches; a smaller one would be read from them.
    """
    rows = table("cast")
    rows = rows[rows.op == "quant_fp8_static"]
    out: dict[str, dict[str, float]] = {}
    report: dict[str, Any] = {}
    for gpu, own in rows.groupby("gpu"):
        chip = CHIPS.get(str(gpu))
        if chip is None:
            continue
        m, k = columns(own, "m", "k")
        moved, measured = 3 * m * k, own["us"].to_numpy() * 1e-6
        large = moved > 4e8
        start = float(np.quantile(measured, 0.02))
        share = float(np.median(moved[large] / (measured[large] - start)) / chip.bandwidth)
        out[chip.family] = {"memory": round(min(share, 0.95), 3), "kernel_s": float(f"{start:.3g}")}
        report[chip.family] = errors((moved / (share * chip.bandwidth) + start)[large], measured[large])
    return out, report
