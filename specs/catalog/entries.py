"""What the hardware catalog knows of a GPU type and of a link."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ..base import Document
from ..cluster import GpuType, LinkKind


class Link(Document):
    """A kind of link. ``bandwidth_bytes_per_s`` is nominal, per port (or per GPU for NVLink, xGMI, PCIe) and direction;
    ``latency_s`` is one hop's; without ``peer_to_peer`` transfers between GPUs pass through host memory."""

    name: str
    kind: LinkKind
    bandwidth_bytes_per_s: PositiveFloat
    latency_s: NonNegativeFloat
    peer_to_peer: bool = True
    source: str


class NodeLevel(Document):
    """A level inside a node, or the NVLink domain of a rack: a link name and how many GPUs an instance joins."""

    link: str
    span: PositiveInt


class ReferenceNode(Document):
    """The node that a GPU type usually sits in: what fills in the parts that a cluster description leaves out.

    ``nic`` names the link of one network port; ``nics_per_node`` ports are shared by the node's GPUs.
    """

    name: str
    gpus_per_node: PositiveInt
    levels: tuple[NodeLevel, ...] = Field(min_length=1)
    nic: str
    nics_per_node: PositiveInt
    host_memory_bytes: PositiveInt
    source: str

    def ports_per_gpu(self, gpus_per_node: int) -> float:
        """Network ports that a GPU drives when ``gpus_per_node`` of the node are used.

        Ports that GPUs share are shared by fewer; a GPU with a port of its own does not get a second one.
        """
        return min(self.nics_per_node / gpus_per_node, max(1.0, self.nics_per_node / self.gpus_per_node))


class CatalogEntry(Document):
    """A GPU type with its reference node and the names it goes by.

    ``loose_aliases`` leave something open (``A100``: memory size and form) and resolve with an assumption.
    """

    gpu: GpuType
    node: ReferenceNode
    aliases: tuple[str, ...] = ()
    loose_aliases: tuple[str, ...] = ()
