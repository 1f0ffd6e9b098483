"""Plans every case of the suite and compares each plan with simpler ways to plan.

    python -m benchmarks.suite [WORD...] [--json FILE] [--out docs/suite.md] [--scaling]

Cases whose name or tags hold one of the words are run, all without any. Each is planned by ``meshwright plan`` in a
process of its own, start-up included in its CPU seconds; a second process checks the answer and prices the baselines.
``--json`` keeps a JSON line a case and ``--again`` reads those that it holds instead of running them. Exit code 1 where
a bar is missed, 130 when interrupted.

    python -m benchmarks.suite mixed --json rows.jsonl
    python -m benchmarks.suite --scaling --out docs/suite.md
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import Case, cases, scaling
from .report import line, page
from .rows import Row, summary


def main() -> int:
    """Run the cases, print a line each and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a JSON line a case here, as it is done")
    parser.add_argument("--again", action="store_true", help="take cases that --json already holds from there")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the page of the documentation")
    parser.add_argument("--scaling", action="store_true", help="also show how a search grows with the GPUs")
    options = parser.parse_args()
    chosen = [case for case in cases() if _wanted(case, options.words)]
    known = _known(options.json) if options.again else {}
    if options.json is not None and not options.again:
        options.json.write_text("", encoding="utf-8")
    rows: list[Row] = []
    try:
        for case in [*chosen, *(scaling() if options.scaling else ())]:
            row = known.get(case.name) or _run(case, len(rows) + 1)
            rows.append(row)
            if case.name not in known and options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            print(line(row), flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {len(rows)} cases", file=sys.stderr)
        return 130
    grown = [row for row in rows if "scaling" in row.tags]
    judged = [row for row in rows if "scaling" not in row.tags]
    found = summary(judged)
    print(
        f"{found.cases} cases: gap median {found.median_gap:.2%}, worst {found.worst_gap:.2%}; {found.illegal} faults; "
        f"{len(found.slower)} baselines faster; at most {found.most_cpu_s:.1f} CPU s and {found.most_mib:.0f} MiB"
    )
    for failure in found.failures:
        print(f"FAILS: {failure}")
    if options.out is not None:
        options.out.write_text(page(judged, grown), encoding="utf-8")
    return int(bool(found.failures))


def _wanted(case: Case, words: list[str]) -> bool:
    return not words or any(word in case.name or word in case.tags for word in words)


def _known(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(text)) for text in path.read_text(encoding="utf-8").splitlines()]
    return {row.name: row for row in found}


def _run(case: Case, number: int) -> Row:
    """A case planned, checked and compared; the cases of scaling are only planned."""
    print(f"[{number}] {case.name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        cpu_s, peak_mib = _planned(case, plan)
        row = Row(
            name=case.name,
            model=case.model,
            cluster=case.cluster,
            gpus=case.spec().num_gpus,
            batch=case.batch,
            seq=case.seq,
            precision=case.precision,
            tags=list(case.tags),
            cpu_s=cpu_s,
            peak_mib=peak_mib,
            refused=case.refused,
        )
        found = _figures(plan) if "scaling" in case.tags else _measured(case, plan)
    for name, value in found.items():
        setattr(row, name, value)
    return row


def _planned(case: Case, path: Path) -> tuple[float, float]:
    """CPU seconds and peak MiB of the command that plans a case into ``path``."""
    command = shutil.which("meshwright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        sys.exit("meshwright is not on the path")
    with path.open("w") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([command, "plan", *case.command(path.parent), "--json"], stdout=out, stderr=errors)
        try:
            _, status, used = os.wait4(child.pid, 0)
        except KeyboardInterrupt:
            child.kill()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read()
    if not path.stat().st_size:
        raise SystemExit(f"{case.name}: exit {child.returncode}: {said}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def _figures(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        "status": document["status"],
        "candidates": document["run"]["candidates"],
        "step_time_s": document["estimate"]["step_time_s"],
        "gap": document["bound"]["gap"],
    }


def _measured(case: Case, path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite.measure", case.name, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
