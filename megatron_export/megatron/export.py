"""Files that start a plan on Megatron-LM."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshwright.planner.rules import OFFLOAD_ENVIRONMENT, uses_fsdp
from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.document import PlanDocument
from meshwright.specs.plan import Plan

from ..launch import NO_SITE, START, Hosts, Program, Site, launch_files, legal_nodes, plan_in, require_launcher
from ..launch.nodes import Node
from ..launch.program import Setting
from ..launch.shell import argument_array, comment, exports, literal, plain
from .arguments import read_arguments
from .model_flags import Flags, expert_flags, model_flags
from .plan_flags import batch_flags, memory_flags, numeric_flags, overlap_flags, parallel_flags
from .site_flags import RUN, with_site

#: Blackwell and later no longer need one connection to order communication after compute (arguments.py:1458).
BLACKWELL = 10.0

#: ``pretrain_gpt.py`` under the plan's arguments. NVIDIA's NeMo containers keep Megatron-LM at the default path.
PROGRAM = Program(
    name="megatron",
    command='"$MEGATRON_LM/pretrain_gpt.py" "${MEGATRON_ARGS[@]}"',
    settings=(Setting("MEGATRON_LM", "checkout of Megatron-LM that holds pretrain_gpt.py", "/opt/megatron-lm"),),
    check="""\
if [[ ! -f $MEGATRON_LM/pretrain_gpt.py ]]; then
    echo "error: no pretrain_gpt.py in $MEGATRON_LM; set MEGATRON_LM to a checkout of Megatron-LM" >&2
    exit 2
