"""The verdict on a configuration, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from meshwright.specs.estimate import Estimate

from .render import GIB, _console
from .units import seconds

#: Differences from the best plan that are shown; --json has all.
MOST = 8


def print_check(result: dict[str, Any]) -> None:
    """The verdict of a check with every broken rule."""
    console = _console()
    fits = {None: "", True: ", fits", False: ", does NOT fit"}[result["fits"]]
    verdict = ("legal" if result["legal"] else "ILLEGAL") + fits
    console.print(Text(verdict, style="bold"))
    for row in result["violations"]:
        valid = f" (valid: {', '.join(map(str, row['alternatives']))})" if row["alternatives"] else ""
        console.print(f"- {row['rule']}: {row['message']}{valid}")
    if result["estimate"] is not None:
        figures = Estimate.model_validate(result["estimate"])
        console.print(f"step time {seconds(figures.step_time_s)}, MFU {figures.mfu:.1%}")
        for index, stage in enumerate(figures.stages):
            used, limit = stage.reserved_bytes / GIB, stage.limit_bytes / GIB
            console.print(f"stage {index}: {used:.1f} of {limit:.1f} GiB")
    elif result["legal"] and result["reason"]:
        console.print(f"not priced: {result['reason']}")
    if result["best"] is not None:
        _print_best(console, result["best"])
    for note in result["notes"]:
        console.print(f"note: {note}")


def _print_best(console: Console, best: dict[str, Any]) -> None:
    if best["step_time_s"] is None or best["ratio"] is None:
        console.print(f"no best plan to compare with: {best['reason']}")
        return
    word = "best" if best["complete"] else "best found in time"
    console.print(f"{word} plan {seconds(best['step_time_s'])}: this one takes {best['ratio']:.3f} times as long")
    rows = sorted(best["differences"], key=lambda row: -(row["worth_s"] or 0.0))
    for row in rows[:MOST]:
        worth = row["worth_s"]
        alone = "" if worth is None else f" (alone saves {seconds(worth)})" if worth > 0 else " (alone saves nothing)"
        console.print(f"- {row['name']}: {row['theirs']} instead of {row['ours']}{alone}")
    if len(rows) > MOST:
        console.print(f"and {len(rows) - MOST} more differences")
