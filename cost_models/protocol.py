"""What pricing offers to search: arrays only, so that any cost source can be plugged in.

Three layers. *Cell*: one block kind on one pool at one :class:`~meshwright.specs.batch.CellKeys` row. *Stage*: a sum of
cells. *Step*: schedule algebra over stages (``cost_models.schedules``) plus the tail after the last backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.specs.batch import CellKeys, FloatArray, IntArray

#: Terms of the seconds of a cell, in the order of the last axis of ``forward_terms_s`` / ``backward_terms_s``.
#: ``dp_comm`` is what sharded parameters and gradients cost inside each micro-batch (FSDP, ZeRO-2/3).
TERMS = ("gemm", "attention", "memory_bound", "host", "tp_comm", "cp_comm", "ep_comm", "recompute", "dp_comm")
#: Kinds of static and activation bytes, in the order of the last axis of ``static_bytes_by``.
STATIC = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class BlockTable:
    """The blocks of a model in pipeline order.

    ``instances[i]`` is ``("vision", 0)``, ``("embed", 0)``, ``("decoder", 7)``, ``("mtp", 0)`` or ``("head", 0)``;
    ``kind_of[i]`` indexes ``kinds``, the names of the different blocks (I instances, B kinds).
    """

    kinds: tuple[str, ...]
    instances: tuple[tuple[str, int], ...]
    kind_of: IntArray


@dataclass(frozen=True)
class CellCosts:
    """Costs of B block kinds on G pools at C cell keys. One micro-batch, one rank (the fullest).

    ``forward_terms_s``, ``backward_terms_s``: [C, G, B, TERMS] seconds; backward includes weight gradients and, in the
    term ``recompute``, the forward work done again. Communication terms are exposed time only.
    ``static_bytes_by``: [C, B, STATIC]. ``activation_bytes``: [C, B] kept for one in-flight micro-batch.
    ``transient_bytes``: [C, B] live only while the block runs (the stage peak takes the maximum).
    ``dense_params``, ``expert_params``: [C, B] trained parameters on a rank, reduced over the data-parallel and the
    expert-data-parallel group. ``fixed_bytes``: [C, G] context, communication buffers, workspace.
    ``limit_bytes``: [G] memory that a plan may use.
    ``weight_gradient_s``: [C, G, B] the part of the backward seconds that weight gradients and their scatter take, and
    ``weight_stash_bytes``: [C, B] what a micro-batch keeps for them once its input gradient is done; schedules that
    run them apart need both, others neither. ``host_bytes``: [C, B] kept in host memory for one in-flight micro-batch.
    """

    keys: CellKeys
    forward_terms_s: FloatArray
    backward_terms_s: FloatArray
    static_bytes_by: FloatArray
    activation_bytes: FloatArray
    transient_bytes: FloatArray
    dense_params: FloatArray
    expert_params: FloatArray
    fixed_bytes: FloatArray
    limit_bytes: FloatArray
    weight_gradient_s: FloatArray
    weight_stash_bytes: FloatArray
    host_bytes: FloatArray | None = None

    @property
    def forward_s(self) -> FloatArray:
        """[C, G, B] seconds forward."""
        out: FloatArray = self.forward_terms_s.sum(axis=-1)
        return out

    @property
    def backward_s(self) -> FloatArray:
        """[C, G, B] seconds backward."""
        out: FloatArray = self.backward_terms_s.sum(axis=-1)
        return out

    @property
    def static_bytes(self) -> FloatArray:
        """[C, B] bytes of weights, gradients and optimizer state."""
        out: FloatArray = self.static_bytes_by.sum(axis=-1)
        return out


@dataclass(frozen=True)
class Tail:
    """What follows the last backward of a stage, exposed seconds, same shape as the stage sums it was asked for."""

    grad_reduce_s: FloatArray
    optimizer_s: FloatArray
    param_gather_s: FloatArray


class StageCosts(Protocol):
    """What the search needs of a cost source."""

    @property
    def blocks(self) -> BlockTable: ...

    def cells(self, keys: CellKeys) -> CellCosts:
        """Price every block kind on every pool of the cluster at the given keys."""
        ...

    def tail(
        self,
        cells: CellCosts,
        row: IntArray,
        pool: IntArray,
        dense_params: FloatArray,
        expert_params: FloatArray,
        last_backward_s: FloatArray,
    ) -> Tail:
        """Gradient reduction, optimizer and parameter gather of stages.

        All arguments broadcast to one shape: row of ``cells``, pool index, parameters on a rank of the stage, and the
        seconds of its last micro-batch's backward, under which the reduction can hide.
        """
        ...

    def boundary_s(
        self, cells: CellCosts, row: IntArray, from_pool: IntArray, to_pool: IntArray, first_rank: IntArray
    ) -> FloatArray:
        """Seconds to send one micro-batch's activations to the next stage.

        ``first_rank`` is the position of the sending stage's first rank inside its pool. Arguments broadcast.
        """
        ...

    def shared_embedding_s(
        self, cells: CellCosts, row: IntArray, first_pool: int, last_pool: int, stages: int
    ) -> FloatArray:
        """Seconds to add up the gradients of an embedding that the first and the last of ``stages`` stages both hold.

        Shape of ``row``; 0 where there is one stage or nothing is shared (tied head, or MTP's look-up). The frameworks
        do it after the gradient reduction, hidden under nothing.
        """
        ...
