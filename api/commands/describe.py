"""``meshwright describe``: what a model is."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import exit_codes, options


def describe(
    model: options.Model = None,
    seq_length: Annotated[
        str | None, typer.Option("--seq-length", metavar="N", help="Sequence length for FLOPs a token. Default 4096.")
    ] = None,
    json: options.Json = False,
    output: options.Output = None,
) -> int:
    """Parameters, layers by kind and FLOPs a token of a model.

    \b
    Examples:
      meshwright describe llama-3.1-70b
      meshwright describe ./config.json --json
    """
    from meshwright.specs.errors import Fault, SpecError

    from ..describe import describe_model
    from ..output import deliver
    from ..requests import Faults, read_model
    from ..units import integer

    if model is None:
        raise SpecError(Fault("/model", "is required"))
    faults = Faults()
    spec = faults.of("/model", lambda: read_model(model, files=True))
    length = integer(seq_length) if seq_length is not None else None
    if length is not None and not (isinstance(length, int) and 1 <= length <= 100_000_000):
        faults.found.append(Fault("/seq_length", f"must be a whole number from 1 to 100000000, got {seq_length!r}"))
    faults.raise_if_any()
    assert spec is not None  # noqa: S101 - raise_if_any has raised otherwise
    data = describe_model(spec, length if isinstance(length, int) else None)
    deliver(data, as_json=json, output=output)
    if not json:
        from ..render import print_model

        print_model(data)
    return exit_codes.DONE
