"""``Workload``: what the user decides and a planner never changes unasked."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from .base import Document
from .cluster import Precision

Task = Literal["pretrain", "sft", "lora"]
Dtype = Literal["fp32", "fp16", "bf16", "fp8"]
BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class Lora(Document):
    """Low-rank adapters of ``rank`` on the named linear maps."""

    rank: PositiveInt = 16
    targets: tuple[Literal["qkv", "proj", "fc1", "fc2"], ...] = ("qkv", "proj", "fc1", "fc2")


class Workload(Document):
    """Task, batch, sequence and numerics of a training run.

    ``frozen`` names modules without gradients (``vision``, ``embedding``, ``decoder``, ``head``). Dtypes are those
    of the stored parameter copy, the gradient buffer, the optimizer's main parameters and its moments.
    ``moe_load_factor`` is the load of the fullest expert rank over the mean (1 = perfectly balanced).
    """

    task: Task = "pretrain"
    lora: Lora | None = None
    frozen: tuple[Literal["vision", "embedding", "decoder", "head"], ...] = ()
    global_batch_size: PositiveInt = Field(le=1_000_000_000)
    seq_length: PositiveInt = Field(le=100_000_000)
    precision: Precision = "bf16"
    params_dtype: Dtype = "bf16"
    gradient_dtype: Dtype = "fp32"
    main_params_dtype: Dtype = "fp32"
    moments_dtype: Dtype = "fp32"
    optimizer: Literal["adam", "sgd"] = "adam"
    moe_capacity_factor: PositiveFloat | None = None
    moe_load_factor: float = Field(default=1.0, ge=1.0, le=1e6)
    mtp: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.task == "lora" and self.lora is None:
            raise ValueError("task lora needs lora: {rank, targets}")
        if self.task != "lora" and self.lora is not None:
            raise ValueError(f"lora is given, but task is {self.task}; use task lora")
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length
