"""``Plan``: how a model is laid out over devices. Data, versioned JSON, no behaviour."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from .base import Document
from .fields import Count
from .schedules import ScheduleName, runs_chunks
from .target import OffloadModule, RecomputeMode

GraphScope = Literal["full_iteration", "attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess"]
CpComm = Literal["p2p", "a2a", "allgather", "a2a+p2p"]
ShardingLevel = Literal["none", "zero1", "zero2", "zero3", "fsdp"]
_BLOCK = re.compile(r"^(?:(embed|head|vision)|(decoder|mtp):(\d+)(?:-(\d+))?)$")
#: Far more than any run has; what is beyond would only fill memory.
_MOST_RANKS, _MOST_LAYERS = 10_000_000, 100_000


def _block(text: str) -> str:
    match = _BLOCK.match(text)
    if not match:
        raise ValueError("is not a block; use embed, decoder:0-4, mtp:0, head or vision")
    if match[2]:
        _bounded(match[3], match[4] or match[3], _MOST_LAYERS)
    return text


def _range(text: str) -> str:
    first, _, last = text.partition("-")
    parse_range(text[:40])
    _bounded(first, last or first, _MOST_RANKS)
    return text


def _bounded(first: str, last: str, most: int) -> None:
    if len(first) > 9 or len(last) > 9 or int(last) >= most:
        raise ValueError(f"reaches beyond {most}")
    if int(last) < int(first):
        raise ValueError("ends before it starts")


Block = Annotated[str, AfterValidator(_block)]
Range = Annotated[str, AfterValidator(_range)]


class HsdpSharding(Document):
    """Hybrid sharding: shard inside groups of ``shard`` ranks, replicate over ``replicate`` such groups."""

    replicate: PositiveInt
    shard: PositiveInt


class Hsdp(Document):
    hsdp: HsdpSharding


Sharding = ShardingLevel | Hsdp


class Degrees(Document):
    """The parallel degrees of a stage: ``tp*cp*dp == etp*ep*edp`` ranks."""

    tp: PositiveInt = 1
    cp: PositiveInt = 1
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    edp: PositiveInt = 1

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if max(self.tp * self.cp * self.dp, self.etp * self.ep * self.edp) > _MOST_RANKS:
            raise ValueError(f"a stage has at most {_MOST_RANKS} ranks")
        return self


class Chunk(Document):
    """A model chunk of a stage. ``order`` is its place along the pipeline; blocks are ``vision``, ``embed``,
    ``decoder:FIRST-LAST`` (inclusive), ``mtp:FIRST-LAST`` and ``head``."""

    order: NonNegativeInt
    blocks: tuple[Block, ...] = Field(default=(), max_length=1000)


class Group(Document):
    """Ranks of a stage that sit in one pool and the micro-batches each of their replicas runs in a step."""

    pool: str
    gpu: str
    ranks: tuple[Range, ...] = Field(min_length=1)
    micro_batches: PositiveInt


class Stage(Document):
    """One pipeline stage: its chunks (one, or one a virtual stage), and who runs it."""

    chunks: tuple[Chunk, ...] = Field(min_length=1)
    degrees: Degrees
    micro_batch_size: PositiveInt
    recompute: RecomputeMode
    sharding: Sharding
    groups: tuple[Group, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _all_ranks(self) -> Self:
        ranks = sum(len(parse_range(text)) for group in self.groups for text in group.ranks)
        product = self.degrees.tp * self.degrees.cp * self.degrees.dp
        if ranks != product:
            raise ValueError(f"groups hold {ranks} ranks, but tp*cp*dp is {product}")
        return self


class Devices(Document):
    """A run of ranks on nodes of one pool. ``nodes`` are node indices in the pool, inclusive; ``host`` where known."""

    ranks: Range
    pool: str
    nodes: Range
    host: str | None = None


class Options(Document):
    """Switches of the target that a plan sets; a value of null keeps the target's.

    ``ep_comm_overlap``: expert exchange under the compute of another micro-batch; ``delay_wgrad`` delays weight
    gradients to fill it. ``moe_shared_expert_overlap``: expert exchange under the shared expert. ``fp8_dispatch``:
    tokens go to their experts in FP8. ``cp_a2a_size``: ranks that exchange heads under ``a2a+p2p``.
    ``grad_bucket_params``: parameters of a gradient bucket; the framework's default if not given.
    ``activation_offload_layers`` are the first layers of each rank whose activations wait in host memory,
    ``activation_offload_modules`` the modules whose inputs do; ``optimizer_offload_fraction`` is the share of the
    optimizer state that lives and is updated there, ``optimizer_offload_overlap`` runs its transfers beside the update.
    """

    sequence_parallel: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    overlap_p2p: bool = False
    dispatcher: Literal["allgather", "alltoall", "flex"] | None = None
    ep_comm_overlap: bool = False
    delay_wgrad: bool = False
    moe_shared_expert_overlap: bool = False
    fp8_dispatch: bool = False
    grad_bucket_params: PositiveInt | None = None
    cp_comm_type: CpComm | None = None
    cp_a2a_size: PositiveInt | None = None
    cuda_graph: bool = False
    cuda_graph_scope: tuple[GraphScope, ...] = ()
    fused_cross_entropy: bool = True
    grouped_gemm: bool = False
    dist_opt_instances: PositiveInt = 1
    loss_chunks: Count | None = None
    reshard_after_forward: bool | None = None
    activation_offload_layers: NonNegativeInt = 0
    activation_offload_modules: tuple[OffloadModule, ...] = ()
    optimizer_offload_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    optimizer_offload_overlap: bool = False
    vp_group_size: PositiveInt | None = None


class Plan(Document):
    """A complete plan. A degree is null where stages differ; ``stages`` always say all."""

    tp: Count | None
    pp: Count
    cp: Count | None
    ep: Count | None
    etp: Count | None
    dp: Count | None
    edp: Count | None
    vpp: Count = 1
    micro_batch_size: Count | None
    num_microbatches: Count
    schedule: ScheduleName
    sharding: Sharding
    recompute: RecomputeMode
    stages: tuple[Stage, ...] = Field(min_length=1)
    rank_order: str = "tp-cp-ep-dp-pp"
    devices: tuple[Devices, ...] = ()
    options: Options = Options()

    @model_validator(mode="after")
    def _says_what_the_stages_say(self) -> Self:
        for name in ("tp", "cp", "ep", "etp", "dp", "edp"):
            self._agrees(name, {getattr(stage.degrees, name) for stage in self.stages})
        self._agrees("micro_batch_size", {stage.micro_batch_size for stage in self.stages})
        if self.pp != len(self.stages):
            raise ValueError(f"pp is {self.pp}, but there are {len(self.stages)} stages")
        chunks = {len(stage.chunks) for stage in self.stages}
        if chunks != {self.vpp}:
            raise ValueError(f"vpp is {self.vpp}, but stages have {sorted(chunks)} chunks")
        if not runs_chunks(self.schedule, self.vpp):
            raise ValueError(f"schedule {self.schedule} does not run {self.vpp} chunks a stage")
        return self

    def _agrees(self, name: str, found: set[int]) -> None:
        stated = getattr(self, name)
        wanted = next(iter(found)) if len(found) == 1 else None
        if stated != wanted:
            raise ValueError(f"{name} is {stated}, but the stages have {sorted(found)}")

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that it uses, in the order in which stages meet them."""
        return tuple(dict.fromkeys(group.pool for stage in self.stages for group in stage.groups))

    @property
    def num_ranks(self) -> int:
        return sum(stage.degrees.tp * stage.degrees.cp * stage.degrees.dp for stage in self.stages)


