"""What learned corrections depend on, and how they add up."""

from __future__ import annotations

import math

import pytest

from meshwright.cost_models.cells import traits_of
from meshwright.cost_models.learned import Traits, multipliers_of, shape_of
from meshwright.specs.model import ModelSpec

from .cost_cases import H100, V100, dense, mla_moe, target, workload

MIXTURE = mla_moe(8, 4096, 32, 64, 8, 2048, 4096, 32000)


def traits(model: ModelSpec, gpu: object = H100) -> Traits:
    return traits_of(model, gpu, workload(), target())  # type: ignore[arg-type]


def test_a_mixture_is_known_by_its_sizes_on_every_gpu_and_under_any_name() -> None:
    renamed = MIXTURE.model_copy(update={"name": "another"})
    assert shape_of(MIXTURE) == "8x4096-64e8k"
    assert traits(MIXTURE).shape == traits(renamed).shape == traits(MIXTURE, V100).shape == "8x4096-64e8k"
    assert traits(dense(8, 4096, 32, 8, 14336, 32000)).shape == ""


def test_coefficients_of_levels_add_up_and_other_mixtures_keep_theirs() -> None:
    table = {"family=test": {"experts": 0.1}, "family|shape=test|8x4096-64e8k": {"experts": 0.2, "host": -0.1}}
    here = multipliers_of(traits(MIXTURE), table)
    other = multipliers_of(traits(mla_moe(8, 4096, 32, 32, 8, 2048, 4096, 32000)), table)
    assert (here.experts, here.host) == pytest.approx((math.exp(0.3), math.exp(-0.1)))
    assert (other.experts, other.host) == pytest.approx((math.exp(0.1), 1.0))
    assert multipliers_of(traits(dense(8, 4096, 32, 8, 14336, 32000)), table).host == 1.0
