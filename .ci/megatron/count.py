"""Parameters of every pipeline stage by kind, of Megatron's own GPT model built on the meta device.

Usage: VENV/bin/python .ci/megatron/count.py < requests.jsonl > counts.jsonl

A request has ``args`` (a list) and ``world_size``; the answer has ``stages``, a list of {dense, replicated, expert,
layers, embedding, output, mtp} of the first rank of each stage. Latent attention's down projections count as whole on
every rank of TP, as TransformerEngine keeps them (the local layers split them).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import machine
import model
import shims  # noqa: F401
import torch

#: Latent attention's projections that TransformerEngine keeps whole (parallel_mode "duplicated").
_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


def count(request: dict[str, Any]) -> dict[str, Any]:
    """Counts of every stage."""
    os.environ |= {"WORLD_SIZE": str(request["world_size"]), "RANK": "0"}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = request.get("env", {}).get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    from megatron.core.parallel_state import RankGenerator

    args = model.read(request["args"], request.get("sm", 9.0))
    pp = args.pipeline_model_parallel_size
    dense = RankGenerator(
        tp=args.tensor_model_parallel_size,
        ep=1,
        dp=args.data_parallel_size,
        pp=pp,
        cp=args.context_parallel_size,
        order=model.ORDERS[bool(args.use_tp_pp_dp_mapping)],
    )
    stages = []
    for stage in range(pp):
        rank = min(group[stage] for group in dense.get_ranks("pp"))
        model.start_groups(args, rank, request["world_size"])
        config = model.config_of(args, build_only=True)
        with torch.device("meta"):
            chunks = model.build(args, config)
        found = {"dense": 0, "replicated": 0, "expert": 0}
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if any(part in name for part in _DOWN):
                    split = args.tensor_model_parallel_size if model.kind_of(name, parameter) == "dense" else 1
                    found["replicated"] += parameter.numel() * split
                else:
                    found[model.kind_of(name, parameter)] += parameter.numel()
        stages.append(
            found
            | {
                "layers": [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks],
                "mtp": sum(len(chunk.mtp.layers) for chunk in chunks if getattr(chunk, "mtp_process", False)),
            }
        )
    return {"name": request.get("name"), "stages": stages}


def main() -> None:
    torch.set_num_threads(1)
    machine.stand_in("meta")
    model.allow_local_latent_attention()
    for line in sys.stdin:
        if line.strip():
            with contextlib.redirect_stdout(io.StringIO()):
                answer = count(json.loads(line))
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
