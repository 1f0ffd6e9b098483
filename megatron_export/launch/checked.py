"""What every export asks of a document before it writes files: a plan, a launcher, legality, and nodes."""

from __future__ import annotations

from meshwright.planner.rules import facts_of_plan, violations
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan

from .hosts import Hosts, in_plan_order
from .nodes import Node, nodes_of_plan
from .scripts import LAUNCHERS


def plan_in(document: PlanDocument) -> Plan:
    """The document's plan; :class:`SpecError` where it has none."""
    if document.plan is None:
        raise SpecError(Fault("/plan", f"the document has no plan to export ({document.reason or document.status})"))
    return document.plan


def require_launcher(launcher: str) -> None:
    """:class:`SpecError` for a launcher that no exporter knows."""
    if launcher not in LAUNCHERS:
        raise SpecError(Fault("/launcher", f"{launcher[:40]!r} is not a launcher", tuple(LAUNCHERS)))


def legal_nodes(document: PlanDocument, hosts: Hosts | None) -> list[Node]:
    """The nodes of the document's plan in rank order; ``hosts`` names them in that order, or maps hosts to pools or
    GPU types. Raises :class:`SpecError` for a plan that the target refuses (each broken rule is a fault), or devices
    that cannot be launched.
    """
    inputs, plan = document.inputs, plan_in(document)
    gpus = [inputs.cluster.gpu_of(inputs.cluster.pool(name)) for name in plan.pools]
    broken = violations(facts_of_plan(plan, inputs.model, inputs.workload, inputs.target, gpus))
    if broken:
        raise SpecError(Fault("/plan", f"{item.rule}: {item.message}", item.alternatives) for item in broken)
    names = None if hosts is None else in_plan_order(hosts, plan, inputs.cluster)
    return nodes_of_plan(plan, inputs.cluster, names)
