"""Regression behind ``benchmarks/fit_learned.py``: how the step time of each run moves with each correction.

``log T(m + d) ~ log T(m) + S d`` with the elasticities ``S`` of the step time in the factors of the terms. The
logarithm of a factor is a sum of coefficients over levels (:class:`meshwright.cost_models.learned.Traits`), so that
measured over predicted is linear in the coefficients: a ridge regression, solved again at the new point until it
settles.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.kernel_ridge import KernelRidge

from meshwright.cost_models.backtest.plans import Case
from meshwright.cost_models.cells import traits_of
from meshwright.cost_models.estimate import plan_step
from meshwright.cost_models.learned import Traits
from meshwright.cost_models.multipliers import CORRECTED, NEUTRAL, Multipliers
from meshwright.cost_models.stage_sums import stage_sums
from meshwright.specs.attention import LinearAttention, MambaMixer

Table = dict[str, dict[str, float]]
#: Step in the logarithm of a factor over which an elasticity is read.
STEP = 0.1
#: Standard deviation that the logarithm of a factor may have at each level before the data speak, and how much more
#: (or less) a term is allowed: communication and host differ more between systems than products do. Chosen by
#: cross-validation over groups.
PRIOR = {
    "architecture": 0.08, "gpu": 0.03, "architecture|precision": 0.08, "family": 0.3, "family|kind": 0.3,
    "family|architecture": 0.15, "family|architecture|precision": 0.1, "stack": 0.1, "stack|kind": 0.2,
    "stack|release": 0.05, "stack|release|kind": 0.05, "family|shape": 0.12,
}  # fmt: skip
TERM_PRIOR = {"host": 1.5, "step": 2.0, "ep_comm": 2.0, "experts": 1.5, "memory_bound": 1.5, "gemm": 0.5}
#: Standard deviation of what no correction explains: the noise between two releases at the same plan.
NOISE = 0.1
#: Runs that miss by more than this many deviations weigh less, as their miss grows (Huber): some releases lost half of
#: the speed at one plan. Rounds of reweighting.
HUBER, REWEIGHTS = 1.5, 4


@dataclass
class Sample:
    """A run in the regression, with the prediction and the elasticities by term at the factors ``at``."""

    case: Case
    traits: Traits
    measured_s: float
    weight: float
    predicted_s: float = 0.0
    elasticity: Mapping[str, float] | None = None
    at: Multipliers = NEUTRAL


def sample_of(case: Case, weight: float = 1.0) -> Sample:
    pool = case.cluster.pools[0]
    measured = case.run.measured_s
    if measured is None:
        raise ValueError(f"run {case.run.id} has no measured time")
    traits = traits_of(case.model, case.cluster.gpu_of(pool), case.workload, case.target)
    return Sample(case, traits, measured, weight)


def seconds(case: Case, by: Multipliers) -> float:
    """Step time of the stated batch under factors."""
    costs, sums = stage_sums(
        case.model, case.cluster, case.workload, case.target, case.plan, (by,) * len(case.cluster.pools)
    )
    return plan_step(costs, case.plan, sums).step_time_s * case.scale


def relevant(case: Case) -> list[str]:
    """Terms whose factor can move the step time of a plan."""
    plan = case.plan
    tp, cp, ep = ((getattr(plan, name) or 2) > 1 for name in ("tp", "cp", "ep"))
    replicas = (plan.dp or 2) * (plan.cp or 1) > 1
    present = {"experts": case.model.is_moe, "tp_comm": tp or (plan.etp or 2) > 1, "cp_comm": cp, "ep_comm": ep,
               "dp_comm": replicas, "pp_comm": plan.pp > 1, "scan": _scans(case)}  # fmt: skip
    return [term for term in CORRECTED if present.get(term, True)]


def _scans(case: Case) -> bool:
    return any(isinstance(kind.attention, LinearAttention | MambaMixer) for kind in case.model.kinds)


def linearised(sample: Sample, by: Multipliers) -> Sample:
    """The sample with its prediction and elasticities at ``by``."""
    base = seconds(sample.case, by)
    slopes = {}
    for term in relevant(sample.case):
        moved = seconds(sample.case, replace(by, **{term: getattr(by, term) * math.exp(STEP)}))
        slopes[term] = math.log(moved / base) / STEP
    return replace(sample, predicted_s=base, elasticity=slopes, at=by)


def columns_of(samples: Sequence[Sample]) -> dict[tuple[str, str], int]:
    """Index of every (level, term) that some sample moves with."""
    out: dict[tuple[str, str], int] = {}
    for sample in samples:
        for level in sample.traits.levels():
            for term, slope in (sample.elasticity or {}).items():
                if slope:
                    out.setdefault((level, term), len(out))
    return out


def prior_of(level: str, term: str) -> float:
    return PRIOR[level.split("=")[0]] * TERM_PRIOR.get(term, 1.0)


def design(samples: Sequence[Sample], columns: Mapping[tuple[str, str], int]) -> np.ndarray:
    """[rows, columns] elasticities, in units of each column's prior deviation."""
    out = np.zeros((len(samples), len(columns)))
    for row, sample in enumerate(samples):
        for level in sample.traits.levels():
            for term, slope in (sample.elasticity or {}).items():
                index = columns.get((level, term))
                if index is not None:
                    out[row, index] = slope * prior_of(level, term)
    return out


