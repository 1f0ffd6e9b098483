"""From the shape of the doors to the planner's nouns: the same for a command line and a REST body.

A body of a stranger never touches the file system: a text is a preset or a shorthand. Only the command line, whose
user owns the machine, passes ``files=True``, which lets a text also name a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from meshwright.cost_models.calibration import Calibration
from meshwright.planner.pins import PINNABLE
from meshwright.planner.request import DEGREES, LABELS, SHORT, PlanRequest
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.expert_load import ExpertLoad, expert_load_from_data
from meshwright.specs.feed_forward import MoEFFN
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan
from meshwright.specs.target import Target
from meshwright.specs.workload import Workload

from .bodies import DEFAULT_TARGET, EstimateBody, PlanBody
from .strict_json import escape

T = TypeVar("T")
B = TypeVar("B", PlanBody, EstimateBody)

INPUTS = ("model", "cluster", "workload", "target", "calibration")
#: Fields of the planner's request that are read from a body's in a way of their own.
READ_APART = ("expert_load", "price", "target_step_time_s", "current")
#: Fields of the planner's request besides its inputs; a body has those that make sense for it.
OPTIONS = tuple(name for name in PlanRequest.model_fields if name not in (*INPUTS, *READ_APART))


class Faults:
    """Collects the faults of several inputs, so that one answer names them all."""

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def of(self, pointer: str, read: Callable[[], T]) -> T | None:
        """The value of ``read``, or None after its faults were noted below ``pointer``."""
        try:
            return read()
        except SpecError as error:
            self.found += [Fault(pointer + f.pointer, f.message, f.alternatives) for f in error.faults]
            return None

    def raise_if_any(self) -> None:
        if self.found:
            raise SpecError(self.found)


def in_field(pointer: str, read: Callable[[], T]) -> T:
    """The value of ``read``, whose faults are placed below ``pointer``."""
    try:
        return read()
    except SpecError as error:
        raise SpecError(Fault(pointer + f.pointer, f.message, f.alternatives) for f in error.faults) from None


def read_model(value: Any, *, files: bool = False) -> ModelSpec:
    """A model by preset name or object; with ``files`` also by the path of a config, ModelSpec or Megatron script."""
    from meshwright.specs import model_io

    if isinstance(value, dict):
        name = value.get("_name_or_path")
        return model_io.model_from_data(value, name if isinstance(name, str) and name else "model")
    if not isinstance(value, str) or not value:
        raise SpecError(Fault("", "must be a preset name or a config object"))
    if not files:
        return model_io.load_preset(value)
    if Path(value).suffix in (".sh", ".args", ".sbatch") and Path(value).is_file():
        return _megatron_model(value)
    return model_io.load_model(value)


def _megatron_model(path: str) -> ModelSpec:
    from meshwright.megatron_export.megatron import model_from_arguments, read_arguments

    from .files import read_text

    return model_from_arguments(read_arguments(read_text(path)))


def read_cluster(value: Any, *, files: bool = False) -> ClusterSpec:
    """A cluster by shorthand or object; with ``files`` also by the path of a YAML or JSON file."""
    from meshwright.specs import cluster_io

    if isinstance(value, str) and value:
        return cluster_io.load_cluster(value) if files else cluster_io.cluster_from_data(value)
    if isinstance(value, dict):
        return cluster_io.cluster_from_data(value)
    raise SpecError(Fault("", "must be a shorthand such as 64xH100 or a cluster object"))


def read_calibration(value: Any) -> Calibration | None:
    """A calibration from JSON data; None is none."""
    return None if value is None else Calibration.parse(value)


def read_expert_load(value: Any, model: ModelSpec) -> ExpertLoad | None:
    """An expert load from JSON data for a model; None is none."""
    if value is None:
        return None
    moe_layers = sum(isinstance(kind.feed_forward, MoEFFN) for kind in model.layers)
    return expert_load_from_data(value, model.moe.num_experts if model.moe else 0, moe_layers)


def read_target(name: str) -> Target:
    """A target by name."""
    from meshwright.specs.targets import load_target

    return load_target(name)


def read_workload(data: dict[str, Any]) -> Workload:
    """A workload from its fields; dtypes that are not given follow from the precision."""
    from meshwright.specs.workload import workload_from_options

    return workload_from_options(data)


def plan_request(data: Any, kind: type[B], *, files: bool = False) -> tuple[PlanRequest, B]:
    """The planner's request in ``data``, and the body as it was read.

    Raises :class:`SpecError` with the faults of the options and of all inputs together.
    """
    faults = Faults()
    body = faults.of("", lambda: kind.read(data))
    given = data if isinstance(data, dict) else {}
    inputs: dict[str, Any] = {}
    if "model" in given:
        inputs["model"] = faults.of("/model", lambda: read_model(given["model"], files=files))
    if "cluster" in given:
        inputs["cluster"] = faults.of("/cluster", lambda: read_cluster(given["cluster"], files=files))
    if isinstance(given.get("workload"), dict):
        inputs["workload"] = faults.of("/workload", lambda: read_workload(given["workload"]))
    target = given.get("target", DEFAULT_TARGET)
    if isinstance(target, str):
        inputs["target"] = faults.of("/target", lambda: read_target(target))
    if body is not None:
        inputs["calibration"] = faults.of("/calibration", lambda: read_calibration(body.calibration))
    faults.found += _choice_faults(given)
    faults.raise_if_any()
    assert body is not None  # noqa: S101 - raise_if_any has raised otherwise
    options = {name: getattr(body, name) for name in OPTIONS if hasattr(body, name)}
    options["expert_load"] = in_field("/expert_load", lambda: read_expert_load(body.expert_load, inputs["model"]))
    if isinstance(body, PlanBody):
        faults.found += _goal_faults(body)
        faults.raise_if_any()
        options["price"] = in_field("/price", lambda: _prices(body.price, inputs["cluster"]))
        missing = sorted({pool.gpu for pool in inputs["cluster"].pools} - options["price"].keys())
        if missing and (options["price"] or body.objective == "cost"):
            raise SpecError(Fault("/price", f"is missing for a GPU-hour of {', '.join(missing)}"))
        options["target_step_time_s"] = _target_step_time_s(body, inputs["workload"])
    request = PlanRequest.parse({**inputs, **options})
    if isinstance(body, PlanBody) and body.current is not None:
        current = in_field("/from", lambda: _current(body.current, request))
        request = request.model_copy(update={"current": current})
    return request, body


def _goal_faults(body: PlanBody) -> list[Fault]:
    """Goals that do not go together."""
    faults = []
    if body.tokens is not None and not body.price:
        faults.append(Fault("/tokens", "gives the cost of a run; give the price of a GPU-hour too"))
    faults += [
        Fault(f"/{name}", f"belongs to objective cost or gpus, not {body.objective}")
        for name in ("target_step_time_s", "target_tokens_per_s")
        if getattr(body, name) is not None and body.objective not in ("cost", "gpus")
    ]
    if body.expert_load is not None and body.workload.get("moe_load_factor", 1.0) != 1.0:
        faults.append(Fault("/expert_load", "and moe_load_factor both say how uneven the load is; leave one out"))
    return faults


def _prices(given: dict[str, float], cluster: ClusterSpec) -> dict[str, float]:
    """Prices by the cluster's own names of its GPU types, which may be given in any spelling of the catalog."""
    from meshwright.specs.catalog import gpu

    out: dict[str, float] = {}
    for name, price in given.items():
        own = name if name in cluster.gpus else in_field("/" + escape(name), lambda name=name: gpu(name).gpu.name)  # type: ignore[misc]
        if own not in cluster.gpus:
            raise SpecError(Fault("/" + escape(name), "is no GPU type of the cluster", tuple(sorted(cluster.gpus))))
        if out.setdefault(own, price) != price:
            raise SpecError(Fault("/" + escape(name), f"and another name both price {own}; leave one out"))
    return out


