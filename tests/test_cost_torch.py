"""How PyTorch's stacks run layers: eager kernels, torchao's casts, FlashAttention-2, unmerged maps, kept products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.cost_models.backtest.rows import run_of
from meshwright.cost_models.backtest.settings import recompute_of
from meshwright.cost_models.backtest.stacks import stack_of
from meshwright.cost_models.backtest.switches import attention_kernel, casts, compiled_loss, fused_norm
from meshwright.cost_models.block_time import block_pieces
from meshwright.cost_models.blocks import block_kinds
from meshwright.cost_models.layer_time import LayerTimer
from meshwright.cost_models.local import Local
from meshwright.cost_models.operators import device, linear_s, matmul_s
from meshwright.cost_models.pieces import ALTERNATE, Pieces
from meshwright.cost_models.protocol import TERMS
from meshwright.specs.workload import Workload

from .cost_cases import H100, cluster, dense, keys, target

TOKENS, HIDDEN, HEADS, KV, FFN = 8192, 4096, 32, 8, 14336
MODEL = dense(2, HIDDEN, HEADS, KV, FFN, 128256)
BANDWIDTH = H100.memory_bandwidth_bytes_per_s


def timer(
    precision: str = "bf16", tp: int = 1, alternate: bool = False, gpu: Any = H100, **changes: object
) -> LayerTimer:
    workload = Workload.parse({"global_batch_size": 8, "seq_length": TOKENS, "precision": precision})
    at = Local(MODEL, workload, target(**changes), keys((tp, 1, 1, 1, tp, 1, 0, 0)))
    return LayerTimer(at, device(gpu, precision), cluster(1).pools[0].levels, alternate=alternate)


def layer(of: LayerTimer) -> Pieces:
    workload = of.at.workload
    kind = next(kind for kind, _ in block_kinds(MODEL, workload) if kind.layer is not None)
    return block_pieces(kind, of)


def both(out: Pieces, term: str) -> tuple[float, float]:
    column = TERMS.index(term)
    forward, backward = out.finish(frozenset(), 0.0)
    return float(forward[0, column]), float(backward[0, column])


def test_eager_kernels_move_what_each_reads_and_writes() -> None:
    eager, fused = layer(timer(fused_elementwise=False, fused_norm=False)), layer(timer())
    norms, rotary, gate = 2 * HIDDEN * TOKENS, (HEADS + KV) * 128 * TOKENS, FFN * TOKENS
    forward = norms * (36 - 4) + rotary * (20 - 4) + gate * (10 - 6)
    backward = norms * (72 - 6) + rotary * (20 - 4) + gate * (18 - 10)
    share = device(H100, "bf16").fit.memory
    for more, moved, way in zip(both(eager, "memory_bound"), (forward, backward), (0, 1), strict=True):
        assert more - both(fused, "memory_bound")[way] == pytest.approx(moved / (BANDWIDTH * share), rel=1e-9)
    assert both(eager, "gemm") == both(fused, "gemm")


def test_flash2_is_slower_on_hopper_alone() -> None:
    own, flash = (both(layer(timer(attention_kernel=k)), "attention") for k in ("native", "flash2"))
    assert flash[0] / own[0] == pytest.approx(1.732, rel=1e-3)
    assert flash[1] / own[1] == pytest.approx(1.620, rel=1e-3)
    ampere = H100.model_copy(update={"name": "A100-SXM-80GB", "compute_capability": 8.0})
    one, two = (both(layer(timer(attention_kernel=k, gpu=ampere)), "attention") for k in ("native", "flash2"))
    assert one == two


def test_a_lower_clock_slows_products_and_attention_alone() -> None:
    slow, full = layer(timer(gpu=H100.model_copy(update={"clock_share": 0.5}))), layer(timer())
    assert both(slow, "memory_bound") == both(full, "memory_bound")
    for term in ("gemm", "attention"):
        assert 1.5 < both(slow, term)[0] / both(full, term)[0] < 2.05  # long products throttle


def cast_bytes(recipe: str, tp: int = 1) -> tuple[float, float]:
    """Bytes that casts add to a bf16 layer, from the seconds of an fp8 one; launches left out."""
    on = timer("fp8", tp, casts=recipe)
    out, plain = layer(on), layer(timer("bf16", tp))
    passes = 3 if recipe == "tensorwise" else 2
    rate = BANDWIDTH * on.on.fit.memory
    kernels = 4 * passes * on.on.fit.kernel_s
    forward, backward = (
        (a - b - kernels) * rate for a, b in zip(both(out, "memory_bound"), both(plain, "memory_bound"), strict=True)
    )
    return forward, backward


#: Per rank and layer at TP 1: elements of the inputs of the four products, of their results, of their weights.
INPUTS = TOKENS * (HIDDEN + HIDDEN + HIDDEN + FFN)
RESULTS = TOKENS * (HIDDEN + 2 * KV * 128 + HIDDEN + 2 * FFN + HIDDEN)
WEIGHTS = HIDDEN * (HIDDEN + 2 * KV * 128 + HIDDEN + 3 * FFN)


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        ("tensorwise", 5 * INPUTS, INPUTS + 6 * RESULTS + 2 * WEIGHTS),
        ("rowwise", 5 * INPUTS + 3 * WEIGHTS, 3 * INPUTS + 8 * RESULTS + 7 * WEIGHTS),
        ("blocks", 3 * INPUTS + 3 * WEIGHTS, 3 * INPUTS + 6 * RESULTS + 3 * WEIGHTS),
    ],
)
def test_casts_move_what_torchao_counts(recipe: str, forward: float, backward: float) -> None:
    assert cast_bytes(recipe) == pytest.approx((forward, backward), rel=1e-6)


def test_tensorwise_operands_are_cast_before_they_are_gathered() -> None:
    tp = 8
    gathered, own = TOKENS * 2 * HIDDEN, TOKENS * (HIDDEN + FFN) / tp
    forward, _ = cast_bytes("tensorwise", tp)
    assert forward == pytest.approx(5 * (gathered / tp + own), rel=1e-6)
    eight, sixteen = (both(layer(timer("fp8", tp, casts=r)), "tp_comm")[0] for r in ("tensorwise", "rowwise"))
    plain = both(layer(timer("bf16", tp)), "tp_comm")[0]
    assert sixteen == plain
    assert 0.7 < eight / plain < 0.85  # half of the gathers' bytes, none of the scatters'


def test_row_wise_products_run_slower() -> None:
    one, rows = (both(layer(timer("fp8", casts=recipe)), "gemm") for recipe in ("tensorwise", "rowwise"))
    assert rows[0] / one[0] == pytest.approx(1243 / 1117, rel=1e-9)


def test_unmerged_maps_are_products_of_their_own() -> None:
    on = timer(merged_projections=False)
    forward = both(layer(on), "gemm")[0]
    widths = (
        (HIDDEN, HIDDEN),
        (HIDDEN, 1024),
        (HIDDEN, 1024),
        (HIDDEN, HIDDEN),
        (HIDDEN, FFN),
        (HIDDEN, FFN),
        (FFN, HIDDEN),
    )
    assert forward == pytest.approx(sum(float(matmul_s(on.on, TOKENS, n, k)) for k, n in widths), rel=1e-9)
    backward = both(layer(on), "gemm")[1]
    count = np.ones(1)
    products = (linear_s(on.on, count * TOKENS, count * k, count * n, count) for k, n in widths)
    added = 2 * TOKENS * HIDDEN * (4 + 3)  # three and two gradients read, their sum written
    sums = added / (BANDWIDTH * on.on.fit.memory) + 2 * on.on.fit.kernel_s
    assert backward == pytest.approx(sum(float(p[1][0] + p[2][0]) for p in products) + sums, rel=1e-9)


def test_every_second_product_is_computed_again() -> None:
    on = timer(alternate=True, merged_projections=False)
    out = layer(on)
    # In order: query, KEY, value, OUTPUT, gate, UP, down.
    again = sum(float(matmul_s(on.on, TOKENS, n, HIDDEN)) for n in (1024, HIDDEN, FFN))
    streams = 4 * (HEADS + KV) * 128 * TOKENS + 6 * FFN * TOKENS
    again += streams / (BANDWIDTH * on.on.fit.memory) + 2 * on.on.fit.kernel_s
    assert float(out.modules[ALTERNATE][0]) == pytest.approx(again, rel=1e-9)
    column = TERMS.index("recompute")
    _, backward = out.finish(frozenset({ALTERNATE}), 0.0)
    assert backward[0, column] == pytest.approx(again, rel=1e-9)
    _, backward = out.finish(frozenset({"*"}), 0.0)
    assert backward[0, column] == pytest.approx(sum(float(seconds[0]) for seconds in out.forward.values()), rel=1e-9)
    assert ALTERNATE not in layer(timer()).modules


def test_rows_say_how_torchtitan_ran() -> None:
    row = {"framework": "torchtitan", "num_gpus": "8", "seq_len": "8192", "global_batch": "8", "release": "2025-06",
           "precision": "fp8-rowwise", "other_flags": "torch.compile"}  # fmt: skip
    stack = stack_of("torchtitan")

    def of(**changes: str) -> Any:
        return run_of({**row, **changes})

    assert casts(of(), stack) == "rowwise"
    assert casts(of(precision="mxfp8-rceil"), stack) == "blocks"
    assert casts(of(precision="fp8"), stack) == "tensorwise"
    assert casts(of(), stack_of("NeMo")) == "transformer_engine"
    assert fused_norm(of(), stack)
    assert not fused_norm(of(other_flags=""), stack)
    assert fused_norm(of(other_flags="", release="2026-06"), stack)
    assert attention_kernel(of(), stack) == "flash2"
    assert attention_kernel(of(release="2026-06"), stack) == "native"
    assert attention_kernel(of(), stack_of("NeMo")) == "native"
    assert compiled_loss(of(), stack)
    assert not compiled_loss(of(release="2024-12"), stack)


def test_the_policy_of_torchtitan_keeps_every_second_product() -> None:
    row = {"framework": "torchtitan", "num_gpus": "8", "seq_len": "8192", "global_batch": "8",
           "recompute": "selective-op"}  # fmt: skip
    mode = recompute_of(run_of(row), stack_of("torchtitan"), MODEL, 1, [])
    assert set(mode.modules) == {"layernorm", ALTERNATE}
