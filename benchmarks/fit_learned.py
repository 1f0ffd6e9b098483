"""Fit corrections and intervals of ``cost_models/data/learned.json`` on published runs; show how they carry over.

    python -m benchmarks.fit_learned [--runs RUNS.csv] [--models MODELS.json] [--rounds 3] [--write]

Needs the extra ``fit``. Prints errors on runs left out: by group (architecture and GPU type), by architecture, by GPU
architecture, and for vTrain's runs by hidden size. Every figure is the exact price of the left-out runs under the
corrections fitted without them. ``--write`` stores the corrections and intervals, and the left-out predictions in
``benchmarks/data/left_out.csv.gz``, from which ``benchmarks/accuracy.py`` makes the page.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
from scipy.stats import norm, t

from benchmarks.learned_fit import Problem, Sample, Table, balanced, linearised, sample_of, seconds, solve
from meshwright.cost_models.backtest.inputs import is_judged, read_models
from meshwright.cost_models.backtest.plans import case_of
from meshwright.cost_models.backtest.rows import Run, UnsupportedError, read_rows, run_of
from meshwright.cost_models.learned import multipliers_of
from meshwright.cost_models.multipliers import Multipliers

HERE = Path(__file__).parent / "data"
OUT = Path(__file__).parents[1] / "cost_models" / "data" / "learned.json"
LEFT_OUT = HERE / "left_out.csv.gz"
LEVEL = 0.8
#: Groups from which a stack has an interval of its own.
FEWEST_GROUPS = 3
#: Runs of one source that differ in little but the batch: a share of them is enough for the fit; all are predicted.
THINNED, SHARE = "VIA-Research/vTrain", 0.2
#: Sources whose hardware is not stated as it ran teach nothing about a type; their runs are predicted all the same.
UNTAUGHT = {"torchtitan/components/quantization/mxfp8.md § Dense Models": "B200 under a power limit of unstated size"}
#: What an anchor weighs: it is a run of the very system, where others are of other releases, models or hosts.
ANCHOR_WEIGHT = 4.0
#: Where the solution starts: stacks whose eager Python launches slower than a layer computes.
START: Table = {"family=megatron-deepspeed": {"host": math.log(4.0)}}
COLUMNS = (
    "id", "source_repo", "framework", "stack", "release", "model", "group", "gpu_type", "precision", "kind",
    "num_gpus", "hidden_size", "scheme", "measured_s", "predicted_s", "low_s", "high_s", "level",
)  # fmt: skip


def samples_of(runs: Path, models: Path) -> list[Sample]:
    """Judged runs on one GPU type whose plan is stated and can be priced."""
    known, out = read_models(models), []
    for row in read_rows(runs):
        if not is_judged(row) or row["gpu_type"] == "mixed":
            continue
        try:
            case = case_of(run_of(row), known)
            if case.run.measured_s and stated(case.run):
                out.append(sample_of(case))
        except UnsupportedError:
            continue
    return balanced(out)


def stated(run: Run) -> bool:
    """Whether the source states the plan: degrees and micro-batch; a guess teaches nothing."""
    return None not in (run.micro_batch_size, run.tp, run.pp)


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that are fitted to: those of :data:`UNTAUGHT` not, a share of those of :data:`THINNED`."""
    rng = np.random.default_rng(0)

    def taken(run: Run) -> bool:
        if run.row["source_path"] in UNTAUGHT:
            return False
        return run.row["source_repo"] != THINNED or run.num_gpus > 8 or rng.random() < SHARE

    return [s for s in samples if taken(s.case.run)]


def _linearised(job: tuple[Sample, Multipliers]) -> Sample:
    return linearised(*job)


def _seconds(job: tuple[Sample, Multipliers]) -> float:
    return seconds(job[0].case, job[1])


def priced(pool: ProcessPoolExecutor, samples: Iterable[Sample], tables: Iterable[Table]) -> np.ndarray:
    """Seconds of each sample under its own corrections."""
    jobs = [(s, multipliers_of(s.traits, table)) for s, table in zip(samples, tables, strict=True)]
    return np.array(list(pool.map(_seconds, jobs, chunksize=32)))


def fitted(pool: ProcessPoolExecutor, samples: Sequence[Sample], rounds: int) -> tuple[Table, list[Sample]]:
    """Corrections after ``rounds`` of linearisation and solution, and the samples at the last point."""
    table, at = START, list(samples)
    for _ in range(rounds):
        at = list(pool.map(_linearised, [(s, multipliers_of(s.traits, table)) for s in at], chunksize=16))
        table = solve(at)
    return table, at


