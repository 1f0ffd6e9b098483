"""``HardwareProfile``: measured costs of operators, layers, collectives and copies, with where they came from.

Points, not curves: each is one measured (or published) shape, so that a reader may fit what it likes. ``None`` means
that the source does not say. Written by importers of other tools' profiles and by our own profiler.
"""

from __future__ import annotations

from math import log2
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Document
from .cluster import Precision

Direction = Literal["forward", "backward", "both"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
#: ``rest`` is all of a model but its decoder layers.
LayerKind = Literal["embedding", "decoder", "head", "rest"]
#: Points of one kind at most; more is no profile.
MAX_POINTS = 1_000_000


class Provenance(Document):
    """Who measured what, where and when; ``sources`` are file names, ``notes`` what a reader must know."""

    tool: str
    device: str | None = None
    driver: str | None = None
    libraries: dict[str, str] = Field(default_factory=dict)
    date: str | None = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class OperatorPoint(Document):
    """One operator at one shape (``{"m": 4096, "n": 4096, "k": 1024}``): median seconds, standard deviation."""

    op: str
    gpu: str | None = None
    shape: dict[str, NonNegativeInt]
    precision: Precision | None = None
    direction: Direction = "forward"
    seconds: PositiveFloat
    spread_s: NonNegativeFloat | None = None
    samples: PositiveInt | None = None


class LayerPoint(Document):
    """One layer, or each layer of a kind (``index`` null), on one rank for one micro-batch.

    ``recompute``: the layer keeps its input only and computes the rest again in the backward pass. ``position``: the
    stage that holds the layer is the ``only``, ``first`` or ``last`` one, where that matters. ``vocab_tp`` splits
    embedding and head where it differs from ``tp``. ``forward_backward_s`` stands where the source has only the sum.
    ``params`` are those of a rank; ``activation_bytes`` are kept for one micro-batch, ``output_bytes`` go to the next
    layer, ``static_bytes`` are weights, gradients and optimizer state, ``peak_bytes`` the most that was allocated.
    """

    model: str
    kind: LayerKind = "decoder"
    index: NonNegativeInt | None = None
    gpu: str | None = None
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    seq_length: PositiveInt | None = None
    precision: Precision | None = None
    sequence_parallel: bool | None = None
    recompute: bool = False
    position: Literal["only", "first", "last"] | None = None
    forward_s: NonNegativeFloat | None = None
    backward_s: NonNegativeFloat | None = None
    forward_backward_s: NonNegativeFloat | None = None
    update_s: NonNegativeFloat | None = None
    spread_s: NonNegativeFloat | None = None
    samples: PositiveInt | None = None
    params: NonNegativeFloat | None = None
    activation_bytes: NonNegativeFloat | None = None
    output_bytes: NonNegativeFloat | None = None
    static_bytes: NonNegativeFloat | None = None
    peak_bytes: NonNegativeFloat | None = None


class End(Document):
    """One end of a link: ``gpus`` GPUs of one type in one machine, and its zone."""

    gpu: str
    gpus: PositiveInt = 1
    zone: str | None = None


class CollectivePoint(Document):
    """One collective of ``ranks`` ranks over ``bytes`` (of the whole message, as NCCL's tests count).

    ``placement``: the ranks are neighbours or one in every machine. ``level`` names the network level that joins them.
    ``nodes``, ``gpus_per_node``: the cluster it was measured on.
    """

    op: CollectiveOp
    ranks: PositiveInt
    bytes: PositiveFloat
    seconds: PositiveFloat
    placement: Literal["consecutive", "strided"] | None = None
    level: str | None = None
    gpu: str | None = None
    peer_gpu: str | None = None
    nodes: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    spread_s: NonNegativeFloat | None = None
    samples: PositiveInt | None = None


class BandwidthCurve(Document):
    """Fitted bandwidth between two ends: a polynomial in log2(megabytes), highest power first, in GB/s (1e9).

    ``max_bytes_per_s`` is the largest rate that was measured, which the polynomial never passes.
    """

    source: End
    peer: End
    log2_megabytes_to_gigabytes_per_s: tuple[float, ...] = Field(min_length=1, max_length=10)
    max_bytes_per_s: PositiveFloat | None = None

    def bandwidth_bytes_per_s(self, size_bytes: float) -> float:
        """Bytes/s of a message of ``size_bytes``; ValueError where the polynomial is not above 0."""
        at, value = log2(size_bytes / 1e6), 0.0
        for coefficient in self.log2_megabytes_to_gigabytes_per_s:
            value = value * at + coefficient
        if value <= 0:
            raise ValueError(f"the bandwidth of {size_bytes:.0f} bytes is not above 0")
        return min(value * 1e9, self.max_bytes_per_s or float("inf"))


class CopyPoint(Document):
    """One copy between or inside memories."""

    kind: Literal["host_to_device", "device_to_host", "device_to_device"]
    gpu: str | None = None
    bytes: PositiveFloat
    seconds: PositiveFloat
    spread_s: NonNegativeFloat | None = None
    samples: PositiveInt | None = None


class OverlapPoint(Document):
    """How much slower compute and communication run while both do (1 = not at all)."""

    gpu: str | None = None
    op: CollectiveOp | None = None
    compute_slowdown: float = Field(ge=1)
    communication_slowdown: float = Field(ge=1)


class HardwareProfile(Document):
    """Everything measured on one kind of hardware, or on several that one source covers."""

    schema_version: Literal[1] = 1
    provenance: Provenance
    operators: tuple[OperatorPoint, ...] = Field(default=(), max_length=MAX_POINTS)
    layers: tuple[LayerPoint, ...] = Field(default=(), max_length=MAX_POINTS)
    collectives: tuple[CollectivePoint, ...] = Field(default=(), max_length=MAX_POINTS)
    bandwidths: tuple[BandwidthCurve, ...] = Field(default=(), max_length=MAX_POINTS)
    copies: tuple[CopyPoint, ...] = Field(default=(), max_length=MAX_POINTS)
    overlaps: tuple[OverlapPoint, ...] = Field(default=(), max_length=MAX_POINTS)

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not any(self.counts.values()):
            raise ValueError("holds no point")
        return self

    @property
    def counts(self) -> dict[str, int]:
        """How many points there are of each kind."""
        kinds = ("operators", "layers", "collectives", "bandwidths", "copies", "overlaps")
        return {kind: len(getattr(self, kind)) for kind in kinds}
