"""The declared search space: every plan skeleton of an arrangement as a ``CandidateBatch``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, isqrt

import numpy as np

from meshwright.specs.attention import MLAAttention
from meshwright.specs.batch import CandidateBatch
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.target import RecomputeMode, Target

from ..request import PlanRequest
from .arrangements import Arrangement

#: Context parallelism keeps at least this many tokens on a rank; below it the ring's messages are all latency.
MIN_TOKENS_PER_CP_RANK = 1024
#: Largest micro-batch tried, in sequences, and in tokens where sequences are short. Beyond it activations grow and
#: GEMMs no longer get faster.
MAX_MICRO_BATCH_SIZE, MAX_MICRO_BATCH_TOKENS = 16, 32_768
#: Virtual stages tried per rank.
VIRTUAL_STAGES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)

#: Sharding levels that gather parameters for every pass.
FULLY_SHARDED = ("zero3", "fsdp")

#: What the space holds, in words, for ``bound.space``.
SPACE = (
    "every pool used whole or left out, the GPUs of a stage in one pool, pools in any order along the pipeline",
    "tp a divisor of the innermost network level, cp, ep, etp, dp any that the target's rules allow",
    f"cp with at least {MIN_TOKENS_PER_CP_RANK} tokens a rank",
    f"micro-batches of up to {MAX_MICRO_BATCH_SIZE} sequences or {MAX_MICRO_BATCH_TOKENS} tokens",
    f"virtual stages {', '.join(map(str, VIRTUAL_STAGES))}",
    "contiguous layer splits with at least one decoder layer a chunk, with and without virtual stages",
    "the target's recompute modes; full recompute of any number of first layers of a chunk",
    "the target's sharding levels, full sharding without pipeline stages only",
)

_COLUMNS = ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch_size", "num_microbatches", "recompute", "sharding")


@lru_cache(maxsize=65536)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors in rising order."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return (*small, *(number // value for value in reversed(small) if value * value != number))


def block_mode(target: Target) -> int | None:
    """The recompute index that means: in full, the first layers of a chunk, as few as fit, none where all fits.

    None where the target has no such mode. It stands one past the target's own modes: how many layers it means is found
    when a candidate is split.
    """
    kinds = {mode.granularity for mode in target.recompute}
    return len(target.recompute) if target.recompute_block_layers and {"none", "full"} <= kinds else None


def recompute_choices(request: PlanRequest) -> list[int]:
    """Indices of the target's recompute modes that do something for the model (or the pinned one)."""
    modes = request.target.recompute
    pinned = request.fix.get("recompute")
    if pinned is not None:
        return [index for index, mode in enumerate(modes) if mode.label == pinned]
    if "recompute" in request.forbid:
        return [index for index, mode in enumerate(modes) if mode.granularity == "none"]
    useful = [index for index, mode in enumerate(modes) if _useful(mode, request)]
    block = block_mode(request.target)
    if block is None:
        return useful
    return [*(index for index in useful if modes[index].granularity == "selective"), block]  # block holds none and full


def _useful(mode: RecomputeMode, request: PlanRequest) -> bool:
    kinds = [request.model.kinds[index] for index in sorted(set(request.model.pattern))]
    has = {
        "moe_act": request.model.is_moe,
        "moe": request.model.is_moe,
        "shared_experts": any(
            isinstance(k.feed_forward, MoEFFN) and k.feed_forward.shared_intermediate_size for k in kinds
        ),
        "mla_up_proj": any(isinstance(k.attention, MLAAttention) for k in kinds),
        "mlp": any(k.feed_forward is not None and k.feed_forward.kind == "dense" for k in kinds),
    }
    return all(has.get(module, True) for module in mode.modules)


def sharding_choices(request: PlanRequest) -> list[int]:
    """Indices of the target's sharding levels in the space.

    ``none`` is left out unless pinned: sharding the optimizer needs no more traffic and never more memory. So is
    ``zero2`` where there is ``zero1``, which :mod:`.widen` tries after it.
    """
    levels = request.target.sharding
    pinned = request.fix.get("sharding")
    if pinned is not None:
        return [index for index, level in enumerate(levels) if level == pinned]
    dropped = {"none"} | ({"fsdp", "zero3"} if "fsdp" in request.forbid else set())
    dropped |= {"zero2"} if "zero1" in levels else set()
    return [index for index, level in enumerate(levels) if level not in dropped] or [0]


