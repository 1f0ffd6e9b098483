"""The verdict on Megatron arguments, in any form that they are kept in."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.specs.cluster import ClusterSpec

from ..reading import Described, Given, Reading
from .arguments import read_arguments
from .interpret import check_arguments
from .read_model import model_from_arguments, workload_from_arguments
from .read_plan import plan_from_arguments


def read_megatron(source: str | Sequence[str], given: Given) -> Reading:
    """The verdict on an argument line, a script, YAML or a list of arguments; they say model and workload too."""

    version = given.target.version

    def describe(cluster: ClusterSpec) -> Described:
        arguments = read_arguments(source, version)
        model = given.model or model_from_arguments(arguments)
        workload = workload_from_arguments(arguments)
        return Described(plan_from_arguments(arguments, model, cluster), model, workload)

    broken = check_arguments(source, given.world_size, given.env, version=version, **given.known)
    return Reading(violations=tuple(broken), describe=describe)
