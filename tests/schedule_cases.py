"""What the schedule tests share: where places lie and how long a run takes, written without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from meshwright.cost_models import schedules
from meshwright.specs.plan import Plan
from meshwright.specs.schedules import ScheduleName

#: Kinds of operations as the orders number them.
F, BW, B, W, JOINED = range(5)
TWO_CHUNKS = ("zb-v", "v-half", "v-min", "dualpipe-v")
ALL = ("1f1b", "interleaved", "gpipe", "looped-bfs", "zb-h1", "zb-auto", "dualpipe", *TWO_CHUNKS)
SPLIT = ("zb-h1", "zb-auto", "dualpipe", *TWO_CHUNKS)


@dataclass(frozen=True)
class Case:
    """A pipeline: seconds [P, V] of the chunks a rank holds, sends [P - 1], micro-batches."""

    name: str
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    send: np.ndarray
    m: int

    @property
    def pp(self) -> int:
        return self.forward.shape[0]

    @property
    def vpp(self) -> int:
        return self.forward.shape[1]

    @property
    def plan_vpp(self) -> int:
        return 1 if self.name == "dualpipe" else self.vpp


def equal(name: str, pp: int, vpp: int, m: int, f: float, b: float, w: float) -> Case:
    """Equal chunks of ``f`` forward, ``b`` input gradient and ``w`` weight gradient; nothing to send."""
    ones = np.ones((pp, vpp))
    return Case(name, f * ones, (b + w) * ones, w * ones, np.zeros(pp - 1), m)


@st.composite
def cases(draw: st.DrawFn, names: Sequence[str] = ALL) -> Case:
    """Any schedule at legal degrees with uneven stages, some of them free."""
    name = draw(st.sampled_from(names))
    pp = draw(st.sampled_from([2, 4] if name == "dualpipe" else [2, 3, 4]))
    vpp = (
        2
        if name in (*TWO_CHUNKS, "dualpipe")
        else draw(st.integers(2, 3))
        if name in ("interleaved", "looped-bfs")
        else 1
    )
    m = draw(st.integers(1, 7))
    if name == "interleaved":
        m = pp * draw(st.integers(1, 3))
    elif name.startswith("dualpipe"):
        m = 2 * pp + 2 * draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Whole quarters, so that ties are common and sums exact.
    forward, inputs, weight = rng.integers(0, 9, size=(3, pp, vpp)) / 4
    send = rng.integers(0, 5, size=pp - 1) / 4 * draw(st.integers(0, 1))
    return Case(name, forward, inputs + weight, weight, send, m)


def neighbours(name: str, stage: int, chunk: int, pp: int, vpp: int) -> tuple[tuple[int, int] | None, ...]:
    """(place before, place after) along the pipeline."""
    if name in TWO_CHUNKS:
        if chunk == 0:
            return (stage - 1, 0) if stage else None, (stage + 1, 0) if stage < pp - 1 else (stage, 1)
        return (stage + 1, 1) if stage < pp - 1 else (stage, 0), (stage - 1, 1) if stage else None
    if name == "dualpipe":
        step = 1 if chunk == 0 else -1
        inside = range(pp)
        return (
            (stage - step, chunk) if stage - step in inside else None,
            (stage + step, chunk) if stage + step in inside else None,
        )
    before = (stage - 1, chunk) if stage else (pp - 1, chunk - 1) if chunk else None
    after = (stage + 1, chunk) if stage < pp - 1 else (0, chunk + 1) if chunk < vpp - 1 else None
    return before, after


def crossing(case: Case, a: tuple[int, int], b: tuple[int, int]) -> float:
    """Seconds between two places: their boundary, or the slowest where the last stage is next to the first."""
    if a[0] == b[0]:
        return 0.0
    if case.name in ("interleaved", "looped-bfs") and a[1] != b[1]:
        return float(case.send.max())
    return float(case.send[min(a[0], b[0])])


def slowest_path(case: Case) -> float:
    """Makespan by relaxing starts over the orders until nothing moves (Bellman-Ford), last stage first."""
    orders = schedules.get(case.name).orders(case.pp, case.plan_vpp, case.m)
    blocking = case.name == "1f1b"
    seconds = {F: case.forward, JOINED: case.forward, BW: case.backward, B: case.backward - case.weight, W: case.weight}
    results: dict[tuple[str, int, int, int], float] = {}
    finish = [0.0] * case.pp
    moved = True
    while moved:
        moved = False
        for stage in reversed(range(case.pp)):
            now, joined = 0.0, None
            for kind, chunk, k in orders[stage]:
                before, after = neighbours(case.name, stage, chunk, case.pp, case.vpp)
                word = {F: "F", JOINED: "F", BW: "B", B: "B", W: "W"}[kind]
                source = {"F": before, "B": after, "W": None}[word]
                sink = {"F": after, "B": before, "W": None}[word]
                if source is not None:
                    arrived = results.get((word, *source, k), 0.0)
                    now = max(now, arrived + (0.0 if blocking else crossing(case, source, (stage, chunk))))
                now += float(seconds[kind][stage, chunk])
                if blocking and sink is not None:
                    now += crossing(case, (stage, chunk), sink)
                done = [(word, stage, chunk, k)] if kind != JOINED else []
                if joined is not None:
                    done.append(joined)
                joined = (word, stage, chunk, k) if kind == JOINED else None
                for result in done:
                    if now > results.get(result, -1.0):
                        results[result], moved = now, True
            finish[stage] = now
    return max(finish)


def scheduled(laid: Plan, name: ScheduleName) -> Plan:
    """``laid`` (looped chunks) under another schedule, its chunks moved to where that schedule has them and sends
    between virtual stages beside compute."""
    options = laid.options.model_copy(update={"overlap_p2p": laid.vpp > 1})
    laid = laid.model_copy(update={"options": options})
    if name not in TWO_CHUNKS:
        return laid.model_copy(update={"schedule": name})
    chunk_at = {chunk.order: chunk for stage in laid.stages for chunk in stage.chunks}
    last = 2 * laid.pp - 1
    stages = tuple(
        stage.model_copy(update={"chunks": (chunk_at[p], chunk_at[last - p])}) for p, stage in enumerate(laid.stages)
    )
    return Plan.parse(laid.model_copy(update={"schedule": name, "stages": stages}).to_json())
