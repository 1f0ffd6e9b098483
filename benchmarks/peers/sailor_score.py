"""Scores of a plan in Sailor's format, from its profile: event by event, and by Sailor's closed form.

Events: every replica chain runs 1F1B. ``blocking`` sends hold their sender, as DeepSpeed's do; others run beside
compute. A step ends with the slowest stage's all-reduce. The closed form is the one published for Sailor, (M - 1) times
the straggler plus one pass, its messages, the all-reduce and the update. Its published scores follow where a stage is
charged for the link from the stage before it; whether the first stage pays for its only link they do not say. The
careful form charges every stage for the slower of its links and is never above the other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .sailor_tables import MEMORY_BYTES, RESERVED_BYTES, STATIC_BYTES_PER_PARAMETER, Machine, SailorTables


@dataclass(frozen=True)
class Chain:
    """One replica of the pipeline: its machines and, for one micro-batch, seconds of stages and of boundaries."""

    machines: tuple[Machine, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """Iterations per second by events and by the closed and the careful form, and the stages that do not fit."""

    events_per_s: float
    blocking_events_per_s: float
    closed_form_per_s: float
    careful_form_per_s: float
    too_full: tuple[int, ...]


def score(plan: dict[str, Any], tables: SailorTables, global_batch: int, *, events: bool = True) -> Score:
    """The scores of a plan file, those by events only where asked for (else 0); ValueError for a plan that is not one
    whole pipeline over all layers."""
    chains, layers, batch = chains_of(plan, tables)
    replicas, stages = len(chains), len(layers)
    if global_batch % (replicas * batch):
        raise ValueError(f"a batch of {global_batch} is no multiple of {replicas} replicas x {batch}")
    count = global_batch // (replicas * batch)
    reduce_s, update_s = [], []
    for stage, held in enumerate(layers):
        machines = tuple(chain.machines[stage] for chain in chains)
        of = [tables.params(m.gpu, m.tp, batch)[list(held)].sum() for m in machines]
        reduce_s.append(tables.reduce_s(machines, float(max(of))))
        update_s.append(max(float(tables.update_s(m.gpu, m.tp, batch)[list(held)].sum()) for m in machines))
    kinds = list(dict.fromkeys(chains))
    free, held_up = (
        max(max(finish_s(chain, count, blocking=blocking)) for chain in kinds) + max(reduce_s) if events else math.inf
        for blocking in (False, True)
    )
    tail = max(a + b for a, b in zip(reduce_s, update_s, strict=True))
    closed = max(closed_form_s(chain, count) for chain in kinds) + tail
    careful = max(closed_form_s(chain, count, careful=True) for chain in kinds) + tail
    full = [
        s
        for s in range(stages)
        if any(not _fits(c.machines[s], layers[s], stages - s, count, batch, tables) for c in kinds)
    ]
    return Score(1 / free, 1 / held_up, 1 / closed, 1 / careful, tuple(full))


def chains_of(plan: dict[str, Any], tables: SailorTables) -> tuple[list[Chain], list[tuple[int, ...]], int]:
    """The replicas of a plan, the layers of its stages and its micro-batch size."""
    batch, (pipeline,) = int(plan["mbs"]), plan["pipeline_list"]
    layers = [tuple(int(layer) for layer in stage) for stage in pipeline["layers_per_stage"]]
    if [layer for stage in layers for layer in stage] != list(range(tables.num_layers)) or not all(layers):
        raise ValueError(f"the stages must hold the layers 0 to {tables.num_layers - 1} in order, none empty")
    if len(set(pipeline["dp"])) != 1 or len(pipeline["dp"]) != len(layers) != pipeline["num_stages"]:
        raise ValueError("all stages must have the same number of replicas")
    chains: list[Chain] = []
    known: dict[tuple[Machine, ...], Chain] = {}
    for replica in range(pipeline["dp"][0]):
        machines = []
        for stage in pipeline["tmp_per_stage"]:
            ((gpu, gpus, zone),), tp = stage[replica]
            if gpus != tp:
                raise ValueError(f"a tensor group of {tp} must be one machine of as many GPUs, got {gpus}")
            machines.append(Machine(gpu, tp, zone))
        if (key := tuple(machines)) not in known:
            known[key] = _chain(key, layers, batch, tables)
        chains.append(known[key])
    return chains, layers, batch


def _chain(machines: tuple[Machine, ...], layers: Sequence[tuple[int, ...]], batch: int, tables: SailorTables) -> Chain:
    pairs = list(zip(machines, layers, strict=True))
    sends = []
    for (machine, held), peer in zip(pairs, machines[1:], strict=False):
        size = float(tables.output_bytes(machine.gpu, machine.tp, batch)[held[-1]])
        sends.append(tables.send_s(machine, peer, size))
    return Chain(
        machines,
        tuple(float(tables.forward_s(m.gpu, m.tp, batch)[list(held)].sum()) for m, held in pairs),
        tuple(float(tables.backward_s(m.gpu, m.tp, batch)[list(held)].sum()) for m, held in pairs),
        tuple(sends),
    )


def finish_s(chain: Chain, count: int, *, blocking: bool) -> list[float]:
    """When every stage ends the last backward of ``count`` micro-batches under 1F1B, seconds."""
    stages = len(chain.forward_s)
    orders = [_order(stages - 1 - stage, count) for stage in range(stages)]
    place, clock = [0] * stages, [0.0] * stages
    done: dict[tuple[str, int, int], float] = {}
    left = sum(map(len, orders))
    while left:
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, batch = order[place[stage]]
                ahead = kind == "forward"
                source = stage - 1 if ahead else stage + 1
                begin = clock[stage]
                if 0 <= source < stages:
                    sent = done.get((kind, source, batch))
                    if sent is None:
                        break
                    begin = max(begin, sent + (0.0 if blocking else chain.send_s[min(stage, source)]))
                span = chain.forward_s[stage] if ahead else chain.backward_s[stage]
                target = stage + 1 if ahead else stage - 1
                if blocking and 0 <= target < stages:
                    span += chain.send_s[min(stage, target)]
                clock[stage] = done[kind, stage, batch] = begin + span
                place[stage] += 1
                left -= 1
    return clock


def _order(warm_up: int, count: int) -> list[tuple[str, int]]:
    first = min(warm_up, count)
    out = [("forward", batch) for batch in range(first)]
    for batch in range(count):
        if batch + first < count:
            out.append(("forward", batch + first))
        out.append(("backward", batch))
    return out


def closed_form_s(chain: Chain, count: int, *, careful: bool = False) -> float:
    """Seconds of a step by the closed or the careful form, without all-reduce and update."""
    busy = [f + b for f, b in zip(chain.forward_s, chain.backward_s, strict=True)]
    links = [0.0, *chain.send_s]
    if careful:
        links = [max(ends) for ends in zip(links, [*chain.send_s, 0.0], strict=True)]
    straggler = max(b + 2 * link for b, link in zip(busy, links, strict=True))
    return (count - 1) * straggler + sum(busy) + 2 * sum(chain.send_s)


def _fits(machine: Machine, held: tuple[int, ...], after: int, count: int, batch: int, tables: SailorTables) -> bool:
    """Whether a stage fits: states of its layers and the activations of the micro-batches in flight."""
    params = float(tables.params(machine.gpu, machine.tp, batch)[list(held)].sum())
    kept = float(tables.activation_bytes(machine.gpu, machine.tp, batch)[list(held)].sum())
    used = STATIC_BYTES_PER_PARAMETER * params + kept * min(after, count) + RESERVED_BYTES
    return used <= MEMORY_BYTES[machine.gpu]
