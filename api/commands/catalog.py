"""``meshwright catalog``: what is known by name."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import exit_codes, options

Kind = Annotated[str | None, typer.Argument(metavar="[KIND]", help="gpus, models, targets or links.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="One entry in full.")]


def catalog(
    kind: Kind = None,
    name: Name = None,
    json: options.Json = False,
    output: options.Output = None,
) -> int:
    """GPU types, model presets, targets and links that can be named.

    \b
    Examples:
      meshwright catalog gpus
      meshwright catalog gpus H100-SXM --json
      meshwright catalog models
    """
    from ..catalog import KINDS, entries, entry
    from ..output import deliver

    if kind is None:
        data: object = {each: [row["name"] for row in entries(each)] for each in KINDS}
    else:
        data = entries(kind) if name is None else entry(kind, name)
    deliver(data, as_json=json, output=output)
    if not json:
        from ..render import print_catalog

        print_catalog(kind, data)
    return exit_codes.DONE
