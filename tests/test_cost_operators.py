"""Operators: hand calculations, and measured rates from public tables."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from meshwright.cost_models.efficiency import family_of
from meshwright.cost_models.feed_forward_time import touched
from meshwright.cost_models.gemm import GemmFit, gemm_s
from meshwright.cost_models.operators import attention_s, device, matmul_s, seen_keys
from meshwright.specs.catalog import gpu as catalog_gpu
from meshwright.specs.cluster import GpuType

from .cost_cases import H100, V100


def gpu_type(name: str) -> GpuType:
    return catalog_gpu(name).gpu


# -- matrix products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k", "groups"), [(256, 256, 1000, 1), (1000, 4096, 512, 1), (64, 128, 64, 16)])
def test_gemm_is_the_best_tiling_by_hand(m: int, n: int, k: int, groups: int) -> None:
    """Compute-bound: try every tile and split in plain arithmetic, full waves only."""
    fit = GemmFit(eff=0.5, overhead_k=32, launch_s=1e-6, wave_hardness=1.0, tile_exponent=0.0, bandwidth_eff=1.0)
    whole = [(256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)]
    choices = (
        [(tile, 1) for tile in whole] + list(itertools.product(whole[3:6], (2, 4, 8))) + [((64, 64), 2), ((64, 64), 4)]
    )
    best = min(
        math.ceil(groups * math.ceil(m / tm) * math.ceil(n / tn) * split / 10)
        * 2 * tm * tn * (k / split + 32) / (1e12 / 10 * 0.5)
        for (tm, tn), split in choices
    )  # fmt: skip
    assert float(gemm_s(fit, 1e12, 10, 1e18, m, n, k, groups)) == pytest.approx(best + 1e-6)


def test_gemm_of_one_row_waits_for_memory() -> None:
    fit = GemmFit(eff=1.0, overhead_k=0, launch_s=0.0, wave_hardness=0.0, tile_exponent=0.0, bandwidth_eff=0.5)
    moved = 2 * (1 * 4096 + 4096 * 8192 + 1 * 8192)
    assert float(gemm_s(fit, 1e18, 100, 1e12, 1, 8192, 4096)) == pytest.approx(moved / 0.5e12)


def test_no_rows_cost_nothing() -> None:
    fit = GemmFit(0.5, 32, 1e-6, 1.0, 0.0, 1.0)
    assert float(gemm_s(fit, 1e12, 10, 1e12, 0, 128, 128)) == 0.0


@pytest.mark.parametrize(
    ("name", "measured"), [("A100-SXM-80GB", 263), ("H100-SXM", 783), ("B200", 1492), ("B300", 1598)]
)
def test_large_gemm_rate_is_the_measured_one(name: str, measured: float) -> None:
    """bf16 TFLOP/s at 8192 cubed, burst clocks, from aiconfigurator's tables."""
    on = device(gpu_type(name), "bf16")
    burst = 2 * 8192**3 / float(matmul_s(on, 8192, 8192, 8192)) / 1e12 / on.fit.sustained
    assert burst == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(("name", "measured"), [("H100-SXM", 1243), ("H200", 1243), ("B200", 2335), ("B300", 2725)])
def test_fp8_gemm_is_faster_than_with_its_quantising(name: str, measured: float) -> None:
    """The measured fp8 TFLOP/s at 8192 cubed contain amax and quantisation of one operand, 12 to 100 us of 390 to
    880; the bare product is faster by about that."""
    on = device(gpu_type(name), "fp8")
    burst = 2 * 8192**3 / float(matmul_s(on, 8192, 8192, 8192)) / 1e12 / on.fit.sustained
    assert measured < burst < 1.35 * measured


@pytest.mark.parametrize(("tokens", "measured"), [(96, 199), (192, 311), (384, 420), (768, 554)])
def test_grouped_gemm_rate_rises_with_the_tokens_of_an_expert(tokens: int, measured: float) -> None:
    """H100 bf16 TFLOP/s by tokens an expert, whole MoE layers incl. routing and permutation (aiconfigurator): the bare
    products must be faster, but not by more than the rest of the layer can explain."""
    on = device(gpu_type("H100-SXM"), "bf16")
    seconds = float(matmul_s(on, tokens, 4096, 2048, 32, True, True))
    rate = 2 * tokens * 4096 * 2048 * 32 / seconds / 1e12
    assert 0.9 * measured < rate < 2.0 * measured


def test_precision_that_the_type_lacks_takes_forever() -> None:
    assert np.isinf(matmul_s(device(V100, "bf16"), 128, 128, 128)).all()
    assert np.isinf(attention_s(device(V100, "bf16"), 1, 128, 64, 8, 64, 64)[0]).all()


@pytest.mark.parametrize(
    ("name", "family"),
    [("A100-SXM-80GB", "a100"), ("A10", "ampere_pro"), ("A40", "ampere_pro"), ("GB200-NVL72", "gb200"),
     ("B200", "b200"), ("GH200-96GB", "h100"), ("V100-SXM2-16GB", "volta"), ("T4", "t4"), ("MI300X", "cdna3")],
)  # fmt: skip
def test_types_find_their_constants_by_name(name: str, family: str) -> None:
    assert family_of(gpu_type(name)) == family


def test_unknown_type_takes_its_generation() -> None:
    unknown = H100.model_copy(update={"name": "X-9000", "compute_capability": 9.1})
    assert family_of(unknown) == "h100"
    assert family_of(unknown.model_copy(update={"compute_capability": None})) == "default"


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rates"),
    [("A100-SXM-80GB", (166, 192, 201)), ("H100-SXM", (500, 583, 605)), ("B200", (871, 1098, 1259))],
)
def test_causal_attention_rate_by_length(name: str, rates: tuple[float, ...]) -> None:
    """Median measured causal forward TFLOP/s at 4k, 8k, 16k, head size 128, 16 to 64 heads (aiconfigurator, SGLang's
    kernels)."""
    on = device(gpu_type(name), "bf16")
    for length, rate in zip((4096, 8192, 16384), rates, strict=True):
        forward, backward = attention_s(on, 1, length, seen_keys(length, None), 48, 128, 128)
        flops = 2 * 48 * length**2 / 2 * 256
        assert flops / float(forward) / 1e12 == pytest.approx(rate, rel=0.15)
        assert 2.2 < float(backward) / float(forward) < 3.6


def test_seen_keys_counts_the_mask() -> None:
    """Brute force over positions."""
    for length, window in ((64, None), (64, 16), (64, 64), (64, 100)):
        width = min(window or length, length)
        exact = sum(min(i + 1, width) for i in range(length)) / length
        assert seen_keys(length, window) == pytest.approx(exact, abs=0.5)  # the diagonal counts half


def test_context_shards_split_the_work() -> None:
    on = device(H100, "bf16")
    one = float(attention_s(on, 1, 65536, 32768, 32, 128, 128, 1)[0])
    four = float(attention_s(on, 1, 65536, 32768, 32, 128, 128, 4)[0])
    assert one / 4 < four < one / 3


def test_expected_nodes_of_a_token() -> None:
    """Draws by simulation; a group limit caps it."""
    rng = np.random.default_rng(0)
    drawn = [len(set(row)) for row in rng.integers(0, 8, size=(20000, 8))]
    assert float(touched(np.array(8.0), 8, None)) == pytest.approx(np.mean(drawn), rel=0.01)
    assert float(touched(np.array(8.0), 8, 4)) == 4.0
    assert float(touched(np.array(1.0), 8, None)) == 1.0
