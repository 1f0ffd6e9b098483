"""Bridge's settings in the names of Megatron's arguments, so that one reading serves both.

Bridge fills the configuration classes of megatron-core, and Megatron's parser names its arguments after the same
fields; what differs is listed here. ``unset`` settings keep the values of Bridge's classes and of the pretraining base
that its recipes share (bridge/recipes/common.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from meshwright.specs.model import ModelSpec
from meshwright.specs.targets import load_target
from meshwright.specs.workload import Workload

from ..megatron import MegatronArguments, read_arguments
from ..megatron.flags import defaults
from ..megatron.model_flags import expert_flags, model_flags
from .overrides import Overrides
from .precisions import fields_of
from .recipes import settings_of_recipe

#: Release of megatron-core that Bridge 0.6 builds on.
CORE = "0.19"

#: Bridge key -> Megatron destination, where the names differ.
RENAMED = {
    "model.num_moe_experts": "num_experts",
    "model.num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "model.num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "model.virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "model.microbatch_group_size_per_vp_stage": "microbatch_group_size_per_vp_stage",
    "ddp.bucket_size": "ddp_bucket_size",
    "ddp.num_buckets": "ddp_num_buckets",
    "ddp.average_in_collective": "ddp_average_in_collective",
    "rerun_state_machine.check_for_nan_in_loss": "check_for_nan_in_loss_and_grad",
}
#: Sections whose other fields have Megatron's names.
SECTIONS = ("model", "train", "validation", "optimizer", "ddp", "dist")
#: What Megatron's parser would have otherwise: defaults of Bridge's provider and of the recipes' pretraining base.
BASE: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "ddp_average_in_collective": True,
    "overlap_p2p_comm": False,
    "cross_entropy_loss_fusion": True,
    "moe_token_dispatcher_type": "allgather",
    "rope_type": "rope",
    "apply_rope_fusion": False,
    "add_bias_linear": True,
}
#: Megatron's ``mixed_precision`` destinations.
_FLOATS = {"bf16": False, "fp16": False, "fp8": None, "fp4": None, "fp8_param_gather": False, "fp4_param_gather": False}
_HALF = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "uint8": "fp8"}
_FULL_GRAPHS = ("full_iteration", "full")


def key_of(dest: str) -> str:
    """Bridge's key of a Megatron destination, for messages."""
    known = {value: key for key, value in RENAMED.items()}
    if dest in known:
        return known[dest]
    for section, names in _OWNERS.items():
        if dest in names:
            return f"{section}.{dest}"
    return f"model.{dest}"


_OWNERS = {
    "train": ("micro_batch_size", "global_batch_size", "decrease_batch_size_if_needed"),
    "validation": ("eval_micro_batch_size", "eval_global_batch_size"),
    "optimizer": ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer", "main_params_dtype"),
    "ddp": (
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
    ),
    "dist": ("use_tp_pp_dp_mapping", "use_torch_fsdp2", "use_gloo_process_groups"),
    "comm_overlap": ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    "mixed_precision": ("fp8_recipe", "fp8_param_gather", "bf16", "fp16", "reuse_grad_buf_for_mxfp8_param_ag"),
    "checkpoint": ("ckpt_format",),
}


def settings_of(overrides: Overrides) -> dict[str, Any]:
    """Settings by key: those of the recipe, then the overrides. A new recipe of precision drops the fields of the old.

    Raises :class:`SpecError` for an unknown recipe.
    """
    settings: dict[str, Any] = {}
    for given in (settings_of_recipe(overrides.recipe) if overrides.recipe else {}, overrides.given):
        if "mixed_precision" in given:
            settings = {key: value for key, value in settings.items() if not key.startswith("mixed_precision.")}
        settings |= given
    return settings


