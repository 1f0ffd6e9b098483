"""Seconds of a layer on one rank of a pool, operator by operator, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.specs.attention import LinearAttention, MambaMixer, MLAAttention, SoftmaxAttention
from meshwright.specs.batch import FloatArray, IntArray
from meshwright.specs.cluster import NetworkLevel
from meshwright.specs.feed_forward import DenseFFN, MoEFFN
from meshwright.specs.model import LayerKind
from meshwright.specs.weights import Weight

from .collectives import collective_s, contention, expert_exchange_s, exposed_s, members_inside
from .context import context_exchange_s
from .local import Linear, Local, activation_element_bytes
from .multipliers import NEUTRAL, Multipliers
from .operators import Device, attention_s, cast_bytes, linear_s, matmul_s, scan_s, seen_keys, stream_s
from .overlap import DEDUP_SMS, FP8_ELEMENT_BYTES, Overlap, hidden_s
from .protocol import TERMS
from .unfused import unfused_attention_s

#: FLOP of a chunked scan per head and token, over key size * value size (state update, read-out, decay).
SCAN_FLOPS = 6.0
#: Framework calls that one operator costs the host in the forward pass, counted in Megatron's layer code with
#: Transformer Engine modules. Its grouped linear map loops over the experts to quantise each one's weight and input.
#: Router (top-k, masks, balance statistics), permutation and all-to-all (sizes read back by the host) are set so that a
#: launch-bound layer of Qwen3-30B-A3B with 16 local experts takes 9 ms forward and backward, as published for B200 at
#: micro-batch 1 without graphs (Megatron-Bridge performance summary, NeMo 25.11 and 26.02).
CALLS = {
    "norm": 1, "linear": 3, "rope": 2, "attention": 4, "activation": 1, "residual": 1, "router": 70, "permute": 40,
    "all_to_all": 20, "experts": 10, "scan": 6, "loss": 6, "embedding": 3, "quantised_expert": 4, "unfused": 12,
}  # fmt: skip
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

    # -- building stones ---------------------------------------------------------------------------------------------

    def _nothing(self) -> FloatArray:
        return np.zeros_like(self.at.tp)

    def stream(
        self,
        out: Pieces,
        module: str,
        kind: str,
        forward_bytes: FloatArray,
        backward_bytes: FloatArray,
        share: float | None = None,
        graph: str = "",
    ) -> None:
        """A memory-bound operator."""
        forward = stream_s(self.on, forward_bytes, share)
        out.add("memory_bound", module, forward, stream_s(self.on, backward_bytes, share), CALLS[kind], graph)

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

    def norms(self, out: Pieces, count: float, residuals: float) -> None:
        """Norms (read and write; backward reads two, writes one) and fused residual additions."""
        size = self.wide * self.at.model.hidden_size * self.at.own_tokens
        for _ in range(int(count)):
            self.stream(out, "layernorm", "norm", 2 * size, 3 * size)
        for _ in range(int(residuals)):
            self.stream(out, "residual", "residual", 3 * size, 2 * size)

    def tensor_parallel(self, out: Pieces, module: str, compute: FloatArray, gathered_width: int | None = None) -> None:
        """Collectives around one column-row pair over TP, with ``compute`` the pair's forward GEMM seconds.

        ``gathered_width`` is the width of what the column part gathers, the hidden size by default.

        Sequence parallel: all-gather in, reduce-scatter out; backward the mirror image, plus the input gathered again
        for the weight gradient, which Megatron hides under the input gradient. Otherwise one all-reduce each way.
        """
        at = self.at
        volume = self.wide * at.model.hidden_size * at.tokens
        if not at.sequence_parallel:
            once = collective_s("all_reduce", self.levels, volume, at.tp, 1)
            out.add("tp_comm", module, once, once, np.where(at.tp > 1, 1.0, 0.0))
            return
        gathered = volume * (gathered_width or at.model.hidden_size) / at.model.hidden_size
        gather = collective_s("all_gather", self.levels, gathered, at.tp, 1)
        scatter = collective_s("reduce_scatter", self.levels, volume, at.tp, 1)
        both = gather + scatter
        again = exposed_s(gather, compute, contention("all_gather", self.levels, at.tp, 1))
        if self.overlap.tensor:
            # Ring exchange by chunks: the first chunk and what the products cannot cover stay visible.
            rest = both * (1 - 1 / at.tp)
            forward = both / at.tp + exposed_s(rest, compute)
            backward = both / at.tp + exposed_s(rest, 2 * compute)
        else:
            forward, backward = both, both
        out.add("tp_comm", module, forward, backward + again, np.where(at.tp > 1, 4.0, 0.0))

    # -- token mixers ------------------------------------------------------------------------------------------------

    def mixer(self, out: Pieces, layer: LayerKind, trained: bool) -> None:
        mixer, at = layer.attention, self.at
        if mixer is None:
            return
        weights = mixer.weights(at.model.hidden_size)
        up_names = ("q_up", "kv_up", "q") if isinstance(mixer, MLAAttention) else ()
        before = out.forward[:, TERMS.index("gemm")].copy()
        self.linears(out, "mla_up_proj", tuple(w for w in weights if w.name in up_names), trained)
        self.linears(out, "attention_linear", tuple(w for w in weights if w.name not in up_names), trained)
        compute = out.forward[:, TERMS.index("gemm")] - before
        if isinstance(mixer, SoftmaxAttention):
            self._softmax(out, mixer)
        elif isinstance(mixer, MLAAttention):
            self._latent(out, mixer)
        else:
            self._scan(out, mixer)
        width = None
        if isinstance(mixer, MLAAttention):
            # The down-projections run on a rank's own tokens, so the up-projections gather the latents
            # (Megatron multi_latent_attention.py); without a query latent the hidden state is gathered for it.
            width = (mixer.q_lora_rank or at.model.hidden_size) + mixer.kv_lora_rank + mixer.qk_rope_head_dim
        self.tensor_parallel(out, "attention_comm", compute, width)

    def _core(
        self, out: Pieces, heads: FloatArray, qk_dim: int, v_dim: int, keys: float, kv_bytes_per_token: FloatArray
    ) -> None:
        """Core attention and the exchange of context parallelism."""
        at = self.at
        length = at.workload.seq_length
        if at.target.fused_attention:
            kv_heads = kv_bytes_per_token / (self.wide * (qk_dim + v_dim))
            forward, backward = attention_s(self.on, at.sequences, length, keys, heads, qk_dim, v_dim, at.cp, kv_heads)
        else:
            forward, backward = unfused_attention_s(self.on, at.sequences, length, heads, qk_dim, v_dim)
        calls = CALLS["attention" if at.target.fused_attention else "unfused"]
        out.add("attention", "core_attn", forward, backward, calls)
        queries, outputs = (self.wide * heads * size * at.tokens for size in (qk_dim, v_dim))
        block = kv_bytes_per_token * at.tokens
        exchange = context_exchange_s(at, self.overlap, self.levels, (forward, backward), block, queries, outputs)
        out.add("cp_comm", "core_attn", *exchange)

    def _softmax(self, out: Pieces, mixer: SoftmaxAttention) -> None:
        at = self.at
        heads, kv_heads = np.ceil(mixer.num_heads / at.tp), np.ceil(mixer.num_kv_heads / at.tp)
        moved = self.wide * (heads + kv_heads) * mixer.head_dim * at.tokens
        if at.model.rotary:
            self.stream(out, "attention_linear", "rope", 2 * moved, 2 * moved)
        if mixer.qk_norm != "none":
            self.stream(out, "attention_linear", "norm", 2 * moved, 3 * moved)
        if mixer.output_gate:
            gate = self.wide * heads * mixer.head_dim * at.tokens
            self.stream(out, "attention_linear", "activation", 3 * gate, 5 * gate)
        keys = float(at.workload.seq_length) if mixer.cross else seen_keys(at.workload.seq_length, mixer.window)
        self._core(out, heads, mixer.head_dim, mixer.head_dim, keys, 2 * self.wide * kv_heads * mixer.head_dim)

    def _latent(self, out: Pieces, mixer: MLAAttention) -> None:
        at = self.at
        heads = np.ceil(mixer.num_heads / at.tp)
        latent = self.wide * ((mixer.q_lora_rank or 0) + mixer.kv_lora_rank) * at.own_tokens
        self.stream(out, "latent", "norm", 2 * latent, 3 * latent)
        # Rotary parts, and the concatenation of rotary and plain parts of queries and keys: read and write both.
        moved = 2 * self.wide * 2 * heads * mixer.qk_head_dim * at.tokens
        self.stream(out, "mla_up_proj", "rope", moved, moved)
        keys = seen_keys(at.workload.seq_length, None, mixer.indexer.top_k if mixer.indexer else None)
        if mixer.indexer:
            index = mixer.indexer
            every = seen_keys(at.workload.seq_length, None)
            scores, scores_back = attention_s(
                self.on,
                at.sequences,
                at.workload.seq_length,
                every,
                np.full_like(heads, index.num_heads),
                index.head_dim,
                0,
                at.cp,
            )
            out.add("attention", "core_attn", scores, scores_back, CALLS["attention"])
        per_token = self.wide * heads * (mixer.qk_head_dim + mixer.v_head_dim)
        self._core(out, heads, mixer.qk_head_dim, mixer.v_head_dim, keys, per_token)

    def _scan(self, out: Pieces, mixer: LinearAttention | MambaMixer) -> None:
        """Convolution, chunked scan and gated norm; context parallelism exchanges heads for tokens and back."""
        at = self.at
        if isinstance(mixer, LinearAttention):
            heads = np.ceil(mixer.num_value_heads / at.tp)
            size = mixer.key_head_dim * mixer.value_head_dim
            inner = heads * mixer.value_head_dim
            channels = inner + 2 * np.ceil(mixer.num_key_heads / at.tp) * mixer.key_head_dim
        else:
            heads = np.ceil(mixer.num_heads / at.tp)
            size = mixer.head_dim * mixer.state_size
            inner = heads * mixer.head_dim
            channels = inner + 2 * np.ceil(mixer.num_groups / at.tp) * mixer.state_size
        conv = self.wide * channels * at.tokens
        self.stream(out, "attention_linear", "activation", 2 * conv, 4 * conv)
        chains, kda = at.sequences * np.ceil(heads / at.cp), isinstance(mixer, LinearAttention) and mixer.rule == "kda"
        forward, backward = scan_s(self.on, at.tokens, SCAN_FLOPS * heads * size, chains, at.workload.seq_length, kda)
        out.add("attention", "core_attn", forward, backward, CALLS["scan"], corrected="scan")
        gated = self.wide * inner * at.tokens
        self.stream(out, "attention_linear", "norm", 3 * gated, 5 * gated)
        exchange = collective_s("all_to_all", self.levels, conv, at.keys.cp, at.keys.tp)
        exchange = exchange + collective_s("all_to_all", self.levels, gated, at.keys.cp, at.keys.tp)
        out.add("cp_comm", "core_attn", exchange, exchange, np.where(at.cp > 1, 4.0, 0.0))

    # -- feed-forward ------------------------------------------------------------------------------------------------

    def dense_ffn(self, out: Pieces, ffn: DenseFFN, trained: bool) -> None:
        before = out.forward[:, TERMS.index("gemm")].copy()
        self.linears(out, "mlp", ffn.weights(self.at.model.hidden_size), trained)
        self._activation(out, "mlp", ffn.intermediate_size / self.at.tp * self.at.tokens, ffn.gated)
        self.tensor_parallel(out, "mlp_comm", out.forward[:, TERMS.index("gemm")] - before)

    def _activation(self, out: Pieces, module: str, elements: FloatArray, gated: bool) -> None:
        read = 2.0 if gated else 1.0
        size = self.wide * elements
        self.stream(out, module, "activation", (read + 1) * size, (2 * read + 1) * size)

    def mixture(self, out: Pieces, moe: MoEFFN, trained: bool) -> None:
        """Router, dispatch, grouped experts, combine, and the shared expert beside them."""
        at = self.at
        weights = moe.weights(at.model.hidden_size)
        width = moe.latent_size or at.model.hidden_size
        own = at.own_tokens
        self.linears(out, "moe", tuple(w for w in weights if not w.expert and not w.name.startswith("shared")), trained)
        # Softmax or sigmoid, group and expert top-k, bias and probabilities: eight passes over the fp32 scores.
        scores = 8 * 4.0 * moe.num_experts * own
        self.stream(out, "moe", "router", scores, scores / 2, graph="moe_router")
        sent = self.wide * width * own * moe.top_k
        pairs = at.expert_tokens(moe.top_k)
        received = self.wide * width * pairs
        # Permute before and sort after the dispatch, and the way back: each reads and writes.
        moved = self.wide * width * own + sent + 2 * received
        for _ in range(2):
            self.stream(out, "moe", "permute", moved, moved, self.on.fit.permute, graph="moe_preprocess")
        self._dispatch(out, moe, sent)
        experts = [linear for linear in at.linears(weights) if linear.expert]
        for linear in experts:
            self.linear(out, "moe", linear, pairs / linear.groups, trained)
        inner = pairs * moe.expert_intermediate_size / at.etp
        self._activation(out, "moe_act", inner, moe.gated)
        if moe.shared_intermediate_size:
            columns = [TERMS.index(term) for term in COMPUTE]
            busy = out.forward[:, columns].sum(axis=1), out.backward[:, columns].sum(axis=1)
            before = out.forward[:, TERMS.index("gemm")].copy()
            shared = tuple(w for w in weights if w.name.startswith("shared"))
            self.linears(out, "shared_experts", shared, trained)
            self._activation(out, "shared_experts", moe.shared_intermediate_size / at.tp * at.tokens, moe.gated)
            self.tensor_parallel(out, "shared_experts", out.forward[:, TERMS.index("gemm")] - before)
            if self.overlap.shared_expert:
                hidden = out.forward[:, columns].sum(axis=1) - busy[0], out.backward[:, columns].sum(axis=1) - busy[1]
                out.hide("ep_comm", "moe", *hidden, self._exchange_contention(), 1.0)

    def _exchange_contention(self) -> FloatArray | float:
        """Share of the compute that an expert exchange takes beside it."""
        if self.at.target.dispatcher == "flex":
            return DEDUP_SMS / self.on.gpu.num_sms
        return contention("all_to_all", self.levels, self.at.keys.ep, self.at.keys.etp)

    def _dispatch(self, out: Pieces, moe: MoEFFN, sent: FloatArray) -> None:
        """All-to-all over EP and all-gather / reduce-scatter over ETP, both ways; the fullest rank's load counts.

        The ``flex`` dispatcher sends a token once to each node and each rank it touches.
        """
        at, keys = self.at, self.at.keys
        load = at.load
        calls = np.where(at.ep > 1, 2.0 * CALLS["all_to_all"], 0.0)
        if at.target.dispatcher == "allgather":
            everyone = sent / moe.top_k * at.ep * at.etp
            gather = collective_s("all_gather", self.levels, everyone, keys.ep * keys.etp, 1)
            scatter = collective_s("reduce_scatter", self.levels, everyone, keys.ep * keys.etp, 1)
            out.add("ep_comm", "moe", gather + scatter, gather + scatter, calls, "moe_preprocess")
            return

        def exchange_s(volume: FloatArray) -> FloatArray:
            if at.target.dispatcher != "flex":
                return collective_s("all_to_all", self.levels, volume, keys.ep, keys.etp)
            inside = members_inside(self.levels[0], keys.ep, keys.etp)
            nodes = touched(at.ep / inside, moe.top_k, moe.top_k_groups) / moe.top_k
            ranks = touched(at.ep, moe.top_k, None) / moe.top_k
            return expert_exchange_s(self.levels, volume, keys.ep, keys.etp, nodes, ranks)

        exchange = exchange_s(sent * load)
        dispatch = exchange_s(sent * load * FP8_ELEMENT_BYTES / self.wide) if self.overlap.fp8_dispatch else exchange
        # Backward, the gradients of the results go out and those of the tokens come back, both in 16 bit.
        out.add("ep_comm", "moe", dispatch + exchange, 2 * exchange, calls)
        gathered = sent * load * at.etp
        gather = collective_s("all_gather", self.levels, gathered, keys.etp, 1)
        scatter = collective_s("reduce_scatter", self.levels, gathered, keys.etp, 1)
        out.add("tp_comm", "moe", gather + scatter, gather + scatter, 0)

    # -- whole layers ------------------------------------------------------------------------------------------------

    def layer(self, out: Pieces, layer: LayerKind, trained: bool) -> None:
        """All operators of a decoder layer."""
        self.mixer(out, layer, trained)
        if isinstance(layer.feed_forward, DenseFFN):
            self.dense_ffn(out, layer.feed_forward, trained)
        elif isinstance(layer.feed_forward, MoEFFN):
            self.mixture(out, layer.feed_forward, trained)
        parts = (layer.attention is not None) + (layer.feed_forward is not None)
        self.norms(out, max(layer.norms, parts), parts)
        if self.overlap.expert and isinstance(layer.feed_forward, MoEFFN):
            # The forward exchange of one micro-batch runs beside the backward compute of another, and vice versa.
            columns = [TERMS.index(term) for term in COMPUTE]
            windows = out.backward[:, columns].sum(axis=1), out.forward[:, columns].sum(axis=1)
            out.hide("ep_comm", "moe", *windows, self._exchange_contention(), self.overlap.expert_hidden)

    def pieces(self) -> Pieces:
        return Pieces(len(self.at.tp), self.by)


def touched(nodes: FloatArray, top_k: int, most: int | None) -> FloatArray:
    """Expected number of distinct nodes that ``top_k`` experts drawn evenly lie on, at most ``most``."""
    nodes = np.maximum(np.asarray(nodes, dtype=float), 1.0)
    expected = nodes * (1.0 - (1.0 - 1.0 / nodes) ** top_k)
    out: FloatArray = np.minimum(expected, most) if most else expected
    return out
