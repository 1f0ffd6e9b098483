"""Software stacks that runs were measured with: what a blank cell means for each, and how stacks are named."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.specs.targets import load_target

from ..learned import FAMILIES


@dataclass(frozen=True)
class Stack:
    """Defaults of a framework where a row says nothing.

    ``name`` groups frameworks that run the same code. ``overlap``: gradient reduction and parameter gather run beside
    compute. ``flash``: fused attention. ``fused_loss``: cross-entropy without an fp32 copy of the logits;
    ``logit_bytes`` live at once for each logit. ``dropout`` is on by default. ``low_precision_primary``: stored weights
    are themselves 8 bit where the GEMMs are.
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
    logit_bytes: float | None = None
    dropout: bool = False
    low_precision_primary: bool = False


#: Stacks on Megatron-LM with Transformer Engine.
MEGATRON_STACKS = tuple(name for name, family in FAMILIES.items() if family == "megatron")
#: Stacks on PyTorch's own full sharding and autograd: gradients are tensors that come and go.
TORCH_STACKS = ("torchtitan", "automodel", "llm-foundry", "transformers")
#: Megatron's own cross-entropy works in place on the fp32 copy of bf16 logits.
IN_PLACE = 6.0
#: The fused cross-entropy of flash-attention, llm-foundry's default loss, puts the gradient in place of the logits.
FLASH = 4.0
#: XLA fuses the softmax of the loss.
XLA = 4.0
#: First match of the ``framework`` column in lower case wins. Sources: the frameworks' own defaults.
STACKS: tuple[tuple[str, Stack], ...] = (
    ("automodel", Stack("automodel", "fsdp", gradient_dtype="bf16", dispatcher="flex", fused_loss=False)),
    ("megatron-bridge", Stack("megatron-bridge", "zero1", gradient_dtype="bf16", low_precision_primary=True)),
    ("nemo", Stack("nemo", "zero1", gradient_dtype="bf16", tp_overlap=True, logit_bytes=IN_PLACE,
                   low_precision_primary=True)),
    ("primus", Stack("megatron-rocm", "zero1")),
    ("sailor", Stack("sailor-deepspeed", "none", "fp32", sequence_parallel=False, overlap=False, flash=False,
                     fused_loss=False, logit_bytes=IN_PLACE)),
    ("aceso", Stack("megatron-aceso", "none", "fp16", sequence_parallel=False, overlap=False, flash=False,
                    fused_loss=False, logit_bytes=IN_PLACE, dropout=True)),
    ("megatron-deepspeed", Stack("megatron-deepspeed", "none", "fp16", sequence_parallel=False, overlap=False,
                                 flash=False, fused_loss=False, gradient_dtype="fp16", logit_bytes=IN_PLACE,
                                 dropout=True)),
    ("deepspeed 3d", Stack("deepspeed-3d", "none", "fp16", sequence_parallel=False, overlap=False, flash=False,
                           fused_loss=False, logit_bytes=IN_PLACE, dropout=True)),
    ("megatron", Stack("megatron-lm", "zero1", logit_bytes=IN_PLACE, low_precision_primary=True)),
    ("llm-foundry", Stack("llm-foundry", "fsdp", fused_loss=False, gradient_dtype="bf16", logit_bytes=FLASH)),
    ("torchtitan", Stack("torchtitan", "fsdp", fused_loss=False)),
    ("nnscaler", Stack("nnscaler", "zero1", fused_loss=False)),
    ("galvatron", Stack("galvatron", "fsdp", fused_loss=False)),
    ("transformers", Stack("transformers", "fsdp", fused_loss=False)),
    ("maxtext", Stack("maxtext", "fsdp", fused_loss=False, gradient_dtype="bf16", recompute="full", logit_bytes=XLA)),
    ("paxml", Stack("paxml", "fsdp", fused_loss=False, gradient_dtype="bf16", recompute="full", logit_bytes=XLA)),
    ("alpa", Stack("alpa", "none", "fp16", overlap=False, flash=False, fused_loss=False, sequence_parallel=False,
                   gradient_dtype="fp16", logit_bytes=XLA)),
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