def arguments_of(settings: Mapping[str, Any], model: ModelSpec | None = None) -> MegatronArguments:
    """The settings as Megatron's arguments; ``model`` gives the architecture where they name none."""
    given: dict[str, Any] = dict(BASE)
    if model is not None:
        given |= _architecture(model)
    dests = defaults(CORE)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        dest = RENAMED.get(key, name if section in SECTIONS and name in dests else None)
        if dest is not None and not (value is None and dests.get(dest) is not None):
            given[dest] = _dtype(value)
        elif dest is not None:
            given.pop(dest, None)
    given |= _model_words(settings, given)
    given |= _overlap(settings, given)
    given |= _floats(settings)
    given |= _grids(settings, given)
    environment = {key.partition(".")[2]: str(value) for key, value in settings.items() if key.startswith("env_vars.")}
    named = settings.get("env_vars")
    environment |= {str(key): str(value) for key, value in named.items()} if isinstance(named, dict) else {}
    return MegatronArguments(given, CORE, environment)


@lru_cache(maxsize=64)
def _architecture(model: ModelSpec) -> Mapping[str, Any]:
    """Megatron destinations of a model, as Bridge's conversions from Hugging Face set them."""
    work = Workload.parse({"global_batch_size": 1, "seq_length": model.max_position_embeddings or 1}, "/workload")
    flags = [*model_flags(model, work, load_target("megatron@0.19")), *expert_flags(model, work)]
    given = dict(read_arguments([part for flag in flags for part in flag]).given)
    given.pop("max_position_embeddings", None)
    if model.is_moe:
        given["moe_grouped_gemm"] = True
    return given


def _dtype(value: Any) -> Any:
    return _HALF.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def _model_words(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the model that Megatron's arguments say in other words."""
    out: dict[str, Any] = {}
    groups = given.get("num_query_groups")
    if "model.num_query_groups" in settings:
        out["group_query_attention"] = groups is not None and groups != given.get("num_attention_heads")
    if "model.share_embeddings_and_output_weights" in settings:
        out["untie_embeddings_and_output_weights"] = not settings["model.share_embeddings_and_output_weights"]
    if {"model.gated_linear_unit", "model.activation_func"} & set(settings):
        gated = bool(settings.get("model.gated_linear_unit"))
        activation = str(settings.get("model.activation_func") or ("silu" if gated else "gelu")).rpartition(".")[2]
        out |= {
            "swiglu": gated and activation == "silu",
            "quick_geglu": gated and activation in ("quick_gelu", "gelu"),
            "squared_relu": not gated and activation in ("squared_relu", "relu2"),
        }
    if settings.get("model.position_embedding_type") in ("yarn", "mrope"):
        out["position_embedding_type"] = "rope"
    if isinstance(given.get("cp_comm_type"), str):
        out["cp_comm_type"] = [given["cp_comm_type"]]
    if not settings.get("model.cpu_offloading"):
        out["cpu_offloading_num_layers"] = 0
    for name in ("recompute_modules", "offload_modules", "hierarchical_context_parallel_sizes"):
        if isinstance(given.get(name), str):
            out[name] = [given[name]]
    layout = given.get("pipeline_model_parallel_layout")
    if isinstance(layout, list):
        out["pipeline_model_parallel_layout"] = layout_text(layout)
    sizes = [settings.get("model.seq_length"), settings.get("dataset.seq_length")]
    length = next((size for size in (*sizes, settings.get("dataset.sequence_length")) if size), None)
    out["seq_length"] = length or 1024  # GPTModelProvider's default
    out["max_position_embeddings"] = given.get("max_position_embeddings") or out["seq_length"]
    return out | _graphs(settings)


def layout_text(layout: list[Any]) -> str:
    """A layout given as lists of layer names, one a stage chunk, as Megatron's string."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    return "|".join(
        "".join(letters.get(str(name), str(name)) for name in (chunk if isinstance(chunk, list) else [chunk]))
        for chunk in layout
    )


def _graphs(settings: Mapping[str, Any]) -> dict[str, Any]:
    kind = settings.get("model.cuda_graph_impl") or "none"
    if kind == "none":
        return {"cuda_graph_impl": "none", "cuda_graph_modules": []}
    stated = settings.get("model.cuda_graph_modules") or settings.get("model.cuda_graph_scope") or []
    listed = stated.split(",") if isinstance(stated, str) else [str(item) for item in stated]
    modules = [item.rpartition(".")[2] for item in listed]
    if kind == "local" and "full_iteration" in modules:
        kind = "full_iteration"
    return {"cuda_graph_impl": kind, "cuda_graph_modules": [name for name in modules if name not in _FULL_GRAPHS]}


def _overlap(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``comm_overlap`` makes of model, optimizer and gradients (CommOverlapConfig.setup)."""
    said = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("comm_overlap.")}
    if not said and settings.get("comm_overlap") in (None, False):
        return {}
    parallel = given.get("tensor_model_parallel_size") or 1, given.get("sequence_parallel")
    out: dict[str, Any] = {
        "tp_comm_overlap": bool(said.get("tp_comm_overlap")) and parallel[0] > 1 and bool(parallel[1]),
        "overlap_moe_expert_parallel_comm": bool(said.get("overlap_moe_expert_parallel_comm")),
        "delay_wgrad_compute": bool(said.get("delay_wgrad_compute")),
        "overlap_p2p_comm": (given.get("num_virtual_stages_per_pipeline_rank") or 1) > 1,
    }
    if said.get("overlap_p2p_comm") is not None:
        out["overlap_p2p_comm"] = bool(said["overlap_p2p_comm"])
    if given.get("use_distributed_optimizer") or given.get("use_megatron_fsdp"):
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            out[name] = said[name] if said.get(name) is not None else True
        if said.get("bucket_size") is not None:
            out["ddp_bucket_size"] = said["bucket_size"]
    return out


