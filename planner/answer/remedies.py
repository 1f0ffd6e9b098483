"""When nothing fits: changes other than more GPUs that would let a plan fit."""

from __future__ import annotations

import time
from collections.abc import Iterator

from meshwright.specs.catalog import gpus as catalog_gpus
from meshwright.specs.document import Explanation, PlanDocument
from meshwright.specs.errors import SpecError

from ..corrections import estimate_of
from ..engine.explore import Search
from ..engine.finalists import SearchResult
from ..engine.widen import searched
from ..objectives.changes import changed
from ..request import PlanRequest
from .document import plan_of
from .explain import GIB
from .no_fit import MAX_SPLITS, closest

#: Sequences are halved down to this many tokens.
SHORTEST = 512
#: GPU types tried, those with least memory first.
MOST_TYPES = 3


def with_remedies(
    request: PlanRequest, document: PlanDocument, result: SearchResult, deadline: float | None
) -> PlanDocument:
    """The document of a request that nothing fits, with the changes that would do, each tried alone."""
    if document.plan is not None or not any(each.kind == "no-fit" for each in document.explanation):
        return document
    found: list[Explanation] = []
    for make in (_offload, _shorter, _leaner_states, _other_gpu):
        if deadline is not None and time.monotonic() > deadline:
            break
        found += make(request, result)
    return document.model_copy(update={"explanation": (*document.explanation, *found)})


def _fits(request: PlanRequest) -> bool:
    asked = request.model_copy(update={"objective": "time", "work_limit": MAX_SPLITS, "deadline_s": None})
    return searched(asked, first_fit=True).result.best is not None


def _offload(request: PlanRequest, result: SearchResult) -> Iterator[Explanation]:
    """The leanest plan with its optimizer in host memory."""
    search = Search(request)
    search.result = result
    plan = plan_of(request, search, closest(result))
    options = plan.options.model_copy(update={"optimizer_offload_fraction": 1.0})
    figures = estimate_of(request, plan.model_copy(update={"options": options}))
    hosts = [pool.host_memory_bytes for pool in request.cluster.pools]
    room = all(host is None or host >= figures.host_ram_bytes for host in hosts)
    if figures.fits and room:
        message = (
            "with the optimizer in host memory the leanest plan would fit "
            f"(optimizer_offload_fraction 1, {figures.host_ram_bytes / GIB:.0f} GiB of host memory a node)"
        )
        data = {"change": "optimizer_offload_fraction=1", "host_ram_bytes": figures.host_ram_bytes}
        yield Explanation(kind="would-fit", message=message, data=data)


def _shorter(request: PlanRequest, result: SearchResult) -> Iterator[Explanation]:
    length = request.workload.seq_length // 2
    while length >= SHORTEST:
        workload = request.workload.model_copy(update={"seq_length": length})
        if _fits(request.model_copy(update={"workload": workload})):
            message = f"sequences of {length:,} tokens would fit"
            yield Explanation(kind="would-fit", message=message, data={"change": f"seq_length={length}"})
            return
        length //= 2


def _leaner_states(request: PlanRequest, result: SearchResult) -> Iterator[Explanation]:
    if request.workload.moments_dtype != "fp32" or request.workload.optimizer != "adam":
        return
    workload = request.workload.model_copy(update={"moments_dtype": "bf16"})
    if _fits(request.model_copy(update={"workload": workload})):
        message = "optimizer moments in bf16 would fit (--moments-dtype bf16)"
        yield Explanation(kind="would-fit", message=message, data={"change": "moments_dtype=bf16"})


def _other_gpu(request: PlanRequest, result: SearchResult) -> Iterator[Explanation]:
    """The type of the catalog with least memory on which it would fit, with as many GPUs."""
    if len(request.cluster.pools) > 1:
        return
    now = request.cluster.gpu_of(request.cluster.pools[0])
    more = [
        entry.gpu
        for entry in catalog_gpus()
        if entry.gpu.usable_memory_bytes > now.usable_memory_bytes
        and entry.gpu.vendor == now.vendor
        and entry.gpu.supports(request.workload.precision)
    ]
    for gpu in sorted(more, key=lambda gpu: (gpu.usable_memory_bytes, gpu.name))[:MOST_TYPES]:
        try:
            asked = changed(request, f"gpu={gpu.name}")
        except SpecError:
            continue
        if _fits(asked):
            message = f"as many {gpu.name} ({gpu.usable_memory_bytes / GIB:.0f} GiB) would fit"
            yield Explanation(kind="would-fit", message=message, data={"change": f"gpu={gpu.name}"})
            return
