"""``meshwright plan``: the best plans."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .. import options

if TYPE_CHECKING:
    from ..requests import Faults

#: Back to the start of the line, and erase it.
_CLEAR = "\r\x1b[2K"

Export = Annotated[
    str | None, typer.Option("--export", metavar="DIR", help="Also write the files that run the plan into DIR.")
]
Launcher = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="NAME",
        help="Launcher of --export: torchrun (default), slurm, ssh, kubernetes or pytorchjob.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Let --export replace files.")]


def plan(
    context: typer.Context,
    model: options.Model = None,
    cluster: options.Cluster = None,
    target: options.Target = None,
    global_batch_size: options.GlobalBatchSize = None,
    seq_length: options.SeqLength = None,
    precision: options.Precision = None,
    task: options.Task = None,
    lora_rank: options.LoraRank = None,
    lora_targets: options.LoraTargets = None,
    frozen: options.Frozen = None,
    params_dtype: options.ParamsDtype = None,
    gradient_dtype: options.GradientDtype = None,
    main_params_dtype: options.MainParamsDtype = None,
    moments_dtype: options.MomentsDtype = None,
    optimizer: options.Optimizer = None,
    moe_load_factor: options.MoeLoadFactor = None,
    moe_capacity_factor: options.MoeCapacityFactor = None,
    mtp: options.Mtp = False,
    objective: options.Objective = None,
    price: options.Price = None,
    tokens: options.Tokens = None,
    target_step_time: options.TargetStepTime = None,
    target_tokens_per_s: options.TargetTokensPerS = None,
    expert_load: options.ExpertLoad = None,
    what_if: options.WhatIf = None,
    from_: options.From = None,
    top: options.Top = None,
    deadline: options.Deadline = None,
    work_limit: options.WorkLimit = None,
    fix: options.Fix = None,
    max: options.Max = None,
    forbid: options.Forbid = None,
    allow: options.Allow = None,
    memory_headroom: options.Headroom = None,
    calibration: options.CalibrationFile = None,
    json: options.Json = False,
    output: options.Output = None,
    export: Export = None,
    launcher: Launcher = None,
    force: Force = False,
) -> int:
    """Find the fastest plan that fits.

    \b
    Examples:
      meshwright plan llama-3.1-70b --cluster 64xH100 --global-batch-size 512 --seq-length 8192
      meshwright plan ./config.json --cluster cluster.yaml --global-batch-size 256 --seq-length 4096 -o plan.json
      meshwright plan llama-3.1-8b --cluster 8xH100 --global-batch-size 128 --seq-length 8192 --fix tp=2 --export run
      meshwright plan llama-3.1-8b --cluster 2x8xH100 --global-batch-size 16 --seq-length 131072 --fix cp_comm_type=a2a
      meshwright plan llama-3.1-8b --cluster 64xH100 --global-batch-size 128 --seq-length 8192 \\
          --objective cost --price H100=2.5
      meshwright plan qwen3-30b-a3b --cluster 16xH100 --global-batch-size 64 --seq-length 4096 --expert-load zipf:0.6
      meshwright plan llama-3.1-8b --cluster 8xH100 --global-batch-size 128 --seq-length 8192 \\
          --what-if gpus=2x --from plan.json
    """
    from meshwright.specs.errors import Fault, SpecError

    from ..answers import answer, exit_code_of
    from ..bodies import PlanBody
    from ..output import deliver, message
    from ..requests import Faults, plan_request

    params = context.params
    faults = Faults()
    _check_destinations(faults, output, export, launcher)
    body = faults.of("", lambda: options.inputs_of(params) | options.search_of(params))
    request = faults.of("", lambda: plan_request(body, PlanBody, files=True)[0]) if body is not None else None
    faults.raise_if_any()
    assert request is not None  # noqa: S101 - raise_if_any has raised otherwise
    watched = sys.stderr is not None and sys.stderr.isatty()
    try:
        document = answer(request, _show_progress if watched else None)
    finally:
        if watched:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
    if export is not None and document.plan is not None:
        from ..exports import export_files
        from ..files import write_folder

        # before anything is printed: a fault here must leave one document, the errors, on standard output
        try:
            files = export_files(document, None, launcher or "torchrun")
        except SpecError as error:  # the document is ours: what is wrong in its inputs was typed here
            raise SpecError(
                Fault(f.pointer.removeprefix("/document/inputs"), f.message, f.alternatives) for f in error.faults
            ) from None
        paths = write_folder(export, files, force=force, pointer="/export")
        message(f"wrote {len(paths)} files to {export}")
    elif export is not None:
        message(f"nothing was exported to {export}: there is no plan (status {document.status})")
    deliver(document.to_json(), as_json=json, output=output)
    if not json:
        from ..render import print_document

        print_document(document)
    return exit_code_of(document)


def _check_destinations(faults: Faults, output: str | None, export: str | None, launcher: str | None) -> None:
    """Note what would keep the files from being written: better told before the search than after it."""
    from meshwright.specs.errors import Fault

    from ..files import require_file_place, require_folder

    if output is not None:
        faults.of("", lambda: require_file_place(output))
    if launcher is not None:
        from meshwright.megatron_export.launch import require_launcher

        faults.of("", lambda: require_launcher(launcher))
        if export is None:
            faults.found.append(Fault("/launcher", "says how --export starts the plan; give --export DIR too"))
    if export is not None:
        faults.of("", lambda: require_folder(export, "/export"))


def _show_progress(stage: str, done: int, total: int) -> None:
    """Rewrite one line of the terminal."""
    print(f"{_CLEAR}{stage} {done:,} of {total:,}", end="", file=sys.stderr, flush=True)