@lru_cache(maxsize=4096)
def parse_range(text: str) -> range:
    """``"0-63"`` or ``"7"`` as a range; ValueError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise ValueError(f"{text!r} is not a range such as 0-63")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


def format_range(first: int, last: int) -> str:
    """Inclusive range as text: ``7`` or ``0-63``."""
    return str(first) if first == last else f"{first}-{last}"


@lru_cache(maxsize=4096)
def expand_blocks(blocks: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Blocks of a chunk as (kind, index) pairs in order: ``("decoder", 3)``; ValueError if malformed."""
    out: list[tuple[str, int]] = []
    for text in blocks:
        match = _BLOCK.match(text)
        if not match:
            raise ValueError(f"{text!r} is not a block; use embed, decoder:0-4, mtp:0, head or vision")
        if match[1]:
            out.append((match[1], 0))
        else:
            first = int(match[3])
            out += [(match[2], index) for index in range(first, int(match[4] or first) + 1)]
    return tuple(out)


def collapse_blocks(blocks: list[tuple[str, int]]) -> tuple[str, ...]:
    """Inverse of :func:`expand_blocks` with consecutive layers joined."""
    out: list[str] = []
    position = 0
    while position < len(blocks):
        kind, first = blocks[position]
        end = position
        while end + 1 < len(blocks) and blocks[end + 1] == (kind, blocks[end][1] + 1):
            end += 1
        out.append(kind if kind in ("embed", "head", "vision") else f"{kind}:{format_range(first, blocks[end][1])}")
        position = end + 1
    return tuple(out)
