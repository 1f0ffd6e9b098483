"""The search over several pools as a :class:`~..engine.explore.Search` has it done."""

from __future__ import annotations

from ..engine.explore import Search
from .search import MixedSearch


def search_over_pools(search: Search, eligible: tuple[int, ...]) -> None:
    """Fill the search's result; where nothing fits, also with whole pools priced, which explain what is missing."""
    result = search.result
    found = MixedSearch(search.request, search.costs, eligible, search.legal, search.late, search.progress).run()
    if not found.plans and found.complete:
        result.rejected.clear()
        result.pruned.clear()
        search.price_whole_pools()
        return
    result.finalists = found.plans
    result.untried_bound_s, result.complete = found.bound_s, found.complete
    result.candidates, result.split = found.candidates, found.partitioned
    result.pruned.update({"bound": found.left, "memory": found.unfit})
