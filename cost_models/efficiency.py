"""How much of its peak a GPU type reaches: constants by family, read from ``data/efficiency.json``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import GpuType

from .core_attention import AttentionFit, ScanFit
from .gemm import GemmFit

#: log2 of the FLOP of a product between which the clock falls to its sustained rate. Shorter calls do not draw the
#: power that lowers it: below 2^33 FLOP sustained and burst runs are equally fast on H200, B200 and GB200
#: (benchmarks/data/operators/sustained.csv).
#: In FLOP at 16 bit: at twice the rate a call of twice the FLOP takes as long.
DERATE_FROM, DERATE_TO = 33.0, 35.0
#: Precisions that run on the 16-bit constants.
SIXTEEN_BIT = {"fp16": "bf16", "tf32": "bf16", "fp32": "bf16"}


@dataclass(frozen=True, eq=False)
class Efficiency:
    """All constants of one GPU type at one precision; ``rung`` says where they come from.

    ``dense_*`` is for products that stay at 16 bit. ``sustained`` is the speed of large products at a long run's clocks
    over a burst, ``weight_gradient`` the rate of a weight gradient over a forward product. ``latent_attention`` is MLA:
    queries and keys wider than values. ``memory``, ``convolution`` (the short one before a scan), ``permute`` and
    ``optimizer`` are shares of the memory bandwidth, ``kernel_s`` the fixed seconds of a memory-bound kernel,
    ``host_call_s`` what a framework call costs the host.
    ``sigma`` is the relative uncertainty (log scale) of the seconds of a large product: the spread of the fit and of
    hosts, or what leaving a GPU type out of the fit costs where none was measured.
    """

    gemm: GemmFit
    dense_gemm: GemmFit
    grouped: GemmFit
    dense_grouped: GemmFit
    attention: AttentionFit
    latent_attention: AttentionFit
    scan: ScanFit
    scan_kda: ScanFit
    sustained: float
    dense_sustained: float
    weight_gradient: float
    memory: float
    convolution: float
    permute: float
    optimizer: float
    kernel_s: float
    host_call_s: float
    sigma: float
    rung: str


def sustained_share(plateau: float, flops: npt.ArrayLike, speedup: float = 1.0) -> FloatArray:
    """Speed of a product of ``flops`` in a long run over a burst: 1 when small, ``plateau`` when large.

    ``speedup`` is the precision's peak over that of 16 bit.
    """
    size = np.log2(np.maximum(np.asarray(flops, dtype=float) / speedup, 1.0))
    part = np.minimum(np.maximum((size - DERATE_FROM) / (DERATE_TO - DERATE_FROM), 0.0), 1.0)
    out: FloatArray = 1.0 - (1.0 - plateau) * part
    return out


@cache
def tables() -> dict[str, Any]:
    """The shipped constants with their sources."""
    out: dict[str, Any] = json.loads(_read("efficiency.json"))
    return out


@cache
def corrections() -> dict[str, list[int]]:
    """Fitted corrections of the GEMM formula by ``family/precision``, in thousandths of a natural logarithm."""
    out: dict[str, list[int]] = json.loads(_read("gemm_corrections.json"))["tables"]
    return out


def _read(name: str) -> str:
    return files("meshwright.cost_models.data").joinpath(name).read_text()


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
def _efficiency(family: str, precision: str, named: bool) -> Efficiency:
    data = tables()
    own: dict[str, Any] = data["families"].get(family, {})
    defaults = data["defaults"]
    merged: dict[str, Any] = {**defaults, **own}
    wanted = SIXTEEN_BIT.get(precision, precision)
    if precision in ("fp32", "tf32") and "fp32" in own.get("gemm", {}):
        wanted = "fp32"  # measured at 32 bit: of the tf32 peak where the type has tf32 units
    dense, low = ("fp32", "bf16") if wanted == "fp32" else ("bf16", wanted)

    def product(kind: str, at: str) -> GemmFit:
        constants = {**defaults[kind], **own.get(kind, {})}[at]
        table = corrections().get(f"{family}/{at}") if kind == "gemm" else None
        return GemmFit(**constants, correction=None if table is None else np.array(table) / 1000.0)

    spread = own.get("sigma", {}) if named else {}  # by precision that was measured
    unseen = defaults["sigma"] | own.get("sigma_of_kin", {})

    def attention(kind: str) -> AttentionFit:
        constants = {**defaults[kind], **own.get(kind, {})}
        return AttentionFit(**{**constants, "eff": tuple(constants["eff"])})

    sustained = {**defaults["sustained"], **own.get("sustained", {})}
    return Efficiency(
        gemm=product("gemm", wanted),
        dense_gemm=product("gemm", dense),
        grouped=product("grouped", low),
        dense_grouped=product("grouped", "bf16"),
        attention=attention("attention"),
        latent_attention=attention("latent_attention"),
        scan=ScanFit(**merged["scan"]),
        scan_kda=ScanFit(**merged["scan_kda"]),
        sustained=sustained[wanted],
        dense_sustained=sustained[dense],
        weight_gradient=merged["weight_gradient"],
        memory=merged["memory"],
        convolution=merged["convolution"],
        permute=merged["permute"],
        optimizer=merged["optimizer"],
        kernel_s=merged["kernel_s"],
        host_call_s=merged["host_call_s"],
        sigma=spread.get(wanted, unseen[low]),
        rung="shipped fit" if wanted in spread else "spec roofline",
    )


def efficiency(gpu: GpuType, precision: str) -> Efficiency:
    """Constants of ``gpu`` at ``precision``. A type that only shares a generation with a measured one takes its
    constants, with the uncertainty of a type that was not measured."""
    family = family_of(gpu)
    name = re.sub(r"[^A-Z0-9]", "", gpu.name.upper())
    named = any(name.startswith(p) for p in tables()["families"].get(family, {"names": ()})["names"])
    return _efficiency(family, precision, named)
