"""``PlanRequest``: everything that decides an answer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshwright.cost_models.calibration import Calibration
from meshwright.specs.base import Document
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

#: Integer choices of a plan that ``fix`` and ``max`` may name, with their accepted short forms.
DEGREES = ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch_size")
SHORT = {"mbs": "micro_batch_size", "micro-batch-size": "micro_batch_size"}
#: Degrees above this are typing errors.
MAX_DEGREE = 1_000_000
#: Features that ``forbid`` may name.
FEATURES = ("vpp", "cp", "ep", "etp", "pp", "tp", "recompute", "fsdp", "uneven")


class PlanRequest(Document):
    """A request to plan.

    ``fix`` pins choices (degrees, ``recompute`` by label, ``sharding``), ``max`` caps degrees, ``forbid`` takes
    features out of the space. ``memory_headroom`` is the share of usable memory that a plan must leave free.
    ``work_limit`` caps how many candidates are partitioned, reproducibly; ``deadline_s`` cuts by the clock.
    ``calibration`` corrects the costs where it has an entry.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    target: Target
    objective: Literal["time", "gpus"] = "time"
    top: PositiveInt = Field(default=5, le=50)
    fix: dict[str, int | str] = Field(default_factory=dict)
    max: dict[str, PositiveInt] = Field(default_factory=dict)
    forbid: tuple[str, ...] = ()
    memory_headroom: float = Field(default=0.05, ge=0.0, lt=1.0)
    work_limit: PositiveInt | None = None
    deadline_s: PositiveFloat | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        for field in ("fix", "max"):
            allowed = {*DEGREES, *SHORT} | ({"recompute", "sharding"} if field == "fix" else set())
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
        valid = {"recompute": [mode.label for mode in self.target.recompute], "sharding": list(self.target.sharding)}
        for name, labels in valid.items():
            if name in self.fix and self.fix[name] not in labels:
                raise ValueError(f"fix: {self.target.name} has no {name} {self.fix[name]!r}; use {', '.join(labels)}")
        pinned = {SHORT.get(name, name): value for name, value in self.fix.items()}
        if len(pinned) < len(self.fix):
            raise ValueError("fix: micro_batch_size and mbs are one choice; give one of them")
        for name, value in pinned.items():
            cap = self.cap(name)
            if cap is not None and isinstance(value, int) and value > cap:
                raise ValueError(f"fix: {name}={value} is above max: {name}={cap}")
            if name in self.forbid and value not in (1, "none"):
                raise ValueError(f"fix: {name}={value} contradicts forbid: {name}")
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
