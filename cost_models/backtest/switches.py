"""What a run's row says of its framework's switches: a plan's options and the target that prices it."""

from __future__ import annotations

import re
from typing import get_args

from meshwright.specs.plan import GraphScope, Options
from meshwright.specs.target import OffloadModule, Target

from .rows import Run
from .stacks import BASE_TARGET, MEGATRON_STACKS, TORCH_STACKS, Stack, release_of

#: Pieces of torchtitan's chunked loss by default.
CHUNKED_LOSS = 8


def options_of(run: Run, stack: Stack, tp: int, notes: list[str]) -> Options:
    blank = not run.flags
    overlap = stack.overlap and "no comm overlap" not in run.text
    tp_overlap = run.flag("tp_comm_overlap", stack.tp_overlap and tp > 1) or "asynctp" in run.text
    if blank and stack.overlap:
        notes.append("communication overlap as the framework's default: flags not stated")
    dispatcher = run.flags.get("moe_dispatcher", "")
    flex = "flex" in dispatcher or "deepep" in run.text or "hybridep" in run.text
    graph = run.flags.get("cuda_graph") or run.flags.get("cuda_graphs") or "none"
    if "cudagraph" in run.text:
        graph = "true"
    sequence_parallel = stack.sequence_parallel if run.sequence_parallel is None else run.sequence_parallel
    return Options.parse(
        {
            "sequence_parallel": tp > 1 and sequence_parallel,
            "overlap_grad_reduce": run.flag("overlap_grad_reduce", overlap),
            "overlap_param_gather": run.flag("overlap_param_gather", overlap),
            "tp_comm_overlap": tp > 1 and tp_overlap,
            "overlap_p2p": run.flag("overlap_p2p", True),
            "ep_comm_overlap": run.flag("ep_comm_overlap", False),
            "delay_wgrad": run.flag("delay_wgrad", False),
            # NeMo's DeepSeek and Llama 4 configurations turn it on; the deduplicating dispatchers forbid it (Megatron).
            "moe_shared_expert_overlap": run.flag("shared_expert_overlap", stack.name == "nemo" and not flex),
            "dispatcher": "flex" if flex else stack.dispatcher,
            "cuda_graph": graph not in ("none", "false", ""),
            "cuda_graph_scope": graph_scope(graph),
            "fused_cross_entropy": stack.fused_loss or fused_loss(run) or compiled_loss(run, stack),
            "grouped_gemm": True,
            "loss_chunks": loss_chunks(run),
            "reshard_after_forward": run.flag("reshard_after_forward", True),
            "activation_offload_layers": offloaded_layers(run),
            "activation_offload_modules": tuple(
                name for name in get_args(OffloadModule) if name in re.split(r"[+,]", run.flags.get("act_offload", ""))
            ),
        }
    )


def loss_chunks(run: Run) -> int | None:
    """Pieces of a chunked loss."""
    stated = run.flags.get("loss_chunks", "")
    if stated.isdigit():
        return int(stated)
    return CHUNKED_LOSS if "chunkedceloss" in run.text or "chunk loss" in run.text else None


def offloaded_layers(run: Run) -> int:
    """Layers whose activations go to host memory."""
    match = re.search(r"(?:act_cpu_offload_layers|cpu_offloading_num_layers)\W+(\d+)", run.text)
    return int(match[1]) if match else 0


def graph_scope(text: str) -> tuple[str, ...]:
    """Scopes of ``transformer_engine:attn+moe_router``; none stated means whole layers."""
    known = get_args(GraphScope)
    return tuple(scope for scope in known if scope in re.split(r"[:+/]", text))


def target_of(run: Run, stack: Stack, options: Options) -> Target:
    """The base target with the stack's own capabilities."""
    return BASE_TARGET.model_copy(
        update={
            "name": stack.name,
            "framework": stack.name,
            "version": release_of(run.framework, run.release),
            "sequence_parallel": options.sequence_parallel or (run.tp or 1) == 1,
            "fused_attention": fused_attention(run, stack),
            "deepspeed_pipeline": "deepspeed" in stack.name,
            "logit_bytes": logit_bytes(run, stack),
            "fused_activation": stack.name not in TORCH_STACKS or compiled(run, "model"),
            "fused_elementwise": stack.name != "torchtitan" or compiled(run, "model"),
            "fused_norm": fused_norm(run, stack),
            "merged_projections": stack.name != "torchtitan",
            "attention_kernel": attention_kernel(run, stack),
            "casts": casts(run, stack),
            "gradient_placeholders": stack.name in MEGATRON_STACKS
            and not run.flag("no_gradient_accumulation_fusion", False),
            "gradient_buffer": stack.name not in TORCH_STACKS,
            "low_precision_inputs": stack.name != "torchtitan",
            "gathered_inputs_kept": stack.name == "torchtitan" and (run.tp or 1) > 1,
        }
    )


def logit_bytes(run: Run, stack: Stack) -> float | None:
    """Live bytes a logit; torchtitan compiles the loss with the model since 2025."""
    return 4.0 if fused_loss(run) or compiled_loss(run, stack) else stack.logit_bytes


def compiled_loss(run: Run, stack: Stack) -> bool:
    """torchtitan compiles the loss with the model since 2025."""
    return stack.name == "torchtitan" and year_of(run) >= "2025" and compiled(run, "loss")


def year_of(run: Run) -> str:
    return max(re.findall(r"\b20[12]\d\b", run.release), default="")


def fused_norm(run: Run, stack: Stack) -> bool:
    """Whether RMSNorm is one kernel: compiled, or PyTorch's own since release 2.9 of late 2025."""
    return stack.name != "torchtitan" or compiled(run, "model") or year_of(run) >= "2026"


def attention_kernel(run: Run, stack: Stack) -> str:
    """llm-foundry calls FlashAttention-2; PyTorch's attention takes it first on Hopper, until torchtitan asks for cuDNN
    (torchtitan 0.3, models/common/attention.py)."""
    flash2 = stack.name == "llm-foundry" or (stack.name == "torchtitan" and year_of(run) <= "2025")
    return "flash2" if flash2 else "native"


def casts(run: Run, stack: Stack) -> str:
    """torchao's recipe by the row's precision; one scale for each operand is its default."""
    if stack.name != "torchtitan":
        return "transformer_engine"
    if run.precision.startswith("mxfp8"):
        return "blocks"
    return "rowwise" if "rowwise" in run.precision else "tensorwise"


def compiled(run: Run, part: str) -> bool:
    """Whether torch.compile covers ``part`` (``model`` or ``loss``); without a stated part it covers both."""
    return "torch.compile" in run.text or part in run.flags.get("compile", "")


def fused_loss(run: Run) -> bool:
    """Whether the row says that cross-entropy is fused."""
    return bool(re.search(r"\bce fusion|cross_entropy_\w*fusion=true", run.text))


def fused_attention(run: Run, stack: Stack) -> bool:
    """Whether attention runs as one kernel: not in stacks of 2022 and before (flash attention is from mid-2022)."""
    if run.flags.get("attention_backend") == "unfused":
        return False
    years = [int(year) for year in re.findall(r"\b(20[12]\d)\b", run.release + " " + run.row.get("source_path", ""))]
    return stack.flash and not (years and max(years) <= 2022)
