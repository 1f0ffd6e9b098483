"""Software stacks that runs were measured with: what a blank cell means for each, and how stacks are named."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.specs.targets import load_target


@dataclass(frozen=True)
class Stack:
    """Defaults of a framework where a row says nothing.

    ``name`` groups frameworks that run the same code. ``overlap``: gradient reduction and parameter gather run beside
    compute. ``flash``: fused attention. ``fused_loss``: cross-entropy without an fp32 copy of the logits.
    """

    name: str
    sharding: str
    precision: str = "bf16"
    recompute: str = "none"
    sequence_parallel: bool = True
    overlap: bool = True
    tp_overlap: bool = False
    flash: bool = True
    fused_loss: bool = True
    gradient_dtype: str = "fp32"
    dispatcher: str = "alltoall"
    grouped: bool = True


#: First match of the ``framework`` column in lower case wins. Sources: the frameworks' own defaults.
STACKS: tuple[tuple[str, Stack], ...] = (
    ("automodel", Stack("automodel", "fsdp", gradient_dtype="bf16", dispatcher="flex", fused_loss=False)),
    ("megatron-bridge", Stack("megatron-bridge", "zero1", gradient_dtype="bf16")),
    ("nemo", Stack("nemo", "zero1", gradient_dtype="bf16", tp_overlap=True)),
    ("primus", Stack("megatron-rocm", "zero1")),
    ("sailor", Stack("megatron-deepspeed", "none", "fp32", sequence_parallel=False, overlap=False, flash=False,
                     fused_loss=False)),
    ("aceso", Stack("megatron-aceso", "none", "fp16", sequence_parallel=False, overlap=False, flash=False,
                    fused_loss=False)),
    ("megatron-deepspeed", Stack("megatron-deepspeed", "none", "fp16", sequence_parallel=False, overlap=False,
                                 flash=False, fused_loss=False, gradient_dtype="fp16")),
    ("deepspeed 3d", Stack("deepspeed-3d", "none", "fp16", sequence_parallel=False, overlap=False, flash=False,
                           fused_loss=False)),
    ("megatron", Stack("megatron-lm", "zero1")),
    ("llm-foundry", Stack("llm-foundry", "fsdp", fused_loss=False, gradient_dtype="bf16")),
    ("torchtitan", Stack("torchtitan", "fsdp", fused_loss=False)),
    ("nnscaler", Stack("nnscaler", "zero1", fused_loss=False)),
    ("galvatron", Stack("galvatron", "fsdp", fused_loss=False)),
    ("maxtext", Stack("maxtext", "fsdp", fused_loss=False, gradient_dtype="bf16", recompute="full")),
    ("paxml", Stack("paxml", "fsdp", fused_loss=False, gradient_dtype="bf16", recompute="full")),
    ("alpa", Stack("alpa", "none", "fp16", overlap=False, flash=False, fused_loss=False, sequence_parallel=False)),
)  # fmt: skip
#: A framework that is not in the table: mixed precision, plain data parallel with sharded optimizer.
UNKNOWN = Stack("other", "zero1")
#: The target whose capabilities the plans of all stacks borrow.
BASE_TARGET = load_target("megatron@0.19")


def stack_of(framework: str) -> Stack:
    """The stack of a ``framework`` cell."""
    words = framework.lower()
    return next((stack for part, stack in STACKS if part in words), UNKNOWN)


def release_of(framework: str, release: str) -> str:
    """A short label of a release: ``nemo 25.04``, ``dgxc 25.02``; words without digits stay as they are."""
    text = re.sub(r"\s*\(.*?\)", "", release).strip().lower()
    return re.sub(r"\bv(?=\d)", "", text)
