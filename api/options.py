"""The options that commands share, and the request body that they spell.

Numbers are taken as text and checked with the rest of the body, so that one call names every fault at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .units import duration_s, fraction, integer


def _option(flag: str, help: str, metavar: str) -> Any:
    return typer.Option(flag, help=help, metavar=metavar, show_default=False)


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
    _option("--cluster", "64xH100, 8x8xH100-SXM, 4x8xH100+4x8xA100-80GB, or YAML file. Required.", "CLUSTER"),
]
Target = Annotated[str | None, _option("--target", "Framework and version. Default megatron@0.19.", "TARGET")]

GlobalBatchSize = Annotated[str | None, _option("--global-batch-size", "Sequences a step. Required.", "N")]
SeqLength = Annotated[str | None, _option("--seq-length", "Tokens a sequence. Required.", "N")]
Precision = Annotated[
    str | None, _option("--precision", "bf16 (default), fp8, mxfp8, nvfp4, fp16, tf32 or fp32.", "NAME")
]
Task = Annotated[str | None, _option("--task", "pretrain (default), sft or lora.", "NAME")]
LoraRank = Annotated[str | None, _option("--lora-rank", "Rank of the adapters.", "N")]
LoraTargets = Annotated[
    str | None, _option("--lora-targets", "Adapted maps, comma-separated: qkv,proj,fc1,fc2.", "LIST")
]
Frozen = Annotated[
    list[str] | None,
    _option("--frozen", "Module without gradients: vision, embedding, decoder, head. Repeatable.", "MODULE"),
]
ParamsDtype = Annotated[str | None, _option("--params-dtype", "Stored parameters.", "DTYPE")]
GradientDtype = Annotated[str | None, _option("--gradient-dtype", "Gradient buffer.", "DTYPE")]
MainParamsDtype = Annotated[str | None, _option("--main-params-dtype", "The optimizer's parameters.", "DTYPE")]
MomentsDtype = Annotated[str | None, _option("--moments-dtype", "The optimizer's moments.", "DTYPE")]
Optimizer = Annotated[str | None, _option("--optimizer", "adam (default) or sgd.", "NAME")]
MoeLoadFactor = Annotated[
    str | None, _option("--moe-load-factor", "Load of the fullest expert rank over the mean. Default 1.", "X")
]
MoeCapacityFactor = Annotated[
    str | None, _option("--moe-capacity-factor", "Drop tokens beyond this share of an expert's mean.", "X")
]
Mtp = Annotated[bool, typer.Option("--mtp", help="Train the multi-token prediction layers.")]

Headroom = Annotated[
    str | None, _option("--memory-headroom", "Share of usable memory to leave free, such as 5%.", "SHARE")
]
Objective = Annotated[str | None, _option("--objective", "time (default): fastest step; gpus: fewest GPUs.", "NAME")]
Top = Annotated[str | None, _option("--top", "How many plans to rank. Default 5.", "K")]
Fix = Annotated[list[str] | None, _option("--fix", "Pin a choice, such as tp=8. Repeatable.", "NAME=VALUE")]
Max = Annotated[list[str] | None, _option("--max", "Cap a degree, such as pp=16. Repeatable.", "NAME=N")]
Forbid = Annotated[list[str] | None, _option("--forbid", "Leave a feature out, such as vpp. Repeatable.", "NAME")]
Deadline = Annotated[
    str | None, _option("--deadline", "Answer with the best so far after this time. Default 30s.", "TIME")
]
WorkLimit = Annotated[str | None, _option("--work-limit", "Stop after N partitioned candidates (reproducible).", "N")]

Tp = Annotated[str | None, _option("--tp", "Tensor parallel.", "N")]
Pp = Annotated[str | None, _option("--pp", "Pipeline parallel.", "N")]
Cp = Annotated[str | None, _option("--cp", "Context parallel.", "N")]
Ep = Annotated[str | None, _option("--ep", "Expert parallel.", "N")]
Etp = Annotated[str | None, _option("--etp", "Expert-tensor parallel. Default as --tp.", "N")]
Vpp = Annotated[str | None, _option("--vpp", "Virtual stages a rank. Default 1.", "N")]
MicroBatchSize = Annotated[str | None, _option("--micro-batch-size", "Sequences a micro-batch. Default 1.", "N")]
Recompute = Annotated[
    str | None, _option("--recompute", "none, full, full:block:N or selective:MODULE+MODULE.", "MODE")
]
Sharding = Annotated[str | None, _option("--sharding", "none, zero1 or fsdp, as the target has them.", "LEVEL")]

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
    if params.get("memory_headroom") is not None:
        body["memory_headroom"] = or_text(fraction, params["memory_headroom"])
    return body


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
    if params.get("forbid"):
        out["forbid"] = list(params["forbid"])
    return out


def degrees_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The degrees that were given."""
    out: dict[str, Any] = {name: integer(params[name]) for name in _DEGREE_INTEGERS if params.get(name) is not None}
    return out | {name: params[name] for name in ("recompute", "sharding") if params.get(name) is not None}


def pairs(items: list[str], flag: str, convert: Any = integer) -> dict[str, Any]:
    """``NAME=VALUE`` items as a dictionary; a usage error for an item that is none. A value may be empty."""
    out: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{flag} takes NAME=VALUE, got {item[:60]!r}")
        out[name.strip()] = convert(value.strip())
    return out


def or_text(convert: Any, text: str) -> Any:
    """``convert(text)``, else the text itself, so that validation can name the field it stands in."""
    try:
        return convert(text)
    except ValueError:
        return text


_ARGUMENTS = {"model": "MODEL", "document": "PLAN", "plan": "PLAN"}


def field_name(pointer: str) -> str:
    """How a command line calls the field at ``pointer``: ``/workload/seq_length`` is ``--seq-length``."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    if not parts:
        return ""
    head, rest = parts[0], parts[1:]
    if head in _ARGUMENTS:
        return ".".join([_ARGUMENTS[head], *rest])
    if head in ("workload", "degrees") and not rest:
        return head
    if head in ("workload", "degrees"):
        head, rest = ("-".join(rest[:2]), rest[2:]) if rest[0] == "lora" else (rest[0], rest[1:])
    flag = "--" + re.sub(r"_s$", "", head).replace("_", "-")
    return ".".join([f"{flag} {rest[0]}", *rest[1:]]) if head in ("fix", "max") and rest else ".".join([flag, *rest])
