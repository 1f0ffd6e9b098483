"""Workloads: defaults that follow from the precision, and one fault per wrong option."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.specs.errors import SpecError
from meshwright.specs.workload import Lora, Workload, workload_from_options

BASE = {"global_batch_size": 128, "seq_length": 8192}


# bytes of the stored parameter and of the optimizer's separate copy
@pytest.mark.parametrize(
    ("precision", "params_dtype", "main_copy_bytes"),
    [
        ("bf16", "bf16", 4),
        ("fp16", "fp16", 4),
        ("fp32", "fp32", 0),
        ("tf32", "fp32", 0),
        ("fp8", "bf16", 4),
        ("mxfp8", "bf16", 4),
        ("nvfp4", "bf16", 4),
    ],
)
def test_dtypes_follow_the_precision(precision: str, params_dtype: str, main_copy_bytes: int) -> None:
    for workload in (
        workload_from_options(BASE, precision=precision),
        Workload.parse({**BASE, "precision": precision}),
    ):
        assert workload.params_dtype == params_dtype
        assert workload.main_params_bytes == main_copy_bytes
        assert (workload.gradient_dtype, workload.moments_dtype) == ("fp32", "fp32")


def test_given_dtypes_are_kept() -> None:
    workload = workload_from_options(
        BASE, precision="fp8", params_dtype="fp8", moments_dtype="bf16", gradient_dtype="bf16"
    )
    assert (workload.params_dtype, workload.gradient_dtype, workload.moments_dtype) == ("fp8", "bf16", "bf16")
    assert workload_from_options(BASE, params_dtype=None) == workload_from_options(BASE)


def test_lora() -> None:
    assert workload_from_options(BASE, task="lora").lora == Lora(rank=32, targets=("qkv", "proj", "fc1", "fc2"))
    assert workload_from_options(BASE, task="lora", lora_rank=8, lora_targets=["qkv"]).lora == Lora(
        rank=8, targets=("qkv",)
    )
    assert workload_from_options(BASE, task="lora", lora={"rank": 4}).lora == Lora(rank=4)
    assert workload_from_options(BASE, task="sft").lora is None


def test_tokens_and_round_trip() -> None:
    workload = workload_from_options(BASE, task="lora", frozen=["vision"], moe_capacity_factor=1.25, mtp=True)
    assert workload.tokens_per_step == 1_048_576
    assert Workload.parse(workload.to_json()) == workload


BAD: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["/global_batch_size", "/seq_length"], "is required"),
    ({**BASE, "global_batch_size": 0}, ["/global_batch_size"], "greater than or equal to 1"),
    ({**BASE, "global_batch_size": "128"}, ["/global_batch_size"], "valid integer"),
    ({**BASE, "global_batch_size": True}, ["/global_batch_size"], "valid integer"),
    ({**BASE, "seq_length": 8192.0}, ["/seq_length"], "valid integer"),
    ({**BASE, "seq_length": -1}, ["/seq_length"], "greater than or equal to 1"),
    ({**BASE, "seq_length": 10**12}, ["/seq_length"], "less than or equal to"),
    ({**BASE, "precision": "int8"}, ["/precision"], "valid: fp32, tf32, fp16, bf16, fp8, mxfp8, nvfp4"),
    ({**BASE, "precision": ["bf16"]}, ["/precision"], "is not a valid value"),
    ({**BASE, "task": "finetune", "optimizer": "adamax"}, ["/task", "/optimizer"], "valid: "),
    ({**BASE, "task": "lora", "lora_rank": 0}, ["/lora/rank"], "greater than or equal to 1"),
    ({**BASE, "task": "lora", "lora_targets": ["q"]}, ["/lora/targets/0"], "valid: qkv, proj, fc1, fc2"),
    ({**BASE, "task": "lora", "lora_targets": []}, ["/lora/targets"], "at least 1"),
    ({**BASE, "task": "lora", "lora": {}, "lora_rank": 1}, ["/lora"], "give one of them"),
    ({**BASE, "lora_rank": 8}, [""], "use task lora"),
    ({**BASE, "moe_load_factor": 0.5}, ["/moe_load_factor"], "greater than or equal to 1"),
    ({**BASE, "moe_load_factor": float("nan")}, ["/moe_load_factor"], "finite"),
    ({**BASE, "moe_capacity_factor": float("inf")}, ["/moe_capacity_factor"], "finite"),
    ({**BASE, "mtp": "yes"}, ["/mtp"], "valid boolean"),
    ({**BASE, "params_dtype": "fp32", "main_params_dtype": "bf16"}, [""], "use fp32 for both, or equal ones"),
    ({**BASE, "frozen": ["decoder", "decoder"]}, [""], "twice"),
    ({**BASE, "frozen": ["vision", "embedding", "decoder", "head"]}, [""], "nothing to train"),
    ({**BASE, "batch": 8}, ["/batch"], "is not a known field"),
]


@pytest.mark.parametrize(("options", "pointers", "fragment"), BAD, ids=[str(bad[1]) + bad[2][:12] for bad in BAD])
def test_each_wrong_option_is_one_fault(options: dict[str, Any], pointers: list[str], fragment: str) -> None:
    with pytest.raises(SpecError) as caught:
        workload_from_options(options)
    assert [fault.pointer for fault in caught.value.faults] == pointers
    assert all(fragment in str(fault) for fault in caught.value.faults)
