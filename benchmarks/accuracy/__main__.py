"""Writes ``docs/accuracy.md`` and its charts anew from the data in ``benchmarks/data``.

    python -m benchmarks.accuracy [--memory RUNS MODELS]

Step times come from ``left_out.csv.gz``, a prediction a line, whose ``scheme`` says what its fit had not seen; memory
from ``memory.csv.gz``, which ``--memory`` first makes anew from published runs and their models. Charts need the extra
``fit``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.cost_models.backtest.rows import read_rows

from . import memory
from .order import pairs_of
from .page import render
from .statistics import of_scheme, read_left_out

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "benchmarks" / "data", ROOT / "docs" / "accuracy.md"
COMMAND = "python -m benchmarks.accuracy --memory benchmarks/data/published_{runs.csv,models.json}.gz"


def page(left_out: Path = DATA / "left_out.csv.gz") -> str:
    """The page from the data as they are."""
    runs = {row["id"]: row for row in read_rows(DATA / "published_runs.csv.gz")}
    tools = list(read_rows(DATA / "other_tools.csv"))
    return render(read_left_out(left_out), runs, memory.read(DATA / "memory.csv.gz"), tools, COMMAND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs=2, type=Path, metavar=("RUNS", "MODELS"))
    parser.add_argument("--left-out", type=Path, default=DATA / "left_out.csv.gz", help="default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="charts go into a folder of its name beside it")
    arguments = parser.parse_args()
    if arguments.memory:
        failed = ROOT / "tests" / "data" / "out_of_memory.jsonl"
        memory.write(DATA / "memory.csv.gz", memory.measure(*arguments.memory, failed))
    arguments.page.write_text(page(arguments.left_out), encoding="utf-8")
    from .plots import draw  # needs matplotlib, which the page's text does not

    unseen = of_scheme(read_left_out(arguments.left_out), "group")
    runs = {row["id"]: row for row in read_rows(DATA / "published_runs.csv.gz")}
    draw(arguments.page.with_suffix(""), unseen, pairs_of(unseen, runs))


if __name__ == "__main__":
    main()
