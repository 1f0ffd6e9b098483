"""Ask Megatron's own code whether it accepts an argument line.

Usage: VENV/bin/python .ci/megatron/referee.py [VERSION] < requests.jsonl > verdicts.jsonl

A request is a JSON object a line: ``args`` (text or list), ``world_size``, optional ``env``, ``te_version`` (default
2.12.0, null = not installed) and ``sm`` (default 9.0). A verdict has ``ok``, ``step`` (where it stopped), ``error``,
and when accepted ``derived``: degrees, micro-batches, decoder layers of every stage chunk, stage of every rank.

Steps: parse_args, validate_args, the configuration's constructor, the micro-batch calculator, the rank grids of
``initialize_model_parallel`` on a fake process group, and the ``divide`` calls of the layers' constructors. A few rules
Megatron checks only when a GPU model is built or during its first step; ``late`` states them again here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shlex
import sys
import traceback
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import shims
import torch

ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1", "CUDA_GRAPHS_USE_NODE_PRIORITY")
DEFAULT_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one request."""
    verdict: dict[str, Any] = {"name": request.get("name"), "ok": False, "step": "parse_args", "error": None}
    environment = DEFAULT_ENVIRONMENT | request.get("env", {})
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
        if environment.get(name):
            os.environ[name] = environment[name]
    os.environ |= {"WORLD_SIZE": str(request["world_size"]), "RANK": "0"}
    shims.set_gpu(float(request.get("sm", 9.0)))
    shims.set_transformer_engine(request.get("te_version", "2.12.0"))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            verdict["derived"] = examine(request, verdict)
        verdict |= {"ok": True, "step": "done"}
    except SystemExit:  # argparse
        lines = output.getvalue().strip().splitlines()
        verdict["error"] = lines[-1] if lines else "exit"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict["error"] = f"{type(error).__name__}: {error}"
        verdict["where"] = f"{pathlib.Path(where.filename).name}:{where.lineno}"
    return verdict


