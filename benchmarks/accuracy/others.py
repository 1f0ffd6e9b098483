"""Figures of other tools beside ours on rows of the same kind (``benchmarks/data/other_tools.csv``).

``basis`` is ``run`` where the tool's public code was run against the published figures, ``claimed`` where its authors
say so. ``frameworks``, ``kind``, ``gpus`` and ``precisions`` (beginnings) and the numbers of GPUs tell which of
our rows are of that kind; where all are blank there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import texts
from .markdown import page, percent, prose, table
from .statistics import Errors, Row, errors_of

CHOICES = ("frameworks", "kind", "gpus", "precisions", "min_gpus", "max_gpus")


def ours(tool: Mapping[str, str], rows: Sequence[Row]) -> Errors | None:
    """Our errors over the rows (of one scheme) that are of the kind on which ``tool`` was measured."""
    if not any(tool[name] for name in CHOICES):
        return None
    chosen = [row for row in rows if is_of_kind(tool, row)]
    return errors_of(chosen) if chosen else None


def is_of_kind(tool: Mapping[str, str], row: Row) -> bool:
    def begins(text: str, names: str) -> bool:
        return not names or text.startswith(tuple(names.split("|")))

    return (
        (not tool["frameworks"] or row.framework in tool["frameworks"].split("|"))
        and tool["kind"] in ("", row.kind)
        and begins(row.gpu_type, tool["gpus"])
        and begins(row.precision.lower(), tool["precisions"])
        and int(tool["min_gpus"] or 1) <= row.num_gpus <= int(tool["max_gpus"] or row.num_gpus)
    )


def tool_cells(tool: Mapping[str, str]) -> list[str]:
    """A tool's name, what it was measured on, and its figures."""
    claimed = " (claimed by its authors)" if tool["basis"] == "claimed" else ""
    shares = [f"{tool[name]}%" if tool[name] else "-" for name in ("mean_percent", "median_percent", "worst_percent")]
    return [tool["tool"], tool["measured_on"] + claimed, tool["n"] or "-", *shares]


def section(tools: Sequence[Mapping[str, str]], rows: Sequence[Row]) -> str:
    lines = []
    for tool in tools:
        if tool["quantity"] == "time":
            errors = ours(tool, rows)
            mine = [str(errors.n), percent(errors.mean), percent(errors.median)] if errors else ["-"] * 3
            lines.append([*tool_cells(tool), *mine])
    heads = ("tool", "measured on", "runs", "mean", "median", "worst", "runs here", "mean here", "median here")
    return page("## Other tools", prose(texts.OTHERS), table(heads, lines, 2))
