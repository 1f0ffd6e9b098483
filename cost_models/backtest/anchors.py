"""From measured runs to a calibration: one factor a run by root finding, pooled by model, release and stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..calibration import Calibration, Cell, Entry, Match, Setting, Source, corrected
from ..learned import shipped_multipliers
from ..multipliers import CORRECTED, HIGHEST, HIGHEST_HOST, LOWEST, Multipliers
from .bulk import in_order, setting_of
from .inputs import is_judged, row_fault
from .price import price
from .rows import measured_s

#: What one common factor scales: what a GPU and its host do, not what links do.
COMPUTE = ("gemm", "experts", "attention", "scan", "head", "memory_bound", "host")
LINKS = ("tp_comm", "cp_comm", "ep_comm", "dp_comm", "pp_comm")
_LINK_TERMS = (*LINKS, "grad_reduce", "param_gather")
#: Nearer than this a run counts as met: a tenth of the scatter between two runs of one plan.
TOLERANCE = 1e-3
#: Two factors, compute and links, need this many runs whose shares of exposed communication span this much.
LEAST_RUNS, LEAST_SPAN = 4, 0.15
#: Runs that the two factors are solved from, evenly over the share of communication. Each of up to six rounds prices
#: them three times, some seconds for 40, whose mean residual errs by a sixth of their scatter: more would tell nothing.
MOST_RUNS = 40
#: (residual scatter of runs of one model, 0.1, over the scatter of factors, 0.4), squared: keeps two factors near 1
#: where the runs cannot tell them apart. Both from benchmarks/calibration_transfer.py.
RIDGE = 0.06
#: Entries for other releases and other models are drawn towards 1 by n / (n + k), n the releases or models behind
#: them. With these k the weight is what predicted best: 0.75 for another release from one, 0.5 for another model from
#: one, near 0.75 from several. The runs of one model and release are not drawn: their full factor predicted best
#: (benchmarks/calibration_transfer.py).
SHRINK_RELEASES, SHRINK_MODELS = 1 / 3, 1.0

Progress = Callable[[str, int, int], None]
Row = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Anchor:
    """A measured run with the factors, as logarithms by term, under which it is met; ``met`` is False at a bound."""

    row: Row
    setting: Setting
    measured_s: float
    link_share: float
    logs: Mapping[str, float]
    met: bool


def calibrate(
    rows: Sequence[Row],
    models: Mapping[str, Any],
    name: str,
    digest: str,
    processes: int = 1,
    progress: Progress | None = None,
) -> tuple[Calibration | None, dict[str, int]]:
    """The calibration that measured ``rows`` make, None where none can be used, and why others were left out.

    ``name`` and ``digest`` are those of the table. ``progress`` hears (stage, done, total).
    """
    anchors: list[Anchor] = []
    skipped: dict[str, int] = {}
    for found in _told(in_order(partial(anchor_of, models=models), rows, processes), "solving", len(rows), progress):
        if isinstance(found, Anchor):
            anchors.append(found)
        else:
            skipped[found] = skipped.get(found, 0) + 1
    if not anchors:
        return None, skipped
    drafts = _drafts(anchors, models)
    owners: dict[Anchor, list[int]] = {}
    for i, (_, _, members) in enumerate(drafts):
        for anchor in members:
            owners.setdefault(anchor, []).append(i)
    tasks = [(anchor, [drafts[i][1] for i in owners[anchor]]) for anchor in anchors]
    residuals: list[list[float]] = [[] for _ in drafts]
    work = in_order(partial(_residuals, models=models), tasks, processes)
    for anchor, values in zip(anchors, _told(work, "checking", len(tasks), progress), strict=True):
        for i, value in zip(owners[anchor], values, strict=True):
            residuals[i].append(value)
    entries = tuple(
        Entry(
            match=match,
            on="physics" if match.release is not None else "shipped",
            multipliers=_on_physics(factors, members) if match.release is not None else factors,
            runs=len(values),
            residual_spread=float(np.std(values)),
            largest_residual=float(np.abs(np.expm1(values)).max()),
        )
        for (match, factors, members), values in zip(drafts, residuals, strict=True)
    )
    source = Source(name=name, sha256=digest, rows=len(rows), used=len(anchors))
    return Calibration.of(source, entries), skipped


def _told(items: Iterable[Any], stage: str, total: int, progress: Progress | None) -> Iterator[Any]:
    for done, item in enumerate(items, 1):
        if progress:
            progress(stage, done, total)
        yield item


def anchor_of(row: Row, models: Mapping[str, Any]) -> Anchor | str:
    """The anchor of a row, or why it is none. Nothing about a row raises."""
    if not is_judged(row):
        return "no pretraining run of quality A or B"
    measured = measured_s(row)
    if not measured:
        return "no measured step time"
    fault = row_fault(row, models)
    if fault:
        return fault
    try:
        usable = {key: value for key, value in models.items() if isinstance(value, dict)}
        first = price(row, usable)
        setting = setting_of(first.case) if first.case else None
        if first.case is None or first.estimate is None:
            return first.reason
        if setting is None:
            return "a cluster of several pools: no one factor can serve it"
        links = sum(first.estimate.breakdown_s.get(term, 0.0) for term in _LINK_TERMS)
        logs, met = _solve(partial(_step_s, row, setting, usable), measured)
        return Anchor(row, setting, measured, links / first.estimate.step_time_s, logs, met)
    except (Exception, MemoryError) as error:  # one row of a stranger's table must not lose the others
        return f"cannot be priced ({type(error).__name__})"


def _step_s(row: Row, setting: Setting, models: dict[str, dict[str, Any]], factors: dict[str, float]) -> float:
    """Predicted step time of a row under factors."""
    step = price(row, models, corrected(shipped_multipliers(setting.traits), factors)).step_time_s
    assert step is not None  # noqa: S101 - the row was priced before, and factors make no row unpriceable
    return step


def _solve(step_s: Callable[[dict[str, float]], float], measured: float) -> tuple[dict[str, float], bool]:
    """Logarithms by term that meet ``measured``: of compute alone, else, where its bounds forbid that, of all terms.
    At the bounds of all terms the nearest is returned, with False."""
    for terms in (COMPUTE, CORRECTED):
        root, met = _root(lambda x, terms=terms: math.log(step_s(dict.fromkeys(terms, math.exp(x))) / measured))  # type: ignore[misc]
        if met or terms == CORRECTED:
            return dict.fromkeys(terms, root), met
    raise AssertionError("unreachable")


def _root(error: Callable[[float], float]) -> tuple[float, bool]:
    """Where a rising ``error`` is within the tolerance of 0 (Illinois), or the nearest bound and False."""
    low, high = math.log(LOWEST), math.log(HIGHEST)
    middle = error(0.0)
    if abs(middle) < TOLERANCE:
        return 0.0, True
    low, high = (low, 0.0) if middle > 0 else (0.0, high)
    below, above = (error(low), middle) if middle > 0 else (middle, error(high))
    if below > 0 or above < 0:
        bound, value = (low, below) if below > 0 else (high, above)
        return bound, abs(value) < TOLERANCE
    for _ in range(40):
        guess = low + (high - low) * below / (below - above) if above != below else (low + high) / 2
        value = error(guess)
        if abs(value) < TOLERANCE or high - low < 1e-12:
            return guess, abs(value) < TOLERANCE
        if value < 0:
            low, below, above = guess, value, above / 2
        else:
            high, above, below = guess, value, below / 2
    return (low + high) / 2, False


Draft = tuple[Match, dict[str, float], list[Anchor]]


def _drafts(anchors: list[Anchor], models: Mapping[str, Any]) -> list[Draft]:
    """(match, factors, anchors) of all entries: each model and release, each model, each stack."""
    tree: dict[Cell, dict[str, dict[str, list[Anchor]]]] = {}
    for anchor in anchors:
        where = anchor.setting
        releases = tree.setdefault(where.cell, {}).setdefault(where.shape, {})
        releases.setdefault(where.release or "", []).append(anchor)
    out: list[Draft] = []
    for cell, by_model in sorted(tree.items()):
        fields = dict(zip(("stack", "gpu", "precision", "moe"), cell, strict=True))
        of_models: list[dict[str, float]] = []
        for model, by_release in sorted(by_model.items()):
            of_releases = []
            for release, members in sorted(by_release.items()):
                logs = _pooled_runs(members, models)
                of_releases.append(logs)
                match = Match.parse({**fields, "model": model, "release": release})
                out.append((match, _factors(logs), members))
            everyone = [anchor for members in by_release.values() for anchor in members]
            middle = _median(of_releases)
            of_models.append(middle)
            weight = len(by_release) / (len(by_release) + SHRINK_RELEASES)
            out.append((Match.parse({**fields, "model": model}), _factors(middle, weight), everyone))
        everyone = [anchor for releases in by_model.values() for members in releases.values() for anchor in members]
        weight = len(by_model) / (len(by_model) + SHRINK_MODELS)
        out.append((Match.parse(fields), _factors(_median(of_models), weight), everyone))
    return out


def _median(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each term; a term that one leaves alone counts as unchanged there."""
    return {name: float(np.median([item.get(name, 0.0) for item in logs])) for name in CORRECTED}


