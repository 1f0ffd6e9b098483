"""Files that start a plan on FlagScale: experiment, training configuration, host file with device types.

Keys after FlagScale da4935ec (2025-11): examples/llama3/conf/train/8b_hetero.yaml, flagscale/train/arguments.py,
runner/utils.py. Read from source, not run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan

from ..launch import LAUNCHERS, NO_SITE, Hosts, Site, legal_nodes, plan_in
from ..launch.nodes import Node
from ..launch.shell import label, plain
from ..megatron.export import environment_of, megatron_arguments
from ..megatron.site_flags import with_site
from .meshes import settings_of_meshes

#: FlagScale's runner starts every host itself, over ssh.
OWN_LAUNCHERS = ("torchrun", "ssh")
#: The layer split goes into the meshes.
_LAYOUT = "--pipeline-model-parallel-layout"
#: Sections of Megatron's arguments, by the section of FlagScale's configuration that takes them.
_OF_MODEL = frozenset({"Model", "Experts", "Batch"})
#: Flags of the run that are data or optimizer in FlagScale's examples; the rest is ``system``.
_DATA = ("--mock-data", "--data", "--tokenizer", "--vocab", "--merge", "--split", "--train-data", "--per-split-data")
_OF_TRAINING = ("--train", "--lr", "--min-lr", "--eval", "--weight-decay", "--clip", "--adam", "--seed")
#: Placeholders of the run whose names are those of the arguments that FlagScale's Megatron has too.
_ARGUMENTS_OF = "0.19"

_START = """\
#!/usr/bin/env bash
# Start the plan with FlagScale's runner, which starts all hosts of the host file over ssh.
# This folder and FlagScale must have the same path on all of them.
#
# FLAGSCALE  checkout of FlagScale that holds run.py
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FLAGSCALE=${FLAGSCALE:-/opt/FlagScale}
if [[ ! -f $FLAGSCALE/run.py ]]; then
    echo "error: no run.py in $FLAGSCALE; set FLAGSCALE to a checkout of FlagScale" >&2
    exit 2
fi
if grep -q '^# placeholder' "$here/hostfile"; then
    echo "error: replace the placeholders in $here/hostfile by hosts of each type" >&2
    exit 2
