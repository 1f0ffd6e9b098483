"""``meshwright calibrate``: corrections from measured runs."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import exit_codes, options
from .backtest import Jobs, Models, Runs

Output = Annotated[
    str | None,
    typer.Option("-o", "--output", help="Write the calibration to FILE. Required.", metavar="FILE", show_default=False),
]


def calibrate(
    runs: Runs = None,
    models: Models = None,
    output: Output = None,
    jobs: Jobs = None,
    json: options.Json = False,
) -> int:
    """Turn measured runs into a calibration, which plan, estimate and backtest take with --calibration.

    One run is enough for its own model and GPU type; more runs serve more models.

    \b
    Examples:
      meshwright calibrate runs.csv --models models.json -o calibration.json
      meshwright plan llama-3.1-70b --cluster 64xH100 ... --calibration calibration.json
    """
    import hashlib
    from pathlib import Path

    from meshwright.cost_models.backtest.anchors import calibrate as fit
    from meshwright.cost_models.backtest.inputs import read_models, read_runs
    from meshwright.specs.errors import Fault, SpecError

    from ..backtests import print_calibration, processes_of, progress_bar, require_other_file
    from ..files import require_file_place
    from ..output import deliver
    from ..requests import Faults

    faults = Faults()
    for name, value in (("runs", runs), ("models", models), ("output", output)):
        if value is None:
            faults.found.append(Fault(f"/{name}", "is required"))
    rows = faults.of("", lambda: read_runs(str(runs))) if runs is not None else None
    known = faults.of("", lambda: read_models(str(models))) if models is not None else None
    if output is not None:
        faults.of("", lambda: require_file_place(output))
        given = {"RUNS.csv": runs, "--models": models}
        read = {name: path for name, path in given.items() if path is not None}
        faults.of("", lambda: require_other_file(output, read, "/output"))
    processes = faults.of("", lambda: processes_of(jobs))
    faults.raise_if_any()
    assert rows is not None  # noqa: S101 - raise_if_any has raised otherwise
    assert known is not None  # noqa: S101
    digest = hashlib.sha256(Path(str(runs)).read_bytes()).hexdigest()
    with progress_bar() as tell:
        found, skipped = fit(rows, known, Path(str(runs)).name, digest, processes or 1, tell)
    if found is None:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in list(skipped.items())[:5])
        raise SpecError(Fault("/runs", f"holds no run to calibrate on: {reasons}"))
    deliver(found.to_json(), as_json=json, output=output)
    if not json:
        print_calibration(found, skipped)
    return exit_codes.DONE
