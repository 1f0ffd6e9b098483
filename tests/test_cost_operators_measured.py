"""Operators against measurements that no fit has seen, published training kernels, and their limits."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost_models.efficiency import corrections, family_of, sustained_share
from meshwright.cost_models.gemm import KNOTS, GemmFit, gemm_s, log_correction
from meshwright.cost_models.operators import attention_s, cast_bytes, device, matmul_s, scan_s, seen_keys, stream_s
from meshwright.specs.catalog import gpu as catalog_gpu
from meshwright.specs.catalog import gpu_names

NAMES = {
    "a100_sxm": "A100-SXM-80GB", "h100_sxm": "H100-SXM", "h200_sxm": "H200-SXM", "b200_sxm": "B200", "b300_sxm": "B300",
    "gb200": "GB200-NVL72", "gb300": "GB300-NVL72", "l40s": "L40S", "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}  # fmt: skip


def held_out() -> dict[tuple[str, str], np.ndarray]:
    """[rows, (m, n, k, microseconds)] by GPU and precision, of (n, k) pairs that are in no fit's sample."""
    out: dict[tuple[str, str], list[list[float]]] = {}
    with (Path(__file__).parent / "data" / "operators_held_out.csv").open() as file:
        for row in csv.DictReader(file):
            if row["dtype"] in ("bf16", "fp8"):  # bare products; the other kernels quantise their input in the call
                out.setdefault((row["gpu"], row["dtype"]), []).append([float(row[c]) for c in ("m", "n", "k", "us")])
    return {key: np.array(rows) for key, rows in out.items()}


@pytest.mark.parametrize("key", sorted(held_out()))
def test_products_that_no_fit_has_seen(key: tuple[str, str]) -> None:
    """Five widths x three token counts on each GPU, burst clocks: half within 8%, nine in ten within 25%."""
    rows, on = held_out()[key], device(catalog_gpu(NAMES[key[0]]).gpu, key[1])
    assert len(rows) >= 12
    m, n, k, microseconds = rows.T
    seconds = gemm_s(
        on.fit.gemm, on.peak, on.sms, on.bandwidth, m, n, k, element_bytes=2.0 if key[1] == "bf16" else 1.0
    )
    error = np.abs(seconds / (1e-6 * microseconds) - 1)
    assert np.median(error) < 0.08
    assert np.quantile(error, 0.9) < 0.25


@pytest.mark.parametrize(
    ("tokens", "width", "inner", "experts", "rates"),
    [(154, 3072, 5120, 160, (449, 438, 211)), (256, 4096, 7168, 128, (611, 748, 331)),
     (512, 4096, 7168, 64, (826, 910, 493)), (1232, 5120, 1536, 20, (894, 876, 720)),
     (9832, 3072, 5120, 40, (1068, 1070, 942))],
)  # fmt: skip
def test_grouped_products_of_training(
    tokens: int, width: int, inner: int, experts: int, rates: tuple[float, ...]
) -> None:
    """TFLOP/s of forward, input and weight gradient on SimuMax's B200, whose plain products reach 0.76 of the burst
    rate, that is 0.85 of the sustained one."""
    on = device(catalog_gpu("B200").gpu, "bf16")
    flops = 2.0 * tokens * width * inner * experts
    seconds = (
        matmul_s(on, tokens, width, inner, experts, grouped=True),
        matmul_s(on, tokens, inner, width, experts, grouped=True),
        matmul_s(on, width, inner, tokens, experts, grouped=True, role="weight_gradient"),
    )
    for measured, ours in zip(rates, seconds, strict=True):
        assert 0.85 * flops / float(ours) / 1e12 == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize(
    ("heads", "forward", "backward"), [(4, 188, 389), (8, 349, 741), (16, 651, 850), (32, 823, 896), (128, 1121, 936)]
)
def test_attention_of_training_by_heads(heads: int, forward: float, backward: float) -> None:
    """Causal TFLOP/s at 4k and head size 128 on SimuMax's B200, both ways: tensor parallelism leaves few heads."""
    on = device(catalog_gpu("B200").gpu, "bf16")
    ours = attention_s(on, 1, 4096, seen_keys(4096, None), heads, 128, 128)
    flops = 2.0 * heads * 4096 * 2048 * 256
    assert flops / float(ours[0]) / 1e12 == pytest.approx(forward, rel=0.2)
    assert 2.5 * flops / float(ours[1]) / 1e12 == pytest.approx(backward, rel=0.2)


@pytest.mark.parametrize(("name", "measured"), [("H100-SXM", 520), ("A100-SXM-80GB", 148), ("B200", 1039)])
def test_latent_attention_rate(name: str, measured: float) -> None:
    """Median causal MLA TFLOP/s at 4k with 64 heads and more (aiconfigurator): queries of 192, values of 128."""
    on = device(catalog_gpu(name).gpu, "bf16")
    forward, _ = attention_s(on, 1, 4096, seen_keys(4096, None), 128, 192, 128)
    assert 2.0 * 128 * 4096 * 2048 * 320 / float(forward) / 1e12 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("window", "microseconds"), [(128, 326), (None, 3558)])
