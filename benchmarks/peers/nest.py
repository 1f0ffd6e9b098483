"""NEST's cases: the exact optimum of its own model, and of its model with the unit errors put right.

    python -m benchmarks.peers.nest

Own model: our step and plan, and the step that NEST's binary returned where that is published for the same input.
Units right: what NEST's plan takes over what ours takes. With Adam: whether NEST's plan still fits, and our step.
NEST's objective (the longest stage alone, and an all-reduce of the first stage) is not that of our pipelines, so the
search over it is a dynamic programme of its own (:mod:`benchmarks.peers.nest_model`) and not the planner's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from .data import NEST
from .nest_model import UNITS_FIXED, WITH_ADAM, Mode, NestProblem, Plan

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
    """Optima in the three modes; ``adam`` is None where nothing fits; ``gain``: NEST's plan over ours, units right."""

    plan: Plan
    step: float
    fixed_plan: Plan
    gain: float
    nest_fits_adam: bool
    adam: tuple[Plan, float] | None
    cpu_s: float


def solve(case: Case, devices: int) -> Outcome:
    """All modes of one case; ``cpu_s`` is that of the first, reading included."""
    started = time.process_time()
    own = NestProblem(NEST / case.file, devices)
    plan, step = own.solve()
    cpu_s = time.process_time() - started
    fixed = _problem(case, devices, UNITS_FIXED)
    fixed_plan, fixed_step = fixed.solve()
    with_adam = _problem(case, devices, WITH_ADAM)
    try:
        adam: tuple[Plan, float] | None = with_adam.solve()
    except ValueError:
        adam = None
    fits = bool(np.isfinite(with_adam.step_s(plan)))
    return Outcome(plan, step, fixed_plan, fixed.step_s(plan) / fixed_step, fits, adam, cpu_s)


def _problem(case: Case, devices: int, mode: Mode) -> NestProblem:
    return NestProblem(NEST / case.file, devices, mode, case.least_edge_bytes)


def text(plan: Plan) -> str:
    return f"{plan.stages},{plan.tp},{plan.dp}"


def main() -> None:
    print(f"{'case':16s} {'N':>5s} {'p,t,d':>9s} {'own model':>12s} {'NEST':>10s} {'CPU s':>6s}", end="")
    print(f" {'units right':>11s} {'gain':>6s} {'Adam: NEST':>10s} {'ours':>9s} {'step s':>9s}")
    for case in CASES:
        for devices in DEVICES:
            found = solve(case, devices)
            known = case.published.get(devices)
            adam = (text(found.adam[0]), f"{found.adam[1]:.3f}") if found.adam else ("none fits", "")
            print(
                f"{case.name:16s} {devices:5d} {text(found.plan):>9s} {found.step:12.6g} "
                f"{f'{known:.6g}' if known else '':>10s} {found.cpu_s:6.2f} {text(found.fixed_plan):>11s} "
                f"{found.gain:6.3f} {'fits' if found.nest_fits_adam else 'does not':>10s} {adam[0]:>9s} {adam[1]:>9s}"
            )


if __name__ == "__main__":
    main()
