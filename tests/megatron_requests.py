"""Random Megatron argument lines, about half of them legal, for comparing verdicts with Megatron's own code."""

from __future__ import annotations

import random
from typing import Any

TRAINING = "--train-iters 10 --lr 1e-4 --min-lr 1e-5 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000"
COMMON = "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights"


def request(number: int, seed: int = 7) -> dict[str, Any]:
    """Request ``number`` of the referee: a legal base with up to three random changes."""
    rng = random.Random(seed * 1_000_003 + number)
    pick = rng.choice
    moe = rng.random() < 0.5
    tp, pp, cp = pick([1, 1, 2, 4]), pick([1, 2, 2, 4]), pick([1, 1, 1, 2])
    dp, micro, groups = pick([1, 2, 4]), pick([1, 2]), pick([1, 2, 4])
    world = tp * pp * cp * dp
    layers = pp * pick([2, 4, 6])
    flags: dict[str, str | None] = {
        "--num-layers": str(layers),
        "--hidden-size": "1024",
        "--ffn-hidden-size": "2816",
        "--num-attention-heads": "16",
        "--group-query-attention": None,
        "--num-query-groups": pick(["2", "4", "8"]),
        "--seq-length": "4096",
        "--max-position-embeddings": "4096",
        "--tensor-model-parallel-size": str(tp),
        "--pipeline-model-parallel-size": str(pp),
        "--context-parallel-size": str(cp),
        "--micro-batch-size": str(micro),
        "--global-batch-size": str(micro * dp * pp * groups),
        "--disable-bias-linear": None,
        "--bf16": None,
        "--use-distributed-optimizer": None,
        "--overlap-grad-reduce": None,
        "--overlap-param-gather": None,
    }
    if tp > 1:
        flags["--sequence-parallel"] = None
    if moe:
        expert_ranks = tp * cp * dp
        flags |= {
            "--num-experts": "8",
            "--moe-ffn-hidden-size": "704",
            "--moe-grouped-gemm": None,
            "--moe-token-dispatcher-type": "alltoall",
            "--expert-tensor-parallel-size": "1",
            "--expert-model-parallel-size": str(pick([size for size in (1, 2, 4, 8) if expert_ranks % size == 0])),
        }
    if pp > 1 and rng.random() < 0.4:
        flags["--num-virtual-stages-per-pipeline-rank"] = "2"
    for change in rng.sample(CHANGES, pick([0, 1, 1, 2, 3])):
        change(flags, rng, layers, pp)
    line = " ".join(name if value is None else f"{name} {value}" for name, value in flags.items())
    environment = {} if rng.random() < 0.9 else {"CUDA_DEVICE_MAX_CONNECTIONS": ""}
    if rng.random() < 0.1:
        world = pick([world + 1, 2 * world, world * 3])
    sm = pick([9.0, 9.0, 9.0, 10.0, 7.0])
    return {"name": number, "args": f"{line} {COMMON} {TRAINING}", "world_size": world, "env": environment, "sm": sm}


