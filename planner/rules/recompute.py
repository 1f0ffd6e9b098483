"""Rules on recompute, offload and CUDA graphs (R of the table)."""

from __future__ import annotations

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

RECOMPUTE: tuple[Rule, ...] = (
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
        lambda f: f.known_recompute_modules,
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
                f.cuda_graph == "none" or (f.cuda_graph == "full_iteration" and f.version >= (0, 18)),
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
                and set(f.offload_modules) <= (_OFFLOAD if f.version >= (0, 19) else _OFFLOAD - {"fused_group_mlp"})
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
        lambda f: (
            f.cuda_graph != "full_iteration" or (not f.nan_check and (not f.cuda_graph_modules or f.version < (0, 18)))
        ),
        "full-iteration CUDA graphs need --no-check-for-nan-in-loss-and-grad and no --cuda-graph-modules",
        "A:1211, A:1969",
        "validate",
    ),
    Rule(
        "megatron.R7e",
        lambda f: either(f.cuda_graph not in ("local", "full_iteration"), f.ep == 1, f.graph_padding),
        "CUDA graphs with EP {f.ep} need --moe-pad-experts-for-cuda-graph-inference",
        "A:1536 (0.17.1)",
        "validate",
        lambda f: ("--moe-pad-experts-for-cuda-graph-inference", "--cuda-graph-impl none"),
        since=(0, 17),
        until=(0, 18),
    ),
    Rule(
        "megatron.R7m",
        lambda f: f.cuda_graph == "none" or f.is_moe or not {"moe", "moe_router"} & set(f.cuda_graph_modules),
        "CUDA graphs of {f.cuda_graph_modules} need a mixture of experts",
        "TC:2572",
        "config",
    ),
)
