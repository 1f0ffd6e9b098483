"""How much of its peak a GPU type reaches: constants by family, read from ``data/efficiency.json``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.specs.cluster import GpuType


@dataclass(frozen=True)
class GemmFit:
    """Constants of the GEMM formula of :func:`~.operators.gemm_s`.

    ``eff`` is the share of the dense peak inside a full tile, ``overhead_k`` the depth of K that filling and draining a
    tile costs, ``launch_s`` the fixed time of a call, ``wave_hardness`` how much of a partly filled last wave is paid,
    ``tile_exponent`` how fast small tiles lose rate, ``bandwidth_eff`` the share of memory bandwidth.
    """

    eff: float
    overhead_k: float
    launch_s: float
    wave_hardness: float
    tile_exponent: float
    bandwidth_eff: float


@dataclass(frozen=True)
class AttentionFit:
    """Constants of :func:`~.operators.attention_forward_s`: peak share by head size, half-rate length, fixed time."""

    eff: float
    half_length: float
    launch_s: float
    backward_eff: float


@dataclass(frozen=True)
class Efficiency:
    """All constants of one GPU type at one precision; ``rung`` says where they come from."""

    gemm: GemmFit
    dense_gemm: GemmFit
    attention: AttentionFit
    sustained: float
    grouped: float
    scan: float
    memory: float
    permute: float
    optimizer: float
    kernel_s: float
    host_call_s: float
    rung: str


@cache
def tables() -> dict[str, Any]:
    """The shipped constants with their sources."""
    out: dict[str, Any] = json.loads(files("meshwright.cost_models.data").joinpath("efficiency.json").read_text())
    return out


def family_of(gpu: GpuType) -> str:
    """The family whose constants a GPU type takes: by name, else by vendor and compute capability."""
    name = re.sub(r"[^A-Z0-9]", "", gpu.name.upper())
    families = tables()["families"]
    matches = [(len(p), family) for family, data in families.items() for p in data["names"] if name.startswith(p)]
    if matches:
        return str(max(matches)[1])  # the longest prefix, so that A100 is no A10
    if gpu.vendor == "amd":
        return "cdna3"
    capability = gpu.compute_capability or 0.0
    by_capability = [(data["capability"], family) for family, data in families.items() if "capability" in data]
    known = [(floor, family) for floor, family in sorted(by_capability) if floor <= capability]
    return str(known[-1][1]) if known else "default"


@cache
def _efficiency(family: str, precision: str) -> Efficiency:
    data = tables()
    own: dict[str, Any] = data["families"].get(family, {})
    merged: dict[str, Any] = {**data["defaults"], **own}
    gemm: dict[str, dict[str, float]] = {**data["defaults"]["gemm"], **own.get("gemm", {})}
    wanted = {"fp16": "bf16", "tf32": "bf16", "fp32": "bf16"}.get(precision, precision)
    if precision in ("fp32", "tf32") and "fp32" in own.get("gemm", {}):
        wanted = "fp32"  # measured at 32 bit: of the tf32 peak where the type has tf32 units
    measured = wanted in own.get("gemm", {})
    return Efficiency(
        gemm=GemmFit(**gemm[wanted]),
        dense_gemm=GemmFit(**gemm["fp32" if wanted == "fp32" else "bf16"]),
        attention=AttentionFit(**{**data["defaults"]["attention"], **own.get("attention", {})}),
        sustained=merged["sustained"],
        grouped=merged["grouped"],
        scan=merged["scan"],
        memory=merged["memory"],
        permute=merged["permute"],
        optimizer=merged["optimizer"],
        kernel_s=merged["kernel_s"],
        host_call_s=merged["host_call_s"],
        rung="shipped fit" if measured else "spec roofline",
    )


def efficiency(gpu: GpuType, precision: str) -> Efficiency:
    """Constants of ``gpu`` at ``precision``."""
    return _efficiency(family_of(gpu), precision)
