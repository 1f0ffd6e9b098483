"""The options that commands share, and the request body that they spell.

Numbers are taken as text and checked with the rest of the body, so that one call names every fault at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .units import count, duration_s, fraction, integer


def option(flag: str, help: str, metavar: str) -> Any:
    """An option that is taken as text."""
    return typer.Option(flag, help=help, metavar=metavar, show_default=False)


CLUSTER_FORMS = "64xH100, 8x8xH100-SXM, 4x8xH100+4x8xA100-80GB, or YAML file"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Preset name, config.json, ModelSpec file or Megatron script. Required.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str | None,
    option("--cluster", f"{CLUSTER_FORMS}. Required.", "CLUSTER"),
]
Target = Annotated[str | None, option("--target", "Framework and version. Default megatron@0.19.", "TARGET")]

GlobalBatchSize = Annotated[str | None, option("--global-batch-size", "Sequences a step. Required.", "N")]
SeqLength = Annotated[str | None, option("--seq-length", "Tokens a sequence. Required.", "N")]
Precision = Annotated[
    str | None, option("--precision", "bf16 (default), fp8, mxfp8, nvfp4, fp16, tf32 or fp32.", "NAME")
]
Task = Annotated[str | None, option("--task", "pretrain (default), sft or lora.", "NAME")]
LoraRank = Annotated[str | None, option("--lora-rank", "Rank of the adapters.", "N")]
LoraTargets = Annotated[
    str | None, option("--lora-targets", "Adapted maps, comma-separated: qkv,proj,fc1,fc2.", "LIST")
]
Frozen = Annotated[
    list[str] | None,
    option("--frozen", "Module without gradients: vision, embedding, decoder, head. Repeatable.", "MODULE"),
]
ParamsDtype = Annotated[str | None, option("--params-dtype", "Stored parameters.", "DTYPE")]
GradientDtype = Annotated[str | None, option("--gradient-dtype", "Gradient buffer.", "DTYPE")]
MainParamsDtype = Annotated[str | None, option("--main-params-dtype", "The optimizer's parameters.", "DTYPE")]
MomentsDtype = Annotated[str | None, option("--moments-dtype", "The optimizer's moments.", "DTYPE")]
Optimizer = Annotated[str | None, option("--optimizer", "adam (default), sgd or muon.", "NAME")]
MoeLoadFactor = Annotated[
    str | None, option("--moe-load-factor", "Load of the fullest expert rank over the mean. Default 1.", "X")
]
MoeCapacityFactor = Annotated[
    str | None, option("--moe-capacity-factor", "Drop tokens beyond this share of an expert's mean.", "X")
]
Mtp = Annotated[bool, typer.Option("--mtp", help="Train the multi-token prediction layers.")]

Headroom = Annotated[
    str | None, option("--memory-headroom", "Share of usable memory to leave free, such as 5%.", "SHARE")
]
Objective = Annotated[
    str | None,
    option(
        "--objective",
        "time (default): fastest step; cost: cheapest step, with --price; gpus: fewest GPUs that fit or meet a target; "
        "batch: also throughput against batch size.",
        "NAME",
    ),
]
Price = Annotated[
    list[str] | None, option("--price", "Price of a GPU-hour, such as H100-SXM=2.5. Repeatable.", "GPU=X")
]
Tokens = Annotated[str | None, option("--tokens", "Tokens of the whole run, such as 15T: its cost and days.", "N")]
TargetStepTime = Annotated[
    str | None, option("--target-step-time", "Longest step for --objective gpus and cost, such as 5s.", "TIME")
]
TargetTokensPerS = Annotated[
    str | None, option("--target-tokens-per-s", "Least throughput instead of --target-step-time.", "N")
]
ExpertLoad = Annotated[
    str | None,
    option("--expert-load", "Tokens by expert, JSON or CSV file, or zipf:0.6; experts are placed to match.", "LOAD"),
]
WhatIf = Annotated[
    list[str] | None,
    option(
        "--what-if",
        "Also plan after a change: gpus=2x, network=2x, nvlink=2x, gpu=H200, memory=2x, batch=2x. Repeatable.",
        "CHANGE",
    ),
]
From = Annotated[
    str | None,
    option("--from", "Plan in use, as plan document or Megatron arguments: how far it is from the best.", "FILE"),
]
Top = Annotated[str | None, option("--top", "How many plans to rank. Default 5.", "K")]
Fix = Annotated[
    list[str] | None, option("--fix", "Pin a choice, such as tp=8 or cuda_graph=true. Repeatable.", "NAME=VALUE")
]
Max = Annotated[list[str] | None, option("--max", "Cap a degree, such as pp=16. Repeatable.", "NAME=N")]
Forbid = Annotated[list[str] | None, option("--forbid", "Leave a feature out, such as vpp. Repeatable.", "NAME")]
Allow = Annotated[
    list[str] | None,
    option(
        "--allow",
        "Let plans have an option that needs more than a stock installation: tp_comm_overlap, ep_comm_overlap, "
        "delay_wgrad, flex_dispatcher, cuda_graph; or activation_offload, optimizer_offload; or all_options, which "
        "tries every option in spaces of any size. Repeatable.",
        "NAME",
    ),
]
Deadline = Annotated[
    str | None, option("--deadline", "Answer with the best so far after this time. Default 30s.", "TIME")
]
WorkLimit = Annotated[str | None, option("--work-limit", "Stop after N partitioned candidates (reproducible).", "N")]

Tp = Annotated[str | None, option("--tp", "Tensor parallel.", "N")]
Pp = Annotated[str | None, option("--pp", "Pipeline parallel.", "N")]
Cp = Annotated[str | None, option("--cp", "Context parallel.", "N")]
Ep = Annotated[str | None, option("--ep", "Expert parallel.", "N")]
Etp = Annotated[str | None, option("--etp", "Expert-tensor parallel. Default as --tp.", "N")]
Vpp = Annotated[str | None, option("--vpp", "Virtual stages a rank. Default 1.", "N")]
MicroBatchSize = Annotated[str | None, option("--micro-batch-size", "Sequences a micro-batch. Default 1.", "N")]
Recompute = Annotated[str | None, option("--recompute", "none, full, full:block:N or selective:MODULE+MODULE.", "MODE")]
Sharding = Annotated[str | None, option("--sharding", "none, zero1 or fsdp, as the target has them.", "LEVEL")]

CalibrationFile = Annotated[
    str | None, option("--calibration", "Correct the costs by a file that `meshwright calibrate` wrote.", "FILE")
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Output = Annotated[
    str | None,
    typer.Option("-o", "--output", help="Write the JSON document to FILE.", metavar="FILE"),
]

_WORKLOAD_INTEGERS = ("global_batch_size", "seq_length")
_WORKLOAD_NUMBERS = ("moe_load_factor", "moe_capacity_factor")
_WORKLOAD_NAMES = (
    "precision",
    "task",
    "params_dtype",
    "gradient_dtype",
    "main_params_dtype",
    "moments_dtype",
    "optimizer",
)
_DEGREE_INTEGERS = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size")


def inputs_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """``model``, ``cluster``, ``workload`` and ``target`` of a body, from the parameters of a command."""
    body: dict[str, Any] = {
        name: params[name] for name in ("model", "cluster", "target") if params.get(name) is not None
    }
    body["workload"] = workload_of(params)
    if params.get("calibration") is not None:
        body["calibration"] = calibration_data(params["calibration"])
    if params.get("expert_load") is not None:
        body["expert_load"] = expert_load_data(params["expert_load"])
    if params.get("memory_headroom") is not None:
        body["memory_headroom"] = or_text(fraction, params["memory_headroom"])
    return body


def calibration_data(path: str) -> Any:
    """The JSON value in a calibration file; :class:`SpecError` at ``/calibration`` where there is none."""
    from .files import read_text
    from .requests import in_field
    from .strict_json import parse_json

    return in_field("/calibration", lambda: parse_json(read_text(path)))


def expert_load_data(value: str) -> Any:
    """``zipf:S`` as it is, else the tokens in the file; :class:`SpecError` at ``/expert_load`` where there are none."""
    from meshwright.specs.expert_load import read_load_text

    from .files import read_text
    from .requests import in_field

    if value.lower().startswith("zipf:"):
        return value
    return in_field("/expert_load", lambda: read_load_text(read_text(value)))


def current_data(path: str) -> Any:
    """A plan document, or Megatron arguments as text, in a file; :class:`SpecError` at ``/from`` for neither."""
    from .files import read_text
    from .plan_files import read_plan_file
    from .requests import in_field

    document = in_field("/from", lambda: read_plan_file(path))
    return document.to_json() if document is not None else in_field("/from", lambda: read_text(path))


def workload_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the workload that were given."""
    out: dict[str, Any] = {name: integer(params[name]) for name in _WORKLOAD_INTEGERS if params.get(name) is not None}
    out |= {name: or_text(float, params[name]) for name in _WORKLOAD_NUMBERS if params.get(name) is not None}
    out |= {name: params[name] for name in _WORKLOAD_NAMES if params.get(name) is not None}
    lora: dict[str, Any] = {}
    if params.get("lora_rank") is not None:
        lora["rank"] = integer(params["lora_rank"])
    if params.get("lora_targets") is not None:
        lora["targets"] = [item.strip() for item in params["lora_targets"].split(",")]
    if lora:
        out["lora"] = lora
    if params.get("frozen"):
        out["frozen"] = list(params["frozen"])
    if params.get("mtp"):
        out["mtp"] = True
    return out


