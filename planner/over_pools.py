"""The search over several pools as a :class:`~.explore.Search` has it done."""

from __future__ import annotations

import numpy as np

from meshwright.specs.batch import BoolArray, CandidateBatch

from . import rules
from .explore import Search
from .finalists import Finalist
from .mixed_search import MixedSearch
from .pricing import in_block_mode, with_recompute


def search_over_pools(search: Search, eligible: tuple[int, ...]) -> None:
    """Fill the search's result; where nothing fits, also with whole pools priced, which explain what is missing."""
    request, result = search.request, search.result
    modes = [mode.granularity for mode in request.target.recompute]
    gpus = [request.cluster.gpu_of(request.cluster.pools[g]) for g in eligible]

    def legal(batch: CandidateBatch) -> BoolArray:
        named = with_recompute(batch, in_block_mode(batch, request.target), modes, "full")
        mask, rejected = rules.bulk_legal(named, request.model, request.workload, request.target, gpus)
        result.rejected.update(rejected)
        result.pruned["illegal"] += int((~mask).sum())
        return np.asarray(mask)

    found = MixedSearch(request, search.costs, eligible, legal, search.late, search.progress).run()
    if not found.plans and found.complete:
        result.rejected.clear()
        result.pruned.clear()
        search.price_whole_pools()
        return
    result.finalists = [
        Finalist(plan.batch, 0, plan.cuts, plan.step_time_s, plan.bound_s, plan.leading) for plan in found.plans
    ]
    result.untried_bound_s, result.complete = found.bound_s, found.complete
    result.candidates, result.split = found.candidates, found.partitioned
    result.pruned.update({"bound": found.left, "memory": found.unfit})
