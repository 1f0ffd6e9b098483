"""What a request looks like at the doors: one shape for REST bodies and command lines."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic.json_schema import WithJsonSchema

from meshwright.specs.base import Document, faults_of
from meshwright.specs.errors import SpecError
from meshwright.specs.goals import Objective
from meshwright.specs.target import Allowed

DEFAULT_TARGET = "megatron@0.19"
DEFAULT_DEADLINE_S = 30.0
#: Far above any real argument list, values included.
MAX_ARGUMENTS = 10_000

_TEXT_OR_OBJECT = {"anyOf": [{"type": "string"}, {"type": "object"}]}
Model = Annotated[
    Any,
    Field(description="Preset name, Hugging Face config.json object, or ModelSpec object"),
    WithJsonSchema({**_TEXT_OR_OBJECT, "examples": ["llama-3.1-70b"]}),
]
Cluster = Annotated[
    Any,
    Field(description="Shorthand such as 64xH100 or 4x8xH100-SXM+4x8xA100-80GB, cluster object, or ClusterSpec object"),
    WithJsonSchema({**_TEXT_OR_OBJECT, "examples": ["64xH100"]}),
]
WorkloadFields = Annotated[
    dict[str, Any],
    Field(
        description="Workload: global_batch_size and seq_length are required; precision, task, lora, frozen, dtypes "
        "and the rest have defaults",
        examples=[{"global_batch_size": 512, "seq_length": 8192}],
    ),
]
CalibrationData = Annotated[
    dict[str, Any] | None,
    Field(description="A calibration, as `meshwright calibrate` writes it: it corrects the costs"),
]


def _choice(value: Any) -> int | str:
    if isinstance(value, bool | float):  # as a command line spells it
        return str(value).lower()
    if not isinstance(value, int | str):
        raise ValueError("must be a whole number or a name")
    return value


def _arguments(value: Any) -> str | list[str]:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        count = len(value.split()) if isinstance(value, str) else len(value)
        if count > MAX_ARGUMENTS:
            raise ValueError(f"must be at most {MAX_ARGUMENTS} arguments, got {count}")
        return value
    raise ValueError("must be an argument line as text, or a list of texts")


def _configuration(value: Any) -> str | dict[str, Any] | None:
    if value is None or isinstance(value, str | dict):
        return value
    raise ValueError("must be the text of a configuration or an object")


Headroom = Annotated[float, Field(ge=0, lt=1)]
Choice = Annotated[Any, BeforeValidator(_choice), WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}]})]
Arguments = Annotated[
    Any,
    BeforeValidator(_arguments),
    Field(description="Argument line, script text, or list of arguments"),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


FormatName = Literal["megatron", "torchtitan-toml", "torchtitan-python", "deepspeed", "accelerate"]
Configuration = Annotated[
    Any,
    BeforeValidator(_configuration),
    Field(description="Text of a configuration file, or its JSON object"),
    WithJsonSchema({**_TEXT_OR_OBJECT, "examples": [{"zero_optimization": {"stage": 3}, "train_batch_size": 64}]}),
]


class Body(Document):
    """A request body: strict types (no number in quotes), no unknown fields."""

    @classmethod
    def read(cls, data: Any, pointer: str = "") -> Self:
        """Validate JSON data; :class:`SpecError` with one fault per wrong field."""
        try:
            return cls.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise SpecError(faults_of(error, pointer)) from None


ExpertLoad = Annotated[
    Any,
    Field(description="zipf:S, tokens by expert, or one such list a MoE layer; experts are placed to even it out"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "array"}]}},
                {"type": "null"},
            ],
            "examples": ["zipf:0.6"],
        }
    ),
]
Current = Annotated[
    Any,
    Field(alias="from", description="The plan in use: a plan document, a Plan, or Megatron arguments"),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "array"}, {"type": "null"}]}),
]


class _Inputs(Body):
    """The four inputs of every question."""

    model: Model
    cluster: Cluster
    workload: WorkloadFields
    target: str = DEFAULT_TARGET
    calibration: CalibrationData = None
    expert_load: ExpertLoad = None


class PlanBody(_Inputs):
    """Ask for the best plans, which leave ``memory_headroom`` of the usable memory free."""

    memory_headroom: Headroom = 0.05

    objective: Objective = "time"
    price: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict, examples=[{"H100-SXM": 2.5}])
    tokens: PositiveFloat | None = None
    target_step_time_s: PositiveFloat | None = None
    target_tokens_per_s: PositiveFloat | None = None
    what_if: Annotated[tuple[str, ...], Field(max_length=16)] = Field(default=(), examples=[["gpus=2x"]])
    current: Current = None
    top: Annotated[int, Field(ge=1, le=50)] = 5
    fix: dict[str, Choice] = Field(default_factory=dict, examples=[{"tp": 8}])
    max: dict[str, PositiveInt] = Field(default_factory=dict, examples=[{"pp": 16}])
    forbid: tuple[str, ...] = Field(default=(), examples=[["vpp"]])
    allow: tuple[Allowed, ...] = Field(default=(), examples=[["tp_comm_overlap"]])
    work_limit: PositiveInt | None = None
    deadline_s: Annotated[PositiveFloat, Field(le=3600)] | None = DEFAULT_DEADLINE_S


class Degrees(Body):
    """A plan by its degrees; the rest follows (even or best layer split, default placement)."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt | None = None
    vpp: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    recompute: str | None = None
    sharding: str | None = None

    def given(self) -> dict[str, int | str]:
        """The degrees that have a value."""
        return {name: value for name, value in self if value is not None}


