"""Feed-forward networks of a layer: dense and mixture of experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from .base import Document
from .weights import Weight, vector


class DenseFFN(Document):
    """Two (three when ``gated``) linear maps between hidden size and ``intermediate_size``."""

    kind: Literal["dense"] = "dense"
    intermediate_size: PositiveInt
    gated: bool = True
    bias: bool = False

    @property
    def variant(self) -> str:
        return "dense"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        return _mlp(hidden_size, self.intermediate_size, self.gated, self.bias)


class MoEFFN(Document):
    """Router, ``num_experts`` experts of which ``top_k`` see a token, and an optional shared expert.

    ``bias`` is for routed experts, ``shared_bias`` for shared ones. ``shared_intermediate_size`` is the total width of
    all shared experts (0 = none). With ``latent_size`` routed experts work at that width, between a down and an up
    projection (latent MoE). ``expert_score_bias`` says that the router balances load with a bias that is no trained
    parameter (a buffer, not counted).
    """

    kind: Literal["moe"] = "moe"
    num_experts: PositiveInt
    top_k: PositiveInt
    expert_intermediate_size: PositiveInt
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    expert_score_bias: bool = False
    shared_intermediate_size: NonNegativeInt = 0
    shared_bias: bool = False
    shared_gate: bool = False
    latent_size: PositiveInt | None = None
    num_expert_groups: PositiveInt | None = None
    top_k_groups: PositiveInt | None = None

    @property
    def variant(self) -> str:
        return "moe"

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        rows = [Weight("router", hidden_size, self.num_experts)]
        if self.router_bias:
            rows.append(vector("router_bias", self.num_experts))
        width = hidden_size
        if self.latent_size:
            width = self.latent_size
            rows += [Weight("latent_down", hidden_size, width), Weight("latent_up", width, hidden_size)]
        rows += self.expert_weights(width, self.num_experts)
        if self.shared_intermediate_size:
            rows += [
                Weight(f"shared_{w.name}", w.inputs, w.outputs, w.split, matmul=w.matmul, fuse=w.fuse and "shared_fc1")
                for w in _mlp(hidden_size, self.shared_intermediate_size, self.gated, self.shared_bias)
            ]
            if self.shared_gate:
                rows.append(Weight("shared_gate", hidden_size, 1))
        return tuple(rows)

    def expert_weights(self, width: int, copies: int) -> tuple[Weight, ...]:
        """Weights of ``copies`` routed experts at input width ``width``."""
        return tuple(
            Weight(w.name, w.inputs, w.outputs, w.split, copies=copies, expert=True, matmul=w.matmul, fuse=w.fuse)
            for w in _mlp(width, self.expert_intermediate_size, self.gated, self.bias)
        )


def _mlp(hidden_size: int, width: int, gated: bool, bias: bool) -> tuple[Weight, ...]:
    rows = [Weight("up", hidden_size, width, "column", fuse="fc1")]
    if gated:
        rows.append(Weight("gate", hidden_size, width, "column", fuse="fc1"))
    rows.append(Weight("down", width, hidden_size, "row"))
    if bias:
        rows += [vector("up_bias", (2 if gated else 1) * width, split="column"), vector("down_bias", hidden_size)]
    return tuple(rows)


FeedForward = Annotated[DenseFFN | MoEFFN, Field(discriminator="kind")]
