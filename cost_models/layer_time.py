"""The operators that layers are made of on one rank: products, streams, norms, tensor-parallel collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import NetworkLevel
from meshwright.specs.weights import Weight

from .casts import CASTS, TURNED
from .collectives import collective_s, contention, exposed_s
from .eager import GATED, RMS_NORM
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
        alternate: bool = False,
    ):
        self.at, self.on, self.levels, self.overlap, self.by = at, on, levels, overlap, by
        self.alternate = alternate
        self.wide = activation_element_bytes(at.workload.precision)
        self.low = at.workload.precision in ("fp8", "mxfp8", "nvfp4")
        self.casts = CASTS[at.target.casts] if self.low else None

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
            if kind in ("rope", "activation"):
                out.repeat("memory_bound", forward)
            out.add("memory_bound", module, forward, backward, CALLS[kind], graph)

    def linear(
        self, out: Pieces, module: str, linear: Linear, tokens: FloatArray, trained: bool, corrected: str = ""
    ) -> None:
        """Forward, input gradient and (if trained) weight gradient of a GEMM on ``tokens`` rows for each group."""
        size_in, size_out = linear.inputs, linear.outputs

        groups, low = linear.groups, linear.low_precision
        corrected = corrected or ("experts" if linear.expert else "")
        merged = self.at.target.merged_projections or len(linear.weights) == 1
        each = [size_out] if merged else [self.at.shape(weight)[1] for weight in linear.weights]
        parts = [linear_s(self.on, tokens, size_in, part, groups, low, linear.expert) for part in each]
        if self.casts and low:
            parts = [(x / self.casts.rate, y / self.casts.rate, z / self.casts.rate) for x, y, z in parts]
        forward, backward, weight_s = parts[0]
        if not merged:
            forward, backward, weight_s = (np.sum(seconds, axis=0) for seconds in zip(*parts, strict=True))
            # The gradients of the shared input are added up.
            backward = backward + stream_s(self.on, self.wide * (len(each) + 1) * tokens * groups * size_in)
        for part in parts:
            out.products += 1
            if not out.products % 2:
                out.repeat(corrected or "gemm", part[0])
        weight: FloatArray | float = weight_s if trained else 0.0
        calls: FloatArray | float = CALLS["experts" if linear.expert else "linear"] * len(each)
        if linear.expert and self.low:
            calls = calls + CALLS["quantised_expert"] * linear.groups
        out.add("gemm", module, forward, backward + weight, calls, corrected=corrected, weight=weight)
        if self.low and linear.low_precision:
            self._casts(out, module, linear, tokens * linear.groups)
        lora = self.at.workload.lora
        if lora is not None and self.at.adapter(linear, lora):
            rank = np.full_like(tokens, lora.rank)
            down = matmul_s(self.on, tokens * linear.groups, rank, size_in, low_precision=False)
            up = matmul_s(self.on, tokens * linear.groups, size_out, rank, low_precision=False)
            out.add("gemm", module, down + up, 2 * (down + up), 2 * CALLS["linear"], weight=down + up)

    def _casts(self, out: Pieces, module: str, linear: Linear, rows: FloatArray) -> None:
        """Quantise the input forward and the gradient backward, and the weight where the recipe does so each time."""
        inputs, outputs, precision, how = rows * linear.inputs, rows * linear.outputs, self.on.precision, self.casts
        if how is None:
            forward, backward = cast_bytes(precision, inputs), cast_bytes(precision, outputs)
            out.add("memory_bound", module, stream_s(self.on, forward), stream_s(self.on, backward), 2)
            return
        weights = linear.inputs * linear.outputs * linear.groups
        input_forward: FloatArray | float = how.input_forward
        input_backward: FloatArray | float = how.input_backward
        gradient: FloatArray | float = how.gradient
        if how.before_gather and self.at.sequence_parallel and linear.split != "replicated":
            # A rank casts its own tokens; what it gathers is turned round for the weight gradient.
            many = self.at.tp > 1
            if linear.split == "column":
                input_forward = input_forward / self.at.tp
                input_backward = np.where(many, TURNED, input_backward)
            else:
                gradient = np.where(many, gradient / self.at.tp + TURNED, gradient)
        forward = input_forward * inputs + how.weight_forward * weights
        backward = input_backward * inputs + gradient * outputs + how.weight_backward * weights
        first, second = (stream_s(self.on, moved, kernels=how.passes) for moved in (forward, backward))
        if not out.products % 2:
            out.repeat("memory_bound", first)
        out.add("memory_bound", module, first, second, how.passes)

    def linears(self, out: Pieces, module: str, weights: tuple[Weight, ...], trained: bool) -> None:
        """The dense GEMMs of a part; replicated maps run on the rank's own tokens under sequence parallelism."""
        for linear in self.at.linears(weights):
            tokens = self.at.own_tokens if linear.split == "replicated" else self.at.tokens
            self.linear(out, module, linear, tokens, trained)

    def norms(self, out: Pieces, count: int, residuals: int) -> None:
        """Norms (read and write; backward reads two, writes one) and fused residual additions."""
        size = self.wide * self.at.model.hidden_size * self.at.own_tokens
        eager = not self.at.target.fused_norm and self.at.model.norm == "RMSNorm"
        elements = self.at.model.hidden_size * self.at.own_tokens
        ways = (RMS_NORM.forward * elements, RMS_NORM.backward * elements) if eager else (2 * size, 3 * size)
        self.stream(out, "layernorm", "norm", *ways, times=count)
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
        if self.casts and self.casts.before_gather:
            gathered = gathered / self.wide
        gather = collective_s("all_gather", self.levels, gathered, at.tp, 1)
        scatter = collective_s("reduce_scatter", self.levels, volume, at.tp, 1)
        both = gather + scatter
        share = contention("all_gather", self.levels, at.tp, 1)
        again = np.zeros_like(gather) if at.target.gathered_inputs_kept else gather
        if self.overlap.tensor:
            # Ring exchange by chunks: the first chunk and what the products cannot cover stay visible.
            late = gather if self.casts and not self.casts.before_gather else np.zeros_like(gather)
            chunked = both - late  # a cast between gather and product waits for the whole
            rest = chunked * (1 - 1 / at.tp)
            forward = late + chunked / at.tp + exposed_s(rest, compute, share)
            backward = late + chunked / at.tp + exposed_s(rest + again, 2 * compute, share)
        else:
            forward, backward = both, both + exposed_s(again, compute, share)
        # The results of reduce-scatters are kept, those of gathers are not.
        out.repeat("tp_comm", forward * gather / np.maximum(both, 1e-30))
        out.add("tp_comm", module, forward, backward, np.where(at.tp > 1, SEQUENCE_CALLS, 0.0))

    def activation(self, out: Pieces, module: str, elements: FloatArray, gated: bool) -> None:
        """An activation function on ``elements`` results; ``gated`` ones read two."""
        read = 2.0 if gated else 1.0
        size = self.wide * elements
        if gated and not self.at.target.fused_elementwise:
            self.stream(out, module, "activation", GATED.forward * elements, GATED.backward * elements)
            return
        self.stream(out, module, "activation", (read + 1) * size, (2 * read + 1) * size)

    def pieces(self) -> Pieces:
        return Pieces(self.at.none, self.by, self.alternate)
