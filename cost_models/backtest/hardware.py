"""The cluster that a run was measured on."""

from __future__ import annotations

import re
from typing import Any

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import cluster_from_data
from meshwright.specs.errors import SpecError

from .rows import Run, UnsupportedError

#: Words of the ``interconnect`` column that name a kind of network.
KINDS = (("roce", "roce"), ("infiniband", "infiniband"), ("/s ib", "infiniband"), ("hdr", "infiniband"),
         ("rdma", "roce"), ("slingshot", "roce"))  # fmt: skip
LATENCY_US = {"roce": 5, "infiniband": 5, "ethernet": 25}


#: What joins or counts GPU types in a cell, and no name of a type holds.
SEVERAL_TYPES = re.compile(r"[+|,;&*]|^mixed$", re.IGNORECASE)


def cluster_of(run: Run) -> ClusterSpec:
    """One pool of the run's GPUs; the network as far as the row states it, else the type's reference node."""
    if SEVERAL_TYPES.search(run.gpu):
        raise UnsupportedError(
            f"GPU type {run.gpu[:60]!r} names several types, and the row does not say which stage is on which"
        )
    per_node = run.gpus_per_node
    if per_node and run.num_gpus < per_node:
        per_node = run.num_gpus
    pool: dict[str, Any] = {"gpu": run.gpu}
    if per_node and run.num_gpus % per_node == 0:
        pool |= {"nodes": run.num_gpus // per_node, "gpus_per_node": per_node}
    else:
        pool |= {"nodes": run.num_gpus, "gpus_per_node": 1} if per_node else {}
    if "nodes" in pool and pool["nodes"] > 1:
        pool |= nic_of(run.interconnect, per_node or 1)
    try:
        if "nodes" not in pool:
            return cluster_from_data(f"{run.num_gpus}x{run.gpu}")
        return cluster_from_data({"pools": [pool]})
    except SpecError as error:
        raise UnsupportedError(f"cluster of {run.num_gpus} {run.gpu}: {error}") from error


def nic_of(text: str, per_node: int) -> dict[str, Any]:
    """Port and ports a node from words such as ``8x400Gb/s IB``, ``800 Gb/s per node`` or ``400 Gb/s per GPU``."""
    words = text.lower()
    if "nvl72" in words:
        return {}
    rate = re.search(r"(?:(\d+)x)?(\d+(?:\.\d+)?)\s*gb(?:ps|/s|it/s)", words)
    kind = next((kind for word, kind in KINDS if word in words), "ethernet" if rate else None)
    if kind is None or rate is None:
        return {}
    ports = int(rate[1] or 0)
    bandwidth, link = float(rate[2]), {"kind": kind, "latency": f"{LATENCY_US[kind]} us"}
    if ports:
        return {"nic": link | {"bandwidth": f"{bandwidth} Gbit/s"}, "nics_per_node": ports}
    if "per gpu" in words:
        return {"nic": link | {"bandwidth": f"{bandwidth} Gbit/s"}, "nics_per_node": per_node}
    return {"nic": link | {"bandwidth": f"{bandwidth} Gbit/s"}, "nics_per_node": 1}