fi""",
    prepare='# shellcheck source=/dev/null\nsource "$here/train_args.sh"',
    image="MEGATRON_IMAGE",  # with Megatron-LM core and Transformer Engine
)

#: What a plan does not know but a training run needs; placeholders that let an export start as it is.
_RUN: Flags = [
    ("--tokenizer-type", "NullTokenizer"),
    ("--mock-data",),
    ("--train-iters", "20"),
    ("--lr", "1e-4"),
    ("--min-lr", "1e-5"),
    ("--eval-iters", "0"),
    ("--log-interval", "1"),
    ("--log-throughput",),
]


def export_megatron(
    document: PlanDocument, launcher: str = "torchrun", hosts: Hosts | None = None, site: Site = NO_SITE
) -> dict[str, str]:
    """File name to text: arguments, environment, launch scripts, host file, README and the plan itself.

    ``hosts`` names the plan's nodes in rank order, or maps hosts to pools or GPU types; ``site`` adds what the plan
    does not know. Raises :class:`SpecError` for a document without a plan, an unknown launcher, a plan that the target
    refuses (each broken rule is a fault), devices that cannot be launched, or a site that contradicts the plan.
    """
    inputs, plan = document.inputs, plan_in(document)
    require_launcher(launcher)
    nodes = legal_nodes(document, hosts)
    name = inputs.model.name
    return {
        "train_args.sh": _train_args(document, plan, site),
        "env.sh": _environment(plan, inputs.cluster),
        **launch_files(name, nodes, PROGRAM, launcher, site),
        "README.md": _readme(document, plan, nodes, launcher),
        "plan.json": json.dumps(document.to_json(), indent=2, ensure_ascii=False) + "\n",
    }


def megatron_arguments(document: PlanDocument) -> dict[str, Flags]:
    """All flags of a document's plan by section. The plan must be legal; placeholders of the run come last.

    Raises :class:`SpecError` that names each flag or value that the target's version does not have.
    """
    plan = plan_in(document)
    model, workload, target = document.inputs.model, document.inputs.workload, document.inputs.target
    sections = {
        "Model": model_flags(model, workload, target),
        "Experts": expert_flags(model, workload),
        "Batch": batch_flags(plan, workload),
        "Parallelism": parallel_flags(plan, model, workload),
        "Memory": memory_flags(plan, document.inputs.workload),
        "Overlap and kernels": overlap_flags(plan, model, target.version),
        "Numerics": numeric_flags(workload),
        RUN: _RUN,
    }
    read_arguments([token for flags in sections.values() for flag in flags for token in flag], target.version)
    return sections


def environment_of(plan: Plan, cluster: ClusterSpec) -> dict[str, str | None]:
    """Environment that the plan needs; None = must be unset."""
    offload = OFFLOAD_ENVIRONMENT if plan.options.activation_offload_modules else {}
    if uses_fsdp(plan.sharding) or plan.options.ep_comm_overlap:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None, **offload}
    degrees = plan.stages[0].degrees
    capabilities = [cluster.gpu_of(cluster.pool(name)).compute_capability or 0.0 for name in plan.pools]
    if (degrees.tp > 1 or degrees.cp > 1) and min(capabilities) < BLACKWELL:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **offload}
    return {**offload}


def _train_args(document: PlanDocument, plan: Plan, site: Site) -> str:
    target = document.inputs.target
    head = [
        "# shellcheck shell=bash disable=SC2034",
        comment(f"Megatron arguments of {document.inputs.model.name} for {target.framework} {target.version}."),
    ]
    sections = with_site(megatron_arguments(document), site, plan.num_ranks, target.version)
    return "\n".join(head) + "\n" + literal(*site.arguments) + argument_array("MEGATRON_ARGS", sections)


def _environment(plan: Plan, cluster: ClusterSpec) -> str:
    environment = environment_of(plan, cluster)
    reason = {
        "1": "# TP or CP above 1 before Blackwell: communication must start in the order in which it is issued.",
        None: "# 1 would serialise what Megatron-FSDP or the expert exchange does beside compute.",
    }
    lines = ["# shellcheck shell=bash", *(reason[value] for value in environment.values())]
    return "\n".join(lines) + "\n" + (exports(environment) or "# Nothing to set for this plan.\n")


def _readme(document: PlanDocument, plan: Plan, nodes: Sequence[Node], launcher: str) -> str:
    inputs = document.inputs
    degrees = plan.stages[0].degrees
    pools = ", ".join(f"{sum(node.pool == pool for node in nodes)} x {pool}" for pool in plan.pools)
    lines = [
        f"# {plain(inputs.model.name)} on {plain(inputs.cluster.name)}",
        "",
        f"TP {degrees.tp}, PP {plan.pp} (virtual stages {plan.vpp}), CP {degrees.cp}, DP {degrees.dp}, "
        f"EP {degrees.ep}, ETP {degrees.etp}; micro-batch {plan.stages[0].micro_batch_size}, "
        f"{plan.num_microbatches} micro-batches a step; {plan.num_ranks} ranks on nodes {plain(pools)}.",
        "",
        "```",
        f"export MEGATRON_LM=/path/to/Megatron-LM   # core {inputs.target.version}: the folder with pretrain_gpt.py",
        START[launcher],
        "```",
        "",
        "| file | is |",
        "|---|---|",
        "| `train_args.sh` | all Megatron arguments; those of the run (data, learning rate, length) are placeholders |",
        "| `env.sh` | environment that the plan needs |",
        "| `hostfile` | hosts in plan order; the order decides which GPUs run which stage |",
        "| `launch_torchrun.sh` | starts one node, found by its name in `hostfile` or by `NODE_RANK` |",
        "| `plan.json` | the plan document |",
        "",
        "It starts as it is, on mock data with a null tokenizer. For a real run replace data, tokenizer and learning",
        "rate.",
    ]
    unknown = _not_in_plan(document)
    if unknown:
        lines += [
            "",
            "The plan does not hold these values of the model; they change no cost, set them for a real run:",
            "",
        ]
        lines += [f"- {item}" for item in unknown]
    if not all(node.known for node in nodes):
        lines += [
            "",
            "Host names were not known: replace the placeholders in `hostfile`, keeping the order of GPU types.",
        ]
    return "\n".join(lines) + "\n"


def _not_in_plan(document: PlanDocument) -> list[str]:
    model = document.inputs.model
    items = ["`--norm-epsilon`, `--init-method-std`"]
    if model.rotary:
        items.append("rotary base, scaling and share of rotated dimensions (`--rotary-base`, `--rotary-percent`, YaRN)")
    if model.moe:
        items.append("`--moe-aux-loss-coeff`, `--moe-router-topk-scaling-factor`, update rate of the router bias")
    return items
