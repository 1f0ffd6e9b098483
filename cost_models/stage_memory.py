"""What one pipeline stage allocates: the parts of its peak, and its first step."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.specs.workload import Workload

from . import memory
from .protocol import STATIC


def parts(
    static: Sequence[float], activations: float, transient: float, logits: float, gradient_buffer: bool
) -> dict[str, int]:
    """Allocated bytes at the peak by kind, in whole bytes.

    ``static`` [STATIC] weights, gradients and optimizer state; ``transient`` includes ``logits`` and the workspaces.
    Without a ``gradient_buffer`` gradients come up while activations go: they count with what they need beyond the
    room that those leave.
    """
    out = dict(zip(STATIC, static, strict=True))
    if not gradient_buffer:
        out["gradients"] = max(out["gradients"] - (activations + transient - memory.WORKSPACE_BYTES), 0.0)
    out |= {
        "activations": activations,
        "logits": logits,
        "transient": transient - logits - memory.WORKSPACE_BYTES,
        "fixed": memory.WORKSPACE_BYTES,
    }
    return {name: max(round(size), 0) for name, size in out.items()}


def first_step_bytes(parts: dict[str, int], workload: Workload) -> int:
    """Allocated bytes at the peak of the first step: the optimizer creates its moments at the end of it."""
    moments = memory.moment_bytes_per_param(workload) / memory.optimizer_bytes_per_param(workload)
    passes = sum(parts.values()) - parts["optimizer"] * moments
    states = sum(parts[name] for name in (*STATIC, "fixed"))
    return round(max(passes, states))
