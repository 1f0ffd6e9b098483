"""What people read: sober tables. Every number has its unit."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.specs.document import PlanDocument
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Plan, Stage, expand_blocks, parse_range

from .render_goals import goal_tables
from .units import seconds

GIB = 2**30
#: Terms of the step time below this share round to nothing and are left out of the table.
LEAST_SHARE = 5e-4


def _console() -> Console:
    """Standard output. Off a terminal lines are not cut, so that tables survive pipes and logs."""
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=140)


def _table(*columns: str, title: str = "") -> Table:
    """A plain table; columns whose name starts with ``>`` are right-aligned."""
    table = Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2)
    )
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def print_document(document: PlanDocument) -> None:
    """The plan document: plan, stages, time, alternatives, reasons, assumptions."""
    console = _console()
    inputs = document.inputs
    work = inputs.workload
    console.print(Text(f"{inputs.model.name} on {inputs.cluster.name} for {inputs.target.name}", style="bold"))
    console.print(
        f"{work.task}, global batch {work.global_batch_size:,} x {work.seq_length:,} tokens, {work.precision}; "
        f"status: {document.status}" + ("" if document.complete else " (search cut short)")
    )
    if document.reason:
        console.print(document.reason, soft_wrap=True)
    if document.plan is not None:
        console.print()
        console.print(Text(plan_line(document.plan), style="bold"))
        console.print(_how(document.plan))
    if document.plan is not None and document.estimate is not None:
        console.print()
        for line in _speed(document):
            console.print(line)
        console.print()
        console.print(_stages(document.plan, document.estimate))
        console.print()
        console.print(_breakdown(document.estimate))
    if document.alternatives:
        console.print()
        console.print(_alternatives(document))
    for table in goal_tables(document, _table):
        console.print()
        console.print(table)
    reasons = [
        item.message for item in document.explanation if item.kind != "choice" and item.message != document.reason
    ]
    _bullets(console, "Why", reasons)
    assumptions = [*inputs.model.assumptions, *inputs.cluster.assumptions]
    assumptions += document.estimate.assumptions if document.estimate else ()
    _bullets(console, "Assumptions", list(dict.fromkeys(assumptions)))


def plan_line(plan: Plan) -> str:
    """The degrees in one line: ``TP4 PP4 CP1 DP4`` with EP, ETP and VPP where they matter."""
    degrees = {"TP": plan.tp, "PP": plan.pp, "CP": plan.cp, "DP": plan.dp}
    if (plan.ep, plan.etp) not in ((1, plan.tp), (None, None)):
        degrees |= {"EP": plan.ep, "ETP": plan.etp, "EDP": plan.edp}
    if plan.vpp > 1:
        degrees["VPP"] = plan.vpp
    return " ".join(f"{name}{'*' if value is None else value}" for name, value in degrees.items())


def _how(plan: Plan) -> str:
    size = "stages differ" if plan.micro_batch_size is None else f"{plan.micro_batch_size} x {plan.num_microbatches}"
    return (
        f"micro-batch {size}, schedule {plan.schedule}, sharding {_sharding(plan)}, recompute {plan.recompute.label}"
        + (", sequence parallel" if plan.options.sequence_parallel else "")
    )


def _sharding(plan: Plan) -> str:
    if isinstance(plan.sharding, str):
        return plan.sharding
    return f"hsdp {plan.sharding.hsdp.shard} x {plan.sharding.hsdp.replicate}"


def _speed(document: PlanDocument) -> list[str]:
    assert document.estimate is not None  # noqa: S101 - only called with one
    figures, bound = document.estimate, document.bound
    low, high = figures.interval_s
    lines = [
        f"step time {seconds(figures.step_time_s)} ({figures.interval_level:.0%} interval {seconds(low)} to "
        f"{seconds(high)}), {figures.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {figures.mfu:.1%}",
        f"{figures.gpus_used:,} of {figures.gpus_offered:,} GPUs used; memory: "
        + ("every stage fits" if figures.fits else "does NOT fit"),
    ]
    if bound is not None:
        proof = "no plan of the space is faster" if bound.gap < 1e-9 else f"at most {bound.gap:.1%} from the optimum"
        lines.append(f"proven: {proof} under the cost model (lower bound {seconds(bound.step_time_s)})")
    return lines


def _stages(plan: Plan, figures: Estimate) -> Table:
    table = _table("stage", "blocks", ">layers", "GPUs", "ranks", ">micro-batch fwd+bwd", ">memory", ">limit", ">full")
    for index, (stage, figure) in enumerate(zip(plan.stages, figures.stages, strict=True)):
        counts = plan.num_microbatches
        table.add_row(
            str(index) + (" *" if index == figures.critical_stage else ""),
            _blocks(stage),
            str(_layers(stage)),
            _gpus(stage),
            ",".join(text for group in stage.groups for text in group.ranks),
            seconds(figure.busy_s / counts),
            f"{figure.reserved_bytes / GIB:.1f} GiB",
            f"{figure.limit_bytes / GIB:.1f} GiB",
            f"{figure.reserved_bytes / figure.limit_bytes:.0%}",
        )
    table.caption = "* critical stage; memory is what the allocator reserves on the stage's fullest GPU"
    table.caption_justify = "left"
    return table


def _blocks(stage: Stage) -> str:
    return " | ".join(" ".join(chunk.blocks) or "(none)" for chunk in stage.chunks)


def _layers(stage: Stage) -> int:
    return sum(kind == "decoder" for chunk in stage.chunks for kind, _ in expand_blocks(chunk.blocks))


def _gpus(stage: Stage) -> str:
    return " + ".join(
        f"{sum(len(parse_range(text)) for text in group.ranks)} {group.gpu} ({group.pool})" for group in stage.groups
    )


def _breakdown(figures: Estimate) -> Table:
    table = _table("step time by term", ">time", ">share", "source")
    for name, value in sorted(figures.breakdown_s.items(), key=lambda item: -item[1]):
        if abs(value) >= LEAST_SHARE * figures.step_time_s:
            table.add_row(name, seconds(value), f"{value / figures.step_time_s:.1%}", figures.rungs.get(name, ""))
    return table


def _alternatives(document: PlanDocument) -> Table:
    table = _table("alternatives", "micro-batch", "sharding", "recompute", ">step time", ">slower by")
    for other in document.alternatives:
        plan = other.plan
        table.add_row(
            plan_line(plan),
            f"{plan.micro_batch_size} x {plan.num_microbatches}",
            _sharding(plan),
            plan.recompute.label,
            seconds(other.step_time_s),
            f"{other.slower_by:.1%}",
        )
    return table


def _bullets(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print()
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(f"- {line}", soft_wrap=True)


def print_model(data: dict[str, Any]) -> None:
    """The description of a model."""
    console = _console()
    console.print(Text(f"{data['name']} ({data['family']})", style="bold"))
    table = _table("", ">")
    table.show_header = False
    table.add_row("parameters", f"{data['total_params']:,}")
    table.add_row("active a token", f"{data['active_params']:,}")
    if data["mtp_params"]:
        table.add_row("multi-token prediction, not in the total", f"{data['mtp_params']:,}")
    table.add_row("layers", f"{data['num_layers']:,}")
    for kind, count in data["layers_by_kind"].items():
        table.add_row(f"  {kind}", f"{count:,}")
    table.add_row("hidden size", f"{data['hidden_size']:,}")
    table.add_row("vocabulary", f"{data['vocab_size']:,}")
    if data["num_experts"]:
        table.add_row("experts, of which a token sees", f"{data['num_experts']}, {data['experts_per_token']}")
    if data["vision_params"]:
        table.add_row("vision tower parameters", f"{data['vision_params']:,}")
    flops = f"{data['flops_per_token'] / 1e9:,.2f} GFLOP at {data['flops_seq_length']:,} tokens"
    table.add_row("training FLOPs a token", flops)
    console.print(table)
    _bullets(console, "Assumptions", data["assumptions"])


def print_catalog(kind: str | None, data: Any) -> None:
    """A list of names, a table of GPU types, or one entry."""
    console = _console()
    if kind is None:
        for name, names in data.items():
            console.print(Text(name, style="bold"))
            console.print("  " + ", ".join(names))
    elif isinstance(data, list) and kind == "gpus":
        table = _table("name", ">memory", ">bandwidth", ">bf16", ">fp16", ">fp8", ">GPUs a node", "scale-up")
        for row in data:
            peaks = row["peak_flops"]
            table.add_row(
                row["name"],
                f"{row['memory_bytes'] / GIB:.0f} GiB",
                f"{row['memory_bandwidth_bytes_per_s'] / 1e12:.2f} TB/s",
                *(f"{peaks[name] / 1e12:,.0f} TF/s" if name in peaks else "-" for name in ("bf16", "fp16", "fp8")),
                str(row["gpus_per_node"]),
                ", ".join(f"{level['link']} x{level['span']}" for level in row["scale_up"]),
            )
        console.print(table)
    elif isinstance(data, list) and kind == "links":
        table = _table("name", "kind", ">bandwidth", ">latency")
        for row in data:
            speed = f"{row['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s"
            table.add_row(row["name"], row["kind"], speed, seconds(row["latency_s"]))
        console.print(table)
    elif isinstance(data, list):
        for row in data:
            extra = f"  (verified: {row['verified']})" if "verified" in row else ""
            console.print(row["name"] + extra)
    else:
        _print_values(console, data, "")


def _print_values(console: Console, data: Any, indent: str) -> None:
    for key, value in data.items():
        if isinstance(value, dict):
            console.print(f"{indent}{key}:")
            _print_values(console, value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(f"{indent}{key}:")
            for item in value:
                console.print(f"{indent}  - " + ", ".join(f"{name}: {each}" for name, each in item.items()))
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            console.print(f"{indent}{key}: {text}")
