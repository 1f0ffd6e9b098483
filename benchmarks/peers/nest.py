"""NEST's cases: the exact optimum of its own model, and of its model with the unit errors put right.

    python -m benchmarks.peers.nest

Own model: our step and plan, and the step that NEST's binary returned where that is published for the same input.
NEST plan / ours: with compute and messages in the same unit and recomputed forwards at a forward's price (units), and
with an activation of Mixtral's at its real size (+ edges). 16 bytes a parameter (Adam): whether NEST's plan still fits.
NEST's objective (the longest stage alone, and an all-reduce of the first stage) is not that of our pipelines, so the
search over it is a dynamic programme of its own (:mod:`benchmarks.peers.nest_model`) and not the planner's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from .data import NEST
from .nest_model import UNITS_FIXED, WITH_ADAM, NestProblem, Plan

DEVICES = (64, 128, 256, 512, 1024)
#: An activation of Mixtral's at sequence 4096: its input has the bytes of another edge (see the profile's notes).
MIXTRAL_EDGE_BYTES = 33_554_432.0


@dataclass(frozen=True)
class Case:
    """A solver input and the steps that NEST's own binary is published to return on it, by number of devices."""

    name: str
    file: str
    published: dict[int, float]
    least_edge_bytes: float = 0.0


#: TPUv4 inputs carry layer times of another integer-programming solver than the published steps, up to 1% apart.
CASES = (
    Case("H100 Mixtral", "h100_spineLeaf__mixtral_mbs1.json", {128: 29796.4, 1024: 4419.16}, MIXTRAL_EDGE_BYTES),
    Case("TPUv4 Llama2-7B", "tpuv4_fatTree__llama2_mbs1.json", {64: 997065.0, 1024: 75055.5}),
    Case("TPUv4 BERT", "tpuv4_fatTree__megatronbert_mbs1.json", {64: 2433.88, 512: 304.265}),
    Case("TPUv4 GPT-3", "tpuv4_fatTree__megatrongpt3_mbs1.json", {64: 10004307.0}),
)


@dataclass(frozen=True)
class Outcome:
    """``plan`` and ``step``: the optimum of NEST's own model. ``units``, ``edges``: what ``plan`` takes over the
    optimum once units (and, in ``edges``, message sizes) are right. ``adam``: the optimum with 16 bytes a parameter,
    None where nothing fits; ``nest_fits_adam``: whether ``plan`` fits then."""

    plan: Plan
    step: float
    units: float
    edges: float
    nest_fits_adam: bool
    adam: tuple[Plan, float] | None
    cpu_s: float


def solve(case: Case, devices: int) -> Outcome:
    """All modes of one case; ``cpu_s`` is that of the own model, reading included."""
    started = time.process_time()
    plan, step = NestProblem(NEST / case.file, devices).solve()
    cpu_s = time.process_time() - started
    gains = []
    for least_edge_bytes in (0.0, case.least_edge_bytes):
        problem = NestProblem(NEST / case.file, devices, UNITS_FIXED, least_edge_bytes)
        gains.append(problem.step_s(plan) / problem.solve()[1])
    with_adam = NestProblem(NEST / case.file, devices, WITH_ADAM, case.least_edge_bytes)
    fits = bool(np.isfinite(with_adam.step_s(plan)))
    try:
        adam: tuple[Plan, float] | None = with_adam.solve()
    except ValueError:
        adam = None
    return Outcome(plan, step, gains[0], gains[1], fits, adam, cpu_s)


def text(plan: Plan) -> str:
    """Stages, tensor-parallel degree and replicas, as NEST's tables have them."""
    return f"{plan.stages},{plan.tp},{plan.dp}"


def main() -> None:
    print(f"{'':22s} {'own model':>32s} {'':6s}   {'NEST plan / ours':>16s}   {'16 bytes a parameter':>30s}")
    print(f"{'case':16s} {'N':>5s} {'p,t,d':>9s} {'step':>11s} {'NEST':>10s} {'CPU s':>6s}", end="")
    print(f"   {'units':>8s} {'+ edges':>7s}   {'NEST plan':>9s} {'ours':>9s} {'step s':>10s}")
    for case in CASES:
        for devices in DEVICES:
            found = solve(case, devices)
            known = case.published.get(devices)
            adam = (text(found.adam[0]), f"{found.adam[1]:.3f}") if found.adam else ("none fits", "")
            print(
                f"{case.name:16s} {devices:5d} {text(found.plan):>9s} {found.step:11.6g} "
                f"{f'{known:.6g}' if known else '':>10s} {found.cpu_s:6.2f}   {found.units:8.4f} {found.edges:7.4f}   "
                f"{'fits' if found.nest_fits_adam else 'too full':>9s} {adam[0]:>9s} {adam[1]:>10s}"
            )


if __name__ == "__main__":
    main()
