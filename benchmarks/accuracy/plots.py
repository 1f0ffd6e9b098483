"""The charts of the accuracy page as SVG, legible on light and dark; equal data and matplotlib give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from .order import Pair, by_distance
from .statistics import Row, by, errors_of

#: Light by default; a viewer that asks for dark gets the second colour. Series are legible on both.
PAPER, INK, FAINT = ("#ffffff", "#0d1117"), ("#1f2328", "#d1d7e0"), ("#d8dee4", "#30363d")
#: Okabe and Ito's colours, told apart with colour-blind eyes, black and yellow replaced for the sake of both papers.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8c8c8c", "#8a63d2", "#7a8b00")
MARKERS = "osD^vP*Xhp<>"
STYLE = {
    "svg.hashsalt": "meshwright", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
    "figure.facecolor": PAPER[0], "axes.facecolor": PAPER[0], "savefig.facecolor": PAPER[0], "text.color": INK[0],
    "axes.edgecolor": INK[0], "axes.labelcolor": INK[0], "xtick.color": INK[0], "ytick.color": INK[0],
    "grid.color": FAINT[0], "axes.grid": True, "axes.axisbelow": True, "legend.facecolor": PAPER[0],
    "legend.edgecolor": FAINT[0], "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
DARK = "".join(
    f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
    for light, dark in (PAPER, INK, FAINT)
    for what in ("fill", "stroke")
)
#: Whiskers hold 90% of the runs.
WHISKERS = (5, 95)


def draw(folder: Path, rows: Sequence[Row], pairs: Sequence[Pair]) -> None:
    """Writes the charts; ``rows`` are those of one scheme."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figures = {
            "scatter": scatter(rows),
            "errors_by_framework": boxes({k[0]: m for k, m in by(rows, lambda row: (row.framework,)).items()}),
            "errors_by_gpu": boxes({k[0]: m for k, m in by(rows, lambda row: (row.gpu_type,)).items()}),
            "coverage": coverage(rows),
            "ranking": order(pairs),
        }
        for name, figure in figures.items():
            (folder / f"{name}.svg").write_text(svg(figure), encoding="utf-8")


def svg(figure: Figure) -> str:
    """The figure as text, without a date, with a rule for dark pages."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    text = out.getvalue()
    at = text.index("<defs>")
    rule = f"<style>@media (prefers-color-scheme: dark) {{{DARK}}}</style>\n "
    return "\n".join(line.rstrip() for line in (text[:at] + rule + text[at:]).splitlines()) + "\n"


def new(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def scatter(rows: Sequence[Row]) -> Figure:
    figure, axes = new(7.5, 5)
    for i, ((name,), members) in enumerate(by(rows, lambda row: (row.framework,)).items()):
        # Marks that nobody could tell apart are drawn once.
        points = sorted({(_rounded(row.measured_s), round(row.error + 1, 2)) for row in members})
        axes.plot(
            *zip(*points, strict=True), MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)], markersize=4,
            alpha=0.7, markeredgewidth=0, label=name,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="measured step time (s)", ylabel="predicted / measured")
    axes.axhline(1.0, color=INK[0], linewidth=1)
    ticks = [0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0]
    low, high = min(row.error for row in rows) + 1, max(row.error for row in rows) + 1
    axes.set_yticks([tick for tick in ticks if low / 1.3 <= tick <= high * 1.3])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return figure


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.2g}")


def boxes(groups: dict[str, list[Row]]) -> Figure:
    figure, axes = new(7.5, 0.34 * len(groups) + 1)
    names = list(groups)[::-1]
    axes.boxplot(
        [[100 * row.error for row in groups[name]] for name in names], orientation="horizontal", whis=WHISKERS,
        showfliers=False, patch_artist=True, widths=0.6,
        boxprops={"facecolor": COLOURS[4], "edgecolor": COLOURS[0]},
        **{f"{part}props": {"color": COLOURS[0]} for part in ("whisker", "cap")},
        medianprops={"color": COLOURS[3], "linewidth": 2},
    )  # fmt: skip
    axes.set_yticks(range(1, len(names) + 1), [f"{name} ({len(groups[name])})" for name in names])
    axes.axvline(0.0, color=INK[0], linewidth=1)
    axes.set_xlabel("predicted over measured step time less one (%); in brackets the number of runs")
    return figure


def coverage(rows: Sequence[Row]) -> Figure:
    groups = by(rows, lambda row: (row.framework,))
    names = list(groups)[::-1]
    figure, axes = new(7.5, 0.34 * len(names) + 1)
    axes.barh(range(len(names)), [100 * errors_of(groups[name]).inside for name in names], color=COLOURS[4], height=0.6)
    axes.set_yticks(range(len(names)), [f"{name[0]} ({len(groups[name])})" for name in names])
    for level in sorted({row.level for row in rows}):
        axes.axvline(100 * level, color=COLOURS[3], linewidth=2)
    axes.set(xlim=(0, 100), xlabel="measured times inside the interval (%); line: what it promises")
    return figure


def order(pairs: Sequence[Pair]) -> Figure:
    found = by_distance(pairs)
    figure, axes = new(6, 3)
    x = np.arange(len(found))
    axes.plot(x, [100 * share for _, _, share in found], "o-", color=COLOURS[0])
    axes.set_xticks(x, [f"{name}\n({count})" for name, count, _ in found], fontsize=8)
    axes.axhline(50.0, color=INK[0], linewidth=1)
    axes.set(xlabel="measured times apart; in brackets the pairs", ylabel="in the measured order (%)")
    axes.set_ylim(min(40.0, 95 * min((share for _, _, share in found), default=0.5)), 102)
    return figure