def left_out(
    pool: ProcessPoolExecutor,
    problem: Problem,
    every: Sequence[Sample],
    at: Sequence[Sample],
    key: Callable[[Sample], str],
) -> np.ndarray:
    """Seconds of every run under the corrections fitted without the runs that share its ``key``."""
    keys, fitted_keys = [key(s) for s in every], np.array([key(s) for s in at])
    tables = {k: problem.solve(fitted_keys != k) for k in sorted(set(keys))}
    return priced(pool, every, [tables[k] for k in keys])


def kind_of(sample: Sample) -> str:
    return "moe" if sample.traits.moe else "dense"


def quantiles(errors: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Ends of the central interval of measured over predicted, from logarithms of left-out errors.

    Runs of one group err alike, so that a handful of groups says little about the next: the ends lie further from the
    median by Student's over the normal quantile for that many groups, and by the spread of their own mean.
    """
    count = len(set(groups.tolist()))
    low, middle, high = np.quantile(errors, ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2))
    upper = (1 + LEVEL) / 2
    wider = t.ppf(upper, max(count - 1, 1)) / norm.ppf(upper) * math.sqrt(1 + 1 / count)
    return math.exp(middle - wider * (middle - low)), math.exp(middle + wider * (high - middle))


def intervals(every: Sequence[Sample], by_scheme: dict[str, np.ndarray]) -> dict[str, object]:
    """Interval ends by stack and kind from left-out groups; wider ones for new stacks and new GPU architectures."""
    measured = np.array([s.measured_s for s in every])
    logs = {name: np.log(measured / values) for name, values in by_scheme.items()}
    names = np.array([s.traits.stack for s in every])
    kinds = np.array([kind_of(s) for s in every])
    of = np.array([s.case.run.row["group"] for s in every])
    groups: dict[str, tuple[float, float]] = {}
    for stack in sorted(set(names)):
        for kind, here in (("|dense", kinds == "dense"), ("|moe", kinds == "moe"), ("", kinds != "")):
            here = here & (names == stack)
            if len(set(of[here])) >= FEWEST_GROUPS:
                groups[stack + kind] = quantiles(logs["group"][here], of[here])

    def pooled(scheme: str) -> dict[str, tuple[float, float]]:
        return {kind: quantiles(logs[scheme][kinds == kind], of[kinds == kind]) for kind in ("dense", "moe")}

    rounded = {k: [round(x, 3) for x in v] for k, v in groups.items()}
    return {
        "level": LEVEL,
        "groups": rounded,
        "new_stack": {k: [round(x, 3) for x in v] for k, v in pooled("stack").items()},
        "new_architecture": {k: [round(x, 3) for x in v] for k, v in pooled("gpu").items()},
    }


def report(title: str, every: Sequence[Sample], values: np.ndarray) -> None:
    """Errors by framework and kind."""
    print(f"\n{title}\n{'':44} {'rows':>5} {'mean':>7} {'median':>7} {'p90':>6} {'bias':>7}")
    errors = defaultdict(list)
    for sample, value in zip(every, values, strict=True):
        run = sample.case.run
        many = " multi-node" if run.row["source_repo"] == THINNED and run.num_gpus > 8 else ""
        error = value / sample.measured_s - 1
        errors[f"{run.framework[:30]} {kind_of(sample)}{many}"].append(error)
        if sample.traits.family == "megatron" and "LAER" not in run.release:
            errors[f"NVIDIA {kind_of(sample)}"].append(error)
    for name, found in sorted(errors.items()):
        e = np.array(found)
        size = np.abs(e)
        print(
            f"{name:44} {len(e):5} {size.mean():7.1%} {np.median(size):7.1%} {np.quantile(size, 0.9):6.0%} "
            f"{np.median(e):+7.1%}"
        )


def cross_fitted(every: Sequence[Sample], values: np.ndarray, new_stack: np.ndarray) -> np.ndarray:
    """[N, 2] interval ends for each run from the left-out errors of the other groups of its stack and kind; of runs of
    left-out stacks (``new_stack``) where there are too few such groups."""
    measured = np.log([s.measured_s for s in every])
    logs, alien = measured - np.log(values), measured - np.log(new_stack)
    names = np.array([s.traits.stack for s in every])
    kinds = np.array([kind_of(s) for s in every])
    groups = np.array([s.case.run.row["group"] for s in every])
    out, known = np.ones((len(every), 2)), {}
    for i, s in enumerate(every):
        key = groups[i], names[i], kinds[i]
        if key not in known:
            other = (groups != groups[i]) & np.isfinite(logs)
            alike = [other & (names == s.traits.stack) & (kinds == kinds[i]), other & (names == s.traits.stack)]
            here = next((h for h in alike if len(set(groups[h])) >= FEWEST_GROUPS), None)
            away = (names != names[i]) & (kinds == kinds[i])
            known[key] = quantiles(alien[away], names[away]) if here is None else quantiles(logs[here], groups[here])
        out[i] = known[key]
    return out


def write_left_out(every: Sequence[Sample], schemes: dict[str, np.ndarray]) -> None:
    # No time stamp: the same predictions make the same file.
    with gzip.GzipFile(LEFT_OUT, "wb", mtime=0) as packed, io.TextIOWrapper(packed, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for scheme, values in schemes.items():
            if scheme == "stack":
                continue
            ends = cross_fitted(every, values, schemes["stack"])
            for sample, value, (low, high) in zip(every, values, ends, strict=True):
                if not math.isfinite(value):
                    continue
                run, row = sample.case.run, sample.case.run.row
                writer.writerow(
                    [run.id, row["source_repo"], run.framework, sample.traits.stack, sample.traits.release, run.model,
                     row["group"], row["gpu_type"], sample.traits.precision, kind_of(sample), run.num_gpus,
                     sample.case.model.hidden_size, scheme]
                    + [f"{x:.5g}" for x in (sample.measured_s, value, value * low, value * high)] + [LEVEL]
                )  # fmt: skip


def anchored(pool: ProcessPoolExecutor, problem: Problem, every: Sequence[Sample], at: Sequence[Sample]) -> np.ndarray:
    """Seconds of every run under the corrections fitted without its group, but with one anchor: the first run of the
    same framework, release, GPU and precision; nan for anchors themselves and for runs without one."""
    index = {s.case.run.id: i for i, s in enumerate(at)}
    groups = np.array([s.case.run.row["group"] for s in at])
    first: dict[tuple[str, ...], str] = {}
    tables: dict[tuple[str, int], Table] = {}
    out, pairs = np.full(len(every), np.nan), {}
    for i, s in enumerate(every):
        run = s.case.run
        anchor = first.setdefault((run.framework, s.traits.release, s.traits.gpu, s.traits.precision), run.id)
        if anchor == run.id or anchor not in index:
            continue
        pair = run.row["group"], index[anchor]
        if pair not in tables:
            rows = groups != pair[0]
            rows[pair[1]] = True
            tables[pair] = problem.solve(rows, {pair[1]: ANCHOR_WEIGHT})
        pairs[i] = pair
    out[list(pairs)] = priced(pool, [every[i] for i in pairs], [tables[pair] for pair in pairs.values()])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=HERE / "published_runs.csv.gz")
    parser.add_argument("--models", type=Path, default=HERE / "published_models.json.gz")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    every = samples_of(options.runs, options.models)
    with ProcessPoolExecutor(2) as pool:
        table, at = fitted(pool, thinned(every), options.rounds)
        problem = Problem(at)
        schemes = {
            "shipped": priced(pool, every, repeat(table, len(every))),
            "group": left_out(pool, problem, every, at, lambda s: s.case.run.row["group"]),
            "architecture": left_out(pool, problem, every, at, lambda s: s.case.run.row["arch"]),
            "gpu": left_out(pool, problem, every, at, lambda s: s.traits.architecture),
            "stack": left_out(pool, problem, every, at, lambda s: s.traits.family),
            "hidden": left_out(
                pool, problem, every, at, lambda s: f"{s.traits.family}|{s.case.model.hidden_size}"
                if s.case.run.row["source_repo"] == THINNED else s.case.run.row["group"],
            ),
            "anchor": anchored(pool, problem, every, at),
        }  # fmt: skip
    for name, values in schemes.items():
        seen = np.isfinite(values)
        title = {"shipped": "in sample", "anchor": "left out by group, with one anchor"}.get(
            name, f"left out by {name}"
        )
        report(title, [s for s, x in zip(every, seen, strict=True) if x], values[seen])
    ends = cross_fitted(every, schemes["group"], schemes["stack"])
    ratio = np.array([s.measured_s for s in every]) / schemes["group"]
    inside = (ratio >= ends[:, 0]) & (ratio <= ends[:, 1])
    print("\ncoverage of the 80% interval on left-out runs")
    for framework in sorted({s.case.run.framework for s in every}):
        here = np.array([s.case.run.framework == framework for s in every])
        print(f"{framework[:44]:44} {here.sum():5} {inside[here].mean():7.1%}")
    if options.write:
        document = {
            "source": "benchmarks/fit_learned.py on published training runs (benchmarks/data/published_runs.csv.gz)",
            "rows": len(at),
            "levels": dict(sorted(table.items())),
            "interval": intervals(every, schemes),
        }
        OUT.write_text(json.dumps(document, indent=1) + "\n")
        write_left_out(every, schemes)


if __name__ == "__main__":
    main()