def search_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The search options of a plan body that were given."""
    out: dict[str, Any] = {
        name: integer(params[name]) for name in ("top", "work_limit") if params.get(name) is not None
    }
    if params.get("objective") is not None:
        out["objective"] = params["objective"]
    if params.get("deadline") is not None:
        out["deadline_s"] = or_text(duration_s, params["deadline"])
    for name in ("fix", "max"):
        if params.get(name):
            out[name] = pairs(params[name], "--" + name)
    if params.get("price"):
        out["price"] = pairs(params["price"], "--price", lambda text: or_text(float, text))
    for name, convert in (("tokens", count), ("target_tokens_per_s", count), ("target_step_time", duration_s)):
        if params.get(name) is not None:
            out["target_step_time_s" if name == "target_step_time" else name] = or_text(convert, params[name])
    if params.get("what_if"):
        out["what_if"] = list(params["what_if"])
    if params.get("from_") is not None:
        out["from"] = current_data(params["from_"])
    for name in ("forbid", "allow"):
        if params.get(name):
            out[name] = list(params[name])
    return out


def degrees_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The degrees that were given."""
    out: dict[str, Any] = {name: integer(params[name]) for name in _DEGREE_INTEGERS if params.get(name) is not None}
    return out | {name: params[name] for name in ("recompute", "sharding") if params.get(name) is not None}


