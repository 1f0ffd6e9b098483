"""The text of ``docs/accuracy.md``: everything on it but the charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from . import others, texts
from .markdown import bullet, chart, page, percent, prose, table
from .memory import MemoryRow
from .memory_tables import memory_section
from .order import Pair, by_distance, pairs_of, release_differences
from .statistics import (
    FEWEST,
    GRID,
    SCHEMES,
    WEAK,
    Errors,
    Row,
    by,
    errors_of,
    family_of,
    median_of_groups,
    nodes_of,
    of_scheme,
    precision_of,
    weak_groups,
)

HEADS = ("runs", "mean", "median", "p90", "bias", "inside")
Key = Callable[[Row], tuple[str, ...]]


def render(
    rows: Sequence[Row],
    runs: Mapping[str, Mapping[str, str]],
    memory_rows: Sequence[MemoryRow],
    tools: Sequence[Mapping[str, str]],
    command: str,
) -> str:
    """The page. ``rows`` are predictions of all schemes, ``runs`` the published rows by id, ``tools`` the figures of
    other tools, ``command`` what makes the page."""
    unseen = of_scheme(rows, "group")
    sections = (
        intro(rows, len(runs), command),
        times(unseen),
        schemes(rows),
        anchors(rows),
        weak(unseen),
        releases(release_differences(unseen, runs)),
        ranking(pairs_of(unseen, runs)),
        memory_section(memory_rows, tools),
        texts.SPEED,
        others.section(tools, unseen),
    )
    return page(*sections) + "\n"


def figures(errors: Errors) -> list[str]:
    e = errors
    shares = [percent(e.mean), percent(e.median), percent(e.p90), percent(e.bias, sign=True), percent(e.inside)]
    return [str(e.n), *shares]


def error_table(names: Sequence[str], rows: Sequence[Row], key: Key) -> str:
    lines = ([*group, *figures(errors_of(members))] for group, members in by(rows, key).items())
    return table((*names, *HEADS), lines, len(names))


def intro(rows: Sequence[Row], published: int, command: str) -> str:
    known = {row.id: row for row in rows}.values()
    levels = sorted({row.level for row in rows})
    return page(
        "# Accuracy",
        prose(texts.INTRO.format(runs=published)),
        f"```text\n{command}\n```",
        "## What was measured, and how",
        prose(
            texts.DATA.format(
                measured=len(known),
                frameworks=len({row.framework for row in known}),
                gpus=len({row.gpu_type for row in known}),
                architectures=len({row.group.split("|")[0] for row in known}),
            )
        ),
        prose(texts.LEFT_OUT),
        "\n".join(bullet(f"`{scheme}`: {texts.SEEN[scheme]}.") for scheme in SCHEMES if of_scheme(rows, scheme)),
        prose(texts.NOT_HIDDEN),
        prose(texts.FIGURES.format(level=" or ".join(f"{level:.0%}" for level in levels))),
    )


def times(rows: Sequence[Row]) -> str:
    kinds = [("all", list(rows)), *((kind, members) for (kind,), members in by(rows, lambda row: (row.kind,)).items())]
    grid = [row for row in rows if row.source_repo == GRID]
    totals = ([kind, *figures(errors_of(some)), percent(median_of_groups(some))] for kind, some in kinds)
    return page(
        "## Step time of an architecture on a GPU type not seen",
        prose(texts.TIMES),
        table(("kind", *HEADS, "median of groups"), totals),
        chart("scatter", texts.SCATTER),
        prose(texts.FRAMEWORKS),
        error_table(("framework", "kind"), rows, lambda row: (row.framework, row.kind)),
        prose(texts.NODES) if grid else "",
        error_table(("vTrain",), grid, lambda row: (nodes_of(row),)) if grid else "",
        chart("errors_by_framework", texts.BOXES.format("framework")),
        chart("coverage", texts.COVERAGE),
        "By GPU type:",
        error_table(("GPU type",), rows, lambda row: (row.gpu_type,)),
        chart("errors_by_gpu", texts.BOXES.format("GPU type")),
        "By precision:",
        error_table(("precision",), rows, lambda row: (precision_of(row.precision),)),
        "By family of models:",
        error_table(("family", "kind"), rows, lambda row: (family_of(row.model), row.kind)),
    )


def schemes(rows: Sequence[Row]) -> str:
    keys: dict[str, Key] = {"hidden": lambda row: (f"{row.kind}, {nodes_of(row)}",)}
    lines = [
        [f"`{scheme}`", kind, *figures(errors_of(members))]
        for scheme in SCHEMES
        for (kind,), members in by(of_scheme(rows, scheme), keys.get(scheme, lambda row: (row.kind,))).items()
    ]
    return page(
        "## The same with more, or less, left out",
        prose(texts.SCHEMES),
        table(("left out", "kind", *HEADS), lines, 2),
    )


def anchors(rows: Sequence[Row]) -> str:
    anchored = of_scheme(rows, "anchor")
    if not anchored:
        return ""

    def key(row: Row) -> tuple[str, ...]:
        return row.framework, row.kind

    ids = {row.id for row in anchored}
    before = by([row for row in of_scheme(rows, "group") if row.id in ids], key)
    lines = []
    for group, members in [*by(anchored, key).items(), (("all", ""), anchored)]:
        same = [row for some in before.values() for row in some] if group[0] == "all" else before.get(group, [])
        without = [percent(errors_of(same).mean), percent(errors_of(same).median)] if same else ["-", "-"]
        lines.append([*group, *figures(errors_of(members)), *without])
    heads = ("framework", "kind", *HEADS, "mean without", "median without")
    return page("## With one run known", prose(texts.ANCHOR), table(heads, lines, 2))


def weak(rows: Sequence[Row]) -> str:
    found = weak_groups(rows)
    large = sum(len(members) >= FEWEST for members in by(rows, lambda row: (row.group,)).values())
    lines = ([group.replace("|", " on "), names, *figures(errors)] for group, names, errors in found)
    return page(
        "## Where it is weak",
        prose(texts.WEAK.format(groups=large, fewest=FEWEST, weak=len(found), limit=f"{WEAK:.0%}")),
        table(("group", "framework", *HEADS), lines, 2) if found else "",
    )


def releases(differences: Mapping[str, Sequence[float]]) -> str:
    lines = [
        [kind, str(len(some)), *(percent(float(f)) for f in (np.mean(some), *np.quantile(some, [0.5, 0.9, 1.0])))]
        for kind, some in differences.items()
    ]
    return page(
        "## How much releases differ",
        prose(texts.RELEASES),
        table(("kind", "pairs", "mean", "median", "p90", "worst"), lines),
    )


def ranking(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return ""
    sources: dict[str, list[Pair]] = {}
    for pair in pairs:
        sources.setdefault(pair.source_repo, []).append(pair)
    ordered = sorted(sources.items(), key=lambda item: (-len(item[1]), item[0]))
    by_source = [
        [name, str(len(some)), percent(sum(pair.right for pair in some) / len(some))]
        for name, some in [*ordered, ("all", list(pairs))]
    ]
    return page(
        "## Order of plans",
        prose(texts.RANKING),
        table(("source", "pairs", "in the measured order"), by_source),
        "By how far apart the measured times are:",
        table(
            ("measured times apart", "pairs", "in the measured order"),
            ([name, str(count), percent(share)] for name, count, share in by_distance(pairs)),
        ),
        chart("ranking", texts.ORDER),
    )
