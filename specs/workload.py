"""``Workload``: what the user decides and a planner never changes unasked.

One sequence length for all samples: length distributions and packing are not part of it yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from .base import Document
from .cluster import Precision
from .errors import Fault, SpecError
from .fields import Count, Positive

Task = Literal["pretrain", "sft", "lora"]
Dtype = Literal["fp32", "fp16", "bf16", "fp8"]
Module = Literal["vision", "embedding", "decoder", "head"]
LoraTarget = Literal["qkv", "proj", "fc1", "fc2"]
BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}

#: Dtype of the stored parameters that mixed-precision training keeps for its GEMM precision. The fp8 and fp4 recipes of
#: Transformer Engine store bf16 and cast before each GEMM.
PARAMS_DTYPE: dict[str, Dtype] = {
    "fp32": "fp32",
    "tf32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "bf16",
    "mxfp8": "bf16",
    "nvfp4": "bf16",
}


class Lora(Document):
    """Low-rank adapters of ``rank`` on the named linear maps.

    Defaults: rank 32 on all four maps of a layer, as in Megatron-Bridge (``bridge/peft/lora.py``, release 0.6.2).
    """

    rank: Count = 32
    targets: tuple[LoraTarget, ...] = Field(default=("qkv", "proj", "fc1", "fc2"), min_length=1)


class Workload(Document):
    """Task, batch, sequence and numerics of a training run.

    ``frozen`` names modules without gradients (``vision``, ``embedding``, ``decoder``, ``head``). Dtypes are those
    of the stored parameter copy, the gradients as they are reduced, the buffer that adds them up
    (``main_gradient_dtype``, by default the same), the optimizer's main parameters and its moments; a dtype that is
    not given follows from ``precision``. Main parameters of the same dtype as the stored ones are no separate copy.
    ``moe_capacity_factor`` drops tokens beyond that multiple of an expert's even share (None: no token is dropped).
    ``moe_load_factor`` is the load of the fullest expert rank over the mean (1 = perfectly balanced), whatever the
    expert-parallel degree; ``moe_load_factor_by_ep`` says it for single degrees and goes before it. ``mtp`` trains
    the model's multi-token-prediction layers too. ``dropout``: hidden and attention dropout are on, so their masks are
    kept. ``params_dtype`` fp8 stores the linear maps of the layers in fp8 (``fp8_param_gather``), the rest in bf16.
    Optimizer ``muon`` keeps one momentum for the maps of the layers and trains embedding and head with Adam.
    """

    task: Task = "pretrain"
    lora: Lora | None = None
    frozen: tuple[Module, ...] = ()
    global_batch_size: Annotated[Count, Field(le=1_000_000_000)]
    seq_length: Annotated[Count, Field(le=100_000_000)]
    precision: Precision = "bf16"
    params_dtype: Dtype = "bf16"
    gradient_dtype: Dtype = "fp32"
    main_gradient_dtype: Dtype | None = None
    main_params_dtype: Dtype = "fp32"
    moments_dtype: Dtype = "fp32"
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    dropout: Annotated[bool, Field(strict=True)] = False
    moe_capacity_factor: Positive | None = None
    moe_load_factor: Annotated[float, Field(strict=True, ge=1.0, le=1e6)] = 1.0
    moe_load_factor_by_ep: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(strict=True, ge=1.0, le=1e6)]] = (
        Field(default_factory=dict)
    )
    mtp: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        """Stored dtype by precision, and the default adapters of task ``lora``."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        precision = filled.get("precision")
        if filled.get("params_dtype") is None and isinstance(precision, str) and precision in PARAMS_DTYPE:
            filled["params_dtype"] = PARAMS_DTYPE[precision]
        if filled.get("task") == "lora" and filled.get("lora") is None:
            filled["lora"] = Lora()
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.task != "lora" and self.lora is not None:
            raise ValueError(f"lora is given, but task is {self.task}; use task lora")
        if len(set(self.frozen)) < len(self.frozen):
            raise ValueError("frozen names a module twice")
        if len(self.frozen) == len(get_args(Module)) and self.task != "lora":
            raise ValueError("frozen names every module, so there is nothing to train")
        if BYTES[self.main_params_dtype] < BYTES[self.params_dtype]:
            raise ValueError(
                f"main_params_dtype {self.main_params_dtype} holds less than params_dtype {self.params_dtype}; "
                "use fp32 for both, or equal ones"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def gradient_bytes(self) -> int:
        """Bytes a parameter of the buffer that micro-batches add their gradients to."""
        return BYTES[self.main_gradient_dtype or self.gradient_dtype]

    @property
    def main_params_bytes(self) -> int:
        """Bytes a parameter of the optimizer's separate copy; 0 where it updates the stored parameters themselves."""
        return 0 if self.main_params_dtype == self.params_dtype else BYTES[self.main_params_dtype]


def workload_from_options(options: Mapping[str, Any] | None = None, **more: Any) -> Workload:
    """The workload of options as a command line or a request gives them; an option that is None is left out.

    Besides the fields of :class:`Workload`: ``lora_rank`` and ``lora_targets``. Raises :class:`SpecError` with one
    fault per wrong option, with the valid values where they can be listed.
    """
    given = {name: value for name, value in {**(options or {}), **more}.items() if value is not None}
    lora = {name: given.pop(f"lora_{name}") for name in ("rank", "targets") if f"lora_{name}" in given}
    if lora:
        if "lora" in given:
            raise SpecError(Fault("/lora", "is given together with lora_rank or lora_targets; give one of them"))
        given["lora"] = lora
    return Workload.parse(given)
