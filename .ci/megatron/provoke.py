"""Run argument lines of tiny models until Megatron's own code refuses: process groups, model build, first step.

Usage: VENV/bin/python .ci/megatron/provoke.py < requests.jsonl > verdicts.jsonl

A request has ``args`` (text), ``world_size`` and optional ``env``. A verdict has ``when``: ``validate``, ``groups``,
``build``, ``step`` or ``passed``, and ``error``. One process stands for rank 0 of the world on the fake backend, which
delivers nothing but checks shapes; layers are the local ones, on CPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shlex
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import machine
import model
import steps
import torch


def provoke(request: dict[str, Any], verdict: dict[str, Any]) -> None:
    """Go as far as Megatron lets; ``verdict["when"]`` names the moment."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {"WORLD_SIZE": str(request["world_size"]), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    verdict["when"] = "validate"
    args = model.read(shlex.split(request["args"]))
    verdict["when"] = "groups"
    model.start_groups(args, 0, request["world_size"])
    verdict["when"] = "build"
    config = model.config_of(args, build_only=False)
    chunks = model.build(args, config)
    verdict["when"] = "step"
    positions = torch.arange(args.seq_length)[None]
    mask = torch.triu(torch.ones(args.seq_length, args.seq_length, dtype=torch.bool), 1)[None, None]

    def forward(batches: Any, chunk: Any) -> Any:
        tokens = next(batches)
        output = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return output, lambda values: (values.float().mean(), {"loss": values.detach().mean()})

    single = args.virtual_pipeline_model_parallel_size is None
    batches = [steps.samples(args, 0) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches[0] if single else batches,
        model=chunks[0] if single else chunks,
        num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=True,
    )
    verdict["when"] = "passed"


def main() -> None:
    torch.set_num_threads(1)
    machine.stand_in("cpu")
    steps.prepare()
    for line in sys.stdin:
        if not line.strip():
            continue
        request = json.loads(line)
        verdict: dict[str, Any] = {"name": request.get("name"), "when": "", "error": None}
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                provoke(request, verdict)
            except (Exception, SystemExit) as error:
                verdict["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