def test_window_attention(window: int | None, microseconds: float) -> None:
    """H100, one sequence of 16k, 32 heads of 128 (8 key/value heads): aiconfigurator."""
    on = device(catalog_gpu("H100-SXM").gpu, "bf16")
    forward, _ = attention_s(on, 1, 16384, seen_keys(16384, window), 32, 128, 128, kv_heads=8)
    assert float(forward) * 1e6 == pytest.approx(microseconds, rel=0.35)


# -- limits and shapes -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(("A100-SXM-80GB", "H100-SXM", "B200", "V100-SXM2-16GB", "MI300X")),
    sizes=st.tuples(*[st.floats(7, 14)] * 3), axis=st.integers(0, 2), grouped=st.booleans(),
)  # fmt: skip
def test_twice_the_size_is_never_faster(name: str, sizes: tuple[float, float, float], axis: int, grouped: bool) -> None:
    on = device(catalog_gpu(name).gpu, "fp16")
    small = [2.0**x for x in sizes]
    large = [2 * x if i == axis else x for i, x in enumerate(small)]
    groups = 8.0 if grouped else 1.0
    one, two = (float(matmul_s(on, *s, groups, grouped=grouped)) for s in (small, large))
    assert two > 0.99 * one


def test_attention_rises_with_every_size() -> None:
    on = device(catalog_gpu("H100-SXM").gpu, "bf16")
    base = (2.0, 4096.0, 2048.0, 16.0)
    for axis, way in itertools.product(range(4), (0, 1)):
        more = [2 * x if i == axis else x for i, x in enumerate(base)]
        assert float(attention_s(on, *more, 128, 128)[way]) > 1.02 * float(attention_s(on, *base, 128, 128)[way])


@pytest.mark.parametrize("name", gpu_names())
def test_a_huge_product_runs_at_its_share_of_the_peak_and_a_tiny_one_costs_a_launch(name: str) -> None:
    on = device(catalog_gpu(name).gpu, "fp16")
    fit, size = on.fit.gemm, 131072
    rate = 2.0 * size**3 / float(matmul_s(on, size, size, size))
    # Beyond the measured shapes the correction has faded: only throttling and the clock are left.
    assert rate == pytest.approx(on.peak * on.fit.sustained * fit.eff / (1 + fit.throttle), rel=0.03)
    tiny = float(matmul_s(on, 16, 16, 16))
    assert fit.launch_s <= tiny < 1.6 * fit.launch_s + 2e-6


def test_grouped_rate_falls_with_few_tokens_and_never_beats_a_plain_product() -> None:
    for name, precision in itertools.product(("A100-SXM-80GB", "H100-SXM", "B200"), ("bf16", "fp8")):
        on = device(catalog_gpu(name).gpu, precision)
        if not on.supported:
            continue
        tokens = np.array([64, 128, 256, 512, 1024, 4096, 16384])
        each = matmul_s(on, tokens, 4096, 7168, 32, grouped=True) / tokens
        assert (np.diff(each) < 0.02 * each[:-1]).all()
        plain = float(matmul_s(on, 32 * 16384, 4096, 7168))
        assert each[-1] * 16384 > 0.97 * plain
        assert each[0] > 1.5 * each[-1]


def test_many_cells_cost_what_each_costs_alone() -> None:
    """More rows than are priced one by one, with repeats and fractions."""
    on, random = device(catalog_gpu("B200").gpu, "bf16"), np.random.default_rng(5)
    m, n, k = (random.choice([0.0, 96.5, 1024.0, 4096.25, 7168.0], 900) for _ in range(3))
    together = matmul_s(on, m, n, k)
    alone = np.concatenate([matmul_s(on, m[i : i + 90], n[i : i + 90], k[i : i + 90]) for i in range(0, 900, 90)])
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_correction_is_trilinear_and_fades() -> None:
    """At a knot the table's value, between two their mean, and e^-1 of the edge an octave outside."""
    shape = tuple(len(axis) for axis in KNOTS)
    table = np.random.default_rng(3).normal(size=shape)

    def at(*powers: float) -> float:
        return float(log_correction(table.ravel(), *(np.array([2.0**p]) for p in powers))[0])

    assert at(KNOTS[0][1], KNOTS[1][2], KNOTS[2][3]) == pytest.approx(table[1, 2, 3])
    assert at(KNOTS[0][1] + 1, KNOTS[1][2], KNOTS[2][3]) == pytest.approx((table[1, 2, 3] + table[2, 2, 3]) / 2)
    middle = table[1:3, 2:4, 3:5].mean()
    assert at(KNOTS[0][1] + 1, KNOTS[1][2] + 1, KNOTS[2][3] + 1) == pytest.approx(middle)
    assert at(KNOTS[0][-1] + 1, KNOTS[1][0], KNOTS[2][0]) == pytest.approx(table[-1, 0, 0] * np.exp(-1))
    assert at(KNOTS[0][-1], KNOTS[1][-1], KNOTS[2][-1] + 12) == pytest.approx(0, abs=1e-4)


