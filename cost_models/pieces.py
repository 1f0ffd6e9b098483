"""Seconds of a block by term and module, and what its host calls and its recomputation add."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .multipliers import NEUTRAL, Multipliers
from .overlap import hidden_s
from .protocol import TERMS

#: Framework calls that one operator costs the host in the forward pass, counted in Megatron's layer code with
#: Transformer Engine modules. Its grouped linear map loops over the experts to quantise each one's weight and input.
#: Router (top-k, masks, balance statistics), permutation and all-to-all (sizes read back by the host) are set so that a
#: launch-bound layer of Qwen3-30B-A3B with 16 local experts takes 9 ms forward and backward, as published for B200 at
#: micro-batch 1 without graphs (Megatron-Bridge performance summary, NeMo 25.11 and 26.02).
CALLS = {
    "norm": 1, "linear": 3, "rope": 2, "attention": 4, "activation": 1, "residual": 1, "router": 70, "permute": 40,
    "all_to_all": 20, "experts": 10, "scan": 6, "loss": 6, "embedding": 3, "quantised_expert": 4, "unfused": 12,
}  # fmt: skip
#: Framework calls of tensor parallelism, counted in Megatron's mappings.py and cross_entropy.py: one all-reduce; a
#: gather and a scatter with a buffer each under sequence parallelism; around the loss a gather with its buffer and
#: three all-reduces.
REDUCE_CALLS, SEQUENCE_CALLS, LOSS_EXCHANGE_CALLS = 1.0, 4.0, 5.0
#: Calls of the backward pass over those of the forward pass (autograd runs in C++ with the same kernels twice).
BACKWARD_CALLS = 1.2


#: Terms under which communication can hide.
COMPUTE = ("gemm", "attention", "memory_bound")


#: Norm in which the host's and the GPU's time add. Where both take as long, neither hides the other: runs of vTrain
#: (GPT 2048 wide, TP 2, micro-batch 2) take 4.9 ms a layer where the host alone takes 3.6 (micro-batch 1) and the GPU
#: 3.3 (half of micro-batch 4): a norm between 2 and 3.
HOST_NORM = 3.0


def host_exposed_s(host_s: FloatArray, busy_s: FloatArray) -> FloatArray:
    """What the host's calls add to the GPU's time: nothing to a busy GPU, all but its own work to a fast one."""
    longest = np.maximum(np.maximum(host_s, busy_s), 1e-30)
    both = longest * ((host_s / longest) ** HOST_NORM + (busy_s / longest) ** HOST_NORM) ** (1 / HOST_NORM)
    out: FloatArray = both - busy_s
    return out


@dataclass
class Pieces:
    """Seconds by term and module. ``modules`` maps a recomputable module to its forward seconds; ``weight_gradient``
    is the part of ``backward`` that weight gradients take."""

    count: int
    by: Multipliers = NEUTRAL
    forward: FloatArray = field(init=False)
    backward: FloatArray = field(init=False)
    weight_gradient: FloatArray = field(init=False)
    modules: dict[str, FloatArray] = field(default_factory=dict)
    calls: dict[tuple[str, str], FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forward = np.zeros((self.count, len(TERMS)))
        self.backward = np.zeros((self.count, len(TERMS)))
        self.weight_gradient = np.zeros(self.count)

    def add(
        self,
        term: str,
        module: str,
        forward: FloatArray,
        backward: FloatArray,
        calls: FloatArray | float = 0.0,
        graph: str = "",
        corrected: str = "",
        weight: FloatArray | float = 0.0,
    ) -> None:
        """Book an operator of ``module`` under ``term`` with its host ``calls``.

        ``graph`` is the CUDA graph scope that captures it (default: the module), ``corrected`` the correction that
        applies (default: the term's), ``weight`` the part of ``backward`` that is a weight gradient.
        """
        factor, at = getattr(self.by, corrected or term), TERMS.index(term)
        forward, backward = factor * forward, factor * backward
        self.forward[:, at] += forward
        self.backward[:, at] += backward
        if not isinstance(weight, float):
            self.weight_gradient += factor * weight
        known, key = self.modules.get(module), (module, graph or module)
        self.modules[module] = forward if known is None else known + forward
        before = self.calls.get(key)
        self.calls[key] = np.full(self.count, calls, dtype=float) if before is None else before + calls

    def hide(
        self, term: str, module: str, forward: FloatArray, backward: FloatArray, share: FloatArray | float, most: float
    ) -> None:
        """Hide what ``term`` has booked under windows of ``forward`` and ``backward`` seconds of compute, at most the
        share ``most`` of it; ``share`` of the compute is lost while both run."""
        at = TERMS.index(term)
        for seconds, window in ((self.forward, forward), (self.backward, backward)):
            saved = (1 - share) * hidden_s(seconds[:, at], window, most)
            seconds[:, at] -= saved
            if seconds is self.forward:
                self.modules[module] = self.modules[module] - saved

    def take(self, rows: IntArray) -> Pieces:
        """The pieces of ``rows``, repeats allowed."""
        out = Pieces(len(rows), self.by)
        out.forward, out.backward = self.forward[rows], self.backward[rows]
        out.weight_gradient = self.weight_gradient[rows]
        out.modules = {module: seconds[rows] for module, seconds in self.modules.items()}
        out.calls = {key: calls[rows] for key, calls in self.calls.items()}
        return out

    def finish(
        self, again: frozenset[str], host_call_s: float, graphs: frozenset[str] = frozenset()
    ) -> tuple[FloatArray, FloatArray]:
        """[C, TERMS] seconds forward and backward when the modules ``again`` (``*`` for all) are computed twice.

        What the host needs beyond the GPU's time is exposed: the slower of the two sets the pace. Calls inside the
        CUDA graph scopes ``graphs`` (``*`` for all) cost the host nothing.
        """
        forward, backward = self.forward.copy(), self.backward.copy()
        repeated = [m for m in self.modules if "*" in again or m in again]
        backward[:, TERMS.index("recompute")] = sum((self.modules[m] for m in repeated), np.zeros(self.count))
        none = np.zeros(self.count)
        launched = {key: n for key, n in self.calls.items() if "*" not in graphs and key[1] not in graphs}
        calls = sum(launched.values(), none)
        calls_back = BACKWARD_CALLS * calls + sum((n for key, n in launched.items() if key[0] in repeated), none)
        for seconds, number in ((forward, calls), (backward, calls_back)):
            busy = seconds.sum(axis=1)
            seconds[:, TERMS.index("host")] = host_exposed_s(number * host_call_s, busy)
        return forward, backward