def _factors(logs: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
    """Bounded factors of the terms that change."""
    out = {}
    for name, value in logs.items():
        if value:
            most = HIGHEST_HOST if name in ("host", "step") else HIGHEST
            out[name] = min(max(math.exp(weight * value), LOWEST), most)
    return out


def _on_physics(factors: Mapping[str, float], members: list[Anchor]) -> dict[str, float]:
    """Factors on the shipped corrections of the runs (their median, where precisions of a class differ) as factors on
    physics alone: a target that stands in for the stack of the runs has other corrections."""
    each = [asdict(shipped_multipliers(anchor.setting.traits)) for anchor in members]
    base = {name: float(np.median([values[name] for values in each])) for name in CORRECTED}
    whole = asdict(corrected(Multipliers(**base), factors))
    return {name: value for name, value in whole.items() if value != 1.0}


def _pooled_runs(members: list[Anchor], models: Mapping[str, Any]) -> dict[str, float]:
    """Logarithms for the runs of one model and release: two factors where the runs tell them apart, else the median."""
    shares = [anchor.link_share for anchor in members]
    if len(members) < LEAST_RUNS or max(shares) - min(shares) <= LEAST_SPAN:
        return _median([anchor.logs for anchor in members])
    members = sorted(members, key=lambda anchor: anchor.link_share)
    chosen = [members[i] for i in np.unique(np.linspace(0, len(members) - 1, MOST_RUNS).round().astype(int))]
    usable = {key: value for key, value in models.items() if isinstance(value, dict)}

    def errors(compute: float, links: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        factors = dict.fromkeys(COMPUTE, math.exp(compute)) | dict.fromkeys(LINKS, math.exp(links))
        return np.array([math.log(_step_s(a.row, a.setting, usable, factors) / a.measured_s) for a in chosen])

    found = np.array([float(np.median([a.logs.get(COMPUTE[0], 0.0) for a in chosen])), 0.0])
    now = errors(*found)
    cost = float(now @ now + RIDGE * found @ found)
    for _ in range(6):  # Gauss-Newton; the problem is nearly linear in the logarithms
        slopes = np.stack([(errors(*(found + step)) - now) / 0.05 for step in 0.05 * np.eye(2)], axis=1)
        move = np.linalg.solve(slopes.T @ slopes + RIDGE * np.eye(2), -(slopes.T @ now + RIDGE * found))
        trial = np.clip(found + move, math.log(LOWEST), math.log(HIGHEST))
        after = errors(*trial)
        better = float(after @ after + RIDGE * trial @ trial)
        if better >= cost * (1 - 1e-4):
            break
        found, now, cost = trial, after, better
    return dict.fromkeys(COMPUTE, float(found[0])) | dict.fromkeys(LINKS, float(found[1]))


def _residuals(task: tuple[Anchor, list[dict[str, float]]], models: Mapping[str, Any]) -> list[float]:
    """Logarithm of predicted over measured of an anchor under each set of factors."""
    anchor, sets = task
    usable = {key: value for key, value in models.items() if isinstance(value, dict)}
    return [math.log(_step_s(anchor.row, anchor.setting, usable, f) / anchor.measured_s) for f in sets]
