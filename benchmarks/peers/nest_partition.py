"""NEST's stages in the planner's own partition: with very many micro-batches its 1F1B bound is the longest stage alone.

The partition takes what adds up over the layers of a stage: what a stage keeps of its input in flight is that of a
chain whose messages are all alike, and the all-reduce of the first stage is left out until splits are compared.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.engine.partition import StageTables, split_1f1b

from .nest_model import NestProblem, Plan

#: So many that one pass through the pipeline is nothing beside them.
MICRO_BATCHES = 2**40


def split(problem: NestProblem, tp: int, stages: int) -> tuple[tuple[int, ...], float]:
    """The split with the shortest longest stage, and that stage's time; inf where none fits."""
    chain = problem.chains[tp]
    own = np.arange(chain.layers)
    forward, backward = chain.forward[own, own + 1], chain.backward[own, own + 1]
    again = forward if problem.mode.recompute_forward else backward
    parameters, activations = chain.parameter_bytes[own, own + 1], chain.activation_bytes[own, own + 1]
    message = float(chain.received_bytes[1, 2])
    busy, held = np.empty((2, 1, stages, chain.layers))
    room, receive = np.empty((2, 1, stages))
    for index in range(stages):
        after = stages - 1 - index
        arrives = message if index else 0.0
        busy[0, index] = forward + backward + (again if problem.recomputes and after else 0.0)
        kept = 0.0 if problem.recomputes else after * activations
        held[0, index] = (8 if problem.mode.adam else 2) * parameters + activations + kept
        room[0, index] = problem.memory_bytes - (after * arrives if problem.recomputes else 0.0)
        receive[0, index] = float(problem.receive_s(np.array(arrives), after, tp * problem.width))
    nothing = np.zeros((1, stages, chain.layers))
    found = split_1f1b(
        StageTables(
            busy_s=busy,
            bytes_=held,
            transient_bytes=nothing[:, 0],
            capacity_bytes=room,
            send_s=receive,
            micro_batches=np.array([MICRO_BATCHES]),
            counted=np.ones(chain.layers),
            leading=np.array([0]),
            extra_busy_s=nothing,
            extra_bytes=nothing,
            extra_transient_bytes=nothing[:, 0],
        )
    )
    return tuple(int(cut) for cut in found.cuts[0]), float(found.bound_s[0]) / MICRO_BATCHES


def solve_by_partition(problem: NestProblem) -> tuple[Plan, float]:
    """The best plan over the partition's split for every degree and number of stages, and its seconds."""
    best: tuple[float, Plan] | None = None
    for tp, chain in problem.chains.items():
        width = tp * problem.width
        for stages in range(1, min(chain.layers, problem.devices // width) + 1):
            cuts, longest = split(problem, tp, stages)
            replicas = problem.devices // (width * stages)
            least = longest * (np.ceil(problem.micro_batches / replicas) + stages - 1)
            if best is not None and not least < best[0]:
                continue
            plan = problem.best_replicas(tp, cuts)
            if plan is not None and (best is None or problem.step_s(plan) < best[0]):
                best = (problem.step_s(plan), plan)
    if best is None:
        raise ValueError("nothing fits")
    return best[1], best[0]
