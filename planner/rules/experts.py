"""Rules on mixture of experts (E of the table)."""

from __future__ import annotations

from .facts import Facts
from .logic import both, divides, divisors, either, implies, nearest, no, options
from .rule import Rule

_CAPACITY_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _ep(f: Facts) -> tuple[str, ...]:
    return options("ep", nearest(divisors(*f.experts), int(f.ep))) if f.experts else ("ep=1",)


EXPERTS: tuple[Rule, ...] = (
    Rule(
        "megatron.E1",
        lambda f: either(f.ep == 1, both(f.is_moe, divides(f.ep, *f.experts))),
        "EP {f.ep} needs a mixture-of-experts model whose experts {f.experts} it divides",
        "A:1650-1654, ML:185",
        "validate",
        _ep,
    ),
    Rule(
        "megatron.E1m",
        lambda f: f.is_moe or not f.moe_ffn_hidden_sizes,
        "--moe-ffn-hidden-size is given without --num-experts",
        "TC:1545",
        "config",
    ),
    Rule(
        "megatron.E2",
        lambda f: either(not (f.is_moe and f.linear_bias), f.etp == 1),
        "experts with bias need ETP 1, it is {f.etp}",
        "TC:2380",
        "config",
        lambda f: ("etp=1", "--disable-bias-linear"),
    ),
    Rule(
        "megatron.E2s",
        lambda f: not (f.shared_ffn_hidden_sizes and f.linear_bias),
        "shared experts take no bias",
        "core/transformer/moe/shared_experts.py:124",
        "build",
        lambda f: ("--disable-bias-linear",),
    ),
    Rule(
        "megatron.E3",
        lambda f: f.moe_layer_pattern_length in (None, f.num_layers),
        "--moe-layer-freq lists {f.moe_layer_pattern_length} layers, the model has {f.num_layers}",
        "core/models/gpt/gpt_layer_specs.py:653",
        "build",
    ),
    Rule(
        "megatron.E4",
        lambda f: implies(
            f.is_moe
            and f.dispatcher == "flex"
            and (f.flex_backend in ("deepep", "ncclep") or f.version < (0, 17)),  # then every backend
            f.etp * f.ep > 1,
        ),
        "the flex dispatcher with backend {f.flex_backend} needs ETP {f.etp} x EP {f.ep} > 1",
        "core/transformer/moe/token_dispatcher.py:1836",
        "build",
        lambda f: ("dispatcher=alltoall",),
    ),
    Rule(
        "megatron.E4p",
        lambda f: not (f.dispatcher == "flex" and f.flex_backend == "deepep" and f.pad_to_capacity),
        "the DeepEP backend does not support padding experts to capacity",
        "TC:1598",
        "config",
    ),
    Rule(
        "megatron.E4n",
        lambda f: f.flex_backend != "ncclep" or f.dispatcher == "flex",
        "backend ncclep needs the flex dispatcher",
        "TC:1607",
        "config",
        lambda f: ("dispatcher=flex",),
    ),
    Rule(
        "megatron.E5",
        lambda f: not f.deepep or (f.dispatcher == "flex" and f.flex_backend != "hybridep"),
        "DeepEP needs the flex dispatcher (and no other backend); the dispatcher is {f.dispatcher}",
        "TC:1585",
        "config",
        lambda f: ("--moe-token-dispatcher-type flex",),
    ),
    Rule(
        "megatron.E6",
        lambda f: not (f.variable_seq_lengths and f.dispatcher == "allgather"),
        "variable sequence lengths do not work with the allgather dispatcher",
        "TC:2656",
        "config",
        lambda f: ("dispatcher=alltoall", "dispatcher=flex"),
    ),
    Rule(
        "megatron.E6o",
        lambda f: not (f.shared_expert_overlap and f.shared_experts) or f.dispatcher in ("alltoall", "flex"),
        "overlapping shared experts needs the alltoall or flex dispatcher, it is {f.dispatcher}",
        "TC:1641",
        "config",
        lambda f: ("dispatcher=alltoall", "dispatcher=flex"),
    ),
    Rule(
        "megatron.E6r",
        lambda f: f.rank_capacity_factor is None or f.flex_backend in ("hybridep", "ncclep"),
        "--moe-expert-rank-capacity-factor needs backend hybridep or ncclep, it is {f.flex_backend}",
        "TC:1690",
        "config",
    ),
    Rule(
        "megatron.E7",
        lambda f: f.capacity_factor is None or all(kind in _CAPACITY_BALANCING for kind in f.load_balancing),
        "an expert capacity factor does not work with load balancing {f.load_balancing}",
        "TC:1658-1682",
        "config",
        lambda f: _CAPACITY_BALANCING,
    ),
    Rule(
        "megatron.E7p",
        lambda f: not f.pad_to_capacity or f.capacity_factor is not None,
        "padding experts to capacity needs --moe-expert-capacity-factor",
        "TC:1684",
        "config",
    ),
    Rule(
        "megatron.E7b",
        lambda f: len(f.load_balancing) == 1 or f.aux_loss_coefficients == len(f.load_balancing),
        "{f.aux_loss_coefficients} auxiliary-loss coefficients for load balancing {f.load_balancing}",
        "TC:1649",
        "config",
    ),
    Rule(
        "megatron.E8",
        lambda f: f.topk != 1 or f.score_function != "softmax" or f.pre_softmax or f.load_balancing == ("sinkhorn",),
        "top-1 routing with softmax needs --moe-router-pre-softmax",
        "TC:2430",
        "config",
        lambda f: ("--moe-router-pre-softmax",),
    ),
    Rule(
        "megatron.E9",
        lambda f: (
            not f.router_group_topk
            or (
                f.router_groups > 0
                and all(experts % f.router_groups == 0 for experts in f.experts)
                and f.router_group_topk <= f.router_groups
            )
        ),
        "group routing needs groups {f.router_groups} that divide experts {f.experts} and top groups "
        "{f.router_group_topk} <= groups",
        "TC:2441-2458",
        "config",
    ),
    Rule(
        "megatron.E9k",
        lambda f: not f.experts or f.topk <= min(f.experts),
        "top-{f.topk} routing needs at least as many experts, there are {f.experts}",
        "core/transformer/moe/moe_utils.py (torch.topk)",
        "step",
        lambda f: options("topk", [min(f.experts)]),
    ),
    Rule(
        "megatron.E10",
        lambda f: not f.expert_score_bias or f.score_function in ("sigmoid", "sqrtsoftplus"),
        "expert bias needs score function sigmoid or sqrtsoftplus, it is {f.score_function}",
        "TC:2385",
        "config",
        lambda f: ("--moe-router-score-function sigmoid", "--moe-router-score-function sqrtsoftplus"),
    ),
    Rule(
        "megatron.E11",
        lambda f: implies(
            f.moe_a2a_overlap,
            both(
                f.ep > 1,
                f.dispatcher in ("alltoall", "flex"),
                f.bf16 or f.fp16,
                no(f.recompute_full),
                no(f.recompute_method_given),
                no(f.recompute_layers_given),
                either(f.version < (0, 17), no(f.recomputes("moe"))),
                not f.shared_expert_overlap,
                f.mtp_num_layers <= 1,
            ),
        ),
        "overlap of expert communication needs EP > 1, the alltoall or flex dispatcher, bf16 or fp16, no full or moe "
        "recompute, no shared-expert overlap, and at most one MTP layer",
        "TC:2672-2712",
        "config",
    ),
    Rule(
        "megatron.E11v",
        lambda f: implies(both(f.moe_a2a_overlap, f.pp > 1), f.vpp > 1),
        "overlap of expert communication with PP {f.pp} needs virtual stages",
        "TC:2667",
        "config",
        lambda f: ("vpp=2",),
    ),
    Rule(
        "megatron.E11m",
        lambda f: implies(both(f.moe_a2a_overlap, f.mtp_num_layers == 1), f.pp > 1),
        "overlap of expert communication with an MTP layer needs PP > 1",
        "TC:1111 (0.17.1)",
        "config",
        lambda f: ("pp=2",),
        until=(0, 18),
    ),
    Rule(
        "megatron.E11g",
        lambda f: implies(f.moe_a2a_overlap, f.cuda_graph in ("none", "transformer_engine")),
        "overlap of expert communication works only with CUDA graphs of transformer_engine, not {f.cuda_graph}",
        "TC:1117 (0.17.1)",
        "config",
        lambda f: ("--cuda-graph-impl transformer_engine", "--cuda-graph-impl none"),
        until=(0, 18),
    ),
    Rule(
        "megatron.E12",
        lambda f: implies(f.delay_wgrad, f.moe_a2a_overlap),
        "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm",
        "TC:2745",
        "config",
    ),
    Rule(
        "megatron.E12t",
        lambda f: implies(
            f.delay_wgrad,
            both(
                f.transformer_impl == "transformer_engine",
                implies(f.overlap_grad_reduce, f.te_at_least(2, 8)),
                f.grad_accumulation_fusion or f.te_at_least(2, 7),
            ),
        ),
        "--delay-wgrad-compute needs TransformerEngine (2.8 with --overlap-grad-reduce, 2.7 without "
        "gradient-accumulation fusion)",
        "A:1880-1910",
        "validate",
    ),
    Rule(
        "megatron.E12d",
        lambda f: (
            not f.dispatch_backward_overlap or both(no(f.moe_a2a_overlap), no(f.delay_wgrad), f.te_at_least(2, 3))
        ),
        "--overlap-dispatch-backward-with-experts-wgrad excludes --overlap-moe-expert-parallel-comm and "
        "--delay-wgrad-compute, and needs TransformerEngine 2.3",
        "TC:2753",
        "config",
    ),
    Rule(
        "megatron.E12f",
        lambda f: not f.fp8_dispatch,
        "Megatron has no switch for dispatching tokens in FP8",
        "arguments.py has none",
        "parse",
        lambda f: ("fp8_dispatch=false",),
    ),
    Rule(
        "megatron.E13",
        lambda f: not (f.is_moe and f.fp8) or (f.te_at_least(1, 7) and (not f.grouped_gemm or f.te_at_least(1, 11))),
        "FP8 experts need TransformerEngine 1.7 (1.11 with grouped GEMM)",
        "TC:2393",
        "config",
    ),
    Rule(
        "megatron.E13q",
        lambda f: not f.pad_for_quantization or ((f.fp8 or f.fp4) and f.dispatcher != "allgather"),
        "router padding for quantization needs fp8 or fp4 and not the allgather dispatcher",
        "TC:2414",
        "config",
        lambda f: ("dispatcher=alltoall", "dispatcher=flex"),
    ),
    Rule(
        "megatron.E14",
        lambda f: not f.grouped_gemm or f.sm >= 8,
        "grouped GEMM needs compute capability 8.0, the lowest here is {f.sm}",
        "A:1378",
        "validate",
    ),
    Rule(
        "megatron.E14p",
        lambda f: not f.permute_fusion or f.te_at_least(2, 1),
        "--moe-permute-fusion needs TransformerEngine 2.1",
        "TC:2662",
        "config",
    ),
    Rule(
        "megatron.E15",
        lambda f: not (f.mla and f.group_query_attention),
        "multi-latent attention excludes --group-query-attention",
        "A:1977",
        "validate",
    ),
    Rule(
        "megatron.E15l",
        lambda f: not f.latent_moe or (f.is_moe and f.te_version is not None),
        "a latent mixture of experts needs --num-experts and TransformerEngine",
        "A:1984, ML:266",
        "build",
    ),
)
