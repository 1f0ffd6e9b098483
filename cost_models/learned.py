"""Corrections learned from published runs: factors of named terms by stack, release, GPU and precision.

The logarithm of a term's factor is a sum over the *levels* that describe a run, from general (the GPU architecture) to
special (one release of one stack). The coefficients come from a ridge regression (``benchmarks/fit_learned.py``), in
which a level that saw few runs stays near zero: a run unlike all others gets the bare physics. Read from
``data/learned.json`` and evaluated here; nothing is learned at run time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.specs.cluster import GpuType
from meshwright.specs.model import ModelSpec

from .multipliers import Multipliers

#: NVIDIA architectures by compute capability (CUDA programming guide, table of compute capabilities).
ARCHITECTURES = ((7.0, "volta"), (7.5, "turing"), (8.0, "ampere"), (8.6, "ampere-rtx"), (8.9, "ada"), (9.0, "hopper"),
                 (10.0, "blackwell"))  # fmt: skip
#: Precisions whose products run at more than the 16-bit rate.
LOW_PRECISION = ("fp8", "mxfp8", "nvfp4")


#: Stacks that run the same code in other ways, and the family they share.
FAMILIES = {
    "nemo": "megatron", "megatron-bridge": "megatron", "megatron-lm": "megatron",
    "sailor-deepspeed": "megatron-deepspeed",
}  # fmt: skip
#: The stack whose runs speak for plans of a target: Megatron-Bridge's releases of 2026 ship the core that
#: Megatron-LM 0.16 to 0.20 do.
STACK_OF_TARGET = {"megatron": "megatron-bridge", "bridge": "megatron-bridge"}


@dataclass(frozen=True)
class Traits:
    """What corrections may depend on: never the plan. ``shape`` is :func:`shape_of` a mixture of experts, else empty.

    Dense models differ in sizes that the physics knows. What a mixture's router, dispatch and grouped products cost
    differs by architecture on every GPU alike, beyond that.
    """

    stack: str
    release: str
    gpu: str
    architecture: str
    precision: str
    moe: bool
    shape: str = ""

    def levels(self) -> tuple[str, ...]:
        """Names of the levels that hold, from general to special."""
        kind = "moe" if self.moe else "dense"
        low = self.precision if self.precision in LOW_PRECISION else "16-bit"
        return (
            f"architecture={self.architecture}",
            f"gpu={self.gpu}",
            f"architecture|precision={self.architecture}|{low}",
            f"family={self.family}",
            f"family|kind={self.family}|{kind}",
            self.family_on_architecture,
            f"family|architecture|precision={self.family}|{self.architecture}|{low}",
            f"stack={self.stack}",
            f"stack|kind={self.stack}|{kind}",
            f"stack|release={self.stack}|{self.release}",
            f"stack|release|kind={self.stack}|{self.release}|{kind}",
            *((f"family|shape={self.family}|{self.shape}",) if self.shape else ()),
        )

    @property
    def family_on_architecture(self) -> str:
        """The level that says whether the family was seen on this architecture at all."""
        return f"family|architecture={self.family}|{self.architecture}"

    @property
    def family(self) -> str:
        """Stacks that run the same code share a family."""
        return FAMILIES.get(self.stack, self.stack)


def shape_of(model: ModelSpec) -> str:
    """An architecture whatever its name: ``80x8192`` layers and hidden size, with experts ``61x7168-256e8k``."""
    experts = f"-{model.moe.num_experts}e{model.moe.top_k}k" if model.moe else ""
    return f"{model.num_layers}x{model.hidden_size}{experts}"


def architecture_of(gpu: GpuType) -> str:
    """Architecture that a GPU type belongs to, by compute capability; an AMD type stands for itself."""
    if gpu.vendor == "amd":
        return "cdna4" if gpu.name.startswith("MI35") else "cdna3" if gpu.name.startswith("MI3") else "cdna2"
    known = [name for floor, name in ARCHITECTURES if floor <= (gpu.compute_capability or 0.0)]
    return known[-1] if known else "unknown"


@cache
def shipped() -> dict[str, Any]:
    """The fitted coefficients with where they come from."""
    out: dict[str, Any] = json.loads(files("meshwright.cost_models.data").joinpath("learned.json").read_text())
    return out


def multipliers_of(traits: Traits, table: Mapping[str, Mapping[str, float]]) -> Multipliers:
    """Factors from ``table``: level to coefficient (natural logarithm) by term."""
    logs: dict[str, float] = {}
    for level in traits.levels():
        for term, value in table.get(level, {}).items():
            logs[term] = logs.get(term, 0.0) + value
    return Multipliers.bounded({term: math.exp(value) for term, value in logs.items()})


@cache
def shipped_multipliers(traits: Traits) -> Multipliers:
    """The shipped corrections for ``traits``."""
    return multipliers_of(traits, shipped()["levels"])


@cache
def interval_of(traits: Traits) -> tuple[float, float, float]:
    """(low, high, level): the interval's ends over the estimate, and the share of runs that lie inside.

    Each part was measured on runs that the fit had not seen: ``groups`` on left-out architectures of a known stack and
    GPU, wider where the stack (``new_stack``) or the GPU architecture (``new_architecture``) is new.
    """
    data = shipped()["interval"]
    kind = "moe" if traits.moe else "dense"
    widths = data["groups"]
    low, high = widths.get(f"{traits.stack}|{kind}") or widths.get(traits.stack) or data["new_stack"][kind]
    if traits.family_on_architecture not in shipped()["levels"]:
        wide_low, wide_high = data["new_architecture"][kind]
        low, high = min(low, wide_low), max(high, wide_high)
    return low, high, data["level"]
