"""Lower bounds from chains: paths through a schedule's own graph of what must follow what.

Whatever the seconds, no run is shorter than any one path. The paths taken are the longest ones of a few nominal
pipelines: all stages equal at several ratios of forward, input and weight gradient, and each stage in turn far slower
than the others. So the bound is exact for equal stages at those ratios and on each side of them, and follows the
slowest stage of uneven ones.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.specs.batch import FloatArray

from .base import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule
from .engine import Graph, ends_of, graph, seconds_by_kind

#: Nominal seconds of (forward, input gradient, weight gradient) of equal stages.
RATIOS = ((1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.5, 0.5), (1.0, 2.0, 0.0), (1.0, 0.5, 1.5), (2.0, 1.0, 0.5))
#: How many times slower the stage in turn is.
SLOW = 4.0


@lru_cache(maxsize=64)
def chains(schedule: Schedule, pp: int, vpp: int, m: int) -> tuple[FloatArray, FloatArray]:
    """Counts of operations [K, 3 P V] (forward, input gradient, weight gradient) and of sends [K, P] on each path."""
    of = graph(schedule, pp, vpp, m)
    nominal = [np.array(ratio)[:, None, None] * np.ones((3, pp, vpp)) for ratio in RATIOS]
    for stage in range(pp):
        uneven = np.ones((3, pp, vpp))
        uneven[:, stage] = SLOW
        nominal.append(uneven)
    paths = []
    for seconds in nominal:
        whole = seconds_by_kind(seconds[0], seconds[1] + seconds[2], seconds[2])
        paths.append(_longest(of, whole, schedule.blocking))
    unique = np.unique(np.array(paths), axis=0)
    return unique[:, : 3 * pp * vpp], unique[:, 3 * pp * vpp :]


def chain_bound_s(
    schedule: Schedule, forward_s: FloatArray, backward_s: FloatArray, weight_s: FloatArray, send_s: FloatArray, m: int
) -> FloatArray:
    """[N] longest of the chains, from [N, P, V] seconds (``weight_s`` as part of ``backward_s``) and [N, P] sends."""
    operations, sends = chains(schedule, forward_s.shape[1], forward_s.shape[2], m)
    rows = np.stack([forward_s, backward_s - weight_s, weight_s], axis=1).reshape(len(forward_s), -1)
    out: FloatArray = (rows @ operations.T + send_s @ sends.T).max(axis=1)
    return out


def _longest(of: Graph, seconds: FloatArray, blocking: bool) -> FloatArray:
    """[3 P V + P] counts along the longest path at ``seconds`` [4, P, V] without sends."""
    takes = seconds.reshape(-1).tolist()
    end = ends_of(of, takes, [0.0] * len(takes))
    size = of.pp * of.vpp
    counts = np.zeros(3 * size)
    sends = np.zeros(of.pp + 1)
    number = max(of.last, key=lambda i: end[i])
    while number:
        at = number - 1
        kind, place = divmod(of.span[at], size)
        for part in {BACKWARD: (1, 2), INPUT_GRADIENT: (1,), WEIGHT_GRADIENT: (2,)}.get(kind, (0,)):
            counts[part * size + place] += 1
        if blocking:
            sends[of.outward[of.span[at]]] += 1
        # Where both came at the same time the stage's own order counts: it stays where work is.
        if end[of.needs[at]] > end[of.before[at]]:
            number = of.needs[at]
            if not blocking:
                sends[of.inward[of.span[at]]] += 1
        else:
            number = of.before[at]
    return np.concatenate([counts, sends[: of.pp]])
