"""Rules on data-parallel sharding, optimizer, numerics, recompute and offload (D, R of the table) and on models."""

from __future__ import annotations

from .facts import MODULES, Facts
from .logic import both, either, implies, no
from .rule import Rule

_OFFLOAD = {
    "core_attn",
    "attn_proj",
    "expert_fc1",
    "fused_group_mlp",
    "moe_act",
    "attn_norm",
    "mlp_norm",
    "qkv_linear",
}


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
            both(f.ckpt_format == "fsdp_dtensor", f.optimizer in ("adam", "sgd"), not f.single_grouped_weight),
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
    Rule(
        "megatron.R1",
        lambda f: implies(f.recompute_full, both(f.recompute_method_given, f.recompute_layers_given)),
        "full recompute needs --recompute-method uniform or block and --recompute-num-layers",
        "TC:1722-1745",
        "config",
    ),
    Rule(
        "megatron.R1s",
        lambda f: implies(f.recompute_selective, both(no(f.recompute_method_given), no(f.recompute_layers_given))),
        "selective recompute takes neither --recompute-method nor --recompute-num-layers",
        "A:1425, TC:1747",
        "validate",
    ),
    Rule(
        "megatron.R1m",
        lambda f: no(both(f.recompute_full, f.recompute_selective)),
        "--moe-layer-recompute is selective and excludes full recompute",
        "TC:1836",
        "config",
    ),
    Rule(
        "megatron.R2",
        lambda f: implies(f.recompute_selective, not f.unknown_recompute_modules),
        "selective recompute does not know {f.unknown_recompute_modules}",
        "TC:1766-1780",
        "config",
        lambda f: MODULES,
    ),
    Rule(
        "megatron.R2a",
        lambda f: implies(both(f.recompute_selective, f.recomputes("moe_act")), f.grouped_gemm),
        "recompute of moe_act needs grouped GEMM",
        "TC:1782",
        "config",
        lambda f: ("--moe-grouped-gemm",),
    ),
    Rule(
        "megatron.R2m",
        lambda f: implies(both(f.recompute_selective, f.recomputes("mla_up_proj")), f.mla),
        "recompute of mla_up_proj needs multi-latent attention",
        "TC:1787",
        "config",
    ),
    Rule(
        "megatron.R2g",
        lambda f: implies(both(f.recompute_selective, f.recomputes("gdn_norm_out")), f.gated_delta_net),
        "recompute of gdn_norm_out needs Gated DeltaNet",
        "TC:1793",
        "config",
    ),
    Rule(
        "megatron.R2s",
        lambda f: implies(
            both(f.recompute_selective, f.recomputes("shared_experts")),
            not (f.shared_experts and f.shared_expert_overlap),
        ),
        "recompute of shared_experts excludes their overlap",
        "TC:1811",
        "config",
    ),
    Rule(
        "megatron.R2q",
        lambda f: implies(
            both(f.recompute_selective, f.fp8, either(f.recomputes("moe_act"), f.recomputes("layernorm"))),
            f.fp8_recipe != "delayed" and f.te_at_least(2, 6),
        ),
        "recompute of moe_act or layernorm in fp8 needs a recipe other than delayed and TransformerEngine 2.6",
        "TC:1821",
        "config",
        lambda f: ("--fp8-recipe tensorwise", "--fp8-recipe blockwise", "--fp8-recipe mxfp8"),
    ),
    Rule(
        "megatron.R3",
        lambda f: implies(
            f.distribute_saved_activations,
            both(f.tp > 1, f.recompute_full, f.recompute_method_given, no(f.sequence_parallel)),
        ),
        "--distribute-saved-activations needs TP > 1, full recompute with a method, and no sequence parallelism",
        "A:1410, TC:1755",
        "validate",
    ),
    Rule(
        "megatron.R4",
        lambda f: either(
            f.cpu_offload_layers == 0,
            both(
                f.pp == 1,
                0 < f.cpu_offload_layers < f.num_layers,
                no(f.recompute_full),
                no(f.recompute_selective),
                f.cuda_graph in ("none", "full_iteration"),
            ),
        ),
        "CPU offload of {f.cpu_offload_layers} layers needs PP 1 (it is {f.pp}), fewer layers than {f.num_layers}, no "
        "recompute and no per-layer CUDA graphs",
        "TC:1704-1719, TC:2553",
        "config",
    ),
    Rule(
        "megatron.R5",
        lambda f: (
            not f.fine_grained_offload
            or (
                f.transformer_impl == "transformer_engine"
                and f.cpu_offload_layers == 0
                and bool(f.offload_modules)
                and set(f.offload_modules) <= _OFFLOAD
                and ("attn_proj" not in f.offload_modules or "core_attn" in f.offload_modules)
                and (not f.te_at_least(2, 10) or f.environment.get("NVTE_CPU_OFFLOAD_V1") == "1")
            )
        ),
        "fine-grained offload of {f.offload_modules} needs TransformerEngine, known modules, attn_proj only with "
        "core_attn, no CPU offload of layers, and NVTE_CPU_OFFLOAD_V1=1 from TransformerEngine 2.10",
        "TC:1843-1860, A:1917",
        "config",
    ),
    Rule(
        "megatron.R7",
        lambda f: implies(both(f.cuda_graph != "none", f.recompute_full), f.cuda_graph == "full_iteration"),
        "full recompute works only with full-iteration CUDA graphs",
        "TC:2602",
        "config",
    ),
    Rule(
        "megatron.R7d",
        lambda f: implies(
            f.recompute_selective,
            both(
                no(both(f.attention_dropout > 0, f.graphs("attn"), f.recomputes("core_attn"))),
                no(both(f.hidden_dropout > 0, f.graphs("mlp"), f.recomputes("mlp"))),
                no(both(f.hidden_dropout > 0, f.graphs("moe"), f.recomputes("moe"))),
            ),
        ),
        "recompute inside a CUDA graph excludes dropout (attention {f.attention_dropout}, hidden {f.hidden_dropout})",
        "TC:2549-2566",
        "config",
        lambda f: ("--attention-dropout 0", "--hidden-dropout 0"),
    ),
    Rule(
        "megatron.R7i",
        lambda f: f.cuda_graph != "full_iteration" or (not f.nan_check and not f.cuda_graph_modules),
        "full-iteration CUDA graphs need --no-check-for-nan-in-loss-and-grad and no --cuda-graph-modules",
        "A:1211, A:1969",
        "validate",
    ),
    Rule(
        "megatron.R7m",
        lambda f: f.cuda_graph == "none" or f.is_moe or not {"moe", "moe_router"} & set(f.cuda_graph_modules),
        "CUDA graphs of {f.cuda_graph_modules} need a mixture of experts",
        "TC:2572",
        "config",
    ),
)

