"""A line on the screen, and the page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .rows import Row, summary

#: Baselines with their heading; :mod:`.baselines` says what each is.
HEADINGS = {
    "published": "published recipe",
    "uniform_even": "best even split",
    "even_on_grid": "even on our grid",
    "topology_blind": "topology-blind",
}


def line(row: Row) -> str:
    """One line of a run."""
    step = "-" if row.step_time_s is None else f"{row.step_time_s:.3f}"
    gap = "-" if row.gap is None else f"{row.gap:.2%}"
    gains = " ".join(f"{name} {gain_of(row, name)}" for name in row.baselines)
    word = " FASTER: " + ", ".join(row.faster) if row.faster else ""
    faults = f" FAULTS: {row.faults}" if row.faults else ""
    return (
        f"{row.cpu_s:6.2f} s {row.peak_mib:5.0f} MiB {row.candidates:8d} {step:>9} s {gap:>7}  {row.name}  {gains}"
        f"{word}{faults}"
    )


def gain_of(row: Row, name: str) -> str:
    """How much longer a baseline's step is, or why it has none, in few words."""
    gain = row.gain(name)
    if gain is not None:
        return "equal" if abs(gain) < 5e-4 else f"{gain:+.1%}"
    why = row.baselines.get(name, {}).get("why", "")
    return why.partition(":")[0] if why else ""


def page(rows: Sequence[Row], grown: Sequence[Row]) -> str:
    """The page."""
    return "\n".join(_lines(rows, grown)) + "\n"


def _lines(rows: Sequence[Row], grown: Sequence[Row]) -> Iterator[str]:
    found = summary(rows)
    yield "# Planning suite"
    yield ""
    yield (
        "Planning cases from 8 to 16,384 GPUs, each planned by `meshwright plan` with its defaults in a process of its "
        "own. `python -m benchmarks.suite --scaling --out docs/suite.md` makes this page; the cases stand in "
        "`benchmarks/suite/cases.yaml`. Step times are predictions of the cost model ([accuracy](accuracy.md)); CPU "
        "seconds and memory are those of the whole process, imports included, on the machine that made the page."
    )
    yield ""
    yield "| cases | median gap | worst gap | faults in plans | baselines faster | most CPU | most memory |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    yield (
        f"| {found.cases} | {found.median_gap:.2%} | {found.worst_gap:.2%} | {found.illegal} | {len(found.slower)} "
        f"| {found.most_cpu_s:.1f} s | {found.most_mib:.0f} MiB |"
    )
    yield ""
    if found.failures:
        yield "Bars that are missed:"
        yield ""
        for failure in found.failures:
            yield f"- {failure}"
        yield ""
    yield "## Plans"
    yield ""
    yield (
        "The gap is to a lower bound that is proven over the whole declared space (`bound.space`); where a search was "
        "cut by its own limit of work (cut), it covers what was not tried. Every plan and "
        "every alternative was exported to Megatron arguments and judged again by `meshwright check`, and priced again "
        "for memory."
    )
    yield ""
    yield "| model | cluster | GPUs | batch x sequence | step | gap | CPU | memory | candidates | plan |"
    yield "|---|---|---:|---|---:|---:|---:|---:|---:|---|"
    for row in rows:
        yield _plan_line(row)
    yield ""
    yield from _gains(rows)
    yield from _mixed([row for row in rows if "single_pool" in row.baselines])
    if grown:
        yield "## How a search grows"
        yield ""
        yield "The same model with 8 sequences a GPU."
        yield ""
        yield "| cluster | CPU | CPU a GPU | memory | candidates | step | gap |"
        yield "|---|---:|---:|---:|---:|---:|---:|"
        for row in grown:
            yield (
                f"| {row.cluster} | {row.cpu_s:.2f} s | {row.cpu_s / row.gpus * 1e3:.2f} ms | {row.peak_mib:.0f} MiB "
                f"| {row.candidates} | {row.step_time_s:.3f} s | {row.gap:.2%} |"
            )


def _plan_line(row: Row) -> str:
    shape = f"{row.batch} x {row.seq}" + ("" if row.precision == "bf16" else f", {row.precision}")
    if row.step_time_s is None or row.gap is None:
        step, gap, plan = "", "", f"refused by {row.refused}" if row.as_expected else f"none: {row.reason}"
    else:
        step, gap, plan = f"{row.step_time_s:.4g} s", f"{row.gap:.2%}", row.plan
        gap += "" if row.complete else " (cut)"
    return (
        f"| {row.model} | {row.cluster} | {row.gpus} | {shape} | {step} | {gap} | {row.cpu_s:.2f} s "
        f"| {row.peak_mib:.0f} MiB | {row.candidates} | {plan} |"
    )


def _gains(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Gains"
    yield ""
    yield "How much longer a step of four simpler ways to plan is, under the same cost model."
    yield ""
    yield (
        "- *Published recipe*: the fastest published recipe that is legal and fits with 5% of memory left free, as "
        "plans do; of those for this model, GPU type, count and precision the nearest in sequence length, then batch. "
        "Its degrees are taken to the case's batch, with its layers split best."
    )
    yield (
        "- *Best even split*: the best plan with one set of degrees and equal layers in every chunk (they differ by a "
        "layer where they must), over all degrees, micro-batches, virtual stages and recompute modes of the space, "
        "under ZeRO-1 or full sharding; pools whole, in any order or left out, or used as in our plan and its "
        "alternatives."
    )
    yield "- *Even on our grid*: our plan with equal layers in every chunk, the fewest recomputed that then fit."
    yield (
        "- *Topology-blind*: our own search on the cluster with every network level as fast as the mean that a pair of "
        "GPUs sees; its plan priced on the true cluster."
    )
    yield ""
    yield f"| model | cluster | {' | '.join(HEADINGS.values())} |"
    yield f"|---|---|{'---:|' * len(HEADINGS)}"
    for row in rows:
        if row.baselines:
            yield f"| {row.model} | {row.cluster} | {' | '.join(gain_of(row, name) for name in HEADINGS)} |"
    yield ""


def _mixed(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "## Several pools: what uneven layers are worth"
    yield ""
    yield (
        "Layers are those of each stage. *Even on our grid* and *best even split* as above; *single pool*: our best "
        "plan on any one pool alone."
    )
    yield ""
    yield "| model | cluster | step | layers | even on our grid | best even split | best single pool |"
    yield "|---|---|---:|---|---:|---:|---:|"
    for row in rows:
        gains = " | ".join(gain_of(row, name) for name in ("even_on_grid", "uniform_even", "single_pool"))
        yield f"| {row.model} | {row.cluster} | {row.step_time_s:.4g} s | {row.layers} | {gains} |"
    yield ""
