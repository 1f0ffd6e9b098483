"""``meshwright estimate``: what a given plan costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import options

#: What may be given beside a plan document.
_BESIDE_A_PLAN = ("model", "memory_headroom", "calibration")
_DEGREES_ONLY = "Required with MODEL; comes with PLAN or the arguments after --."
Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL | PLAN]",
        help="Model (preset, config.json, ModelSpec file or Megatron script), or plan document. "
        "Optional with arguments after --.",
        show_default=False,
    ),
]
Cluster = Annotated[
    str | None,
    options.option("--cluster", f"{options.CLUSTER_FORMS}. Required unless PLAN is given.", "CLUSTER"),
]
GlobalBatchSize = Annotated[
    str | None, options.option("--global-batch-size", f"Sequences a step. {_DEGREES_ONLY}", "N")
]
SeqLength = Annotated[str | None, options.option("--seq-length", f"Tokens a sequence. {_DEGREES_ONLY}", "N")]


def estimate(
    context: typer.Context,
    model: Subject = None,
    cluster: Cluster = None,
    target: options.Target = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
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
    tp: options.Tp = None,
    pp: options.Pp = None,
    cp: options.Cp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    vpp: options.Vpp = None,
    micro_batch_size: options.MicroBatchSize = None,
    recompute: options.Recompute = None,
    sharding: options.Sharding = None,
    expert_load: options.ExpertLoad = None,
    memory_headroom: options.Headroom = None,
    calibration: options.CalibrationFile = None,
    json: options.Json = False,
    output: options.Output = None,
) -> int:
    """Price a plan: step time with its breakdown, and the memory of every stage.

    The plan is given by degrees, by a plan document, or by Megatron arguments after -- (the model too, unless named).
    The answer is a plan document; exit code 3 says that the plan does not fit.

    \b
    Examples:
      meshwright estimate llama-3.1-70b --cluster 64xH100 --global-batch-size 512 --seq-length 8192 --tp 4 --pp 4
      meshwright estimate plan.json
      meshwright estimate --cluster 8xH100 -- --num-layers 32 --hidden-size 4096 ...
    """
    from ..answers import exit_code_of
    from ..files import require_file_place
    from ..output import deliver

    if output is not None:
        require_file_place(output)
    document = _document(context.params, context.obj)
    deliver(document.to_json(), as_json=json, output=output)
    if not json:
        from ..render import print_document

        print_document(document)
    return exit_code_of(document)


def _document(params: dict[str, Any], arguments: tuple[str, ...] | None) -> Any:
    """Priced by whichever of the three ways the command line gives the plan."""
    from ..answers import estimate_arguments, estimate_data, estimate_document
    from ..bodies import HeadroomBody
    from ..plan_files import read_plan_file
    from ..requests import in_field, read_calibration

    inputs = options.inputs_of(params)
    if arguments is not None:
        _refuse(params, options.degrees_of(params), "comes with the arguments after --; leave it out")
        return estimate_arguments(list(arguments), inputs, files=True)
    model = params.get("model")
    stored = read_plan_file(model) if model is not None else None
    if stored is not None:
        given = {name: value for name, value in inputs.items() if name not in _BESIDE_A_PLAN and value}
        _refuse(params, given | options.degrees_of(params), "comes with the plan document; leave it out")
        headroom = {name: inputs[name] for name in inputs if name == "memory_headroom"}
        calibration = in_field("/calibration", lambda: read_calibration(inputs.get("calibration")))
        return estimate_document(stored, HeadroomBody.read(headroom).memory_headroom, calibration)
    return estimate_data({**inputs, "degrees": options.degrees_of(params)}, files=True)


def _refuse(params: dict[str, Any], given: dict[str, Any], message: str) -> None:
    """Refuse options that would contradict the plan; silence would price something else than was asked."""
    from meshwright.specs.errors import Fault, SpecError

    faults = [Fault(f"/{name}", message) for name in given if name != "workload"]
    workload = given.get("workload")
    faults += [Fault(f"/workload/{name}", message) for name in workload or {}]
    if faults:
        raise SpecError(faults)
