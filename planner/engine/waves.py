"""Settings beyond those that every candidate is priced with, each a :class:`Wave` over the candidates of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.cost_models.protocol import STATIC, StageCosts
from meshwright.specs.batch import BoolArray, CandidateBatch, FloatArray, IntArray

from ..request import PlanRequest
from .explore import Search
from .host_memory import least_host_update_s, without_optimizer
from .pinned import divides
from .pricing import PricedBatch

#: Sends there and back over the passes of a mean chunk, from which on the pipeline is tried inside data parallelism:
#: shorter ones gain next to nothing, and on fabrics with a port for each GPU all are.
LEAST_SENDS = 0.02


@dataclass(frozen=True)
class Wave:
    """Candidates under one more setting.

    ``costs`` makes what prices it, ``chosen`` are facts for the rules, ``shorter`` the terms of a pass that it may
    shorten. ``batch`` gives the candidates to price, of those in ``rows``. ``known`` keeps the bounds of batches for
    waves that share it, as they have the same.
    """

    request: PlanRequest
    costs: Callable[[], StageCosts]
    chosen: Mapping[str, Any] = field(default_factory=dict)
    shorter: tuple[str, ...] = ()
    known: dict[int, FloatArray] = field(default_factory=dict, compare=False)

    def rows(self, priced: PricedBatch) -> BoolArray:
        """[N] the candidates that can have the setting."""
        return np.ones(len(priced), dtype=np.bool_)

    def least_s(self, priced: PricedBatch) -> FloatArray:
        """[N] lower bound of the step time of the candidates with the setting."""
        return priced.least_passes_s(self.shorter)

    def without_memory(self, priced: PricedBatch, limit_s: float) -> BoolArray:
        """[N] the candidates of one stage that may be quicker than ``limit_s`` if their memory sufficed."""
        able = self.able(priced.batch) & (priced.batch.pp == 1)
        return np.asarray(able & (priced.least_passes_s(self.shorter) < limit_s)) if able.any() else able

    def able(self, batch: CandidateBatch) -> BoolArray:
        """[N] the candidates that have a place for the setting; the others would only be priced twice."""
        return np.zeros(len(batch), dtype=np.bool_)

    def price(self, search: Search, priced: PricedBatch, which: BoolArray) -> None:
        """Add the candidates ``which`` to ``search`` under the setting."""
        search.add(priced.arrangement, self.batch(priced.batch.take(which)))

    def batch(self, batch: CandidateBatch) -> CandidateBatch:
        """The candidates of the wave from those of the search."""
        return batch


def spans(request: PlanRequest) -> IntArray:
    """Ranks inside one instance of each network level of the pools."""
    return np.array(sorted({level.span for pool in request.cluster.pools for level in pool.levels}), dtype=np.int64)


def _least_with_s(priced: PricedBatch, static_bytes: FloatArray, shorter: tuple[str, ...] = ()) -> FloatArray:
    """[N] lower bound of the passes where blocks hold ``static_bytes`` [C, B] and the terms ``shorter`` are free;
    infinite where they cannot fit."""
    other = copy(priced)
    other.static_bytes = static_bytes
    bound = other.least_passes_s(shorter) if shorter else other.least_step_s() - priced.least_tail_s()
    out: FloatArray = np.where(other.least_fill() > 1.0, np.inf, bound)
    return out


@dataclass(frozen=True)
class Sharding(Wave):
    """Other ways of sharding than the search has: candidates under zero1 once more under each of ``names``, where
    there is one under the exchange ``context`` of context parallelism."""

    names: tuple[str, ...] = ()
    context: Context | None = None

    def able(self, batch: CandidateBatch) -> BoolArray:
        target = self.request.target
        zero1 = batch.sharding == target.sharding.index("zero1")
        hybrid = any(name.startswith("hsdp") for name in self.names)
        if hybrid and target.shards_fully_on_one_stage_only:  # there is no zero1 on one stage to start from
            zero1 |= (batch.sharding == target.sharding.index("fsdp")) & (batch.pp == 1)
        return np.asarray(zero1 & self.context.able(batch) if self.context else zero1)

    def rows(self, priced: PricedBatch) -> BoolArray:
        return self.able(priced.batch)

    def without_memory(self, priced: PricedBatch, limit_s: float) -> BoolArray:
        """Only full sharding with replicas leaves more to offload than what the search has."""
        able = any(name.startswith("hsdp") for name in self.names)
        return super().without_memory(priced, limit_s) if able else np.zeros(len(priced), dtype=np.bool_)

    def least_s(self, priced: PricedBatch) -> FloatArray:
        """Weights and gradients may be divided by all ranks of a stage, the optimizer is no more than it was."""
        static, ranks = priced.cells.static_bytes_by, priced.cells.keys.stage_ranks
        optimizer = static[..., STATIC.index("optimizer")]
        divided = optimizer + (static.sum(axis=-1) - optimizer) / ranks[:, None]
        return _least_with_s(priced, divided, self.shorter)

    def batch(self, batch: CandidateBatch) -> CandidateBatch:
        ranks, inside = batch.stage_ranks, spans(self.request)
        parts = []
        for name in self.names:
            level, _, replicas = name.partition(":")
            with_stages = ("fsdp" if level == "hsdp" else level) in self.request.target.sharding_with_stages
            able = (batch.pp == 1) | with_stages
            if replicas:
                shards = (ranks % int(replicas) == 0) & np.isin(ranks // int(replicas), inside)
                able &= shards & divides(batch, int(replicas))
            elif level == "fsdp":
                able &= batch.pp > 1  # those of one stage are in the search already
            part = batch.take(able)
            index = np.full(len(part), self.request.target.sharding.index(name))
            parts.append(replace(part, sharding=index))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.joined(part)
        return whole


@dataclass(frozen=True)
class Instances(Sharding):
    """Instances of the distributed optimizer: they hold more than one does, and differ from it in the tail alone."""

    def rows(self, priced: PricedBatch) -> BoolArray:
        return np.asarray(super().rows(priced) & (priced.least_fill() <= 1.0))

    def least_s(self, priced: PricedBatch) -> FloatArray:
        return priced.least_step_s() - priced.least_tail_s()


@dataclass(frozen=True)
class Context(Wave):
    """Another exchange of context parallelism; ``inner`` ranks exchange heads where a ring joins them."""

    inner: int = 1
    cp: int | None = None

    def of(self, options: Mapping[str, Any]) -> bool:
        """Whether plans with ``options`` exchange like this."""
        kind, inner = options.get("cp_comm_type"), options.get("cp_a2a_size", 1)
        return bool((kind,) == self.chosen["cp_comm_type"] and inner == self.inner)

    def able(self, batch: CandidateBatch) -> BoolArray:
        if self.cp is None:
            return np.asarray(batch.cp > 1)
        # The all-to-all fills a network level.
        return np.asarray((batch.cp == self.cp) & np.isin(batch.tp * self.inner, spans(self.request)))

    def rows(self, priced: PricedBatch) -> BoolArray:
        return self.able(priced.batch)

    def least_s(self, priced: PricedBatch) -> FloatArray:
        """Infinite where candidates cannot fit: the exchange does not change what they keep."""
        out: FloatArray = np.where(priced.least_fill() > 1.0, np.inf, super().least_s(priced))
        return out


@dataclass(frozen=True)
class OptimizerOffload(Wave):
    """A share of the optimizer in host memory."""

    fraction: float = 0.0

    def rows(self, priced: PricedBatch) -> BoolArray:
        return np.asarray(priced.batch.sharding == self.request.target.sharding.index("zero1"))

    def least_s(self, priced: PricedBatch) -> FloatArray:
        static = without_optimizer(priced.cells.static_bytes_by, self.fraction)
        return _least_with_s(priced, static.sum(axis=-1)) + least_host_update_s(self.request, priced, self.fraction)

    def price(self, search: Search, priced: PricedBatch, which: BoolArray) -> None:
        """Passes cost what they did; the rules ask for nothing of single candidates."""
        static = without_optimizer(priced.cells.static_bytes_by, self.fraction)
        search.result.priced.append(priced.under(which, search.costs, static))


@dataclass(frozen=True)
class Order(Wave):
    """The pipeline inside data parallelism: sends stay near, gradients go far. Blocks cost and hold what they did."""

    def rows(self, priced: PricedBatch) -> BoolArray:
        """Where the order changes what crosses which level, and the grids of attention and experts allow it."""
        batch, pools = priced.batch, [self.request.cluster.pools[index] for index in priced.arrangement.pools]
        if len(pools) > 1 or pools[0].levels[0].span >= pools[0].num_gpus:
            return np.zeros(len(batch), dtype=np.bool_)
        zero1 = batch.sharding == self.request.target.sharding.index("zero1")
        able = zero1 & (batch.pp > 1) & (batch.dp > 1) & (batch.dp == batch.edp)
        index, pool = np.flatnonzero(able), priced.arrangement.pools[0]
        passes_s = priced.busy[priced.row[index], pool][:, priced.kind].sum(axis=1)
        sends_s = 2 * batch.pp[index] * batch.vpp[index] * priced.send_s(index).max(axis=1)
        able[index[sends_s < LEAST_SENDS * passes_s]] = False
        return np.asarray(able & (priced.least_fill() <= 1.0) if able.any() else able)

    def least_s(self, priced: PricedBatch) -> FloatArray:
        """Tails may differ, passes do not."""
        return priced.least_step_s() - priced.least_tail_s()

    def price(self, search: Search, priced: PricedBatch, which: BoolArray) -> None:
        """Only sends and tails are priced again."""
        legal = np.flatnonzero(which)[search.legal(priced.batch.take(which))]
        kept = np.zeros(len(which), dtype=np.bool_)
        kept[legal] = True
        if kept.any():
            search.result.priced.append(priced.under(kept, search.costs, priced.cells.static_bytes_by))
