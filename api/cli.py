"""The command ``meshwright``.

Only Typer is imported at the top: rooms, pydantic, numpy and Rich load inside the commands that need them, so that
``meshwright --help`` starts at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import typer

from . import exit_codes
from .commands import backtest, calibrate, catalog, check, describe, estimate, export, import_, plan, serve

#: New objects after which garbage is collected. Python's own 700 would spend a tenth of the start-up on looking through
#: modules and schemas, none of which is garbage.
COLLECTED_AFTER = 50_000
#: Base of all usage errors of the command-line parser. Typer 0.29 carries its own copy of click, earlier versions use
#: click itself; the base class is the same one of ``BadParameter`` in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]
assert issubclass(UsageError, Exception)  # noqa: S101

app = typer.Typer(
    name="meshwright",
    help="Plan large-model training: the fastest parallel plan that fits, what it costs, and the files that run it.",
    epilog="Exit codes: 0 done, 2 bad input, 3 does not fit, 4 illegal for the target, "
    "5 deadline before any plan, 130 interrupted.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("describe")(describe.describe)
app.command("plan")(plan.plan)
app.command("estimate")(estimate.estimate)
app.command("check")(check.check)
app.command("export")(export.export)
app.command("import")(import_.import_)
app.command("backtest")(backtest.backtest)
app.command("calibrate")(calibrate.calibrate)
app.command("catalog")(catalog.catalog)
app.command("serve")(serve.serve)

#: Commands that take arguments of a framework after ``--``.
_TAKES_ARGUMENTS = ("check", "estimate")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> int:
    if version:
        from importlib.metadata import version as version_of

        print(f"meshwright {version_of('meshwright')}")
        raise typer.Exit
    return exit_codes.DONE


def main() -> None:
    """Entry point of the command."""
    gc.set_threshold(COLLECTED_AFTER)
    _open_closed_streams()
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Read and write nothing where the caller closed a standard stream, which Python then leaves None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Never raises for anything a user can type."""
    try:
        return _run(argv)
    except OSError as error:  # files are read and written with faults of their own; only standard output is left
        from .output import message, silence_stdout

        silence_stdout()
        message(f"error: standard output: {error.strerror or error}")
        return exit_codes.BAD_INPUT


def _run(argv: Sequence[str]) -> int:
    head, tail = _split(list(argv) or ["--help"])
    as_json = "--json" in head
    try:
        code = typer.main.get_command(app).main(args=head, prog_name="meshwright", standalone_mode=False, obj=tail)
        if code == exit_codes.INTERRUPTED:
            raise KeyboardInterrupt
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        _tell("interrupted")
        return exit_codes.INTERRUPTED
    except UsageError as error:
        return _bad_usage(error, as_json)
    except MemoryError:  # telling more would need memory
        _tell("error: out of memory")
        return exit_codes.INTERNAL_ERROR
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        return _failed(error, as_json)


def _tell(line: str) -> None:
    from .output import message

    message(line)


def _split(argv: list[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """The command line, and what follows ``--`` for a command that takes framework arguments."""
    if argv and argv[0] in _TAKES_ARGUMENTS and "--" in argv:
        at = argv.index("--")
        return argv[:at], tuple(argv[at + 1 :])
    return argv, None


def _bad_usage(error: Exception, as_json: bool) -> int:
    from meshwright.specs.errors import Fault

    from .output import emit, fault_dicts, message, to_json

    text = error.format_message() if hasattr(error, "format_message") else str(error)
    message(f"error: {text.strip()}")
    if as_json:
        emit(to_json({"errors": fault_dicts([Fault("", text.strip())])}))
    return exit_codes.BAD_INPUT


def _failed(error: Exception, as_json: bool) -> int:
    """Exit code of an exception that a command raised, after telling it."""
    from meshwright.planner.errors import DeadlineExceeded, IllegalPlan
    from meshwright.specs.errors import Fault, SpecError

    from .output import report_faults, report_violations

    if isinstance(error, SpecError):
        from .answers import NoPlan, exit_code_of

        report_faults(error.faults, as_json=as_json)
        return exit_code_of(error.document) if isinstance(error, NoPlan) else exit_codes.BAD_INPUT
    if isinstance(error, IllegalPlan):
        report_violations(error.violations, as_json=as_json)
        return exit_codes.ILLEGAL
    if isinstance(error, DeadlineExceeded):
        report_faults([Fault("/deadline_s", str(error) or "was over before any plan was found")], as_json=as_json)
        return exit_codes.DEADLINE
    from .internal_error import incident_of

    incident = incident_of(error)
    if os.environ.get("MESHWRIGHT_DEBUG"):
        import traceback

        traceback.print_exception(error)
    text = f"internal error {incident}: {type(error).__name__}; MESHWRIGHT_DEBUG=1 shows where"
    report_faults([Fault("", text)], as_json=as_json)
    return exit_codes.INTERNAL_ERROR


if __name__ == "__main__":
    main()
