"""The blocks of a model in pipeline order: what a stage is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from meshwright.specs.model import LayerKind, ModelSpec
from meshwright.specs.target import Target
from meshwright.specs.weights import Weight, vector
from meshwright.specs.workload import Workload

from .protocol import BlockTable

Role = Literal["vision", "embed", "decoder", "mtp", "head"]


@dataclass(frozen=True, eq=False)
class BlockKind:
    """One kind of block: its role, its layer (decoder and MTP), its parameters and whether the task trains them.

    Kinds are equal only to themselves, so that they make cheap keys.
    """

    name: str
    role: Role
    weights: tuple[Weight, ...]
    trained: bool
    layer: LayerKind | None = None
    adapted: bool = False


#: Kinds of blocks, each with its instances.
Kinds = tuple[tuple[BlockKind, tuple[tuple[str, int], ...]], ...]


def block_kinds(model: ModelSpec, workload: Workload) -> Kinds:
    """The kinds in order of first use, each with its instances."""
    return _block_kinds(model, workload.task == "lora", workload.frozen, workload.mtp)


@lru_cache(maxsize=32)
def _block_kinds(model: ModelSpec, lora: bool, frozen: tuple[str, ...], with_mtp: bool) -> Kinds:
    """:func:`block_kinds`, which every plan of one model shares."""
    hidden = model.hidden_size

    def trained(part: str) -> bool:
        return not lora and part not in frozen

    kinds: list[tuple[BlockKind, list[tuple[str, int]]]] = []
    if model.vision:
        # Priced by its exact total: a vision encoder's parameters count as one replicated tensor.
        weights = (vector("vision", model.vision.parameters),)
        kinds.append((BlockKind("vision", "vision", weights, trained("vision")), [("vision", 0)]))
    kinds.append((BlockKind("embed", "embed", model.embedding_weights(), trained("embedding")), [("embed", 0)]))
    index_of: dict[LayerKind, int] = {}
    number_of: dict[int, int] = {}  # hashing a layer is slow: once for each of the model's kinds, not for each layer
    for position, kind_index in enumerate(model.pattern):
        if kind_index in number_of:
            kinds[number_of[kind_index]][1].append(("decoder", position))
            continue
        layer = model.kinds[kind_index]
        if layer not in index_of:
            index_of[layer] = len(kinds)
            name = f"{layer.name}#{kind_index}" if any(layer.name == k.name for k, _ in kinds) else layer.name
            kind = BlockKind(name, "decoder", layer.weights(hidden), trained("decoder"), layer, adapted=lora)
            kinds.append((kind, []))
        number_of[kind_index] = index_of[layer]
        kinds[index_of[layer]][1].append(("decoder", position))
    if with_mtp and model.mtp:
        mtp = model.mtp
        kind = BlockKind("mtp", "mtp", mtp.weights(hidden), trained("decoder"), mtp.layer, adapted=lora)
        kinds.append((kind, [("mtp", i) for i in range(mtp.num_layers)]))
    kinds.append((BlockKind("head", "head", model.head_weights(), trained("head")), [("head", 0)]))
    return tuple((kind, tuple(own)) for kind, own in kinds)


def block_table(model: ModelSpec, workload: Workload, target: Target) -> BlockTable:
    """The table of ``model``: vision tower if any, embedding, decoder layers, MTP layers when trained, head."""
    return table_of(block_kinds(model, workload))


@lru_cache(maxsize=32)
def table_of(kinds: Kinds) -> BlockTable:
    """The table of :func:`block_kinds`."""
    rank = {"vision": 0, "embed": 1, "decoder": 2, "mtp": 3, "head": 4}
    placed = [(rank[role], i, role, number) for number, (_, own) in enumerate(kinds) for role, i in own]
    placed.sort(key=lambda item: item[:2])
    return BlockTable(
        kinds=tuple(kind.name for kind, _ in kinds),
        instances=tuple((role, i) for _, i, role, _ in placed),
        kind_of=np.array([number for *_, number in placed], dtype=np.int64),
    )
