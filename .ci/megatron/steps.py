"""Train a few real steps of a plan's argument line with megatron-core on CPU, one process a rank.

Usage: RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 VENV/bin/python .ci/megatron/steps.py STEPS ARGUMENTS

Megatron's parser, ``validate_args``, configuration, process groups, model, schedule, gradient reduction and optimizer
run as they are, on gloo, in fp32 and without TransformerEngine. Parameters are filled by their global names and data by
the number of the sample, so every layout of one model computes the same function: rank 0 prints {"losses", "norms",
"layers": decoder layers of every rank's chunks} as JSON, and the losses of two layouts must be equal. gloo cannot run
context parallelism (needs TransformerEngine) and ETP > 1 (uneven gathers).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import machine
import model
import torch
import torch.distributed as dist

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")


def prepare() -> None:
    """What of a GPU's random state and of TransformerEngine's norms training asks for."""
    import megatron.core.tensor_parallel.random as randomness
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    randomness._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    randomness._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    randomness.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # there is no dropout
    make = WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        """torch's norm refuses sequence parallelism only because it does not mark its parameters for the reduction."""
        wanted, config.sequence_parallel = config.sequence_parallel, False
        try:
            made = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = wanted
        for parameter in made.parameters():
            parameter.sequence_parallel = wanted
        return made

    WrappedTorchNorm.__new__ = staticmethod(norm)


def fill(chunk: Any, args: Any) -> None:
    """Every parameter from its name in the whole model, cut as Megatron cuts it."""
    from megatron.core import parallel_state as state

    numbers = [layer.layer_number for layer in chunk.decoder.layers]
    per_rank = (args.num_experts or 0) // args.expert_model_parallel_size
    first_expert = state.get_expert_model_parallel_rank() * per_rank
    for local_name, parameter in chunk.named_parameters():
        expert = model.kind_of(local_name, parameter) == "expert"
        name = _LAYER.sub(lambda found: f"layer {numbers[int(found[1])]}.", local_name)
        name = _EXPERT.sub(lambda found: f"expert {int(found[1]) + first_expert}.", name)
        if chunk.share_embeddings_and_output_weights:
            name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
        size, rank = (
            (state.get_expert_tensor_parallel_world_size(), state.get_expert_tensor_parallel_rank())
            if expert
            else (state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank())
        )
        axis, shape = getattr(parameter, "partition_dim", -1), list(parameter.shape)
        cut = axis >= 0 and size > 1
        if cut:
            shape[axis] *= size
        if "norm" in name:
            whole = torch.ones(shape)
        else:
            # A padded vocabulary is longer where TP is larger: row by row, so that the rows of all tokens agree.
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
        # A gated network keeps the halves of both maps side by side on each rank.
        if cut and args.swiglu and "linear_fc1" in name:
            halves = [half.chunk(size, axis)[rank] for half in whole.chunk(2, axis)]
            parameter.data.copy_(torch.cat(halves, axis))
        else:
            parameter.data.copy_(whole.chunk(size, axis)[rank] if cut else whole)


def samples(args: Any, step: int) -> Iterator[torch.Tensor]:
    """The micro-batches of this rank: sample s of the global batch goes to data-parallel rank s mod DP."""
    from megatron.core import parallel_state as state

    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, args.vocab_size, (args.global_batch_size, args.seq_length + 1), generator=generator)
    mine = tokens[state.get_data_parallel_rank() :: state.get_data_parallel_world_size()]
    yield from mine.split(args.micro_batch_size)


def train(args: Any, steps: int) -> dict[str, Any]:
    """Losses and gradient norms of each step, and who holds which layers."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = model.config_of(args, build_only=False)
    chunks = model.build(args, config)
    for chunk in chunks:
        fill(chunk, args)
    wrapped_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=args.use_distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )
    models = [DistributedDataParallel(config, wrapped_config, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.0,
            clip_grad=1.0,
            params_dtype=torch.float32,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        models,
    )
    config.finalize_model_grads_func = finalize_model_grads
    mask = torch.triu(torch.ones(args.seq_length, args.seq_length, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(args.seq_length)[None].expand(args.micro_batch_size, -1)
    count = args.global_batch_size // (args.micro_batch_size * state.get_data_parallel_world_size())

    def forward(batches: Any, chunk: Any) -> Any:
        tokens = next(batches)
        output = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

        def mean(values: torch.Tensor) -> Any:
            loss = values.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return output, mean

    run, losses, norms = get_forward_backward_func(), [], []
    for step in range(steps):
        for chunk in models:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [samples(args, step) for _ in models]
        single = args.virtual_pipeline_model_parallel_size is None
        reports = run(
            forward_step_func=forward,
            data_iterator=batches[0] if single else batches,
            model=models[0] if single else models,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        # Only ranks of the last stage report losses; ranks of one TP group report the same one.
        total = torch.tensor([sum(float(report["loss"]) for report in reports), float(len(reports))])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        norms.append(float(norm))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks])
    return {"losses": losses, "norms": norms, "layers": held}


def main() -> None:
    rank, world, steps = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    torch.set_num_threads(1)
    machine.stand_in("cpu")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        args = model.read(sys.argv[2:])
        prepare()
        model.start_groups(args, rank, world, "gloo")
        result = train(args, steps)
    if rank == 0:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