fi
# The configuration names the host file and the outputs below this variable.
export PLAN_DIR=$here
cd "$FLAGSCALE"
exec python run.py --config-path "$here/conf" --config-name experiment action="${ACTION:-run}"
"""


def export_flagscale(
    document: PlanDocument, launcher: str = "torchrun", hosts: Hosts | None = None, site: Site = NO_SITE
) -> dict[str, str]:
    """File name to text. ``hosts`` and ``site`` as for Megatron-LM; FlagScale's own runner replaces the launchers.

    Raises :class:`SpecError` for a document without a plan, a plan that the target refuses (each broken rule is a
    fault), a launcher that starts nodes itself, or devices that cannot be launched.
    """
    plan = plan_in(document)
    if launcher not in OWN_LAUNCHERS:
        known = "is started by FlagScale's own runner" if launcher in LAUNCHERS else "is not a launcher"
        raise SpecError(Fault("/launcher", f"{launcher[:40]!r}: a FlagScale plan {known}", OWN_LAUNCHERS))
    nodes = legal_nodes(document, hosts)
    types = device_types(nodes)
    return {
        "conf/experiment.yaml": _yaml(_experiment(document, nodes, site)),
        "conf/train/plan.yaml": _yaml(_training(document, plan, types, site)),
        "hostfile": hostfile(nodes, types),
        "launch_flagscale.sh": _START,
        "README.md": _readme(document, plan, nodes),
        "plan.json": json.dumps(document.to_json(), indent=2, ensure_ascii=False) + "\n",
    }


def device_types(nodes: Sequence[Node]) -> dict[str, str]:
    """A device type for every pool: the GPU's name, or the pool's where pools have the same GPU.

    FlagScale compares these names and looks nothing up by them.
    """
    gpus = {node.pool: node.gpu for node in nodes}
    if len(set(gpus.values())) == len(gpus):
        return {pool: label(gpu) for pool, gpu in gpus.items()}
    named = {pool: label(pool) for pool in gpus}
    if len(set(named.values())) == len(gpus):
        return named
    return {pool: f"{label(pool)}-{index}" for index, pool in enumerate(gpus)}


def hostfile(nodes: Sequence[Node], types: Mapping[str, str]) -> str:
    """``HOST slots=N type=TYPE`` lines: ranks go by type and then by line, so the order of types does not matter."""
    lines = []
    for node in nodes:
        lines += [] if node.known else [f"# placeholder: name a host of {plain(node.gpu)}, pool {plain(node.pool)}"]
        lines.append(f"{node.host} slots={node.ranks} type={types[node.pool]}")
    return "\n".join(lines) + "\n"


def _experiment(document: PlanDocument, nodes: Sequence[Node], site: Site) -> dict[str, Any]:
    plan = document.plan
    assert plan is not None  # noqa: S101 - the exporter has looked
    wanted = environment_of(plan, document.inputs.cluster)
    envs = {**{name: _text(value) for name, value in sorted(site.environment.items())}, **_set(wanted)}
    return {
        "defaults": ["_self_", {"train": "plan"}],
        "experiment": {
            "exp_name": label(document.inputs.model.name),
            "exp_dir": "${oc.env:PLAN_DIR}/outputs",
            "task": {"type": "train", "backend": "megatron", "entrypoint": "flagscale/train/train_gpt.py"},
            "runner": {
                "backend": "torchrun",
                "rdzv_backend": "static",
                "nnodes": len(nodes),
                "nproc_per_node": nodes[0].ranks,
                "hostfile": "${oc.env:PLAN_DIR}/hostfile",
            },
            "envs": envs,
        },
        "action": "run",
        "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }


def _training(document: PlanDocument, plan: Plan, types: Mapping[str, str], site: Site) -> dict[str, Any]:
    sections = with_site(megatron_arguments(document), site, plan.num_ranks, _ARGUMENTS_OF)
    system: dict[str, Any] = {}
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for title, flags in sections.items():
        for flag in flags:
            if flag[0] != _LAYOUT:
                place = model if title in _OF_MODEL else _place(title, flag[0], system, model, data)
                place.update(_entry(flag))
    system["hetero"] = settings_of_meshes(plan, [types[stage.groups[0].pool] for stage in plan.stages])
    return {"system": system, "model": model, "data": data}


def _place(
    title: str, name: str, system: dict[str, Any], model: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    if not title.startswith("Run"):
        return system
    if name.startswith(_DATA):
        return data
    return model if name.startswith(_OF_TRAINING) else system


def _entry(flag: tuple[str, ...]) -> dict[str, Any]:
    """A flag as a key; FlagScale turns it back: true is a switch, a list several values."""
    name, *values = flag
    texts = [_text(value) for value in values]
    return {name.removeprefix("--").replace("-", "_"): True if not texts else texts[0] if len(texts) == 1 else texts}


def _text(value: str) -> int | str:
    """A value that OmegaConf takes as it is: no interpolation."""
    return (
        int(value) if value.isascii() and value.isdigit() and str(int(value)) == value else value.replace("${", "\\${")
    )


def _set(environment: Mapping[str, str | None]) -> dict[str, int | str]:
    return {name: _text(value) for name, value in environment.items() if value is not None}


def _yaml(data: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(data), default_flow_style=None, sort_keys=False, width=120, allow_unicode=True)


def _readme(document: PlanDocument, plan: Plan, nodes: Sequence[Node]) -> str:
    inputs, degrees = document.inputs, plan.stages[0].degrees
    lines = [
        f"# {plain(inputs.model.name)} on {plain(inputs.cluster.name)}",
        "",
        f"TP {degrees.tp}, PP {plan.pp}, CP {degrees.cp}, DP {degrees.dp}, EP {degrees.ep}; micro-batch "
        f"{plan.stages[0].micro_batch_size}, {plan.num_microbatches} micro-batches a step; {plan.num_ranks} ranks on "
        f"{len(nodes)} node(s). For FlagScale of 2025-11, whose sources were read and not run.",
        "",
        "```",
        "export FLAGSCALE=/path/to/FlagScale",
        "bash launch_flagscale.sh             # from a node that reaches all hosts",
        "```",
        "",
        "| file | is |",
        "|---|---|",
        "| `conf/train/plan.yaml` | process meshes and Megatron's arguments; data and learning rate are placeholders |",
        "| `conf/experiment.yaml` | the experiment: nodes, host file, environment |",
        "| `hostfile` | hosts with their device type; ranks go by type, in the order of the meshes |",
        "| `plan.json` | the plan document |",
    ]
    if not all(node.known for node in nodes):
        lines += ["", "Host names were not known: replace the placeholders in `hostfile`, keeping the types."]
    return "\n".join(lines) + "\n"