def _floats(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Numerics: the named recipe, then its fields; Bridge writes them over model, optimizer and gradients."""
    stated = {"mixed_precision.bf16", "mixed_precision.fp16"} & set(settings)
    name = settings.get("mixed_precision", None if stated else "bf16_mixed")
    said = {key.partition(".")[2]: value for key, value in settings.items() if key.startswith("mixed_precision.")}
    if name is None and not said:
        return {}
    fields = {**_FLOATS, **(fields_of(str(name)) or {} if name is not None else {}), **said}
    out = {key: fields[key] for key in _FLOATS}
    out["fp8_recipe"] = fields.get("fp8_recipe") or "tensorwise"
    out["reuse_grad_buf_for_mxfp8_param_ag"] = bool(fields.get("reuse_grad_buf_for_mxfp8_param_ag"))
    out["grad_reduce_in_bf16"] = bool(out["bf16"]) and fields.get("grad_reduce_in_fp32") is False
    out["accumulate_allreduce_grads_in_fp32"] = fields.get("grad_reduce_in_fp32") is not False
    return out


def _grids(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What Bridge derives from degrees: experts are not split by TP unless asked to; SP falls away without TP."""
    out: dict[str, Any] = {}
    if given.get("expert_tensor_parallel_size") is None and (given.get("expert_model_parallel_size") or 1) > 1:
        out["expert_tensor_parallel_size"] = 1
    if settings.get("dist.use_megatron_fsdp") or given.get("use_megatron_fsdp"):
        out |= {"use_megatron_fsdp": True, "use_distributed_optimizer": True, "ckpt_format": "fsdp_dtensor"}
        out["reuse_grad_buf_for_mxfp8_param_ag"] = False
    out["ckpt_format"] = settings.get("checkpoint.ckpt_format") or out.get("ckpt_format", "torch_dist")
    if not given.get("use_megatron_fsdp") and not out.get("use_megatron_fsdp"):
        out["data_parallel_sharding_strategy"] = "no_shard"
    return out