def pairs(items: list[str], flag: str, convert: Any = integer) -> dict[str, Any]:
    """``NAME=VALUE`` items as a dictionary; a value may be empty.

    Raises :class:`SpecError` for an item that is none, and for a name that is given two values.
    """
    from meshwright.specs.errors import Fault, SpecError

    from .strict_json import escape

    out: dict[str, Any] = {}
    given: dict[str, str] = {}
    faults = []
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        pointer = f"/{flag.removeprefix('--')}" + ("/" + escape(name[:60]) if name else "")
        if not equals or not name:
            faults.append(Fault(pointer, f"takes NAME=VALUE, got {item[:60]!r}"))
        elif given.setdefault(name, value) != value:
            faults.append(Fault(pointer, f"is given as {given[name][:60]} and as {value[:60]}; leave one out"))
        else:
            out[name] = convert(value)
    if faults:
        raise SpecError(faults)
    return out


def or_text(convert: Any, text: str) -> Any:
    """``convert(text)``, else the text itself, so that validation can name the field it stands in."""
    try:
        return convert(text)
    except ValueError:
        return text


_ARGUMENTS = {
    "model": "MODEL",
    "document": "PLAN",
    "plan": "PLAN",
    "file": "FILE",
    "runs": "RUNS.csv",
    "format": "FORMAT",
    "path": "PATH",
}


def field_name(pointer: str) -> str:
    """How a command line calls the field at ``pointer``: ``/workload/seq_length`` is ``--seq-length``."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    if not parts:
        return ""
    head, rest = parts[0], parts[1:]
    if head.startswith("--"):  # an argument of the framework
        return ".".join(parts)
    if head in _ARGUMENTS:
        return ".".join([_ARGUMENTS[head], *rest])
    if head in ("workload", "degrees") and not rest:
        return head
    if head in ("workload", "degrees"):
        head, rest = ("-".join(rest[:2]), rest[2:]) if rest[0] == "lora" else (rest[0], rest[1:])
    flag = "--" + re.sub(r"_s$", "", head).replace("_", "-")
    return (
        ".".join([f"{flag} {rest[0]}", *rest[1:]])
        if head in ("fix", "max", "env", "price") and rest
        else ".".join([flag, *rest])
    )
