"""``ModelSpec``: an architecture as kinds of layers and the order they come in."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from .attention import Attention
from .base import Document
from .feed_forward import DenseFFN, FeedForward, MoEFFN
from .weights import Weight, count, vector


class LayerKind(Document):
    """One kind of decoder layer: a token mixer, a feed-forward network, or only one of them (hybrid models).

    ``norms`` counts the norm weights of hidden size in the layer; ``norm_bias`` says that each has a bias too.
    """

    attention: Attention | None = None
    feed_forward: FeedForward | None = None
    norms: NonNegativeInt = 2
    norm_bias: bool = False
    extra_parameters: NonNegativeInt = 0

    @property
    def name(self) -> str:
        """Short name such as ``gqa+moe`` or ``mamba2``."""
        parts = [part.variant for part in (self.attention, self.feed_forward) if part is not None]
        return "+".join(parts) or "no-op"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """All parameters of the layer."""
        rows: list[Weight] = []
        if self.attention:
            rows += self.attention.weights(hidden_size)
        if self.feed_forward:
            rows += self.feed_forward.weights(hidden_size)
        if self.norms:
            rows.append(vector("norms", self.norms * hidden_size * (2 if self.norm_bias else 1)))
        if self.extra_parameters:
            rows.append(vector("extra", self.extra_parameters))
        return tuple(rows)

    def active_parameters(self, hidden_size: int) -> int:
        """Parameters that one token meets: everything but the routed experts it is not sent to."""
        total = count(self.weights(hidden_size))
        if isinstance(self.feed_forward, MoEFFN):
            moe = self.feed_forward
            idle = moe.expert_weights(moe.latent_size or hidden_size, moe.num_experts - moe.top_k)
            total -= count(idle) if moe.num_experts > moe.top_k else 0
        return total


class MTP(Document):
    """Multi-token prediction: ``num_layers`` extra layers of a kind, each with a 2h x h projection and three norms."""

    num_layers: PositiveInt
    layer: LayerKind

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Parameters of one MTP layer, without the shared embedding and head."""
        return (
            *self.layer.weights(hidden_size),
            Weight("eh_proj", 2 * hidden_size, hidden_size, "column"),
            vector("mtp_norms", 3 * hidden_size),
        )


class VisionTower(Document):
    """A vision encoder and its projector, run before the language model on the first stage.

    ``parameters`` is the exact total; the shape fields price it. ``tokens_per_image`` are the language-model tokens
    that one image becomes, where the configuration states it. ``in_total`` says whether the model's total counts it:
    the causal-language-model class of transformers leaves the tower out in some families.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    gated: bool = False
    parameters: PositiveInt
    tokens_per_image: PositiveInt | None = None
    in_total: bool = True


class ModelSpec(Document):
    """A decoder model.

    ``kinds`` are the different layers, ``pattern`` is the index into ``kinds`` of every decoder layer in order.
    ``assumptions`` names each value that the configuration did not state and where it came from.
    """

    name: str
    family: str
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    kinds: tuple[LayerKind, ...] = Field(min_length=1)
    pattern: tuple[NonNegativeInt, ...] = Field(min_length=1)
    tied_embeddings: bool = False
    max_position_embeddings: PositiveInt | None = None
    learned_positions: NonNegativeInt = 0
    final_norm_bias: bool = False
    head_bias: bool = False
    extra_parameters: NonNegativeInt = 0
    rotary: bool = True
    norm: str = "RMSNorm"
    activation: str = "silu"
    mtp: MTP | None = None
    vision: VisionTower | None = None
    stored_dtype: str | None = None
    assumptions: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _pattern_in_range(self) -> Self:
        worst = max(self.pattern)
        if worst >= len(self.kinds):
            raise ValueError(f"pattern names layer kind {worst}, but there are {len(self.kinds)} kinds")
        return self

    @property
    def num_layers(self) -> int:
        """Decoder layers, without MTP."""
        return len(self.pattern)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every decoder layer in order."""
        return tuple(self.kinds[index] for index in self.pattern)

    @property
    def is_moe(self) -> bool:
        return any(isinstance(self.kinds[index].feed_forward, MoEFFN) for index in set(self.pattern))

    @property
    def moe(self) -> MoEFFN | None:
        """The first MoE feed-forward network, if any."""
        for index in sorted(set(self.pattern)):
            feed_forward = self.kinds[index].feed_forward
            if isinstance(feed_forward, MoEFFN):
                return feed_forward
        return None

    def embedding_weights(self) -> tuple[Weight, ...]:
        """Token and learned-position embedding tables."""
        rows = [Weight("embedding", self.vocab_size, self.hidden_size, "row", matmul=False)]
        if self.learned_positions:
            rows.append(Weight("positions", self.learned_positions, self.hidden_size, matmul=False))
        return tuple(rows)

    def head_weights(self) -> tuple[Weight, ...]:
        """Final norm and output projection; the projection is listed also when it is tied to the embedding."""
        rows = [
            vector("final_norm", self.hidden_size * (2 if self.final_norm_bias else 1)),
            Weight("head", self.hidden_size, self.vocab_size, "column"),
        ]
        if self.head_bias:
            rows.append(vector("head_bias", self.vocab_size, split="column"))
        return tuple(rows)

    @cached_property
    def total_params(self) -> int:
        """Parameters as Hugging Face counts them: of the class that ``AutoModelForCausalLM`` builds, else the
        family's multimodal class. Tied ones once, MTP apart, a vision tower where that class holds it."""
        per_kind = [count(kind.weights(self.hidden_size)) for kind in self.kinds]
        return sum(per_kind[index] for index in self.pattern) + self._outside_layers

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token meets: :attr:`total_params` less the routed experts it is not sent to."""
        per_kind = [kind.active_parameters(self.hidden_size) for kind in self.kinds]
        return sum(per_kind[index] for index in self.pattern) + self._outside_layers

    @property
    def text_params(self) -> int:
        """Parameters of the language model alone, tied ones once, MTP apart."""
        return self.total_params - (self.vision.parameters if self.vision and self.vision.in_total else 0)

    @property
    def whole_params(self) -> int:
        """Parameters of the language model and the vision tower, tied ones once, MTP apart."""
        return self.text_params + (self.vision.parameters if self.vision else 0)

    @cached_property
    def mtp_params(self) -> int:
        """Parameters of all MTP layers, without embedding and head, which they share."""
        return self.mtp.num_layers * count(self.mtp.weights(self.hidden_size)) if self.mtp else 0

    @property
    def _outside_layers(self) -> int:
        head = count(self.head_weights()) - (self.hidden_size * self.vocab_size if self.tied_embeddings else 0)
        vision = self.vision.parameters if self.vision and self.vision.in_total else 0
        return count(self.embedding_weights()) + head + vision + self.extra_parameters

    def layers_by_kind(self) -> dict[str, int]:
        """How many decoder layers there are of each kind, by name, in order of first use."""
        return dict(Counter(self.kinds[index].name for index in self.pattern))


__all__ = ["MTP", "DenseFFN", "LayerKind", "MoEFFN", "ModelSpec", "VisionTower"]
