"""``PlanRequest``: everything that decides an answer."""

from __future__ import annotations

from typing import Self, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from meshwright.cost_models.calibration import Calibration
from meshwright.cost_models.rank_order import DATA_INSIDE, PIPELINE_INSIDE
from meshwright.specs.base import Document
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.expert_load import ExpertLoad
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.goals import Objective
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan
from meshwright.specs.target import Allowed, Switch, Target
from meshwright.specs.workload import Workload

from .pins import PINNABLE, option_fault
from .rules import uses_fsdp

#: Integer choices of a plan that ``fix`` and ``max`` may name, choices by a word of the target that ``fix`` may name,
#: and accepted short forms.
DEGREES = ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch_size")
LABELS = ("recompute", "sharding", "rank_order")
SHORT = {"mbs": "micro_batch_size", "micro-batch-size": "micro_batch_size"}
#: Degrees above this are typing errors.
MAX_DEGREE = 1_000_000
#: Features that ``forbid`` may name.
FEATURES = (
    "vpp", "cp", "ep", "etp", "pp", "tp", "recompute", "fsdp", "uneven", "hsdp", "zero2", "dist_opt_instances",
    "offload", "cp_comm_type", "rank_order", *get_args(Switch),
)  # fmt: skip


class PlanRequest(Document):
    """A request to plan.

    ``fix`` pins choices (degrees, ``recompute`` by label, ``sharding``, ``rank_order``, options of
    :data:`.pins.PINNABLE`), ``max`` caps degrees, ``forbid`` takes features out of the space. ``memory_headroom`` is
    the share of usable memory that a plan must leave free. ``work_limit`` caps how many candidates are partitioned,
    reproducibly; ``deadline_s`` cuts by the clock. ``calibration`` corrects the costs where it has an entry.

    ``price`` is money a GPU-hour by GPU type, ``tokens`` the length of the whole run. ``target_step_time_s`` is the
    longest step that objectives ``cost`` and ``gpus`` may take. ``expert_load`` says how unevenly tokens meet experts;
    they are then placed to even that out. ``allow`` lets plans have options that the target leaves off. ``what_if``
    names changes to plan for as well, and ``current`` is a plan in use that the best one is compared with.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    target: Target
    objective: Objective = "time"
    top: PositiveInt = Field(default=5, le=50)
    fix: dict[str, int | str] = Field(default_factory=dict)
    max: dict[str, PositiveInt] = Field(default_factory=dict)
    forbid: tuple[str, ...] = ()
    memory_headroom: float = Field(default=0.05, ge=0.0, lt=1.0)
    work_limit: PositiveInt | None = None
    deadline_s: PositiveFloat | None = None
    calibration: Calibration | None = None
    price: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    tokens: PositiveFloat | None = None
    target_step_time_s: PositiveFloat | None = None
    expert_load: ExpertLoad | None = None
    what_if: tuple[str, ...] = Field(default=(), max_length=16)
    current: Plan | None = None
    allow: tuple[Allowed, ...] = ()

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for field in ("fix", "max"):
            allowed = {*DEGREES, *SHORT} | ({*LABELS, *PINNABLE} if field == "fix" else set())
            for name, value in getattr(self, field).items():
                if name not in allowed:
                    raise ValueError(f"{field}: {name!r} is not a choice; use one of {', '.join(sorted(allowed))}")
                whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DEGREE
                if SHORT.get(name, name) in DEGREES and not whole:
                    raise ValueError(f"{field}: {name} must be a whole number from 1 to {MAX_DEGREE}, got {value!r}")
        for name in self.forbid:
            if name not in FEATURES:
                raise ValueError(f"forbid: {name!r} is not a feature; use one of {', '.join(FEATURES)}")
        return self

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        valid = {
            "recompute": [mode.label for mode in self.target.recompute],
            "sharding": list(self.target.sharding),
            "rank_order": list(self.target.rank_orders),
        }
        for name, labels in valid.items():
            if name in self.fix and self.fix[name] not in labels:
                raise ValueError(f"fix: {self.target.name} has no {name} {self.fix[name]!r}; use {', '.join(labels)}")
        if self.fix.get("rank_order") == PIPELINE_INSIDE:
            if len(self.cluster.pools) > 1:
                raise ValueError(
                    f"fix: rank_order={PIPELINE_INSIDE} gives each replica of the pipeline its own GPUs; over several "
                    f"pools plans have {DATA_INSIDE}"
                )
            if uses_fsdp(self.fix.get("sharding")):
                raise ValueError(f"fix: sharding={self.fix['sharding']} does not go with rank_order={PIPELINE_INSIDE}")
        fault = option_fault(self.fix, self.model, self.target)
        if fault is not None:
            raise ValueError(f"fix: {fault}")
        pinned = {SHORT.get(name, name): value for name, value in self.fix.items()}
        if len(pinned) < len(self.fix):
            raise ValueError("fix: micro_batch_size and mbs are one choice; give one of them")
        for name, value in pinned.items():
            cap = self.cap(name)
            if cap is not None and isinstance(value, int) and value > cap:
                raise ValueError(f"fix: {name}={value} is above max: {name}={cap}")
            if name in self.forbid and value not in (1, "none", "false", DATA_INSIDE):
                raise ValueError(f"fix: {name}={value} contradicts forbid: {name}")
        return self

    @model_validator(mode="after")
    def _goals(self) -> Self:
        types = {pool.gpu for pool in self.cluster.pools}
        unknown, missing = sorted(self.price.keys() - types), sorted(types - self.price.keys())
        if unknown:
            raise ValueError(f"price: {unknown[0]!r} is no GPU type of the cluster; use {', '.join(sorted(types))}")
        if missing and (self.price or self.objective == "cost"):
            raise ValueError(f"price: {', '.join(missing)} has none; give its price for a GPU-hour")
        if self.tokens is not None and not self.price:
            raise ValueError("tokens: needs the price of a GPU-hour of every GPU type")
        if self.target_step_time_s is not None and self.objective not in ("cost", "gpus"):
            raise ValueError("target_step_time_s: belongs to objective cost or gpus; time already takes the fastest")
        if self.expert_load is not None:
            if self.workload.moe_load_factor != 1.0:
                raise ValueError("expert_load: and moe_load_factor both say how uneven the load is; leave one out")
            found = {
                kind.feed_forward.num_experts for kind in self.model.kinds if isinstance(kind.feed_forward, MoEFFN)
            }
            if found != {self.expert_load.num_experts}:
                raise ValueError(f"expert_load: is for {self.expert_load.num_experts} experts, the model has {found}")
        return self

    def fixed(self, name: str) -> int | None:
        """The pinned value of a degree, under its long or short name; a forbidden degree is pinned to 1."""
        for key, value in self.fix.items():
            if SHORT.get(key, key) == name and isinstance(value, int):
                return value
        return 1 if name in self.forbid and name in DEGREES else None

    def cap(self, name: str) -> int | None:
        """The upper limit of a degree."""
        for key, value in self.max.items():
            if SHORT.get(key, key) == name:
                return value
        return None
