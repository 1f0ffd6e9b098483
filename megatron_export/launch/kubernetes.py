"""Manifests that start a plan on Kubernetes: a JobSet for any plan, a PyTorchJob for one pool of alike nodes.

Keys after the API types of jobset.x-k8s.io/v1alpha2 and kubeflow.org/v1; checked against their schemas, not deployed
by this project's tests. A JobSet has one replicated job for each run of nodes of one pool, in plan order: a pod's node
rank is the offset of its job plus its completion index, so pools keep their place in the plan. The workers of a
PyTorchJob share one pod template, and so one node selector: it is refused where a plan mixes pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import yaml

from meshwright.specs.errors import Fault, SpecError

from .nodes import Node
from .program import Program
from .shell import label
from .site import NO_SITE, Site

#: Label by which the nodes of a pool are chosen where a plan mixes pools; set it with kubectl label node.
POOL_LABEL = "meshwright/pool"
_MAX_NAME = 40  # JobSet adds job and pod names; the whole must stay below 63 characters (RFC 1123)


def jobset(name: str, nodes: Sequence[Node], program: Program, site: Site = NO_SITE) -> dict[str, str]:
    """``jobset.yaml``; the other files of the export go into a config map of the same name."""
    title = _title(name)
    runs = [(pool, list(same)) for pool, same in groupby(nodes, key=lambda node: node.pool)]
    mixed = len({pool for pool, _ in runs}) > 1
    jobs, offset = [], 0
    for index, (pool, members) in enumerate(runs):
        jobs.append(_job(title, index, pool if mixed else None, members, offset, program, site))
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
    return {"jobset.yaml": _manifest(document, title, "jobset.yaml", site, mixed=mixed)}


def pytorch_job(name: str, nodes: Sequence[Node], program: Program, site: Site = NO_SITE) -> dict[str, str]:
    """``pytorchjob.yaml``: Kubeflow's operator sets RANK (0 for the master, then the workers) and MASTER_ADDR.

    There is no elastic policy, which would bring c10d's rendezvous and its own order of nodes. Raises
    :class:`SpecError` where the plan mixes pools.
    """
    pools = list(dict.fromkeys(node.pool for node in nodes))
    if len(pools) > 1:
        message = f"workers of a PyTorchJob are of one kind, the plan uses pools {', '.join(pools)}; use kubernetes"
        raise SpecError(Fault("/launcher", message, ("kubernetes",)))
    title = _title(name)
    pod = _pod(title, nodes[0].ranks, "NODE_RANK=$RANK", [], program, site, container="pytorch")
    replicas: dict[str, Any] = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod}}}
    if len(nodes) > 1:
        replicas["Worker"] = {"replicas": len(nodes) - 1, "restartPolicy": "Never", "template": {"spec": pod}}
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": title},
        "spec": {
            "nprocPerNode": str(nodes[0].ranks),
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return {"pytorchjob.yaml": _manifest(document, title, "pytorchjob.yaml", site, mixed=False)}


class _Plain(yaml.SafeDumper):
    """Writes shared parts in full: anchors are legal YAML but hard to edit."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _manifest(document: dict[str, Any], title: str, file: str, site: Site, *, mixed: bool) -> str:
    image = "" if site.image else "Set the image, then: "
    head = f"# {image}kubectl create configmap {title} --from-file=. && kubectl apply -f {file}\n"
    head += f"# Nodes are chosen by the label {POOL_LABEL}.\n" if mixed else ""
    return head + yaml.dump(document, Dumper=_Plain, sort_keys=False)


def _title(name: str) -> str:
    """A name that Kubernetes takes (RFC 1123): letters, digits and inner dashes, a letter first."""
    text = label(name).lower().replace("_", "-").replace(".", "-")[:_MAX_NAME].strip("-") or "plan"
    return text if text[0].isalpha() else f"plan-{text}"[:_MAX_NAME].strip("-")


def _job(
    title: str, index: int, pool: str | None, members: Sequence[Node], offset: int, program: Program, site: Site
) -> dict[str, Any]:
    place = f"NODE_RANK=$(({offset} + JOB_COMPLETION_INDEX))"
    env = [{"name": "MASTER_ADDR", "value": f"{title}-pool-0-0-0.{title}"}]
    pod = _pod(title, members[0].ranks, place, env, program, site, container=program.name)
    if pool is not None:
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


def _pod(
    title: str, gpus: int, place: str, env: list[dict[str, str]], program: Program, site: Site, *, container: str
) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "plan", "mountPath": "/plan"},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - NCCL's shared memory
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "plan", "configMap": {"name": title}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    for index, mount in enumerate(site.mounts):
        name = f"site-{index}"
        mounts.append({"name": name, "mountPath": mount.target, **({"readOnly": True} if mount.read_only else {})})
        source = (
            {"persistentVolumeClaim": {"claimName": mount.claim}}
            if mount.claim
            else {"hostPath": {"path": mount.source}}
        )
        volumes.append({"name": name, **source})
    main: dict[str, Any] = {
        "name": container,
        "image": site.image or program.image,
        "command": ["bash", "-c", f"export {place} && exec bash /plan/launch_torchrun.sh"],
        **({"env": env} if env else {}),
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": mounts,
    }
    return {"restartPolicy": "Never", "containers": [main], "volumes": volumes}
