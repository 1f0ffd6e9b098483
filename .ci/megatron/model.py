"""Megatron's GPT model from an argument line, without TransformerEngine: for counting parameters and for training."""

from __future__ import annotations

import copy
import sys
from typing import Any

import shims
import torch
import torch.distributed as dist

ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}
#: What the local layers cannot do and what no parameter and, in fp32 without dropout, no loss depends on.
_LOCAL = {
    "use_cpu_initialization": True,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "gradient_accumulation_fusion": False,
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
#: What else only training needs; the local layers refuse some of it at build.
_BUILD_ONLY = {
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "perform_initialization": False,
    "fp8": None,
    "fp4": None,
}


def read(line: list[str], compute_capability: float = 9.0) -> Any:
    """Megatron's arguments after its own validation; ``WORLD_SIZE`` comes from the environment."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    shims.set_gpu(compute_capability)
    shims.set_transformer_engine("2.12.0")
    sys.argv = ["pretrain_gpt.py", *line]
    args = validate_args(parse_args(), {})
    if args.padded_vocab_size is None:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
        )
    return args


def config_of(args: Any, *, build_only: bool) -> Any:
    """The transformer configuration with the changes that running without TransformerEngine needs."""
    import megatron.core.utils as utils
    from megatron.training.argument_utils import core_transformer_config_from_args

    changed = copy.copy(args)
    for name, value in (_LOCAL | (_BUILD_ONLY if build_only else {})).items():
        setattr(changed, name, value)
    if args.virtual_pipeline_model_parallel_size is None:
        changed.overlap_p2p_comm = False
    config = core_transformer_config_from_args(changed)
    utils._te_version = None
    return config


def allow_local_latent_attention() -> None:
    """Let latent attention and MTP be built (not run) on local layers, which hold the same parameters."""
    import megatron.core.transformer.multi_token_prediction as prediction
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        build(self, *args, **kwargs)

    DotProductAttention.__init__ = init  # type: ignore[method-assign]
    prediction.is_inference_column_parallel_linear = lambda _: False


def start_groups(args: Any, rank: int, world_size: int, backend: str = "fake") -> None:
    """``initialize_model_parallel`` as one rank of a world; the fake backend needs no other process."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    store = {"store": FakeStore()} if backend == "fake" else {}
    dist.init_process_group(backend, rank=rank, world_size=world_size, **store)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_comm_backend=args.pipeline_model_parallel_comm_backend,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        order=ORDERS[bool(args.use_tp_pp_dp_mapping)],
        create_gloo_process_groups=backend != "fake",
    )


def build(args: Any, config: Any) -> list[Any]:
    """The GPT model of every virtual stage of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    virtual = args.virtual_pipeline_model_parallel_size
    stage, last = parallel_state.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size - 1
    chunks = []
    for index in range(virtual or 1):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=index if virtual else None,
        )
        prediction = None
        if args.mtp_num_layers:
            layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
                config, use_transformer_engine=False, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm
            )
            prediction = gpt_layer_specs.get_gpt_mtp_block_spec(
                config, layers[-1], use_transformer_engine=False, vp_stage=index if virtual else None
            )
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=stage == 0 and index == 0,
                post_process=stage == last and index == (virtual or 1) - 1,
                parallel_output=True,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_percent=args.rotary_percent,
                rotary_base=args.rotary_base,
                mtp_block_spec=prediction,
                vp_stage=index if virtual else None,
            )
        )
    return chunks


def kind_of(name: str, parameter: torch.nn.Parameter) -> str:
    """``expert`` (split over EP and ETP), ``dense`` (split over TP) or ``replicated``."""
    if ".experts." in name and "shared" not in name:
        return "expert"
    return "dense" if getattr(parameter, "tensor_model_parallel", False) else "replicated"
