"""``meshwright export``: the files that run a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import exit_codes

PlanFile = Annotated[str | None, typer.Argument(metavar="PLAN", help="Plan document, or - for standard input.")]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="Default: the target the plan is for. Or another planner's format: sailor, galvatron, flagscale, metis, "
        "flashflex, nest.",
        show_default=False,
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        metavar="NAME",
        help="torchrun (default), slurm, ssh, kubernetes (a JobSet) or pytorchjob.",
        show_default=False,
    ),
]
Site = Annotated[
    str | None,
    typer.Option(
        "--site",
        metavar="FILE",
        help="Account, partition, image, mounts, environment, data and tokenizer arguments of a place (YAML or JSON).",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts", metavar="FILE", help="Host names in plan order, or a mapping of each host to its pool or GPU type."
    ),
]
Folder = Annotated[str | None, typer.Option("-o", "--output", metavar="DIR", help="Folder to write into.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print the files as one JSON document; -o may be left out.")]


def export(
    document: PlanFile = None,
    target: Target = None,
    launcher: Launcher = "torchrun",
    site: Site = None,
    hosts: Hosts = None,
    output: Folder = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Write the arguments, scripts and host file that run a plan.

    \b
    Examples:
      meshwright export plan.json -o run
      meshwright export plan.json --target megatron@0.19 --launcher slurm -o run
      meshwright export plan.json --launcher slurm --site site.yaml --hosts hosts.yaml -o run
      meshwright export plan.json --target flagscale -o run
    """
    from meshwright.megatron_export.launch import NO_SITE, Site, read_hosts, require_launcher
    from meshwright.specs.errors import Fault, SpecError
    from meshwright.specs.files import read_document, read_text

    from ..answers import plan_of
    from ..exports import export_files
    from ..files import require_folder, write_folder
    from ..output import emit, message, to_json
    from ..plan_files import require_plan_file
    from ..requests import Faults

    if document is None:
        raise SpecError(Fault("/document", "is required"))
    if output is None and not json:
        raise SpecError(Fault("/output", "is required (or --json)"))
    faults = Faults()
    faults.of("", lambda: require_launcher(launcher))
    if output is not None:
        faults.of("", lambda: require_folder(output, "/output"))
    plan = faults.of("", lambda: require_plan_file(document))
    place = NO_SITE if site is None else faults.of("/site", lambda: Site.read(read_document(site), ""))
    names = None if hosts is None else faults.of("/hosts", lambda: read_hosts(read_text(hosts)))
    faults.raise_if_any()
    assert plan is not None  # noqa: S101 - raise_if_any has raised otherwise
    plan_of(plan)
    files = export_files(plan, target, launcher, names, place or NO_SITE)
    if output is not None:
        for path in write_folder(output, files, force=force):
            message(f"wrote {path}")
    if json:
        emit(to_json({"files": files}))
    return exit_codes.DONE