def _target_step_time_s(body: PlanBody, workload: Workload) -> float | None:
    if body.target_tokens_per_s is None:
        return body.target_step_time_s
    if body.target_step_time_s is not None:
        raise SpecError(Fault("/target_tokens_per_s", "and target_step_time_s are one target; leave one out"))
    return workload.tokens_per_step / body.target_tokens_per_s


def _current(value: Any, request: PlanRequest) -> Plan:
    """A plan in use from a plan document, a Plan, or Megatron arguments."""
    from meshwright.megatron_export.megatron import plan_from_arguments, read_arguments

    from .plan_files import plan_document

    if isinstance(value, dict):
        if "inputs" not in value:
            return Plan.parse(value)
        found = plan_document(value, "").plan
        if found is None:
            raise SpecError(Fault("/plan", "is null: the document holds no plan"))
        return found
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return plan_from_arguments(read_arguments(value), request.model, request.cluster)
    raise SpecError(Fault("", "must be a plan document, a Plan, or Megatron arguments"))


def _choice_faults(given: dict[str, Any]) -> list[Fault]:
    """Names in ``fix`` and ``max`` that are no choice of a plan, and one choice under two names."""
    faults = []
    choices_of: dict[str, tuple[str, ...]] = {"fix": (*DEGREES, *LABELS, *PINNABLE), "max": DEGREES}
    for field, valid in choices_of.items():
        choices = given.get(field)
        if not isinstance(choices, dict):
            continue
        names: dict[str, str] = {}
        for name in choices:
            pointer = f"/{field}/{escape(name)}"
            choice = str(SHORT.get(name, name))
            if choice not in valid:
                faults.append(Fault(pointer, "is no choice of a plan", valid))
            elif names.setdefault(choice, name) != name:
                faults.append(Fault(pointer, f"and {names[choice]} are one choice; give one of them"))
    return faults


def document_request(
    document: PlanDocument, *, memory_headroom: float = 0.0, calibration: Calibration | None = None
) -> PlanRequest:
    """The request that a plan document answers, so that its plan can be priced again."""
    inputs = document.inputs
    return PlanRequest(
        model=inputs.model,
        cluster=inputs.cluster,
        workload=inputs.workload,
        target=inputs.target,
        memory_headroom=memory_headroom,
        calibration=calibration,
    )
