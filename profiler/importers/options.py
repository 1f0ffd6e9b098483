"""What the formats leave open and a user may say."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.errors import Fault, SpecError


@dataclass(frozen=True)
class ImportOptions:
    """``gpus``: how many there are; ``gpu``: their type; for formats that say neither."""

    gpus: int | None = None
    gpu: str | None = None

    def whole_nodes(self, gpus_per_node: int) -> tuple[int, int]:
        """Nodes and GPUs a node of ``gpus`` in nodes of that size; :class:`SpecError` where they do not divide."""
        total = self.gpus or gpus_per_node
        if total <= gpus_per_node:
            return 1, total
        if total % gpus_per_node:
            near = total // gpus_per_node * gpus_per_node
            message = f"{total} GPUs are no whole number of nodes of {gpus_per_node}"
            raise SpecError(Fault("/gpus", message, (str(near), str(near + gpus_per_node))))
        return total // gpus_per_node, gpus_per_node
