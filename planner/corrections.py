"""A request's calibration on the costs that search and answer are priced with."""

from __future__ import annotations

from meshwright.cost_models.calibration import Entry, Setting, calibrated, multipliers_under
from meshwright.cost_models.cells import CostModel, traits_of
from meshwright.cost_models.estimate import estimate
from meshwright.cost_models.learned import shape_of
from meshwright.cost_models.multipliers import Multipliers
from meshwright.cost_models.uneven import Spans
from meshwright.specs.estimate import Estimate
from meshwright.specs.plan import Plan

from .request import PlanRequest


def cost_model(request: PlanRequest) -> CostModel:
    """The costs of a request's space."""
    return CostModel(
        request.model, request.cluster, request.workload, request.target, multipliers=multipliers_of(request)
    )


def estimate_of(request: PlanRequest, plan: Plan, spans: Spans | None = None) -> Estimate:
    """What a plan costs under the request's calibration, which the assumptions name; ``spans`` as of ``estimate``."""
    found = estimate(
        request.model,
        request.cluster,
        request.workload,
        request.target,
        plan,
        request.memory_headroom,
        multipliers_of(request),
        spans,
    )
    if request.calibration is None:
        return found
    used = set(plan.pools)
    pools = zip(request.cluster.pools, _entries(request), strict=True)
    return calibrated(found, request.calibration, [entry for pool, entry in pools if pool.name in used])


def multipliers_of(request: PlanRequest) -> tuple[Multipliers, ...] | None:
    """Factors of each pool; None where the shipped ones hold."""
    if request.calibration is None:
        return None
    pairs = zip(_settings(request), _entries(request), strict=True)
    return tuple(multipliers_under(setting, entry) for setting, entry in pairs)


def _entries(request: PlanRequest) -> list[Entry | None]:
    found = request.calibration
    return [found.find(setting) if found else None for setting in _settings(request)]


def _settings(request: PlanRequest) -> list[Setting]:
    """Where each pool stands. The release is open unless the calibration holds runs of the target's own version."""
    target, found = request.target, request.calibration
    release = target.version if found and target.version in found.releases() else None
    return [
        Setting(
            traits_of(request.model, request.cluster.gpu_of(pool), request.workload, target),
            release,
            shape_of(request.model),
        )
        for pool in request.cluster.pools
    ]