def examine(request: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    """Run Megatron's checks in its own order, naming the step in ``verdict``; return what it derived."""
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.training import arguments
    from megatron.training.arguments import parse_args, validate_args

    # In arguments.py until 0.17.
    make_config = getattr(arguments, "core_transformer_config_from_args", None)
    if make_config is None:
        from megatron.training.argument_utils import core_transformer_config_from_args as make_config

    line = request["args"]
    sys.argv = ["pretrain_gpt.py", *(shlex.split(line) if isinstance(line, str) else line)]
    args = parse_args()
    verdict["step"] = "validate_args"
    args = validate_args(args, {})
    verdict["step"] = "config"
    config = make_config(args)
    verdict["step"] = "optimizer"
    optimizer_config(args)
    verdict["step"] = "batch"
    calculator = ConstantNumMicroBatchesCalculator(
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        bool(args.decrease_batch_size_if_needed),
        0,
    )
    micro_batches = calculator.get()
    verdict["step"] = "groups"
    stage_ranks = form_groups(args, request["world_size"])
    verdict["step"] = "build"
    divisions(args, config)
    verdict["step"] = "first step"
    late(args, config, micro_batches)
    return {
        "dp": args.data_parallel_size,
        "etp": args.expert_tensor_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "num_microbatches": micro_batches,
        "sequence_parallel": args.sequence_parallel,
        "ffn_hidden_size": config.ffn_hidden_size,
        "layers": layers_of_chunks(config),
        "stage_ranks": stage_ranks,
    }


def optimizer_config(args: Any) -> None:
    """The checks of the optimizer's and the data-parallel wrapper's configuration."""
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    with shims.fused_adam():
        OptimizerConfig(**{name: value for name, value in vars(args).items() if name in names})
    wanted = {
        "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "overlap_param_gather": args.overlap_param_gather,
        "use_distributed_optimizer": args.use_distributed_optimizer,
        "num_buckets": args.ddp_num_buckets,
        "bucket_size": args.ddp_bucket_size,
        "fp8_param_gather": args.fp8_param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": args.reuse_grad_buf_for_mxfp8_param_ag,
    }
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    DistributedDataParallelConfig(**{name: value for name, value in wanted.items() if name in known})
    if "num_buckets" not in known and args.ddp_num_buckets is not None:  # 0.17: get_model() of training.py
        assert args.ddp_bucket_size is None, "Cannot specify both --ddp-num-buckets and --ddp-bucket-size"


def form_groups(args: Any, world_size: int) -> list[list[int]]:
    """Run ``initialize_model_parallel`` on a fake process group as rank 0; return the ranks of every stage."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    pp = args.pipeline_model_parallel_size
    # 0.19 only; there they count as ranks of their own in both grids.
    names = {"gtp_remat_size": "gtp_weight_remat_size", "expert_gtp_remat_size": "expert_gtp_weight_remat_size"}
    shards = {name: size for name, dest in names.items() if (size := getattr(args, dest, 1)) > 1}
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            pp,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=args.expert_model_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            order=order,
            create_gloo_process_groups=False,
            **shards,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    if shards:
        return []
    tp, cp, dp = args.tensor_model_parallel_size, args.context_parallel_size, args.data_parallel_size
    dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    return [sorted(group[stage] for group in dense.get_ranks("pp")) for stage in range(pp)]


def divisions(args: Any, config: Any) -> None:
    """Megatron's ``divide`` on the widths that its layers' constructors divide."""
    from megatron.core.utils import divide

    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    frequency = args.moe_layer_freq
    if args.num_experts is None:
        moe_layers = [0] * args.num_layers
    elif isinstance(frequency, int):
        moe_layers = [int(index % frequency == 0) for index in range(args.num_layers)]
    else:
        moe_layers = frequency
        assert len(frequency) == args.num_layers, f"moe_layer_freq has {len(frequency)} of {args.num_layers} layers"
    if 0 in moe_layers:
        divide(config.ffn_hidden_size, tp)
    if 1 in moe_layers:
        divide(config.moe_ffn_hidden_size, etp)
        if config.moe_shared_expert_intermediate_size:
            divide(config.moe_shared_expert_intermediate_size, tp)
    if config.sequence_parallel:
        divide(args.seq_length // args.context_parallel_size, tp)


def late(args: Any, config: Any, micro_batches: int) -> None:
    """Rules of the first step, from schedules.py (interleaved), moe_layer.py and token_dispatcher.py."""
    pp, group = args.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage
    if args.virtual_pipeline_model_parallel_size is not None:
        assert pp <= group <= micro_batches, f"micro-batch group {group} must be in [PP={pp}, M={micro_batches}]"
        assert not 0 < micro_batches % group < pp, f"M % group = {micro_batches % group} must be 0 or at least {pp}"
    if args.num_experts is None:
        return
    if args.tensor_model_parallel_size > 1:
        assert config.sequence_parallel, "MoE training with tensor parallelism needs sequence parallelism"
    if args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend in ("deepep", "ncclep"):
        ranks = args.expert_tensor_parallel_size * args.expert_model_parallel_size
        assert ranks > 1, "the flex dispatcher needs ETP x EP > 1"


def layers_of_chunks(config: Any) -> list[list[int]]:
    """Decoder layers of every [stage][chunk]."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layout, chunks = config.pipeline_model_parallel_layout, config.virtual_pipeline_model_parallel_size
    if layout is not None:
        return [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    return [
        [
            get_num_layers_to_build(config, vp_stage=chunk if chunks else None, pp_rank=stage)
            for chunk in range(chunks or 1)
        ]
        for stage in range(config.pipeline_model_parallel_size)
    ]


def main() -> None:
    shims.use_release(sys.argv[1] if len(sys.argv) > 1 else shims.NEWEST)
    torch.set_num_threads(1)
    for line in sys.stdin:
        if line.strip():
            sys.stdout.write(json.dumps(judge(json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
