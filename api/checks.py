"""A user's own configuration: legal or not, whether its plan fits, and how far that is from the best plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.megatron_export.formats import FORMATS, format_of
from meshwright.megatron_export.megatron.source import read_source
from meshwright.megatron_export.reading import Described, Given, Reading
from meshwright.planner.errors import DeadlineExceeded, IllegalPlan
from meshwright.planner.experts.goal import with_expert_load, with_placement
from meshwright.planner.goals import answer
from meshwright.planner.request import PlanRequest
from meshwright.planner.single import document_for_plan
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.target import Target

from .bodies import DEFAULT_TARGET, CheckBody, HeadroomBody
from .output import violation_dicts
from .requests import Faults, in_field, read_calibration, read_cluster, read_expert_load, read_model, read_target

#: Megatron 0.19 has 845 flags. Near matches of a wrong one take 3 ms (measured), so more would keep a service busy.
MAX_FLAGS = 1_000


def run_check(data: Any, *, files: bool = False) -> dict[str, Any]:
    """The verdict on a body of the kind :class:`CheckBody`.

    ``{"format", "target", "legal", "violations", "fits", "estimate", "best", "reason", "notes"}``. What the framework's
    own reader refuses is a violation too. ``fits`` and ``estimate`` are null without a cluster, for illegal
    configurations, and where something that only the training script says was not given; ``reason`` then says what.
    ``best`` compares with the best plan where ``compare`` asks for it. Raises :class:`SpecError` for a wrong body.
    """
    faults = Faults()
    body = faults.of("", lambda: CheckBody.read(data))
    fields = data if isinstance(data, dict) else {}
    cluster: ClusterSpec | None = None
    model: ModelSpec | None = None
    if fields.get("cluster") is not None:
        cluster = faults.of("/cluster", lambda: read_cluster(fields["cluster"], files=files))
    if fields.get("model") is not None:
        model = faults.of("/model", lambda: read_model(fields["model"], files=files))
    target: Target | None = None
    if isinstance(fields.get("target"), str):
        target = faults.of("/target", lambda: read_target(fields["target"]))
    if body is None:
        faults.raise_if_any()
    assert body is not None  # noqa: S101 - raise_if_any has raised otherwise
    source, pointer = _source(body, faults, files=files)
    name = faults.of(pointer, lambda: body.format or format_of(source)) or "megatron"
    if name != "accelerate" and body.world_size is None and fields.get("cluster") is None:
        faults.found.append(Fault("/world_size", "is required where no cluster says how many ranks there are"))
    if body.compare and fields.get("cluster") is None:
        faults.found.append(Fault("/compare", "needs a cluster, for which the best plan is sought"))
    faults.raise_if_any()
    found = _target_of(name, target)
    given = _given(body, cluster, model, found)
    if name == "megatron":
        _require_few_flags(source, pointer)
    reading = in_field(pointer, lambda: FORMATS[name].read(source, given))
    return _verdict(reading, body, cluster, found, name)


def _source(body: CheckBody, faults: Faults, *, files: bool) -> tuple[Any, str]:
    """What is checked, and where the body gives it."""
    if body.arguments is not None and body.configuration is not None:
        faults.found.append(Fault("/configuration", "and arguments are both given; give one of them"))
    if body.arguments is None and body.configuration is None:
        faults.found.append(Fault("/arguments", "or configuration is required"))
    if body.arguments is not None:
        return body.arguments, "/file" if files and isinstance(body.arguments, str) else "/arguments"
    return body.configuration or "", "/file" if files else "/configuration"


def _target_of(name: str, target: Target | None) -> Target:
    """The target that a format is checked for."""
    if target is None:
        return read_target(FORMATS[name].target)
    framework = FORMATS[name].framework
    if target.framework != framework:
        raise SpecError(Fault("/target", f"{target.name} does not read {name} configurations", (framework,)))
    return target


def _given(body: CheckBody, cluster: ClusterSpec | None, model: ModelSpec | None, target: Target) -> Given:
    world_size = body.world_size or (cluster.num_gpus if cluster is not None else 0)
    if cluster is not None and world_size != cluster.num_gpus:
        raise SpecError(Fault("/world_size", f"is {world_size}, but the cluster has {cluster.num_gpus} GPUs"))
    known: dict[str, Any] = {} if body.te_version is None else {"te_version": body.te_version}
    if body.sm is not None:
        known["sm"] = body.sm
    elif cluster is not None:
        capabilities = [gpu.compute_capability for gpu in cluster.gpus.values()]
        known["sm"] = min((each for each in capabilities if each is not None), default=None)
    return Given(
        target=target,
        world_size=world_size,
        model=model,
        workload=body.workload.given(),
        degrees=body.degrees.given(),
        env=body.env,
        known=known,
    )


def _verdict(
    reading: Reading, body: CheckBody, cluster: ClusterSpec | None, target: Target, name: str
) -> dict[str, Any]:
    violations, reason = list(reading.violations), None
    document: PlanDocument | None = None
    best: dict[str, Any] | None = None
    if not violations and cluster is not None:
        if reading.missing:
            reason = "; ".join(f"{fault.pointer.rpartition('/')[2]} {fault.message}" for fault in reading.missing)
        else:
            try:
                described = reading.describe(cluster)
                request = _request(described, cluster, described.target or target, body)
                document = document_for_plan(request, described.plan)
                reason = document.reason
                best = _best(request, described, body) if body.compare else None
            except IllegalPlan as error:  # what only the model shows
                violations = list(error.violations)  # type: ignore[arg-type]
            except SpecError as error:
                if name == "megatron":  # its arguments say all; what they lack is asked for
                    raise
                reason = "; ".join(f"{fault.pointer.strip('/')} {fault.message}".strip() for fault in error.faults)
    estimate = document.estimate if document is not None else None
    return {
        "format": name,
        "target": target.name,
        "legal": not violations,
        "fits": estimate.fits if estimate is not None else None,
        "violations": violation_dicts(violations),
        "estimate": estimate.to_json() if estimate is not None else None,
        "best": best,
        "reason": reason,
        "notes": list(reading.notes),
    }


def _request(described: Described, cluster: ClusterSpec, target: Target, body: CheckBody) -> PlanRequest:
    return PlanRequest(
        model=described.model,
        cluster=cluster,
        workload=described.workload,
        target=target,
        memory_headroom=body.memory_headroom,
    )


def _best(request: PlanRequest, described: Described, body: CheckBody) -> dict[str, Any]:
    """How far the plan is from the best one that the same target runs. ``complete`` false: the search was cut short."""
    offloads = described.plan.options.optimizer_offload_fraction > 0
    asked = request.model_copy(
        update={
            "current": described.plan,
            "deadline_s": body.deadline_s,
            "work_limit": body.work_limit,
            "allow": ("optimizer_offload",) if offloads else (),
        }
    )
    try:
        document = answer(asked)
    except DeadlineExceeded as error:
        return {"step_time_s": None, "ratio": None, "differences": [], "complete": False, "reason": str(error)}
    compared, figures = document.current, document.estimate
    out: dict[str, Any] = {
        "step_time_s": figures.step_time_s if figures is not None else None,
        "ratio": compared.ratio if compared is not None and figures is not None else None,
        "differences": [each.model_dump(mode="json") for each in compared.differences] if compared is not None else [],
        "complete": document.complete,
        "reason": document.reason,
    }
    return out | {"gap": document.bound.gap if document.bound is not None else None}


def priced_arguments(arguments: list[str], inputs: dict[str, Any], *, files: bool = False) -> PlanDocument:
    """The plan that Megatron ``arguments`` describe as a priced document.

    ``inputs`` is a body with ``cluster``, and with ``model``, ``target``, ``calibration`` and ``memory_headroom`` where
    given; the workload comes with the arguments. Raises :class:`SpecError` and :class:`IllegalPlan`.
    """
    faults = Faults()
    headroom = {name: value for name, value in inputs.items() if name == "memory_headroom"}
    share = faults.of("", lambda: HeadroomBody.read(headroom))
    target = faults.of("/target", lambda: read_target(inputs.get("target", DEFAULT_TARGET)))
    if inputs.get("cluster") is None:
        faults.found.append(Fault("/cluster", "is required"))
        cluster = None
    else:
        cluster = faults.of("/cluster", lambda: read_cluster(inputs["cluster"], files=files))
    faults.of("/calibration", lambda: read_calibration(inputs.get("calibration")))
    for field in inputs.get("workload", {}):
        faults.found.append(Fault(f"/workload/{field}", "comes with the arguments after --; leave it out"))
    faults.raise_if_any()
    assert share is not None  # noqa: S101 - raise_if_any has raised otherwise
    assert target is not None  # noqa: S101
    assert cluster is not None  # noqa: S101
    if target.framework != "megatron":
        raise SpecError(Fault("/target", f"{target.name} has no argument line; megatron has"))
    named = inputs.get("model")
    model = read_model(named, files=files) if named is not None else None
    body = CheckBody.read({"arguments": arguments})
    reading = FORMATS["megatron"].read(arguments, _given(body, cluster, model, target))
    if reading.violations:
        raise IllegalPlan(reading.violations)
    described = reading.describe(cluster)
    request = PlanRequest(
        model=described.model,
        cluster=cluster,
        workload=described.workload,
        target=target,
        memory_headroom=share.memory_headroom,
        calibration=read_calibration(inputs.get("calibration")),
        expert_load=in_field("/expert_load", lambda: read_expert_load(inputs.get("expert_load"), described.model)),
    )
    request = with_expert_load(request)
    return with_placement(request, document_for_plan(request, described.plan))


def _require_few_flags(source: str | list[str] | Mapping[str, Any], pointer: str) -> None:
    """:class:`SpecError` for a text that cannot be read or names no flag, which is no argument list, right or wrong;
    and for one of very many flags."""
    if isinstance(source, str):
        try:
            tokens = read_source(source).tokens
        except SpecError as error:
            raise SpecError(Fault(pointer, f"{f.pointer} {f.message}".strip()) for f in error.faults) from None
        if not any(token.startswith("--") for token in tokens):
            raise SpecError(Fault(pointer, "holds no Megatron arguments"))
    else:
        tokens = list(source)
    count = sum(token.startswith("--") for token in tokens)
    if count > MAX_FLAGS:
        raise SpecError(Fault(pointer, f"names {count} flags; at most {MAX_FLAGS} are read"))
