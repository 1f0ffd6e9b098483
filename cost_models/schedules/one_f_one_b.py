"""1F1B without interleaving, in Megatron's order (``forward_backward_pipelining_without_interleaving``).

Sends block: Megatron waits for each exchange before it goes on, so a transfer occupies its sender until it has
arrived. The receiver's stream is not charged again: it either waits for the data anyway or finds it there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .base import BACKWARD, FORWARD, Operation, Orders, Timeline, boundary_sends
from .listed import ListedSchedule


class OneFOneB(ListedSchedule):
    """Warm-up of ``min(M, P - p - 1)`` forwards, then one forward and one backward in turn, then the rest."""

    name = "1f1b"
    blocking = True
    ends_at_first = True

    def legal(self, pp: int, vpp: int, m: int) -> str | None:
        if vpp != 1:
            return f"1f1b has one chunk a stage, got {vpp} virtual stages; use interleaved"
        return super().legal(pp, vpp, m)

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return _orders(pp, m)

    def in_flight(self, pp: int, vpp: int, m: int) -> IntArray:
        return np.minimum(m, pp - np.arange(pp, dtype=np.int64))[:, None]

    def bound_s(
        self,
        forward_s: FloatArray,
        backward_s: FloatArray,
        send_s: FloatArray,
        m: int | IntArray,
        weight_s: FloatArray | None = None,
    ) -> FloatArray:
        """Largest of two chains through every stage i, both of operations that must follow each other.

        One runs the first forward down to i, all work of i, and the last backward up from i. The other runs the first
        micro-batch through all stages and back to i, then what i has left to do, then up. Sends count in the
        operations of the sender.
        """
        forward, backward = forward_s.sum(axis=-1), backward_s.sum(axis=-1)
        pp = forward.shape[-1]
        send = boundary_sends(send_s, pp)[..., : pp - 1]
        nothing = np.zeros((*send.shape[:-1], 1))
        forward = forward + np.concatenate([send, nothing], axis=-1)
        backward = backward + np.concatenate([nothing, send], axis=-1)
        both = forward + backward
        before = np.cumsum(both, axis=-1) - both
        whole_stage = (before + m * both).max(axis=-1)
        warm_up = np.minimum(m, pp - 1 - np.arange(pp))
        first_then_rest = (
            forward.sum(axis=-1, keepdims=True)
            + backward.sum(axis=-1, keepdims=True)
            + (m - 1) * backward
            + np.maximum(m - warm_up - 1, 0) * forward
        ).max(axis=-1)
        out: FloatArray = np.maximum(whole_stage, first_then_rest)
        return out

    def pace_s(self, timeline: Timeline, few: int, seconds: FloatArray, sends: FloatArray) -> float:
        """Stages pass one micro-batch on after another: once the start has settled, the busiest sets the pace."""
        return float((timeline.busy_s + timeline.send_s).max()) / few


@lru_cache(maxsize=16)
def _orders(pp: int, m: int) -> Orders:
    out = []
    for stage in range(pp):
        warm_up = min(m, pp - 1 - stage)
        order: list[Operation] = [(FORWARD, 0, k) for k in range(warm_up)]
        for k in range(m - warm_up):
            order += [(FORWARD, 0, warm_up + k), (BACKWARD, 0, k)]
        order += [(BACKWARD, 0, k) for k in range(m - warm_up, m)]
        out.append(tuple(order))
    return tuple(out)
