"""Which communication a plan hides, and how: what the cost model needs of a plan's options."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from meshwright.specs.attention import MLAAttention
from meshwright.specs.batch import FloatArray
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import CpComm, Options

#: Share of an expert exchange that hides under another micro-batch's compute, with weight gradients in their place and
#: delayed so that they fill the gaps too: 0.65 to 0.85 in AMD-AGI/Primus' projection (projection.py, MIT).
EXPERT_HIDDEN, EXPERT_HIDDEN_DELAYED = 0.65, 0.85
#: SMs that DeepEP's kernels keep for themselves (Megatron's --moe-deepep-num-sms default).
DEDUP_SMS = 20
#: Bytes of an element that is dispatched in FP8: one scale of four bytes for 128 elements (DeepEP).
FP8_ELEMENT_BYTES = 1.0 + 4.0 / 128.0


@dataclass(frozen=True)
class Overlap:
    """Switches of communication, off as a plan without options has them.

    ``tensor``: TP collectives under products (Transformer Engine). ``expert``: expert exchange under the compute of
    another micro-batch; ``delay_wgrad`` fills it with weight gradients. ``shared_expert``: expert exchange under the
    shared expert. ``fp8_dispatch``: tokens go out in FP8, results come back in 16 bit. ``context``: how context
    parallelism exchanges keys and values; ``context_a2a_size`` ranks exchange heads under ``a2a+p2p``.
    ``sends``: sends between virtual stages run beside compute. ``bucket_params``: parameters of a gradient bucket,
    None for Megatron's default.
    """

    tensor: bool = False
    expert: bool = False
    delay_wgrad: bool = False
    shared_expert: bool = False
    fp8_dispatch: bool = False
    context: CpComm = "p2p"
    context_a2a_size: int = 1
    sends: bool = True
    bucket_params: int | None = None

    @property
    def expert_hidden(self) -> float:
        """Share of an expert exchange that can hide under another micro-batch."""
        return EXPERT_HIDDEN_DELAYED if self.delay_wgrad else EXPERT_HIDDEN


def default_overlap(model: ModelSpec, switches: Collection[str] = (), exchanges: Collection[str] = ()) -> Overlap:
    """What search prices and writes into its plans: sparse attention gathers keys over the context group (C8s), and so
    do all models where the target has nothing else (``exchanges``).

    ``switches`` are the target's. Expert exchange runs beside a shared expert wherever there is one: it costs nothing
    by this model. Exchange beside another micro-batch excludes that (E11).
    """
    mixers = (kind.attention for kind in model.kinds)
    sparse = any(isinstance(mixer, MLAAttention) and mixer.top_k for mixer in mixers)
    shared = any(isinstance(k.feed_forward, MoEFFN) and k.feed_forward.shared_intermediate_size for k in model.kinds)
    return Overlap(
        shared_expert=shared and "moe_shared_expert_overlap" in switches and "ep_comm_overlap" not in switches,
        tensor="tp_comm_overlap" in switches,
        expert="ep_comm_overlap" in switches,
        delay_wgrad={"ep_comm_overlap", "delay_wgrad"} <= set(switches),
        context="allgather" if sparse or tuple(exchanges) == ("allgather",) else "p2p",
    )


def overlap_of(options: Options) -> Overlap:
    """The switches that a plan's options set."""
    return Overlap(
        tensor=options.tp_comm_overlap,
        expert=options.ep_comm_overlap,
        delay_wgrad=options.delay_wgrad,
        shared_expert=options.moe_shared_expert_overlap,
        fp8_dispatch=options.fp8_dispatch,
        context=options.cp_comm_type or "p2p",
        context_a2a_size=options.cp_a2a_size or 1,
        sends=options.overlap_p2p,
        bucket_params=options.grad_bucket_params,
    )


def hidden_s(busy_s: FloatArray, window_s: FloatArray, most: float = 1.0) -> FloatArray:
    """Seconds of ``busy_s`` that hide under ``window_s`` of compute, at most the share ``most`` of them."""
    out: FloatArray = np.minimum(most * busy_s, window_s)
    return out


def sharded_exposed_s(
    busy_s: FloatArray, device_s: FloatArray, host_s: FloatArray, most: float, share: FloatArray | float
) -> FloatArray:
    """What ``busy_s`` of gathers and scatters adds to a unit that computes for ``device_s`` and waits ``host_s`` more
    for its launches.

    They run on streams of their own, launched ahead, under ``most`` of the unit's time, be the device or the host
    what sets it. The ``share`` of the compute that they take while they run beside it first fills the device's wait.
    """
    taken = share * np.minimum(busy_s, most * device_s)
    window = most * (device_s + np.maximum(host_s - taken, 0.0))
    out: FloatArray = np.maximum(taken - host_s, 0.0) + np.maximum(busy_s - window, 0.0)
    return out
