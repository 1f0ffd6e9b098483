"""Files that start a plan on torchtitan."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshwright.planner.rules.derive import version_of
from meshwright.planner.rules.torchtitan_models import PYTHON_CONFIG
from meshwright.specs.document import PlanDocument
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.plan import Plan

from ..launch import NO_SITE, START, Hosts, Program, Site, launch_files, legal_nodes, plan_in, require_launcher
from ..launch.nodes import Node
from ..launch.program import Setting
from ..launch.shell import plain
from . import python_files, toml_files
from .settings import settings_of
from .shapes import preset_of, shape_of

_MOCK = Setting(
    "MOCK_DATA", "1: random tokens, no tokenizer; 0: the data and tokenizer that the configuration names", "1"
)
#: What each node runs, by whether the version reads TOML or Python.
PROGRAMS = {
    False: Program(
        name="torchtitan",
        command='-m torchtitan.train --job.config_file "$here/train.toml"',
        settings=(_MOCK,),
        prepare='export MOCK_DATA PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"',
        image="TORCHTITAN_IMAGE",
    ),
    True: Program(
        name="torchtitan",
        command="-m torchtitan.train --module plan_config --config plan",
        settings=(_MOCK,),
        prepare='export MOCK_DATA PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"',
        image="TORCHTITAN_IMAGE",
    ),
}
#: Releases that exports are checked with, by target version.
RELEASES = {"0.2": "torchtitan==0.2.2", "0.3": "torchtitan==0.3.0", "main": "torchtitan of 2026-08-21 (b5bcd76c)"}


def export_torchtitan(
    document: PlanDocument, launcher: str = "torchrun", hosts: Hosts | None = None, site: Site = NO_SITE
) -> dict[str, str]:
    """File name to text: configuration, environment, launch scripts, host file, README and the plan itself.

    ``hosts`` and ``site`` as for :func:`export_megatron`, whose arguments of a site mean nothing to torchtitan. Raises
    :class:`SpecError` as it does.
    """
    if site.arguments:
        raise SpecError(Fault("/site/arguments", "are Megatron-LM's; set data and tokenizer in the configuration"))
    inputs, plan = document.inputs, plan_in(document)
    require_launcher(launcher)
    nodes = legal_nodes(document, hosts)
    python = version_of(inputs.target) >= PYTHON_CONFIG
    return {
        **configuration_files(document),
        "env.sh": "# shellcheck shell=bash\n# Nothing to set for this plan.\n",
        **launch_files(inputs.model.name, nodes, PROGRAMS[python], launcher, site),
        "README.md": _readme(document, plan, nodes, launcher, python),
        "plan.json": json.dumps(document.to_json(), indent=2, ensure_ascii=False) + "\n",
    }


def configuration_files(document: PlanDocument) -> dict[str, str]:
    """What torchtitan itself reads: ``train.toml`` and ``plan_model.py``, or ``plan_config.py``."""
    inputs, plan = document.inputs, plan_in(document)
    version = version_of(inputs.target)
    shape = shape_of(inputs.model, version)
    preset = preset_of(shape, version)
    settings = settings_of(plan, inputs.workload, inputs.target)
    title = f"{inputs.model.name} on {inputs.cluster.name}"
    if version >= PYTHON_CONFIG:
        batch = (plan.stages[0].micro_batch_size, inputs.workload.seq_length)
        text = python_files.module_of(settings, shape, preset, title, inputs.target.version, batch)
        return {"plan_config.py": text}
    flavor, module = toml_files.module_of(shape, preset)
    return {"train.toml": toml_files.toml_of(settings, shape, flavor, title), "plan_model.py": module}


def _readme(document: PlanDocument, plan: Plan, nodes: Sequence[Node], launcher: str, python: bool) -> str:
    inputs = document.inputs
    degrees = plan.stages[0].degrees
    where = "`plan_config.py`" if python else "`train.toml`"
    rows = (
        ["| `plan_config.py` | the trainer's configuration; data, tokenizer, rate and steps are placeholders |"]
        if python
        else [
            "| `train.toml` | the job's configuration; data, tokenizer, learning rate and steps are placeholders |",
            "| `plan_model.py` | sizes of a model that is no preset, and random tokens to start with |",
        ]
    )
    lines = [
        f"# {plain(inputs.model.name)} on {plain(inputs.cluster.name)}",
        "",
        f"TP {degrees.tp}, PP {plan.pp} (virtual stages {plan.vpp}), CP {degrees.cp}, DP {degrees.dp}, "
        f"EP {degrees.ep}; micro-batch {plan.stages[0].micro_batch_size}, {plan.num_microbatches} micro-batches a "
        f"step; {plan.num_ranks} ranks on {len(nodes)} node(s). For {RELEASES[inputs.target.version]}.",
        "",
        "```",
        START[launcher],
        "```",
        "",
        "| file | is |",
        "|---|---|",
        *rows,
        "| `hostfile` | hosts in plan order; the order decides which GPUs run which stage |",
        "| `launch_torchrun.sh` | starts one node, found by its name in `hostfile` or by `NODE_RANK` |",
        "| `plan.json` | the plan document |",
        "",
        "It starts as it is, on random tokens without a tokenizer. For a real run set `MOCK_DATA=0`, and in",
        f"{where} name the data set and the folder with the tokenizer (`hf_assets_path`). The wheel has neither.",
        "",
        "The plan does not hold rotary base and scaling, initialisation, and how expert loads are balanced; they",
        "change no cost. A preset of torchtitan brings its own.",
    ]
    if not all(node.known for node in nodes):
        lines += [
            "",
            "Host names were not known: replace the placeholders in `hostfile`, keeping the order of GPU types.",
        ]
    return "\n".join(lines) + "\n"
