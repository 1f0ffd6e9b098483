"""Interleaved 1F1B with V chunks a stage, in Megatron's order (``forward_backward_pipelining_with_interleaving``).

Micro-batches go in groups of P through each chunk in turn. Point-to-point transfers overlap with compute
(``overlap_p2p_comm``): a send delays its receiver and does not hold its sender, unless the schedule is ``blocking``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .base import BACKWARD, FORWARD, Orders, boundary_sends
from .listed import ListedSchedule


class Interleaved(ListedSchedule):
    """Warm-up of ``2(P - p - 1) + (V - 1)P`` chunk forwards (at most all), then one forward, one backward in turn."""

    name = "interleaved"
    ends_at_first = True

    def __init__(self, blocking: bool = False):
        self.blocking = blocking

    def legal(self, pp: int, vpp: int, m: int) -> str | None:
        if vpp < 2:
            return "interleaved needs at least 2 virtual stages; use 1f1b"
        if pp < 2:
            return "interleaved needs at least 2 pipeline stages"
        if m < pp or m % pp:
            return f"interleaved needs a multiple of {pp} micro-batches, got {m}"
        return None

    def orders(self, pp: int, vpp: int, m: int) -> Orders:
        return tuple(tuple((kind, chunk, k) for kind, chunk, k in rows.tolist()) for rows in _arrays(pp, vpp, m))

    def arrays(self, pp: int, vpp: int, m: int) -> Sequence[IntArray]:
        return _arrays(pp, vpp, m)

    def in_flight(self, pp: int, vpp: int, m: int) -> IntArray:
        """The peak total is first reached by the forward after the warm-up; the mix is counted in the forward order."""
        chunks = _forward_order(pp, vpp, m)[:, 0]
        counts = [np.bincount(chunks[: _warm_up(pp, vpp, m, stage) + 1], minlength=vpp) for stage in range(pp)]
        return np.stack(counts).astype(np.int64)

    def bound_s(
        self,
        forward_s: FloatArray,
        backward_s: FloatArray,
        send_s: FloatArray,
        m: int | IntArray,
        weight_s: FloatArray | None = None,
    ) -> FloatArray:
        """Longest chain through a stage: what it waits for at the start, all its work, what follows it at the end.

        Before micro-batch 0 reaches chunk v of stage i, some stage before has run a group of micro-batches of each
        earlier chunk, so that uneven chunks make stages wait between chunks too. The end is the same, run backwards.
        """
        pp = forward_s.shape[-2]
        send = boundary_sends(send_s, pp)
        count = np.asarray(m)
        waits = _wait_s(forward_s, send, np.minimum(count, pp)) + _wait_s(backward_s, send, (count - 1) % pp + 1)
        out: FloatArray = (waits + count * (forward_s + backward_s).sum(axis=-1)).max(axis=-1)
        return out


def _wait_s(seconds: FloatArray, send_s: FloatArray, group: IntArray) -> FloatArray:
    """[..., P] seconds a stage waits at least until it has begun every chunk; ``group`` micro-batches run one first.

    The longest path over (stage, chunk): on to the next stage with micro-batch 0, or on to the next chunk with the
    whole group. What the stage itself has done by then does not count as waiting.
    """
    after = seconds + send_s[..., None]
    across = np.cumsum(after, axis=-2) - after
    arrived = across[..., 0]
    wait, own = arrived, np.zeros_like(arrived)
    for chunk in range(1, seconds.shape[-1]):
        done = group * seconds[..., chunk - 1]
        own, ready = own + done, arrived + done
        ready[..., 0] = np.maximum(ready[..., 0], arrived[..., -1] + after[..., -1, chunk - 1])
        arrived = across[..., chunk] + np.maximum.accumulate(ready - across[..., chunk], axis=-1)
        wait = np.maximum(wait, arrived - own)
    return wait


def _warm_up(pp: int, vpp: int, m: int, stage: int) -> int:
    return min(m * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp)


def _forward_order(pp: int, vpp: int, m: int) -> IntArray:
    """[M V, 2] (chunk, micro-batch) of every forward: groups of P micro-batches, each through all chunks."""
    group, within = np.divmod(np.arange(m), pp)
    chunk = np.repeat(np.arange(vpp), m)
    order = np.lexsort((np.tile(within, vpp), chunk, np.tile(group, vpp)))
    return np.stack([chunk, np.tile(np.arange(m), vpp)], axis=1)[order]


@lru_cache(maxsize=16)
def _arrays(pp: int, vpp: int, m: int) -> tuple[IntArray, ...]:
    sequence = _forward_order(pp, vpp, m)
    total = len(sequence)
    forwards = np.insert(sequence, 0, FORWARD, axis=1)
    backwards = np.stack([np.full(total, BACKWARD), vpp - 1 - sequence[:, 0], sequence[:, 1]], axis=1)
    out = []
    for stage in range(pp):
        warm_up = _warm_up(pp, vpp, m, stage)
        pairs = np.stack([forwards[warm_up:], backwards[: total - warm_up]], axis=1).reshape(-1, 3)
        out.append(np.concatenate([forwards[:warm_up], pairs, backwards[total - warm_up :]]))
    return tuple(out)
