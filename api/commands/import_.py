"""``meshwright import``: profiles and clusters of other planners."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import exit_codes, options

Format = Annotated[
    str | None,
    typer.Argument(
        metavar="FORMAT", help="amp, flashflex, galvatron, metis, nest or sailor. Required.", show_default=False
    ),
]
Path = Annotated[
    str | None,
    typer.Argument(metavar="PATH", help="File or folder of the other planner. Required.", show_default=False),
]
Gpus = Annotated[str | None, options.option("--gpus", "GPUs of the cluster, where the format does not say.", "N")]
Gpu = Annotated[str | None, options.option("--gpu", "GPU type, where the format does not say.", "TYPE")]


def import_(
    format: Format = None,
    path: Path = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    output: options.Output = None,
    json: options.Json = False,
) -> int:
    """Read a profile, a cluster, or both from another planner's files.

    The result is one JSON document; --cluster of the other commands takes it where it holds a cluster.

    \b
    Examples:
      meshwright import sailor sailor-data -o profile.json
      meshwright import galvatron configs --gpu A100-SXM-80GB --gpus 64 -o galvatron.json
      meshwright import nest solver_input.json --gpu H100 --gpus 128 --json
    """
    from meshwright.specs.errors import Fault

    from ..imports import import_from, summary_of
    from ..output import deliver, message
    from ..requests import Faults

    faults = Faults()
    for name, value in (("format", format), ("path", path)):
        if value is None:
            faults.found.append(Fault(f"/{name}", "is required"))
    if output is None and not json:
        faults.found.append(Fault("/output", "is required (or --json)"))
    faults.raise_if_any()
    assert format is not None and path is not None  # noqa: S101, PT018 - raise_if_any has raised otherwise
    found = import_from(format, path, gpus=gpus, gpu=gpu)
    deliver(found.to_json(), as_json=json, output=output)
    for line in summary_of(found):
        message(line)
    if output is not None:
        message(f"wrote {output}")
    return exit_codes.DONE
