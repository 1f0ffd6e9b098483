"""``meshwright plan``: the best plans."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import options

#: Back to the start of the line, and erase it.
_CLEAR = "\r\x1b[2K"

Export = Annotated[
    str | None, typer.Option("--export", metavar="DIR", help="Also write the files that run the plan into DIR.")
]
Launcher = Annotated[str, typer.Option("--launcher", metavar="NAME", help="Launcher of --export: torchrun or slurm.")]
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
    top: options.Top = None,
    deadline: options.Deadline = None,
    work_limit: options.WorkLimit = None,
    fix: options.Fix = None,
    max: options.Max = None,
    forbid: options.Forbid = None,
    memory_headroom: options.Headroom = None,
    json: options.Json = False,
    output: options.Output = None,
    export: Export = None,
    launcher: Launcher = "torchrun",
    force: Force = False,
) -> int:
    """Find the fastest plan that fits.

    \b
    Examples:
      meshwright plan llama-3.1-70b --cluster 64xH100 --global-batch-size 512 --seq-length 8192
      meshwright plan ./config.json --cluster cluster.yaml --global-batch-size 256 --seq-length 4096 -o plan.json
      meshwright plan llama-3.1-8b --cluster 8xH100 --global-batch-size 128 --seq-length 8192 --fix tp=2 --export run
    """
    from ..answers import answer, exit_code_of
    from ..bodies import PlanBody
    from ..output import deliver, message
    from ..requests import plan_request

    params = context.params
    request, _ = plan_request(options.inputs_of(params) | options.search_of(params), PlanBody, files=True)
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
        paths = write_folder(export, export_files(document, None, launcher), force=force, pointer="/export")
        message(f"wrote {len(paths)} files to {export}")
    deliver(document.to_json(), as_json=json, output=output)
    if not json:
        from ..render import print_document

        print_document(document)
    return exit_code_of(document)


def _show_progress(stage: str, done: int, total: int) -> None:
    """Rewrite one line of the terminal."""
    print(f"{_CLEAR}{stage} {done:,} of {total:,}", end="", file=sys.stderr, flush=True)
