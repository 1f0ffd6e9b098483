"""Rules on data-parallel sharding, optimizer, numerics and training flags (D of the table)."""

from __future__ import annotations

from .facts import Facts
from .logic import Truth, both, either, implies, no
from .rule import Rule


def _fsdp2(f: Facts) -> bool:
    return not f.torch_fsdp2 or bool(
        f.pp == 1
        and f.ep == 1
        and not f.dist_opt
        and not f.grad_accumulation_fusion
        and f.ckpt_format in ("torch_dist", "torch_dcp")
        and not f.tied_embeddings
        and not f.fp16
        and f.max_connections != "1"
        and f.optimizer in ("adam", "sgd")
    )


def _plain_checkpoint(f: Facts) -> Truth:
    return either(f.ckpt_format == "torch", f.ckpt_format == "torch_dist")


SHARDING: tuple[Rule, ...] = (
    Rule(
        "megatron.D1",
        lambda f: implies(f.overlap_param_gather, either(f.dist_opt, f.megatron_fsdp, f.optimizer == "dist_muon")),
        "--overlap-param-gather needs the distributed optimizer or Megatron-FSDP",
        "A:1024",
        "validate",
        lambda f: ("--use-distributed-optimizer",),
    ),
    Rule(
        "megatron.D1g",
        lambda f: implies(f.overlap_param_gather, f.overlap_grad_reduce),
        "--overlap-param-gather needs --overlap-grad-reduce",
        "A:1028",
        "validate",
        lambda f: ("--overlap-grad-reduce",),
    ),
    Rule(
        "megatron.D2",
        lambda f: implies(
            f.param_gather_with_step, both(f.dist_opt, f.overlap_param_gather, f.vpp > 1, f.ckpt_format == "torch")
        ),
        "--overlap-param-gather-with-optimizer-step needs the distributed optimizer, --overlap-param-gather, virtual "
        "stages and --ckpt-format torch",
        "A:1066",
        "validate",
    ),
    Rule(
        "megatron.D3",
        _fsdp2,
        "--use-torch-fsdp2 needs PP 1, EP 1, no distributed optimizer, no gradient-accumulation fusion, untied "
        "embeddings, no fp16, --ckpt-format torch_dist or torch_dcp, and CUDA_DEVICE_MAX_CONNECTIONS not 1",
        "A:1031-1050",
        "validate",
    ),
    Rule(
        "megatron.D4c",
        lambda f: implies(f.megatron_fsdp, f.environment_follows or f.max_connections != "1"),
        "Megatron-FSDP needs CUDA_DEVICE_MAX_CONNECTIONS unset or above 1, it is {f.max_connections!r}",
        "A:1163",
        "validate",
        lambda f: ("CUDA_DEVICE_MAX_CONNECTIONS unset",),
    ),
    Rule(
        "megatron.D4",
        lambda f: implies(
            f.megatron_fsdp,
            both(
                f.ckpt_format == "fsdp_dtensor",
                f.version < (0, 18) or f.optimizer in ("adam", "sgd"),
                f.version < (0, 19) or not f.single_grouped_weight,
            ),
        ),
        "Megatron-FSDP needs --ckpt-format fsdp_dtensor, optimizer adam or sgd, and no single grouped expert weight",
        "A:1118-1170",
        "validate",
        lambda f: ("--ckpt-format fsdp_dtensor",),
    ),
    Rule(
        "megatron.D4k",
        lambda f: either(f.ckpt_format != "fsdp_dtensor", f.megatron_fsdp),
        "--ckpt-format fsdp_dtensor works only with Megatron-FSDP",
        "A:1626",
        "validate",
        lambda f: ("--ckpt-format torch_dist",),
    ),
    Rule(
        "megatron.D4d",
        lambda f: either(f.ckpt_format != "torch_dcp", both(f.torch_fsdp2, f.tp == 1, f.pp == 1)),
        "--ckpt-format torch_dcp needs --use-torch-fsdp2, TP 1 and PP 1",
        "A:1618",
        "validate",
        lambda f: ("--ckpt-format torch_dist",),
    ),
    Rule(
        "megatron.D6",
        lambda f: either(f.gloo, no(f.dist_opt), f.ckpt_format != "torch"),
        "the distributed optimizer without Gloo groups needs distributed checkpoints",
        "A:1690",
        "validate",
        lambda f: ("--ckpt-format torch_dist",),
    ),
    Rule(
        "megatron.D7",
        lambda f: len(f.bucket_flags) <= 1,
        "give only one of {f.bucket_flags}",
        "core/distributed/distributed_data_parallel_config.py:270",
        "build",
    ),
    Rule(
        "megatron.D8",
        lambda f: f.precision_aware or not f.state_dtypes,
        "optimizer states not in fp32 ({f.state_dtypes}) need --use-precision-aware-optimizer",
        "core/optimizer/optimizer_config.py:470-481",
        "build",
        lambda f: ("--use-precision-aware-optimizer",),
    ),
    Rule(
        "megatron.D8a",
        lambda f: implies(
            f.precision_aware,
            both(f.optimizer == "adam", either(f.dist_opt, f.megatron_fsdp), f.te_version is not None),
        ),
        "--use-precision-aware-optimizer needs adam, the distributed optimizer and TransformerEngine",
        "core/optimizer/optimizer_config.py:430-468",
        "build",
    ),
    Rule(
        "megatron.D9",
        lambda f: (
            not f.optimizer_cpu_offload or (f.precision_aware and (not f.fp8_param_gather or f.fp8_recipe == "delayed"))
        ),
        "optimizer offload needs --use-precision-aware-optimizer (and with --fp8-param-gather recipe delayed)",
        "A:1862",
        "validate",
    ),
    Rule(
        "megatron.D10",
        lambda f: not (f.fp16 and f.bf16),
        "fp16 and bf16 exclude each other",
        "A:1196, TC:1313",
        "validate",
        lambda f: ("--bf16", "--fp16"),
    ),
    Rule(
        "megatron.D10q",
        lambda f: not (f.fp8 and f.fp4),
        "fp8 and fp4 exclude each other",
        "A:1100",
        "validate",
    ),
    Rule(
        "megatron.D10g",
        lambda f: implies(f.fp8_param_gather, both(f.fp8, either(f.dist_opt, f.torch_fsdp2, f.megatron_fsdp))),
        "--fp8-param-gather needs --fp8-format and the distributed optimizer or FSDP",
        "A:1095, TC:1461",
        "validate",
    ),
    Rule(
        "megatron.D10f",
        lambda f: (not f.fp4_param_gather or f.fp4) and (not f.fp4 or f.te_at_least(2, 7)),
        "--fp4-param-gather needs --fp4-format, which needs TransformerEngine 2.7",
        "A:1104-1109",
        "validate",
    ),
    Rule(
        "megatron.D10r",
        lambda f: not f.reuse_grad_buffer or f.fp8_param_gather or bool(f.megatron_fsdp),
        "--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather",
        "core/distributed/distributed_data_parallel_config.py:254",
        "build",
    ),
    Rule(
        "megatron.D12",
        lambda f: not f.te_cross_entropy_fusion,
        "--cross-entropy-loss-fusion with implementation te is refused",
        "A:1641",
        "validate",
        lambda f: ("--cross-entropy-fusion-impl native",),
        since=(0, 18),
    ),
    Rule(
        "megatron.D16",
        lambda f: implies(
            "muon" in f.optimizer,
            both(
                no(f.dist_opt),
                no(f.megatron_fsdp),
                not f.torch_fsdp2,
                _plain_checkpoint(f),
                f.optimizer != "muon" or both(no(f.overlap_grad_reduce), no(f.overlap_param_gather)),
            ),
        ),
        "optimizer {f.optimizer} excludes the distributed optimizer, FSDP and (but for dist_muon) overlapped "
        "communication of gradients and parameters, and needs --ckpt-format torch or torch_dist",
        "A:1480-1495 (0.17.1)",
        "validate",
        until=(0, 18),
    ),
    Rule(
        "megatron.D16e",
        lambda f: either(
            f.optimizer in ("adam", "sgd"),
            both(no(f.megatron_fsdp), not f.torch_fsdp2, _plain_checkpoint(f)),
        ),
        "optimizer {f.optimizer} excludes FSDP and needs --ckpt-format torch or torch_dist",
        "A:1500-1520",
        "validate",
        since=(0, 18),
    ),
    Rule(
        "megatron.D13",
        lambda f: f.data_sources <= 1,
        "give one data source: --mock-data, --data-path or per-split paths",
        "A:1632",
        "validate",
    ),
    Rule(
        "megatron.D14",
        lambda f: not f.train_iters_and_samples,
        "--train-iters and --train-samples (and their learning-rate options) exclude each other",
        "A:1228-1262",
        "validate",
    ),
    Rule(
        "megatron.D15",
        lambda f: not f.save_without_interval and not f.min_lr_above_lr,
        "--save needs a positive --save-interval, and --min-lr may not be above --lr",
        "A:1360-1366",
        "validate",
    ),
)
