"""The verdict on a configuration of torchtitan, TOML or Python."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.planner.rules import Violation
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.model import ModelSpec
from meshwright.specs.plan import Plan
from meshwright.specs.workload import Workload

from ..reading import Described, Given, Reading
from .interpret import check_python, check_toml, model_of_configuration, plan_from_python, plan_from_toml
from .read import Configuration, read_python, read_toml


def read_torchtitan_toml(text: str, given: Given) -> Reading:
    """The verdict on a TOML job configuration. Raises :class:`SpecError` for a text that is no TOML."""
    return _reading(read_toml(text), check_toml(text, given.world_size, given.model), given, plan_from_toml, text)


def read_torchtitan_python(text: str, given: Given) -> Reading:
    """The verdict on a Python configuration, by its literals. Raises :class:`SpecError` for text that is no Python."""
    config = read_python(text)
    return _reading(config, check_python(text, given.world_size, given.model), given, plan_from_python, text)


def _reading(
    config: Configuration,
    broken: list[Violation],
    given: Given,
    plan: Callable[[str, ClusterSpec, ModelSpec | None], tuple[Plan, ModelSpec, Workload]],
    text: str,
) -> Reading:
    missing, notes = [], []
    if given.model is None:
        try:
            model_of_configuration(config)
        except SpecError:
            missing.append(Fault("/model", "is no preset that is known here; give it to know whether it fits"))
            notes.append("the sizes of the model are not known: rules on heads and layers were not judged")
    if config.unread:
        notes.append(f"not read, because it is no literal: {', '.join(config.unread)}")

    def describe(cluster: ClusterSpec) -> Described:
        found, model, workload = plan(text, cluster, given.model)
        return Described(found, model, workload)

    return Reading(tuple(broken), describe, tuple(notes), tuple(missing))