def _set(**choices: list[str | None]) -> Any:
    """A change that sets a flag to one of some values (None: a switch)."""
    ((name, values),) = choices.items()

    def change(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
        flags["--" + name.replace("_", "-")] = rng.choice(values)

    return change


def _drop(name: str) -> Any:
    def change(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
        flags.pop(name, None)

    return change


def _ends(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
    """Layer counts of the first and perhaps the last stage."""
    flags["--decoder-first-pipeline-num-layers"] = str(rng.choice([1, 2, 4, layers // pp]))
    if rng.random() < 0.6:
        flags["--decoder-last-pipeline-num-layers"] = str(rng.choice([1, 2, 4, layers // pp]))


def _layout(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
    """A layout, sometimes with a fault."""
    flags.pop("--num-virtual-stages-per-pipeline-rank", None)
    stages = pp * rng.choice([1, 1, 2])
    cuts = sorted(rng.choices(range(layers + 1), k=stages - 1))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    chunks = [f"t*{count}" if count > 2 else "t" * count for count in counts]
    text = "E" + "|".join(chunks) + "L"
    fault = rng.random()
    if fault < 0.1:
        text = text.replace("L", "")
    elif fault < 0.2:
        text += "|t"
    elif fault < 0.3:
        text = text.replace("t", "x", 1)
    flags["--pipeline-model-parallel-layout"] = f"'{text}'"


def _fsdp(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
    flags["--use-megatron-fsdp"] = None
    if rng.random() < 0.7:
        flags["--ckpt-format"] = "fsdp_dtensor"


def _forgotten_experts(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
    """Expert width without experts, in what may be a mixed model."""
    flags.pop("--num-experts", None)
    flags["--moe-ffn-hidden-size"] = "704"
    if rng.random() < 0.7:
        flags["--moe-layer-freq"] = "2"


def _exchange_overlap(flags: dict[str, str | None], rng: random.Random, layers: int, pp: int) -> None:
    """Overlap of the expert exchange with what some releases refuse beside it."""
    flags["--overlap-moe-expert-parallel-comm"] = None
    if rng.random() < 0.4:
        flags["--mtp-num-layers"] = "1"
    if rng.random() < 0.4:
        flags |= {"--recompute-granularity": "selective", "--recompute-modules": rng.choice(["moe", "layernorm"])}
    if rng.random() < 0.3:
        flags["--cuda-graph-impl"] = "local"


CHANGES: list[Any] = [
    _forgotten_experts,
    _exchange_overlap,
    _exchange_overlap,
    _set(cross_entropy_loss_fusion=[None]),
    _set(cross_entropy_fusion_impl=["te"]),
    _set(recompute_modules=["gdn_norm_out", "shared_experts"]),
    _set(cuda_graph_scope=["full_iteration", "attn", "moe"]),
    _set(optimizer=["sgd"]),
    _ends,
    _layout,
    _layout,
    _fsdp,
    _set(tensor_model_parallel_size=["3", "8"]),
    _set(pipeline_model_parallel_size=["3"]),
    _set(num_layers_per_virtual_pipeline_stage=["1", "2", "3"]),
    _set(num_virtual_stages_per_pipeline_rank=["1", "2", "3"]),
    _set(account_for_embedding_in_pipeline_split=[None]),
    _set(account_for_loss_in_pipeline_split=[None]),
    _set(global_batch_size=["6", "20", "36"]),
    _set(microbatch_group_size_per_virtual_pipeline_stage=["2", "3", "5"]),
    _set(no_overlap_p2p_communication=[None]),
    _set(expert_tensor_parallel_size=["2", "4"]),
    _set(expert_model_parallel_size=["2", "3", "16"]),
    _set(num_query_groups=["3", "16"]),
    _set(ffn_hidden_size=["2815", "2817"]),
    _set(moe_ffn_hidden_size=["705", "1408"]),
    _set(moe_shared_expert_intermediate_size=["704", "705"]),
    _set(moe_layer_freq=["2", "([0]*2+[1]*2)", "[1]*8"]),
    _set(moe_router_topk=["1", "2"]),
    _set(moe_router_num_groups=["4", "3"]),
    _set(moe_router_group_topk=["2", "5"]),
    _set(moe_router_enable_expert_bias=[None]),
    _set(moe_router_score_function=["sigmoid"]),
    _set(moe_router_pre_softmax=[None]),
    _set(moe_token_dispatcher_type=["allgather", "flex"]),
    _set(moe_enable_deepep=[None]),
    _set(moe_expert_capacity_factor=["1.0"]),
    _set(moe_pad_expert_input_to_capacity=[None]),
    _set(moe_shared_expert_overlap=[None]),
    _set(moe_permute_fusion=[None]),
    _set(overlap_moe_expert_parallel_comm=[None]),
    _set(delay_wgrad_compute=[None]),
    _set(recompute_granularity=["full", "selective"]),
    _set(recompute_method=["uniform", "block"]),
    _set(recompute_num_layers=["1"]),
    _set(recompute_modules=["core_attn moe_act", "layernorm", "mla_up_proj", "moe mlp"]),
    _set(recompute_activations=[None]),
    _set(distribute_saved_activations=[None]),
    _set(cpu_offloading_num_layers=["1", "100"]),
    _set(seq_length=["4094", "4098"]),
    _set(cp_comm_type=["a2a", "allgather", "a2a+p2p"]),
    _set(hierarchical_context_parallel_sizes=["1 2", "2 2"]),
    _set(use_tp_pp_dp_mapping=[None]),
    _set(num_distributed_optimizer_instances=["2", "3"]),
    _set(use_torch_fsdp2=[None]),
    _set(tp_comm_overlap=[None]),
    _set(defer_embedding_wgrad_compute=[None]),
    _set(fp16=[None]),
    _set(fp8_format=["hybrid"]),
    _set(fp8_recipe=["tensorwise", "mxfp8"]),
    _set(fp8_param_gather=[None]),
    _set(exp_avg_dtype=["bf16"]),
    _set(use_precision_aware_optimizer=[None]),
    _set(optimizer_cpu_offload=[None]),
    _set(ddp_num_buckets=["4"]),
    _set(ddp_bucket_size=["1000000"]),
    _set(mtp_num_layers=["1"]),
    _set(position_embedding_type=["learned_absolute"]),
    _set(multi_latent_attention=[None]),
    _set(no_rope_fusion=[None]),
    _set(cuda_graph_impl=["local", "full_iteration"]),
    _set(eval_micro_batch_size=["3"]),
    _set(decrease_batch_size_if_needed=[None]),
    _set(ckpt_format=["torch", "torch_dcp", "fsdp_dtensor"]),
    _set(disable_gloo_process_groups=[None]),
    _set(data_path=["a b"]),
    _set(train_samples=["100"]),
    _set(kv_channels=["64", "128"]),
    _set(num_attention_heads=["12", "24"]),
    _drop("--sequence-parallel"),
    _drop("--disable-bias-linear"),
    _drop("--use-distributed-optimizer"),
    _drop("--overlap-grad-reduce"),
    _drop("--num-experts"),
    _drop("--moe-grouped-gemm"),
    _drop("--micro-batch-size"),
    _drop("--global-batch-size"),
    _drop("--expert-tensor-parallel-size"),
]
