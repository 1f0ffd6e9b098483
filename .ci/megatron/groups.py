"""Process groups of every rank, by Megatron's generator of ranks and by its own initialisation.

Usage: VENV/bin/python .ci/megatron/groups.py < requests.jsonl > groups.jsonl

A request has ``args``, ``world_size`` and ``every_rank``. The answer has ``generator``: {grid: {axes: groups}}, and
``ranks``: for each rank {grid:axes: its group} after ``initialize_model_parallel`` on the fake backend, [] unless
``every_rank``.
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
import torch
import torch.distributed as dist

AXES = {
    "dense": ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp"),
    "expert": ("ep", "tp", "tp-ep", "tp-ep-pp", "dp"),
}


def groups_of_rank() -> dict[str, list[int]]:
    """The groups that this rank is in, as Megatron hands them out."""
    from megatron.core import parallel_state as state

    found = {
        "dense:tp": state.get_tensor_model_parallel_group(),
        "dense:cp": state.get_context_parallel_group(),
        "dense:dp": state.get_data_parallel_group(),
        "dense:dp-cp": state.get_data_parallel_group(with_context_parallel=True),
        "dense:pp": state.get_pipeline_model_parallel_group(),
        "dense:tp-pp": state.get_model_parallel_group(),
        "dense:tp-cp": state.get_tensor_and_context_parallel_group(),
        "dense:tp-dp-cp": state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "expert:ep": state.get_expert_model_parallel_group(),
        "expert:tp": state.get_expert_tensor_parallel_group(),
        "expert:tp-ep": state.get_expert_tensor_and_model_parallel_group(),
        "expert:tp-ep-pp": state.get_expert_tensor_model_pipeline_parallel_group(),
        "expert:dp": state.get_expert_data_parallel_group(),
    }
    return {name: sorted(dist.get_process_group_ranks(group)) for name, group in found.items()}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Groups by the generator, and of every rank if asked."""
    from megatron.core.parallel_state import RankGenerator

    world = request["world_size"]
    os.environ |= {"WORLD_SIZE": str(world), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    args = model.read(request["args"], request.get("sm", 9.0))
    pp, etp, ep = args.pipeline_model_parallel_size, args.expert_tensor_parallel_size, args.expert_model_parallel_size
    order = model.ORDERS[bool(args.use_tp_pp_dp_mapping)]
    generators = {
        "dense": RankGenerator(
            tp=args.tensor_model_parallel_size,
            ep=1,
            dp=args.data_parallel_size,
            pp=pp,
            cp=args.context_parallel_size,
            order=order,
        ),
        "expert": RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order=order),
    }
    ranks = []
    for rank in range(world if request["every_rank"] else 0):
        model.start_groups(args, rank, world)
        ranks.append(groups_of_rank())
    generated = {
        grid: {axes: sorted(sorted(group) for group in generators[grid].get_ranks(axes)) for axes in names}
        for grid, names in AXES.items()
    }
    return {"generator": generated, "ranks": ranks}


def main() -> None:
    torch.set_num_threads(1)
    machine.stand_in("cpu")
    for line in sys.stdin:
        if line.strip():
            with contextlib.redirect_stdout(io.StringIO()):
                found = answer(json.loads(line))
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
