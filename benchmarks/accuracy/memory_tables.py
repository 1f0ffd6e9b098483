"""What the page says of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from . import texts
from .markdown import page, percent, prose, table
from .memory import GUESSED, NEIGHBOUR, OUT, STATED, MemoryRow
from .others import tool_cells

PEAKS = ("allocated", "reserved")
VERDICTS = {
    STATED: "ran, plan stated: said to fit",
    GUESSED: "ran, micro-batch, recomputation or layout not stated: said to fit",
    OUT: "ran out of memory: said not to fit",
    NEIGHBOUR: "ran, beside one that ran out: said to fit",
}


def memory_section(rows: Sequence[MemoryRow], tools: Sequence[Mapping[str, str]]) -> str:
    others = sum(row.what not in (*PEAKS, *VERDICTS) for row in rows)
    beside = [tool_cells(tool) for tool in tools if tool["quantity"] == "memory"]
    return page(
        "## Memory",
        prose(texts.MEMORY.format(others=others)),
        table(("peak", "framework", "runs", "mean", "median", "worst", "bias"), _peaks(rows), 2),
        "Whether a plan fits, headroom included:",
        table(("configurations", "number", "right"), _verdicts(rows)),
        "Other tools:",
        table(("tool", "measured on", "runs", "mean", "median", "worst"), beside, 2),
    )


def _peaks(rows: Sequence[MemoryRow]) -> Iterator[list[str]]:
    for what in PEAKS:
        for functional in (False, True):
            chosen = [row for row in rows if row.what == what and ("functional" in row.task) == functional]
            kind = f"{what}, test runs" if functional else what
            for name in sorted({row.framework for row in chosen}):
                yield _line(kind, name, [row for row in chosen if row.framework == name])
            if chosen:
                yield _line(kind, "all", chosen)


def _line(kind: str, name: str, members: Sequence[MemoryRow]) -> list[str]:
    error = np.array([row.error for row in members])
    size = np.abs(error)
    shares = [percent(float(value)) for value in (size.mean(), np.median(size), size.max())]
    return [kind, name, str(len(members)), *shares, percent(float(np.median(error)), sign=True)]


def _verdicts(rows: Sequence[MemoryRow]) -> Iterator[list[str]]:
    for what, text in VERDICTS.items():
        right = [row.right for row in rows if row.what == what]
        if right:
            yield [text, str(len(right)), percent(sum(right) / len(right))]
