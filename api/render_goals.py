"""Tables of a plan document's goals: parts of the cluster, plans worth a choice, batch sizes, expert placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.table import Table

from meshwright.specs.document import PlanDocument

from .units import seconds

MakeTable = Callable[..., Table]


def goal_tables(document: PlanDocument, table_of: MakeTable) -> Iterator[Table]:
    """One table for each goal that the document holds."""
    if len(document.pareto) > 1:
        yield _pareto(document, table_of)
    if document.goal is not None and document.goal.considered:
        yield _considered(document, table_of)
    if document.batch_sweep is not None:
        yield _batches(document, table_of)
    if document.what_if:
        yield _what_ifs(document, table_of)
    if document.current is not None and document.current.differences:
        yield _current(document, table_of)


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _time(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _pareto(document: PlanDocument, table_of: MakeTable) -> Table:
    costs = any(point.cost is not None for point in document.pareto)
    table = table_of("best for time, free memory and cost", ">step time", ">memory free", ">GPUs", *[">a step"] * costs)
    for point in document.pareto:
        table.add_row(
            " ".join(f"{name}={value}" for name, value in point.choices.items() if value != 1),
            seconds(point.step_time_s),
            f"{point.memory_headroom:.0%}",
            f"{point.gpus_used:,}",
            *([_money(point.cost)] if costs else []),
        )
    return table


def _considered(document: PlanDocument, table_of: MakeTable) -> Table:
    assert document.goal is not None  # noqa: S101 - only called with one
    costs = document.goal.objective == "cost"
    table = table_of("parts of the cluster", ">GPUs", ">step time", *[">a step"] * costs, "")
    for each in document.goal.considered:
        table.add_row(
            each.cluster,
            f"{each.num_gpus:,}",
            _time(each.step_time_s),
            *([_money(each.cost_per_step)] if costs else []),
            each.reason or "",
        )
    return table


def _batches(document: PlanDocument, table_of: MakeTable) -> Table:
    assert document.batch_sweep is not None  # noqa: S101 - only called with one
    table = table_of(
        ">global batch", ">step time", ">tokens/s", ">of the best", ">tokens/s of the last added", "plan or reason"
    )
    for point in document.batch_sweep.points:
        knee = " knee" if point.global_batch_size == document.batch_sweep.knee else ""
        table.add_row(
            f"{point.global_batch_size:,}{knee}",
            _time(point.step_time_s),
            "" if point.tokens_per_s is None else f"{point.tokens_per_s:,.0f}",
            "" if point.share_of_best is None else f"{point.share_of_best:.1%}",
            "" if point.marginal_tokens_per_s is None else f"{point.marginal_tokens_per_s:,.0f}",
            point.summary or point.reason or "",
        )
    return table


def _what_ifs(document: PlanDocument, table_of: MakeTable) -> Table:
    table = table_of("what if", ">GPUs", ">step time", ">throughput", "plan or reason")
    for each in document.what_if:
        gain = "" if each.gain is None else f"{each.gain:+.1%}"
        table.add_row(
            each.change, f"{each.num_gpus:,}", _time(each.step_time_s), gain, each.summary or each.reason or ""
        )
    return table


def _current(document: PlanDocument, table_of: MakeTable) -> Table:
    assert document.current is not None  # noqa: S101 - only called with one
    table = table_of("current plan", "now", "best plan", ">saves if changed alone", "")
    for each in document.current.differences:
        saves = "" if each.worth_s is None else ("-" if each.worth_s < 0 else "") + seconds(abs(each.worth_s))
        table.add_row(each.name, str(each.ours), str(each.theirs), saves, each.reason or "")
    return table
