"""The program order that DualPipe and DualPipe-V share (DeepSeek's DualPipe repository, MIT, README and its figure).

A rank has two chunks, "first" (which it runs forward first) and "second", and ``depth`` ranks lie between it and the
turning point. Eight phases: forwards of the first chunk; forwards of both; input gradient, weight gradient and forward
of the second; the main part with one forward and one backward in turn; the same without the first chunk's forwards;
backwards of both, the later half with weight gradients put off; input gradients with the weight gradients put off
before; weight gradients.

The main part overlaps a forward with a backward. What that hides is communication, which the seconds of a stage count
only where it is exposed; here the two follow each other.
"""

from __future__ import annotations

from .base import BACKWARD, FORWARD, INPUT_GRADIENT, JOINED_FORWARD, WEIGHT_GRADIENT, Operation


def dual_order(depth: int, ranks: int, counts: tuple[range, range], chunks: tuple[int, int]) -> tuple[Operation, ...]:
    """Order of the rank that is number ``depth`` of ``ranks`` on the way to the turning point.

    ``counts`` are the micro-batches of the first and the second chunk, at least 2 ``ranks`` each, and ``chunks`` their
    numbers.
    """
    order: list[Operation] = []
    forwards, backwards = [iter(counts[0]), iter(counts[1])], [iter(counts[0]), iter(counts[1])]
    waiting: list[tuple[int, int]] = []

    def forward(which: int, joined: bool = False) -> None:
        order.append((JOINED_FORWARD if joined else FORWARD, chunks[which], next(forwards[which])))

    def backward(which: int, apart: bool = False) -> None:
        micro_batch = next(backwards[which])
        order.append((INPUT_GRADIENT if apart else BACKWARD, chunks[which], micro_batch))
        if apart:
            waiting.append((chunks[which], micro_batch))

    def weight() -> None:
        order.append((WEIGHT_GRADIENT, *waiting.pop(0)))

    beyond = ranks - depth - 1
    for _ in range(2 * beyond):
        forward(0)
    for _ in range(depth + 1):
        forward(0)
        forward(1)
    for _ in range(beyond):
        backward(1, apart=True)
        weight()
        forward(1)
    for i in range(len(counts[0]) - 2 * ranks + depth + 1):
        # The rank at the turning point has just run the forward whose backward comes first.
        forward(0, joined=i > 0 or beyond > 0)
        backward(1)
        forward(1, joined=True)
        backward(0)
    for _ in range(beyond):
        backward(1)
        forward(1, joined=True)
        backward(0)
    apart = False
    for i in range(depth + 1):
        half = i == (depth + 1) // 2
        apart = apart or (half and depth % 2 == 1)
        backward(1, apart)
        apart = apart or half
        backward(0, apart)
    for _ in range(beyond):
        weight()
        backward(0, apart=True)
    while waiting:
        weight()
    return tuple(order)
