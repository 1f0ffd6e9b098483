"""``meshwright backtest``: price measured runs and tell the error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import exit_codes, options

if TYPE_CHECKING:
    from meshwright.cost_models.backtest.bulk import Outcome

Runs = Annotated[
    str | None, typer.Argument(metavar="RUNS.csv", help="Table of measured runs. Required.", show_default=False)
]
Models = Annotated[
    str | None, options.option("--models", "Architectures by the name in column model. Required.", "FILE")
]
Jobs = Annotated[str | None, options.option("--jobs", "Processes. Default: all processors.", "N")]
Out = Annotated[str | None, options.option("--out", "Write one line a run to this CSV file. Required.", "OUT.csv")]
By = Annotated[
    list[str] | None,
    options.option("--by", "Group errors by this column. Repeatable. Default: framework, experts.", "COLUMN"),
]
WithRanking = Annotated[bool, typer.Option("--ranking", help="Tell also how often plans are put in the right order.")]


def backtest(
    runs: Runs = None,
    models: Models = None,
    out: Out = None,
    by: By = None,
    ranking: WithRanking = False,
    calibration: options.CalibrationFile = None,
    jobs: Jobs = None,
    json: options.Json = False,
) -> int:
    """Price measured runs one by one and print the error of each group.

    A run that cannot be priced is a line of OUT.csv with its reason. Interrupted, OUT.csv keeps the lines so far.

    \b
    Examples:
      meshwright backtest runs.csv --models models.json --out out.csv
      meshwright backtest runs.csv --models models.json --out out.csv --by gpu_type --by precision --ranking
    """
    from meshwright.cost_models.backtest.inputs import read_models, read_runs
    from meshwright.cost_models.backtest.ranking import rankings
    from meshwright.cost_models.backtest.report import DEFAULT_BY, report_of
    from meshwright.specs.errors import Fault

    from ..backtests import print_report, processes_of, report_data
    from ..output import emit, to_json
    from ..requests import Faults, read_calibration

    faults = Faults()
    for name, value in (("runs", runs), ("models", models), ("out", out)):
        if value is None:
            faults.found.append(Fault(f"/{name}", "is required"))
    rows = faults.of("", lambda: read_runs(str(runs))) if runs is not None else None
    known = faults.of("", lambda: read_models(str(models))) if models is not None else None
    faults.of("", lambda: _check_out(out, {"RUNS.csv": runs, "--models": models, "--calibration": calibration}))
    processes = faults.of("", lambda: processes_of(jobs))
    data = faults.of("", lambda: options.calibration_data(calibration)) if calibration is not None else None
    correction = faults.of("/calibration", lambda: read_calibration(data))
    if rows is not None:
        faults.found += _column_faults(by, rows[0])
    faults.raise_if_any()
    assert rows is not None  # noqa: S101 - raise_if_any has raised otherwise
    assert known is not None  # noqa: S101
    outcomes = _priced(rows, known, str(out), correction, processes or 1)
    report = report_of(rows, outcomes, known, tuple(by) if by else DEFAULT_BY)
    order = rankings(rows, outcomes, known) if ranking else None
    if json:
        emit(to_json({"out": out} | report_data(report, order)))
    else:
        print_report(report, order)
    return exit_codes.DONE


def _check_out(out: str | None, given: dict[str, str | None]) -> None:
    from ..backtests import require_other_file
    from ..files import require_file_place

    if out is None:
        return
    require_file_place(out, "/out")
    require_other_file(out, {name: path for name, path in given.items() if path is not None}, "/out")


def _column_faults(by: list[str] | None, row: dict[str, str]) -> list[Any]:
    from meshwright.cost_models.backtest.report import DERIVED
    from meshwright.specs.errors import Fault

    columns = (*(name for name in row if name.isprintable()), *DERIVED)
    return [Fault("/by", f"{name[:60]!r} is no column", columns) for name in by or () if name not in columns]


def _priced(rows: Any, models: Any, out: str, calibration: Any, processes: int) -> list[Outcome]:
    """The outcomes, each written to ``out`` as soon as it is there."""
    from meshwright.cost_models.backtest.bulk import price_rows
    from meshwright.cost_models.backtest.output import write_outcomes
    from meshwright.specs.errors import Fault, SpecError

    from ..backtests import progress_bar
    from ..output import message

    done: list[Outcome] = []
    try:
        with open(out, "w", buffering=1, encoding="utf-8", newline="") as file, progress_bar() as tell:
            priced = price_rows(rows, models, calibration, processes)
            try:
                for outcome in write_outcomes(file, priced):
                    done.append(outcome)
                    if tell:
                        tell("pricing", len(done), len(rows))
            finally:
                priced.close()  # ends the processes
    except KeyboardInterrupt:
        message(f"{len(done):,} of {len(rows):,} runs are in {out}")
        raise
    except SpecError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(Fault("/out", f"cannot write {out}: {reason}")) from None
    return done