def test_corrections_are_bounded_and_complete() -> None:
    size = np.prod([len(axis) for axis in KNOTS])
    for key, values in corrections().items():
        assert len(values) == size, key
        assert max(map(abs, values)) <= 350, key


def test_clocks_fall_with_the_length_of_a_call() -> None:
    assert sustained_share(0.8, 2.0**33) == 1.0
    assert sustained_share(0.8, 2.0**34) == pytest.approx(0.9)
    assert sustained_share(0.8, 2.0**40) == pytest.approx(0.8)
    assert sustained_share(0.8, 2.0**34, speedup=2.0) == 1.0  # half of the time at twice the rate


def test_sharpness_joins_tile_and_memory_time() -> None:
    """Compute 3, memory 4 time units: 5 in the Euclidean norm, 4 at an infinite one."""
    sizes, work, moved = (1024, 1024, 1024), 2.0 * 1024**3, 6.0 * 1024**2
    for sharpness, expected in ((2.0, 5.0), (np.inf, 4.0)):
        fit = GemmFit(1.0, 0.0, 0.0, 0.0, 0.0, 1.0, sharpness=sharpness)
        assert float(gemm_s(fit, work / 3, 1, moved / 4, *sizes)) == pytest.approx(expected)


def test_a_weight_gradient_accumulates_in_fp32() -> None:
    """Few tokens: 8 bytes an output element bound it, whatever the rate."""
    on = device(catalog_gpu("A100-SXM-80GB").gpu, "bf16")
    moved = 8.0 * 8192**2 + 2.0 * 2 * 64 * 8192
    seconds = float(matmul_s(on, 8192, 8192, 64, role="weight_gradient"))
    assert seconds > moved / on.bandwidth
    assert seconds > 1.5 * float(matmul_s(on, 8192, 8192, 64))


@pytest.mark.parametrize(("precision", "expected"), [("bf16", 0.0), ("fp8", 4.0), ("mxfp8", 4.0625), ("nvfp4", 5.125)])
def test_cast_bytes(precision: str, expected: float) -> None:
    """Read 2 bytes, twice for nvfp4; write two copies of 1, 1 + 1/32, or 1/2 + 1/16 bytes."""
    assert float(cast_bytes(precision, 1.0)) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "microseconds"), [("H100-SXM", 950), ("B200", 700)])
def test_scan_by_hand(name: str, microseconds: float) -> None:
    """32 heads of 128 over 8k tokens: work, chain and launch from the constants. KDA is slower."""
    on = device(catalog_gpu(name).gpu, "bf16")
    flops = 6.0 * 32 * 128 * 128
    forward, backward = scan_s(on, 8192, flops, 32, 8192)
    fit = on.fit.scan
    expected = 8192 * flops / (on.peak * fit.eff) + 128 * fit.chunk_s + fit.launch_s
    assert float(forward) == pytest.approx(expected)
    assert float(forward) * 1e6 == pytest.approx(microseconds, rel=0.35)
    assert float(backward) > float(forward)
    assert float(scan_s(on, 8192, flops, 32, 8192, kda=True)[0]) > float(forward)


@pytest.mark.parametrize(("name", "microseconds"), [("H100-SXM", 546.5), ("B200", 356.6), ("GB300-NVL72", 329.6)])
def test_a_short_convolution_as_measured(name: str, microseconds: float) -> None:
    """Two sequences of 16k tokens, 128 heads of 64 and 8 groups of 128 states: in and out at 16 bit. Measured."""
    on = device(catalog_gpu(name).gpu, "bf16")
    moved = 4.0 * 2 * 16384 * (128 * 64 + 2 * 8 * 128)
    assert float(stream_s(on, moved, on.fit.convolution)) * 1e6 == pytest.approx(microseconds, rel=0.1)


def test_uncertainty_is_small_where_measured_and_stated_elsewhere() -> None:
    for name in ("A100-SXM-80GB", "H100-SXM", "H200-SXM", "B200", "GB300-NVL72"):
        fit = device(catalog_gpu(name).gpu, "bf16").fit
        assert fit.rung == "shipped fit"
        assert 0.05 <= fit.sigma < 0.1
    for name, precision in (("T4", "fp16"), ("A40", "bf16"), ("MI300X", "bf16"), ("L4", "bf16"), ("A30", "bf16")):
        fit = device(catalog_gpu(name).gpu, precision).fit
        assert fit.rung == "spec roofline", name
        assert 0.1 < fit.sigma < 0.4, name
    future = catalog_gpu("B200").gpu.model_copy(update={"name": "X-1", "compute_capability": 11.0})
    assert family_of(future) == "b300"
    assert device(future, "bf16").fit.rung == "spec roofline"
    # Blackwell types predict each other to about 10%; a stranger is less certain, a measured one more.
    assert device(catalog_gpu("B300").gpu, "bf16").fit.sigma < device(future, "bf16").fit.sigma < 0.15
