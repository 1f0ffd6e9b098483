"""Framework arguments: legal or not, and what the plan that they describe costs."""

from __future__ import annotations

from typing import Any

from meshwright.megatron_export.megatron import (
    check_arguments,
    model_from_arguments,
    plan_from_arguments,
    read_arguments,
    workload_from_arguments,
)
from meshwright.megatron_export.megatron.source import read_source
from meshwright.planner.errors import IllegalPlan
from meshwright.planner.experts.goal import with_expert_load, with_placement
from meshwright.planner.request import PlanRequest
from meshwright.planner.rules import Violation
from meshwright.planner.single import document_for_plan
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.target import Target

from .bodies import DEFAULT_TARGET, CheckBody, HeadroomBody
from .output import violation_dicts
from .requests import Faults, in_field, read_calibration, read_cluster, read_expert_load, read_model, read_target

#: Megatron 0.19 has 845 flags. Near matches of a wrong one take 3 ms (measured), so more would keep a service busy.
MAX_FLAGS = 1_000


def run_check(data: Any, *, files: bool = False) -> dict[str, Any]:
    """``{"legal", "fits", "violations", "estimate"}`` of a body of the kind :class:`CheckBody`.

    An argument that the framework's parser refuses is a violation too. ``fits`` and ``estimate`` are null without a
    cluster and for illegal arguments. Raises :class:`SpecError` for a wrong body.
    """
    faults = Faults()
    body = faults.of("", lambda: CheckBody.read(data))
    given = data if isinstance(data, dict) else {}
    name = given.get("target", DEFAULT_TARGET)
    target = faults.of("/target", lambda: read_target(name)) if isinstance(name, str) else None
    cluster: ClusterSpec | None = None
    if given.get("cluster") is not None:
        cluster = faults.of("/cluster", lambda: read_cluster(given["cluster"], files=files))
    if body is not None and body.world_size is None and given.get("cluster") is None:
        faults.found.append(Fault("/world_size", "is required where no cluster says how many ranks there are"))
    faults.raise_if_any()
    assert body is not None  # noqa: S101 - raise_if_any has raised otherwise
    assert target is not None  # noqa: S101
    _only_megatron(target)
    if isinstance(body.arguments, str):
        _require_flags(body.arguments, "/file" if files else "/arguments")
    else:
        _require_few_flags(body.arguments, "/arguments")
    broken = _violations(body, cluster, target)
    document = None
    if not broken and cluster is not None:
        document = _priced(body.arguments, cluster, target, body.memory_headroom, {}, files=files)
    estimate = document.estimate if document is not None else None
    return {
        "legal": not broken,
        "fits": estimate.fits if estimate is not None else None,
        "violations": violation_dicts(broken),
        "estimate": estimate.to_json() if estimate is not None else None,
    }


def priced_arguments(arguments: list[str], inputs: dict[str, Any], *, files: bool = False) -> PlanDocument:
    """The plan that ``arguments`` describe as a priced document.

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
    _only_megatron(target)
    broken = _violations(CheckBody.read({"arguments": arguments}), cluster, target)
    if broken:
        raise IllegalPlan(broken)
    return _priced(arguments, cluster, target, share.memory_headroom, inputs, files=files)


def _require_flags(text: str, pointer: str) -> None:
    """:class:`SpecError` for a text that cannot be read or names no flag: it is no argument list, right or wrong."""
    try:
        tokens = read_source(text).tokens
    except SpecError as error:
        raise SpecError(Fault(pointer, f"{f.pointer} {f.message}".strip()) for f in error.faults) from None
    if not any(token.startswith("--") for token in tokens):
        raise SpecError(Fault(pointer, "holds no Megatron arguments"))
    _require_few_flags(tokens, pointer)


def _require_few_flags(tokens: list[str], pointer: str) -> None:
    count = sum(token.startswith("--") for token in tokens)
    if count > MAX_FLAGS:
        raise SpecError(Fault(pointer, f"names {count} flags; at most {MAX_FLAGS} are read"))


def _violations(body: CheckBody, cluster: ClusterSpec | None, target: Target) -> list[Violation]:
    world_size = body.world_size or (cluster.num_gpus if cluster is not None else 0)
    if cluster is not None and world_size != cluster.num_gpus:
        raise SpecError(Fault("/world_size", f"is {world_size}, but the cluster has {cluster.num_gpus} GPUs"))
    known: dict[str, Any] = {} if body.te_version is None else {"te_version": body.te_version}
    if body.sm is not None:
        known["sm"] = body.sm
    elif cluster is not None:
        capabilities = [gpu.compute_capability for gpu in cluster.gpus.values()]
        known["sm"] = min((each for each in capabilities if each is not None), default=None)
    return check_arguments(body.arguments, world_size, body.env, version=target.version, **known)


def _priced(
    source: str | list[str],
    cluster: ClusterSpec,
    target: Target,
    memory_headroom: float,
    inputs: dict[str, Any],
    *,
    files: bool,
) -> PlanDocument:
    arguments = read_arguments(source, target.version)
    model = inputs.get("model")
    spec = read_model(model, files=files) if model is not None else model_from_arguments(arguments)
    request = PlanRequest(
        model=spec,
        cluster=cluster,
        workload=workload_from_arguments(arguments),
        target=target,
        memory_headroom=memory_headroom,
        calibration=read_calibration(inputs.get("calibration")),
        expert_load=in_field("/expert_load", lambda: read_expert_load(inputs.get("expert_load"), spec)),
    )
    request = with_expert_load(request)
    return with_placement(request, document_for_plan(request, plan_from_arguments(arguments, spec, cluster)))


def _only_megatron(target: Target) -> None:
    if target.framework != "megatron":
        raise SpecError(Fault("/target", f"{target.name} has no argument line; megatron has"))
