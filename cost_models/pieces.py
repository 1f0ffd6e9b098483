"""Seconds of a block by term and module, and what its host calls and its recomputation add."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.specs.batch import FloatArray, IntArray

from .multipliers import NEUTRAL, Multipliers
from .overlap import hidden_s
from .protocol import TERMS

#: Framework calls that one operator costs the host in the forward pass, counted in Megatron's layer code with
#: Transformer Engine modules. Its grouped linear map loops over the experts to quantise each one's weight and input.
#: Router (top-k, masks, balance statistics), permutation and all-to-all (sizes read back by the host) are set so that a
#: launch-bound layer of Qwen3-30B-A3B with 16 local experts takes 9 ms forward and backward, as published for B200 at
#: micro-batch 1 without graphs (Megatron-Bridge performance summary, NeMo 25.11 and 26.02). The gated delta rule is
#: counted in Megatron's gated_delta_net.py, which computes gates and norms by single operations, with
#: flash-linear-attention's eight Triton launches at two calls each.
CALLS = {
    "norm": 1, "linear": 3, "rope": 2, "attention": 4, "activation": 1, "residual": 1, "router": 70, "permute": 40,
    "all_to_all": 20, "experts": 10, "scan": 6, "delta_rule": 40, "loss": 6, "embedding": 3,
    "quantised_expert": 4, "unfused": 12,
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


def host_exposed_s(host_s: FloatArray | float, busy_s: FloatArray) -> FloatArray:
    """What the host's calls add to the GPU's time: nothing to a busy GPU, all but its own work to a fast one."""
    longest = np.maximum(np.maximum(host_s, busy_s), 1e-30)
    both = longest * ((host_s / longest) ** HOST_NORM + (busy_s / longest) ** HOST_NORM) ** (1 / HOST_NORM)
    out: FloatArray = both - busy_s
    return out


#: [C] seconds by what they are booked under.
Booked = dict[str, FloatArray]
#: Module of what is computed again where every second product is kept, beside the norms.
ALTERNATE = "alternate_ops"


@dataclass
class Pieces:
    """Seconds by term and module. ``modules`` maps a recomputable module to its forward seconds; ``weight_gradient``
    is the part of ``backward`` that weight gradients take. ``none`` [C] are zeros. Arrays are never changed in place.
    Where a plan wants it (``alternate``), module :data:`ALTERNATE` holds once more what is computed again by a policy
    that keeps every second of the ``products``.
    """

    none: FloatArray
    by: Multipliers = NEUTRAL
    alternate: bool = False
    forward: Booked = field(default_factory=dict)
    backward: Booked = field(default_factory=dict)
    weight_gradient: FloatArray | float = 0.0
    modules: Booked = field(default_factory=dict)
    calls: dict[tuple[str, str], FloatArray | float] = field(default_factory=dict)
    products: int = 0

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
        factor, key = getattr(self.by, corrected or term), (module, graph or module)
        forward, backward = factor * forward, factor * backward
        for booked, under, seconds in (
            (self.forward, term, forward),
            (self.backward, term, backward),
            (self.modules, module, forward),
        ):
            booked[under] = booked[under] + seconds if under in booked else seconds
        if not isinstance(weight, float):
            self.weight_gradient = self.weight_gradient + factor * weight
        self.calls[key] = self.calls.get(key, 0.0) + calls

    def compute(self) -> tuple[FloatArray, FloatArray]:
        """[C] seconds forward and backward under which communication can hide."""
        forward, backward = (
            sum((by.get(t, self.none) for t in COMPUTE), self.none) for by in (self.forward, self.backward)
        )
        return forward, backward

    def repeat(self, term: str, forward: FloatArray) -> None:
        """Book ``forward`` seconds, part of what is booked already, as computed again under :data:`ALTERNATE`."""
        if not self.alternate:
            return
        seconds = getattr(self.by, term) * forward
        known = self.modules.get(ALTERNATE)
        self.modules[ALTERNATE] = seconds if known is None else known + seconds

    def hide(
        self, term: str, module: str, forward: FloatArray, backward: FloatArray, share: FloatArray | float, most: float
    ) -> None:
        """Hide what ``term`` has booked under windows of ``forward`` and ``backward`` seconds of compute, at most the
        share ``most`` of it; ``share`` of the compute is lost while both run."""
        for seconds, window in ((self.forward, forward), (self.backward, backward)):
            saved = (1 - share) * hidden_s(seconds[term], window, most)
            seconds[term] = seconds[term] - saved
            if seconds is self.forward:
                self.modules[module] = self.modules[module] - saved

    def copy(self) -> Pieces:
        """Pieces to book more in."""
        return replace(
            self,
            forward=dict(self.forward),
            backward=dict(self.backward),
            modules=dict(self.modules),
            calls=dict(self.calls),
        )

    def take(self, rows: IntArray) -> Pieces:
        """The pieces of ``rows``, repeats allowed."""

        def of(booked: Booked) -> Booked:
            return {name: seconds[rows] for name, seconds in booked.items()}

        calls = {key: number if isinstance(number, float) else number[rows] for key, number in self.calls.items()}
        weight = (self.none + self.weight_gradient)[rows]
        booked = of(self.forward), of(self.backward), weight, of(self.modules), calls
        return Pieces(self.none[rows], self.by, self.alternate, *booked, self.products)

    def finish(
        self, again: frozenset[str], host_call_s: float, graphs: frozenset[str] = frozenset()
    ) -> tuple[FloatArray, FloatArray]:
        """[C, TERMS] seconds forward and backward when the modules ``again`` (``*`` for all) are computed twice.

        What the host needs beyond the GPU's time is exposed: the slower of the two sets the pace. Calls inside the
        CUDA graph scopes ``graphs`` (``*`` for all) cost the host nothing.
        """
        forward, backward = (np.zeros((len(self.none), len(TERMS))) for _ in range(2))
        for seconds, booked in ((forward, self.forward), (backward, self.backward)):
            for term, each in booked.items():
                seconds[:, TERMS.index(term)] = each
        repeated = [m for m in self.modules if m in again or ("*" in again and m != ALTERNATE)]
        backward[:, TERMS.index("recompute")] = sum((self.modules[m] for m in repeated), self.none)
        launched = {key: n for key, n in self.calls.items() if "*" not in graphs and key[1] not in graphs}
        calls = sum(launched.values())
        calls_back = BACKWARD_CALLS * calls + sum(n for key, n in launched.items() if key[0] in repeated)
        for seconds, number in ((forward, calls), (backward, calls_back)):
            busy = seconds.sum(axis=1)
            seconds[:, TERMS.index("host")] = host_exposed_s(number * host_call_s, busy)
        return forward, backward