def _allowed(request: PlanRequest, name: str, values: Sequence[int]) -> list[int]:
    pinned, cap = request.fixed(name), request.cap(name)
    if pinned is not None:
        return [pinned] if pinned in values else []
    return [value for value in values if cap is None or value <= cap]


def _expert_grids(request: PlanRequest, stage_ranks: int, tp: int, span: int) -> list[tuple[int, int]]:
    """(ep, etp) pairs. A dense model keeps ep = 1 and etp = tp, so that both grids are the same."""
    experts = [k.feed_forward.num_experts for k in request.model.kinds if isinstance(k.feed_forward, MoEFFN)]
    if not experts:
        return [(ep, etp) for ep in _allowed(request, "ep", [1]) for etp in _allowed(request, "etp", [tp])]
    common = gcd(*experts)
    tensor = [value for value in divisors(stage_ranks) if span % value == 0]
    return [
        (ep, etp)
        for etp in _allowed(request, "etp", tensor)
        for ep in _allowed(request, "ep", divisors(gcd(common, stage_ranks // etp)))
        if stage_ranks % (ep * etp) == 0
    ]


def candidates(request: PlanRequest, arrangement: Arrangement, lean: bool = False) -> CandidateBatch:
    """All skeletons of one arrangement, before the target's rules.

    With ``lean`` only those that need least memory among their like: the smallest micro-batch, fewest virtual stages,
    and block mode where it is open, which holds full recompute.
    """
    expert_tensor = request.target.expert_tensor_parallel
    pools = [request.cluster.pools[index] for index in arrangement.pools]
    span = gcd(*(gcd(pool.levels[0].span, pool.num_gpus) for pool in pools))
    ranks, pp = arrangement.stage_ranks, arrangement.pp
    batch, seq = request.workload.global_batch_size, request.workload.seq_length
    empty = CandidateBatch(**{name: np.empty(0, dtype=np.int64) for name in _COLUMNS})
    if not _allowed(request, "pp", [pp]):
        return empty
    modes, levels = recompute_choices(request), sharding_choices(request)
    virtual = [v for v in VIRTUAL_STAGES if v == 1 or (pp > 1 and pp * v <= request.model.num_layers)]
    if "interleaved" not in request.target.schedules:
        virtual = [1]
    virtual = _allowed(request, "vpp", virtual)
    if lean:
        virtual = virtual[:1]
        block = block_mode(request.target)
        modes = [block] if block in modes else modes
    heads: list[tuple[int, ...]] = []
    for tp in _allowed(request, "tp", [t for t in divisors(ranks) if span % t == 0]):
        longest = max(1, seq // MIN_TOKENS_PER_CP_RANK)
        for cp in _allowed(request, "cp", [c for c in divisors(ranks // tp) if c <= longest]):
            dp = ranks // (tp * cp)
            if batch % dp or not _allowed(request, "dp", [dp]):
                continue
            sizes = divisors(batch // dp)
            if request.fixed("micro_batch_size") is None:
                most = max(MAX_MICRO_BATCH_SIZE, MAX_MICRO_BATCH_TOKENS // seq)
                sizes = tuple(size for size in sizes if size <= most)
            sizes = tuple(_allowed(request, "micro_batch_size", sizes))[: 1 if lean else None]
            for ep, etp in _expert_grids(request, ranks, tp, span):
                if etp > 1 and etp != tp and not expert_tensor:
                    continue
                heads += [(tp, pp, cp, ep, etp, dp, size, batch // dp // size) for size in sizes]
    if not heads or not virtual or not modes or not levels:
        return empty
    base = np.array(heads, dtype=np.int64)
    tails = np.array([(v, mode, level) for v in virtual for mode in modes for level in levels], dtype=np.int64)
    if pp > 1:  # full sharding gathers parameters again for every micro-batch; with stages :mod:`.widen` tries it
        runs = {*request.target.sharding_with_stages} - ({*FULLY_SHARDED} if "sharding" not in request.fix else set())
        tails = tails[[request.target.sharding[level] in runs for level in tails[:, 2]]]
    left = np.repeat(base, len(tails), axis=0)
    right = np.tile(tails, (len(base), 1))
    return CandidateBatch(
        tp=left[:, 0],
        pp=left[:, 1],
        cp=left[:, 2],
        ep=left[:, 3],
        etp=left[:, 4],
        dp=left[:, 5],
        vpp=right[:, 0],
        micro_batch_size=left[:, 6],
        num_microbatches=left[:, 7],
        recompute=right[:, 1],
        sharding=right[:, 2],
    )
