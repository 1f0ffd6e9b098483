"""The files that run a plan, for whichever target it is for."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.megatron_export import EXPORTERS
from meshwright.megatron_export.launch import NO_SITE, Hosts, Site, hosts_of, require_launcher
from meshwright.megatron_export.peers import PEER_EXPORTERS
from meshwright.planner.errors import IllegalPlan
from meshwright.planner.rules import facts_of_plan, violations
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.placement import placement_faults
from meshwright.specs.plan import Plan
from meshwright.specs.targets import load_target

from .requests import Faults

#: Earliest time that a zip archive can hold; a fixed one keeps the archive the same for the same plan.
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def export_files(
    document: PlanDocument,
    target: str | None = None,
    launcher: str = "torchrun",
    hosts: Hosts | None = None,
    site: Site = NO_SITE,
) -> dict[str, str]:
    """Name to text of every file. ``target`` must be the one that the plan was made for (None = that one), or the
    format of another planner, which any legal plan that the format can say is written in. ``hosts`` and ``site`` fill
    in what the plan does not know; other planners' formats hold neither.

    Raises :class:`SpecError` for another target, an unknown launcher, or a document without a plan;
    :class:`IllegalPlan` for a plan that the target refuses.
    """
    if document.plan is None:
        raise SpecError(Fault("/plan", f"is null: there is nothing to export (status {document.status})"))
    made_for = document.inputs.target
    if target in PEER_EXPORTERS and made_for.framework != target:
        require_launcher(launcher)
        _require_legal(document, document.plan)
        return _in_documents_terms(lambda: PEER_EXPORTERS[str(target)](document))
    if target is not None:
        try:
            name = load_target(target).name
        except SpecError as error:
            raise SpecError(Fault("/target" + f.pointer, f.message, f.alternatives) for f in error.faults) from None
        if name != made_for.name:
            raise SpecError(
                Fault("/target", f"the plan is for {made_for.name}; plan again for {name}", (made_for.name,))
            )
    require_launcher(launcher)
    _require_legal(document, document.plan)
    exporter = EXPORTERS.get(made_for.framework)
    if exporter is None:
        raise SpecError(Fault("/target", f"there is no exporter for {made_for.framework}", tuple(EXPORTERS)))
    return _in_documents_terms(lambda: exporter(document, launcher, hosts, site), hosts is not None)


def _in_documents_terms(files: Callable[[], dict[str, str]], hosts_given: bool = False) -> dict[str, str]:
    """The files; faults point into the document."""
    try:
        return files()
    except SpecError as error:
        raise SpecError(
            Fault(_in_document(f.pointer, hosts_given), f.message, f.alternatives) for f in error.faults
        ) from None


def _in_document(pointer: str, hosts_given: bool) -> str:
    """Where the document holds what an exporter refuses: host names that are not given come with its cluster."""
    if pointer == "/hosts" and not hosts_given:
        return "/document/inputs/cluster"
    return f"/document{pointer}" if pointer.startswith("/plan") else pointer


def _require_legal(document: PlanDocument, plan: Plan) -> None:
    """Refuse what an estimate of the same document refuses, in the same way."""
    inputs = document.inputs
    faults = placement_faults(plan, inputs.cluster, "/document/plan")
    if faults:
        raise SpecError(faults)
    used = dict.fromkeys(group.gpu for stage in plan.stages for group in stage.groups)
    gpus = [inputs.cluster.gpus[name] for name in used if name in inputs.cluster.gpus]
    broken = violations(facts_of_plan(plan, inputs.model, inputs.workload, inputs.target, gpus))
    if broken:
        raise IllegalPlan(broken)


def read_place(hosts: Any, site: Any) -> tuple[Hosts | None, Site]:
    """Hosts and site from plain data (None = not given); :class:`SpecError` names every wrong field of both."""
    faults = Faults()
    names = None if hosts is None else faults.of("", lambda: hosts_of(hosts))
    place = NO_SITE if site is None else faults.of("", lambda: Site.read(site))
    faults.raise_if_any()
    return names, place or NO_SITE


def zip_of(files: Mapping[str, str]) -> bytes:
    """The files as a zip archive that is the same for the same files; scripts are executable in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith((".sh", ".sbatch")) else 0o644) << 16
            archive.writestr(entry, text)
    return out.getvalue()
