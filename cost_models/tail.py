"""What follows the last backward of a stage: gradient reduction, optimizer, parameter gather; exposed seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import CellKeys, FloatArray, IntArray
from meshwright.specs.cluster import Pool
from meshwright.specs.target import Target
from meshwright.specs.workload import BYTES, Workload

from .collectives import collective_s, contention, exposed_s
from .memory import held, update_bytes_per_param
from .multipliers import Multipliers
from .operators import Device
from .protocol import Tail

#: Megatron's default bucket of the gradient buffer: max(40M, 1M * data-parallel size) parameters (DDP config).
BUCKET_PARAMS, BUCKET_PARAMS_PER_RANK = 40e6, 1e6
#: Host time of a step outside the passes: gradient-norm reductions and their synchronisation, scheduler, data iterator.
#: An assumption; regressions on vTrain's runs of an old stack give up to 20 ms.
STEP_OVERHEAD_S = 2e-3


def tail_of(
    keys: CellKeys,
    row_shape: tuple[int, ...],
    pool: IntArray,
    dense_params: FloatArray,
    expert_params: FloatArray,
    last_backward_s: FloatArray,
    *,
    pools: Sequence[Pool],
    devices: Sequence[Device],
    workload: Workload,
    target: Target,
    shardings: Sequence[str],
    multipliers: Sequence[Multipliers],
    bucket_params: int | None = None,
    host_optimizer: float = 0.0,
) -> Tail:
    """Exposed seconds of stages; ``keys`` are the cell keys of the rows, flat, that had shape ``row_shape``.

    Gradients: a reduce-scatter (all-reduce when nothing is sharded) of each bucket over each data-parallel group,
    hidden under the last micro-batch's backward but for the last bucket. The gather of updated parameters hides under
    the next forward (half of that backward) but for the first bucket. Full sharding does both inside the passes.
    Where a sharding has replicas, both stay inside one, and the shards are all-reduced over the replicas as well.
    Without overlap there is one bucket. ``bucket_params`` replaces Megatron's default size.
    The share ``host_optimizer`` of the parameters is updated on the host (:mod:`.offload`); its gradients are still
    reduced, clipped and zeroed here.
    """

    def column(name: str) -> FloatArray:
        return np.asarray(getattr(keys, name)).reshape(row_shape)

    arrays = [column(n) for n in ("tp", "cp", "ep", "etp", "stage_ranks", "sharding")]
    (tp, _cp, ep, etp, ranks, sharding, pool, dense, expert, backward) = np.broadcast_arrays(
        *arrays, pool, dense_params, expert_params, last_backward_s
    )
    trained = dense + expert
    dense_size, expert_size = ranks // tp, ranks // (etp * ep)
    shape = trained.shape
    reduce_s, gather_s, first_s, last_s, optimizer_s = (np.zeros(shape) for _ in range(5))
    kinds = [held(name) for name in shardings]
    whole, inside, fully = (
        np.array([kind.level in names for kind in kinds])[sharding]
        for names in (("none",), ("zero2", "zero3", "fsdp"), ("zero3", "fsdp"))
    )
    all_whole, some_whole = bool(whole.all()), bool(whole.any())
    copies = np.array([kind.replicas for kind in kinds])[sharding]
    replicated = bool((copies > 1).any())
    bucket_group = dense_size
    if replicated:
        dense_size, expert_size = np.maximum(dense_size // copies, 1), np.maximum(expert_size // copies, 1)
    shards = np.where(whole, 1, dense_size), np.where(whole, 1, expert_size)
    owned = dense / shards[0] + expert / shards[1]
    bucket = np.maximum(BUCKET_PARAMS, BUCKET_PARAMS_PER_RANK * bucket_group)
    if bucket_params is not None:
        bucket = np.full_like(bucket, float(bucket_params))
    last_bucket = np.minimum(dense, bucket)
    share = np.zeros(shape)
    gradient, parameter = BYTES[workload.gradient_dtype], BYTES[workload.params_dtype]
    # The update; beside it the buffer of gradients is zeroed, read for the norm, clipped.
    update, buffer = update_bytes_per_param(workload), workload.gradient_bytes
    touched = owned * ((1 - host_optimizer) * update + 3 * buffer) + trained * buffer
    for g, place in enumerate(pools):
        here = pool == g
        if not here.any():
            continue

        def time(
            op: str,
            params: FloatArray,
            size: int,
            group: IntArray,
            stride: IntArray,
            at: Pool = place,
            factor: float = multipliers[g].dp_comm,
            part: FloatArray | float = 1.0,
        ) -> FloatArray:
            pieces = np.maximum(np.ceil(params / bucket), 1.0) if target.overlap_grad_reduce else 1.0
            one = collective_s(op, at.levels, params / pieces * part * size, group, stride)  # type: ignore[arg-type]
            return factor * pieces * one

        def between(params: FloatArray, group: IntArray, stride: IntArray) -> FloatArray:
            return time("all_reduce", params, gradient, copies, stride * group, part=1.0 / group)

        def reduced(params: FloatArray, group: IntArray, stride: IntArray) -> FloatArray:
            if all_whole:
                return time("all_reduce", params, gradient, group, stride)
            scatter = time("reduce_scatter", params, gradient, group, stride)
            if replicated:
                scatter = np.where(inside, 0.0, scatter) + between(params, group, stride)
            if not some_whole:
                return scatter
            return np.where(whole, time("all_reduce", params, gradient, group, stride), scatter)

        reduce_s = np.where(here, reduced(dense, dense_size, tp) + reduced(expert, expert_size, etp * ep), reduce_s)
        last_s = np.where(here, reduced(last_bucket, dense_size, tp), last_s)
        if not all_whole:
            gathered = time("all_gather", dense, parameter, dense_size, tp)
            gathered = gathered + time("all_gather", expert, parameter, expert_size, etp * ep)
            gather_s = np.where(here & ~whole, gathered, gather_s)
            first_s = np.where(here & ~whole, time("all_gather", last_bucket, parameter, dense_size, tp), first_s)
        free = contention("all_reduce", place.levels, bucket_group, tp)
        taken = np.where(whole, free, contention("reduce_scatter", place.levels, bucket_group, tp))
        share = np.where(here, taken, share)
        on = devices[g]
        updated = multipliers[g].optimizer * touched / (on.bandwidth * on.fit.optimizer)
        optimizer_s = np.where(here, updated + multipliers[g].step * STEP_OVERHEAD_S, optimizer_s)
    if target.overlap_grad_reduce:
        reduce_s = last_s + exposed_s(np.maximum(reduce_s - last_s, 0.0), backward, share)
    if target.overlap_param_gather:
        gather_s = first_s + exposed_s(np.maximum(gather_s - first_s, 0.0), backward / 2, share)
    return Tail(
        grad_reduce_s=np.where(inside & (copies == 1), 0.0, reduce_s),
        optimizer_s=np.where(trained > 0, optimizer_s, 0.0),
        param_gather_s=np.where(fully, 0.0, gather_s),
    )
