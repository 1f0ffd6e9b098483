"""A JobSet that starts a plan on Kubernetes: one replicated job for each run of nodes of one pool, in plan order.

Keys after the API types of jobset.x-k8s.io/v1alpha2; not deployed by this project's tests. A pod's node rank is the
offset of its job plus its completion index, so pools keep their place in the plan. A PyTorchJob could not do that: its
workers share one pod template, and so one node selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import yaml

from .nodes import Node
from .program import Program
from .shell import label

#: Label by which the nodes of a pool are chosen where a plan mixes pools; set it with kubectl label node.
POOL_LABEL = "meshwright/pool"
_MAX_NAME = 40  # JobSet adds job and pod names; the whole must stay below 63 characters (RFC 1123)


def jobset(name: str, nodes: Sequence[Node], program: Program) -> dict[str, str]:
    """``jobset.yaml``; the other files of the export go into a config map of the same name."""
    title = label(name).lower().replace("_", "-").replace(".", "-")[:_MAX_NAME].strip("-") or "plan"
    runs = [(pool, list(same)) for pool, same in groupby(nodes, key=lambda node: node.pool)]
    jobs, offset = [], 0
    for index, (pool, members) in enumerate(runs):
        jobs.append(_job(title, index, pool, members, offset, program, mixed=len({run[0] for run in runs}) > 1))
        offset += len(members)
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": title},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": title, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": jobs,
        },
    }
    head = (
        f"# Set the image, then: kubectl create configmap {title} --from-file=. && kubectl apply -f jobset.yaml\n"
        + (f"# Nodes are chosen by the label {POOL_LABEL}.\n" if len(runs) > 1 else "")
    )
    return {"jobset.yaml": head + yaml.safe_dump(document, sort_keys=False)}


def _job(
    title: str, index: int, pool: str, members: Sequence[Node], offset: int, program: Program, *, mixed: bool
) -> dict[str, Any]:
    container = {
        "name": program.name,
        "image": program.image,
        "command": [
            "bash",
            "-c",
            f"export NODE_RANK=$(({offset} + JOB_COMPLETION_INDEX)) && exec bash /plan/launch_torchrun.sh",
        ],
        "env": [{"name": "MASTER_ADDR", "value": f"{title}-pool-0-0-0.{title}"}],
        "resources": {"limits": {"nvidia.com/gpu": members[0].ranks}},
        "volumeMounts": [
            {"name": "plan", "mountPath": "/plan"},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's shared memory
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "plan", "configMap": {"name": title}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if mixed:
        pod["nodeSelector"] = {POOL_LABEL: label(pool)}
    return {
        "name": f"pool-{index}",
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": len(members),
                "completions": len(members),
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": {"spec": pod},
            }
        },
    }