def target_of(samples: Sequence[Sample]) -> np.ndarray:
    """Measured over bare prediction, as the linearisation sees it: log ratio at the point plus what it already has."""
    return np.array(
        [
            math.log(s.measured_s / s.predicted_s)
            + sum(slope * math.log(getattr(s.at, term)) for term, slope in (s.elasticity or {}).items())
            for s in samples
        ]
    )


class Problem:
    """The regression over ``samples`` at their linearisation, solved for any part of them."""

    def __init__(self, samples: Sequence[Sample]):
        self.columns = columns_of(samples)
        self.matrix, self.target = design(samples, self.columns), target_of(samples)
        self.weights = np.array([s.weight for s in samples])
        self.kernel = self.matrix @ self.matrix.T

    def solve(self, rows: np.ndarray, weights: Mapping[int, float] | None = None) -> Table:
        """Coefficients by level and term from the samples where ``rows`` is true; ``weights`` replaces some."""
        own = self.weights.copy()
        for index, weight in (weights or {}).items():
            own[index] = weight
        own, target, kernel = own[rows], self.target[rows], self.kernel[np.ix_(rows, rows)]
        ridge, now = KernelRidge(alpha=NOISE**2, kernel="precomputed"), own
        for _ in range(REWEIGHTS):
            ridge.fit(kernel, target, sample_weight=now)
            miss = np.abs(target - kernel @ ridge.dual_coef_)
            now = own * np.minimum(1.0, HUBER * NOISE / np.maximum(miss, 1e-9))
        coefficients = self.matrix[rows].T @ ridge.dual_coef_
        table: Table = defaultdict(dict)
        for (level, term), index in self.columns.items():
            value = float(coefficients[index]) * prior_of(level, term)
            if abs(value) > 5e-4:
                table[level][term] = round(value, 4)
        return dict(table)


def solve(samples: Sequence[Sample]) -> Table:
    """Coefficients by level and term from all ``samples``."""
    return Problem(samples).solve(np.ones(len(samples), dtype=bool))


def balanced(samples: list[Sample]) -> list[Sample]:
    """Weights that keep a group with many rows from drowning the others: a group of n rows weighs sqrt(n)."""
    sizes = Counter((s.case.run.row.get("group", ""), s.case.run.framework) for s in samples)
    return [replace(s, weight=sizes[(s.case.run.row.get("group", ""), s.case.run.framework)] ** -0.5) for s in samples]
