"""Target data files: what they claim, how they are found."""

from __future__ import annotations

from typing import get_args

import pytest

from meshwright.specs.errors import SpecError
from meshwright.specs.target import RecomputeModule
from meshwright.specs.targets import list_targets, load_target

#: --recompute-modules of Megatron-LM (transformer_config.py:1940) that our cost model knows.
MEGATRON_MODULES = {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}


@pytest.mark.parametrize("name", list_targets())
def test_each_file_is_a_consistent_target(name: str) -> None:
    target = load_target(name)
    assert target.name == name == f"{target.framework}@{target.version}"
    assert target.recompute[0].granularity == "none"
    labels = [mode.label for mode in target.recompute]
    assert len(set(labels)) == len(labels)
    for mode in target.recompute:  # rule R1: full needs method and layers, selective neither
        if mode.granularity == "full":
            assert mode.method
            assert mode.num_layers
            assert not mode.modules
        if mode.granularity == "selective":
            assert mode.modules
            assert set(mode.modules) <= (
                MEGATRON_MODULES if target.framework == "megatron" else set(get_args(RecomputeModule))
            )
            assert mode.method is None
            assert mode.num_layers is None
    assert target.sources


def test_megatron_019() -> None:
    target = load_target("megatron@0.19")
    assert target.verified == "code"
    assert target.schedules == ("1f1b", "interleaved")
    assert target.sharding == ("none", "zero1", "zero2", "fsdp")
    assert target.rank_orders == ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
    assert target.vocab_divisor == 128
    assert target.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert all("core_attn" not in mode.modules for mode in target.recompute)
    assert target.recompute_block_layers


def test_the_newest_version_verified_by_code_is_the_default() -> None:
    assert [name for name in list_targets() if load_target(name).verified == "code"] == [
        "bridge@0.6",
        "megatron@0.17",
        "megatron@0.18",
        "megatron@0.19",
        "torchtitan@0.2",
        "torchtitan@0.3",
    ]
    assert load_target("megatron") == load_target(" Megatron@0.19 ") == load_target("megatron@0.19")
    assert load_target("torchtitan") == load_target("torchtitan@0.3")


@pytest.mark.parametrize("name", ["megatron@0.9", "megatron@", "colossalai", "", "../workload", "megatron-0.19"])
def test_unknown_targets_list_the_known_ones(name: str) -> None:
    with pytest.raises(SpecError, match="unknown target") as caught:
        load_target(name)
    near = tuple(target for target in list_targets() if "@" in name and target.split("@")[0] == name.split("@")[0])
    assert caught.value.faults[0].alternatives == (near or tuple(list_targets()))
