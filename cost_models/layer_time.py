"""The operators that layers are made of on one rank: products, streams, norms, tensor-parallel collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import NetworkLevel
from meshwright.specs.weights import Weight

from .collectives import collective_s, contention, exposed_s
from .local import Linear, Local, activation_element_bytes
from .multipliers import NEUTRAL, Multipliers
from .operators import Device, cast_bytes, linear_s, matmul_s, stream_s
from .overlap import Overlap
from .pieces import CALLS, REDUCE_CALLS, SEQUENCE_CALLS, Pieces


class LayerTimer:
    """Prices the operators of blocks for one model on one pool at all cell keys."""

    def __init__(
        self,
        at: Local,
        on: Device,
        levels: Sequence[NetworkLevel],
        overlap: Overlap = Overlap(),  # noqa: B008 (frozen)
        by: Multipliers = NEUTRAL,
    ):
        self.at, self.on, self.levels, self.overlap, self.by = at, on, levels, overlap, by
        self.wide = activation_element_bytes(at.workload.precision)
        self.low = at.workload.precision in ("fp8", "mxfp8", "nvfp4")

    def stream(
        self,
        out: Pieces,
        module: str,
        kind: str,
        forward_bytes: FloatArray,
        backward_bytes: FloatArray,
        share: float | None = None,
        graph: str = "",
        times: int = 1,
    ) -> None:
        """A memory-bound operator that runs so many ``times``."""
        forward, backward = stream_s(self.on, forward_bytes, share), stream_s(self.on, backward_bytes, share)
        for _ in range(times):
            out.add("memory_bound", module, forward, backward, CALLS[kind], graph)

    def linear(
        self, out: Pieces, module: str, linear: Linear, tokens: FloatArray, trained: bool, corrected: str = ""
    ) -> None:
        """Forward, input gradient and (if trained) weight gradient of a GEMM on ``tokens`` rows for each group."""
        size_in, size_out = linear.inputs, linear.outputs

        groups, low = linear.groups, linear.low_precision
        forward, backward, weight_s = linear_s(self.on, tokens, size_in, size_out, groups, low, linear.expert)
        weight: FloatArray | float = weight_s if trained else 0.0
        calls: FloatArray | float = CALLS["experts" if linear.expert else "linear"]
        if linear.expert and self.low:
            calls = calls + CALLS["quantised_expert"] * linear.groups
        corrected = corrected or ("experts" if linear.expert else "")
        out.add("gemm", module, forward, backward + weight, calls, corrected=corrected, weight=weight)
        if self.low and linear.low_precision:
            # Quantise the input forward and the gradient backward.
            rows, precision = tokens * linear.groups, self.on.precision
            forward = stream_s(self.on, cast_bytes(precision, rows * size_in))
            out.add("memory_bound", module, forward, stream_s(self.on, cast_bytes(precision, rows * size_out)), 2)
        lora = self.at.workload.lora
        if lora is not None and self.at.adapter(linear, lora):
            rank = np.full_like(tokens, lora.rank)
            down = matmul_s(self.on, tokens * linear.groups, rank, size_in, low_precision=False)
            up = matmul_s(self.on, tokens * linear.groups, size_out, rank, low_precision=False)
            out.add("gemm", module, down + up, 2 * (down + up), 2 * CALLS["linear"], weight=down + up)

    def linears(self, out: Pieces, module: str, weights: tuple[Weight, ...], trained: bool) -> None:
        """The dense GEMMs of a part; replicated maps run on the rank's own tokens under sequence parallelism."""
        for linear in self.at.linears(weights):
            tokens = self.at.own_tokens if linear.split == "replicated" else self.at.tokens
            self.linear(out, module, linear, tokens, trained)

    def norms(self, out: Pieces, count: int, residuals: int) -> None:
        """Norms (read and write; backward reads two, writes one) and fused residual additions."""
        size = self.wide * self.at.model.hidden_size * self.at.own_tokens
        self.stream(out, "layernorm", "norm", 2 * size, 3 * size, times=count)
        self.stream(out, "residual", "residual", 3 * size, 2 * size, times=residuals)

    def tensor_parallel(self, out: Pieces, module: str, compute: FloatArray, gathered_width: int | None = None) -> None:
        """Collectives around one column-row pair over TP, with ``compute`` the pair's forward GEMM seconds.

        ``gathered_width`` is the width of what the column part gathers, the hidden size by default.

        Sequence parallel: all-gather in, reduce-scatter out; backward the mirror image, plus the input gathered again
        for the weight gradient, which Megatron hides under the input gradient. Otherwise one all-reduce each way.
        With ``overlap.tensor`` all that the backward moves shares one window, its two products.
        """
        at = self.at
        volume = self.wide * at.model.hidden_size * at.tokens
        if not at.sequence_parallel:
            once = collective_s("all_reduce", self.levels, volume, at.tp, 1)
            out.add("tp_comm", module, once, once, np.where(at.tp > 1, REDUCE_CALLS, 0.0))
            return
        gathered = volume * (gathered_width or at.model.hidden_size) / at.model.hidden_size
        gather = collective_s("all_gather", self.levels, gathered, at.tp, 1)
        scatter = collective_s("reduce_scatter", self.levels, volume, at.tp, 1)
        both = gather + scatter
        share = contention("all_gather", self.levels, at.tp, 1)
        if self.overlap.tensor:
            # Ring exchange by chunks: the first chunk and what the products cannot cover stay visible.
            rest = both * (1 - 1 / at.tp)
            forward = both / at.tp + exposed_s(rest, compute, share)
            backward = both / at.tp + exposed_s(rest + gather, 2 * compute, share)
        else:
            forward, backward = both, both + exposed_s(gather, compute, share)
        out.add("tp_comm", module, forward, backward, np.where(at.tp > 1, SEQUENCE_CALLS, 0.0))

    def activation(self, out: Pieces, module: str, elements: FloatArray, gated: bool) -> None:
        """An activation function on ``elements`` results; ``gated`` ones read two."""
        read = 2.0 if gated else 1.0
        size = self.wide * elements
        self.stream(out, module, "activation", (read + 1) * size, (2 * read + 1) * size)

    def pieces(self) -> Pieces:
        return Pieces(self.at.none, self.by)