class HeadroomBody(Body):
    """The share of usable memory to leave free."""

    memory_headroom: Headroom = 0.0


class EstimateBody(_Inputs):
    """Price a plan given by ``degrees`` or, in full, by ``plan``. It fits if memory just holds it."""

    memory_headroom: Headroom = 0.0

    degrees: Degrees | None = None
    plan: dict[str, Any] | None = Field(default=None, description="A Plan, as in the plan document")


class DocumentBody(HeadroomBody):
    """Price the plan of a plan document again."""

    calibration: CalibrationData = None
    document: dict[str, Any] = Field(description="A plan document, as POST /v1/plans returns it")


class ExportBody(Body):
    """What the files of a plan need of a place: its launcher, its hosts, its site."""

    launcher: str = "torchrun"
    hosts: Any = Field(default=None, description="Host names in plan order, or an object from host to pool or GPU type")
    site: dict[str, Any] | None = Field(
        default=None,
        description="account, partition, qos, reservation, time_limit, image, mounts, environment, megatron_path, "
        "arguments",
        examples=[{"account": "llm", "time_limit": "4:00:00"}],
    )


class ScriptWorkload(Body):
    """What a configuration leaves to the training script."""

    global_batch_size: PositiveInt | None = None
    seq_length: PositiveInt | None = None
    precision: str | None = None

    def given(self) -> dict[str, int | str]:
        """The fields that have a value."""
        return {name: value for name, value in self if value is not None}


class ScriptDegrees(Body):
    """Choices that a configuration leaves to the training script."""

    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    recompute: str | None = None

    def given(self) -> dict[str, int | str]:
        """The choices that have a value."""
        return {name: value for name, value in self if value is not None}


class CheckBody(Body):
    """Check a configuration: legal for the target, and with a cluster also whether it fits; with ``compare`` also how
    far it is from the best plan. Give ``arguments`` (Megatron) or ``configuration`` (any format).

    ``model``, ``workload`` and ``degrees`` complete formats that leave them to the training script.
    """

    target: str | None = Field(default=None, description="By default the format's framework in its default version")
    format: FormatName | None = Field(default=None, description="By default told from the content")
    arguments: Arguments | None = None
    configuration: Configuration = None
    world_size: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    cluster: Cluster = None
    model: Model = None
    workload: ScriptWorkload = ScriptWorkload()
    degrees: ScriptDegrees = ScriptDegrees()
    env: dict[str, str] = Field(default_factory=dict, examples=[{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}])
    te_version: str | None = None
    sm: PositiveFloat | None = Field(default=None, description="Compute capability, such as 9.0")
    memory_headroom: Headroom = 0.0
    compare: bool = Field(default=False, description="Search for the best plan and compare with it")
    work_limit: PositiveInt | None = None
    deadline_s: Annotated[PositiveFloat, Field(le=3600)] | None = DEFAULT_DEADLINE_S