MODELS: tuple[Rule, ...] = (
    Rule(
        "megatron.M1",
        lambda f: not f.inexpressible,
        "Megatron 0.19's GPT model, as exported here, cannot hold: {f.inexpressible}",
        "core/models/gpt/gpt_model.py, core/transformer/transformer_config.py",
        "build",
    ),
    Rule(
        "megatron.M2",
        lambda f: not (f.mla and f.rope_fusion and f.rope_type not in (None, "yarn")),
        "RoPE fusion with multi-latent attention works only with --rope-type yarn",
        "TC:2959",
        "config",
        lambda f: ("--no-rope-fusion", "--rope-type yarn"),
    ),
    Rule(
        "megatron.M2r",
        lambda f: f.mla or f.rope_type in (None, "rope"),
        "--rope-type {f.rope_type} works only with multi-latent attention",
        "training/argument_utils.py:339",
        "config",
        lambda f: ("--position-embedding-type yarn",),
    ),
    Rule(
        "megatron.M2f",
        lambda f: not (f.rope_fusion and f.position_embedding == "rope") or f.mla or f.te_at_least(1, 4),
        "RoPE fusion needs TransformerEngine 1.4",
        "TC:2232",
        "config",
        lambda f: ("--no-rope-fusion",),
    ),
    Rule(
        "megatron.M3",
        lambda f: not (f.swiglu and (f.squared_relu or f.quick_geglu)),
        "--swiglu excludes --squared-relu and --quick-geglu",
        "training/argument_utils.py:320-326",
        "config",
    ),
    Rule(
        "hardware.precision",
        lambda f: not f.gpus_without_precision,
        "{f.gpus_without_precision} cannot compute in {f.precision}",
        "GPU catalog, dense peaks by precision",
        "step",
        lambda f: f.precision_alternatives,
    ),
)
