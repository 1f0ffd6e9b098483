"""``meshwright check``: is a configuration legal for its target, and does it fit?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import exit_codes, options

FORMATS = ("megatron", "torchtitan-toml", "torchtitan-python", "deepspeed", "accelerate")
File = Annotated[str | None, typer.Argument(metavar="[FILE]", help="Configuration of any format, instead of --.")]
WorldSize = Annotated[
    str | None, typer.Option("--world-size", metavar="N", help="Number of ranks. Required without --cluster.")
]
Env = Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Environment variable. Repeatable.")]
TeVersion = Annotated[str | None, typer.Option("--te-version", metavar="V", help="Transformer Engine version.")]
Sm = Annotated[str | None, typer.Option("--sm", metavar="X.Y", help="Compute capability, such as 9.0.")]

Cluster = Annotated[
    str | None,
    options.option("--cluster", f"{options.CLUSTER_FORMS}. Tells also whether the plan fits.", "CLUSTER"),
]
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help=f"{', '.join(FORMATS)}. By default told from the content."),
]
Model = Annotated[
    str | None,
    options.option("--model", "Model (preset or file), where the configuration does not say it.", "MODEL"),
]
GlobalBatchSize = Annotated[str | None, options.option("--global-batch-size", "Sequences a step, likewise.", "N")]
SeqLength = Annotated[str | None, options.option("--seq-length", "Tokens a sequence, likewise.", "N")]
Compare = Annotated[bool, typer.Option("--compare", help="Search for the best plan too, and compare with it.")]


def check(
    context: typer.Context,
    file: File = None,
    target: options.Target = None,
    world_size: WorldSize = None,
    cluster: Cluster = None,
    env: Env = None,
    te_version: TeVersion = None,
    sm: Sm = None,
    memory_headroom: options.Headroom = None,
    format: Format = None,
    model: Model = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    precision: options.Precision = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    micro_batch_size: options.MicroBatchSize = None,
    recompute: options.Recompute = None,
    compare: Compare = False,
    deadline: options.Deadline = None,
    work_limit: options.WorkLimit = None,
    json: options.Json = False,
    output: options.Output = None,
) -> int:
    """Check a configuration of your own: every broken rule, and with a cluster whether it fits.

    Reads Megatron arguments (after --, or a script or YAML), torchtitan TOML and Python, DeepSpeed JSON and Accelerate
    YAML. No file is ever run.
    Exit code 4: illegal for the target. 3: legal, but does not fit.

    \b
    Examples:
      meshwright check --world-size 64 -- --num-layers 80 --hidden-size 8192 ...
      meshwright check --cluster 64xH100 --compare train.sh
      meshwright check --cluster 8xH100 --model llama-3.1-8b --seq-length 4096 ds_config.json
      meshwright check --world-size 8 --env CUDA_DEVICE_MAX_CONNECTIONS=1 --json -- --num-layers 32 ...
    """
    from ..checks import run_check
    from ..files import require_file_place
    from ..output import deliver

    if output is not None:
        require_file_place(output)
    result = run_check(_body(context), files=True)
    deliver(result, as_json=json, output=output)
    if not json:
        from ..render_check import print_check

        print_check(result)
    if not result["legal"]:
        return exit_codes.ILLEGAL
    return exit_codes.DOES_NOT_FIT if result["fits"] is False else exit_codes.DONE


def _body(context: typer.Context) -> dict[str, Any]:
    from meshwright.specs.errors import Fault, SpecError

    from ..files import read_text
    from ..units import fraction, integer

    params, tail = context.params, context.obj
    if tail is not None and params["file"] is not None:
        raise SpecError(Fault("/arguments", "give a file or arguments after --, not both"))
    if tail is None and params["file"] is None:
        raise SpecError(Fault("/arguments", "give arguments after --, or a file"))
    body: dict[str, Any] = (
        {"arguments": list(tail)} if tail is not None else {"configuration": read_text(params["file"], "/file")}
    )
    for name in ("target", "cluster", "model", "format", "te_version"):
        if params[name] is not None:
            body[name] = params[name]
    body["workload"] = options.workload_of(params)
    body["degrees"] = options.degrees_of(params)
    body |= options.search_of(params)
    if params["compare"]:
        body["compare"] = True
    if params["world_size"] is not None:
        body["world_size"] = integer(params["world_size"])
    if params["env"]:
        body["env"] = options.pairs(params["env"], "--env", str)
    if params["sm"] is not None:
        body["sm"] = options.or_text(float, params["sm"])
    if params["memory_headroom"] is not None:
        body["memory_headroom"] = options.or_text(fraction, params["memory_headroom"])
    return body
