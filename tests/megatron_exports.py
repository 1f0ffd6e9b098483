"""What an export would start, as a request of the scripts that run Megatron's own code."""

from __future__ import annotations

import subprocess
from typing import Any

from meshwright.megatron_export.megatron import environment_of, export_megatron
from meshwright.specs.document import PlanDocument


def request_of(doc: PlanDocument, name: str) -> dict[str, Any]:
    """What an export would start, as a request."""
    files = export_megatron(doc)
    args = subprocess.run(
        ["bash", "-c", 'source /dev/stdin && printf "%s\\0" "${MEGATRON_ARGS[@]}"'],
        input=files["train_args.sh"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")[:-1]
    assert doc.plan is not None
    cluster = doc.inputs.cluster
    sm = min(cluster.gpu_of(pool).compute_capability for pool in cluster.pools)
    env = {key: value or "" for key, value in environment_of(doc.plan, cluster).items()}
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return {"name": name, "args": args, "world_size": doc.plan.num_ranks, "env": env, "sm": sm}
