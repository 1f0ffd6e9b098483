"""What one rank holds: sizes of tokens, weights and groups at every cell key, as arrays of length C."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from meshwright.specs.batch import CellKeys, FloatArray
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Target
from meshwright.specs.weights import Weight
from meshwright.specs.workload import Lora, Workload

T = TypeVar("T")

#: Weights whose vocabulary axis is padded to a multiple of ``target.vocab_divisor * tp``.
VOCABULARY = ("embedding", "head", "head_bias")
#: Names of the linear maps that a LoRA target stands for.
LORA_MAPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v", "q_down", "q_up", "kv_down", "kv_up", "qkvz", "ba", "in"),
    "proj": ("o",),
    "fc1": ("up", "gate", "shared_up", "shared_gate"),
    "fc2": ("down", "shared_down"),
}


class Linear(NamedTuple):
    """One GEMM of a block on one rank: ``inputs`` x ``outputs`` for each of ``groups`` experts (1 if dense)."""

    name: str
    inputs: FloatArray
    outputs: FloatArray
    groups: FloatArray
    split: str
    expert: bool
    low_precision: bool
    weights: tuple[Weight, ...]


class Local:
    """Degrees and token counts of the cell keys for one model, workload and target."""

    def __init__(self, model: ModelSpec, workload: Workload, target: Target, keys: CellKeys):
        self.model, self.workload, self.target, self.keys = model, workload, target, keys
        self.tp, self.cp, self.ep, self.etp = (
            np.asarray(x, dtype=float) for x in (keys.tp, keys.cp, keys.ep, keys.etp)
        )
        self.dp, self.edp = np.asarray(keys.dp, dtype=float), np.asarray(keys.edp, dtype=float)
        self.sequences = np.asarray(keys.micro_batch_size, dtype=float)
        self.sequence_parallel = target.sequence_parallel
        self._full: dict[float, FloatArray] = {}
        self.none = self.full(0.0)
        self._shapes: dict[Weight, tuple[FloatArray, FloatArray]] = {}
        self._elements: dict[Weight, FloatArray] = {}
        self._remembered: dict[Hashable, Any] = {}

    def full(self, value: float) -> FloatArray:
        """``value`` at every key, read-only."""
        if value not in self._full:
            self._full[value] = np.full_like(self.tp, value)
            self._full[value].flags.writeable = False
        return self._full[value]

    def remember(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What ``compute`` gives, once for each ``key``; not to be changed in place."""
        if key not in self._remembered:
            self._remembered[key] = compute()
        found: T = self._remembered[key]
        return found

    @cached_property
    def tokens(self) -> FloatArray:
        """Tokens of one micro-batch on a rank's context shard."""
        out: FloatArray = self.sequences * self.workload.seq_length / self.cp
        return out

    @cached_property
    def own_tokens(self) -> FloatArray:
        """Tokens outside the tensor-parallel regions: split over TP under sequence parallelism."""
        out: FloatArray = self.tokens / self.tp if self.sequence_parallel else self.tokens.copy()
        return out

    @cached_property
    def one_stage(self) -> npt.NDArray[np.bool_]:
        """Where one rank holds both embedding and head."""
        return np.asarray(self.keys.one_stage > 0)

    @cached_property
    def load(self) -> FloatArray:
        """Load of the fullest expert rank over the mean; a capacity factor caps it."""
        factor = np.full_like(self.ep, self.workload.moe_load_factor)
        for degree, own in self.workload.moe_load_factor_by_ep.items():
            factor[self.ep == degree] = own
        capacity = self.workload.moe_capacity_factor
        out: FloatArray = factor if capacity is None else np.minimum(factor, capacity)
        return out

    def expert_tokens(self, top_k: int) -> FloatArray:
        """(token, expert) pairs that a rank's experts work on; ETP gathers the tokens of its group."""
        out: FloatArray = self.own_tokens * top_k * self.etp * self.load
        return out

    def padded(self, size: int) -> FloatArray:
        """A vocabulary size padded for TP."""
        unit = self.target.vocab_divisor * self.tp
        out: FloatArray = np.ceil(size / unit) * unit
        return out

    def pieces(self, weight: Weight) -> FloatArray:
        """Length of the split axis on a rank (0-d axis of vectors included)."""
        degree = self.etp if weight.expert else self.tp
        size = weight.outputs if weight.split == "column" else weight.inputs
        if weight.units:
            out: FloatArray = np.ceil(weight.units / degree) * (size / weight.units)
            return out
        if weight.name in VOCABULARY:
            vocabulary: FloatArray = self.padded(size) / degree
            return vocabulary
        out = np.ceil(size / degree)
        return out

    def shape(self, weight: Weight) -> tuple[FloatArray, FloatArray]:
        """(inputs, outputs) of one copy on a rank; a vector has 1 input. Not to be changed in place."""
        if weight not in self._shapes:
            self._shapes[weight] = self._shape(weight)
        return self._shapes[weight]

    def _shape(self, weight: Weight) -> tuple[FloatArray, FloatArray]:
        inputs, outputs = self.full(max(weight.inputs, 1)), self.full(weight.outputs)
        if weight.split == "column":
            outputs = self.pieces(weight)
        elif weight.split == "row":
            inputs = self.pieces(weight)
        return inputs, outputs

    def copies(self, weight: Weight) -> FloatArray:
        """Copies on a rank: experts are split over EP."""
        if weight.expert:
            out: FloatArray = np.ceil(weight.copies / self.ep)
            return out
        return self.full(weight.copies)

    def numel(self, weights: Iterable[Weight]) -> FloatArray:
        """Elements of ``weights`` on a rank."""
        total = self.none
        for weight in weights:
            if weight not in self._elements:
                inputs, outputs = self.shape(weight)
                self._elements[weight] = self.copies(weight) * inputs * outputs
            total = total + self._elements[weight]
        return total

    def linears(self, weights: Iterable[Weight]) -> list[Linear]:
        """The GEMMs of a block in order, weights of one ``fuse`` group together."""
        chosen = tuple(weights)
        return self.remember(chosen, lambda: self._linears(chosen))

    def _linears(self, weights: tuple[Weight, ...]) -> list[Linear]:
        groups: dict[str, list[Weight]] = {}
        for weight in weights:
            if weight.matmul:
                groups.setdefault(weight.fuse or weight.name, []).append(weight)
        out = []
        for name, members in groups.items():
            first = members[0]
            inputs = self.shape(first)[0]
            outputs = self.shape(first)[1]
            for more in members[1:]:
                outputs = outputs + self.shape(more)[1]
            low = name not in ("head", "router", "shared_gate", "index_weights")
            out.append(
                Linear(name, inputs, outputs, self.copies(first), first.split, first.expert, low, tuple(members))
            )
        return out

    def adapter(self, linear: Linear, lora: Lora) -> tuple[FloatArray, FloatArray] | None:
        """Elements of the (down, up) LoRA matrices of a GEMM on a rank, or None where the task adapts it not.

        The rank is split like the map, as in Megatron-Bridge; the experts of a rank share one adapter.
        """
        wanted = {name for target in lora.targets for name in LORA_MAPS[target]}
        if not any(weight.name in wanted for weight in linear.weights):
            return None
        return linear.inputs * lora.rank, linear.outputs * lora.rank


def activation_element_bytes(precision: str) -> float:
    """Bytes of an element of the residual stream."""
    return 4.0 if precision in ("fp32", "tf32") else 2.0


def linear_input_bytes(precision: str) -> float:
    """Bytes a saved GEMM input takes an element: low precision keeps the copy that the weight gradient reads."""
    return {"fp8": 1.0, "mxfp8": 1.03125, "nvfp4": 0.5625}.get(precision, activation_element_bytes(precision))
