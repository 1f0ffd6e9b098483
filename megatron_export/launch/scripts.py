"""Launch scripts: torchrun with static rendezvous, alone, under Slurm or over ssh.

Rank follows node order, and node order decides which GPU type runs which stage. torchrun keeps ``--node-rank`` only
with its static rendezvous (c10d sorts nodes by address), so every script looks the node up in the plan's host list.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from .kubernetes import jobset, pytorch_job
from .nodes import Node
from .program import Program
from .shell import label, literal
from .site import NO_SITE, Site

#: torchrun's default port (torch/distributed/run.py).
MASTER_PORT = 29500

_TORCHRUN = """\
#!/usr/bin/env bash
# Start this node's share of the plan: {nodes} node(s), {ranks} rank(s) each. Run it on every node.
#
# NODE_RANK    place of this node in the plan (default: where its name stands in the host file)
# HOSTFILE     host names in plan order, first word of each line (default: hostfile beside this script)
# MASTER_ADDR  address of node 0 (default: first host); MASTER_PORT its port
{notes}{literal}set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
HOSTFILE=${{HOSTFILE:-$here/hostfile}}
{defaults}MASTER_PORT=${{MASTER_PORT:-{port}}}
nodes={nodes}
{check}
hosts=()
while read -r host _; do
    [[ -z $host || $host == \\#* ]] || hosts+=("$host")
done <"$HOSTFILE"
if ((${{#hosts[@]}} != nodes)); then
    echo "error: $HOSTFILE lists ${{#hosts[@]}} hosts, the plan has $nodes nodes" >&2
    exit 2
fi

if [[ -z ${{NODE_RANK:-}} ]]; then
    if ((nodes == 1)); then
        NODE_RANK=0
        MASTER_ADDR=${{MASTER_ADDR:-127.0.0.1}}
    else
        full=$(hostname -f 2>/dev/null || hostname)
        for index in "${{!hosts[@]}}"; do
            for name in "$(hostname)" "$full" "${{full%%.*}}"; do
                [[ ${{hosts[index]}} == "$name" ]] && NODE_RANK=$index
            done
        done
    fi
fi
if [[ -z ${{NODE_RANK:-}} ]]; then
    echo "error: $(hostname) is not in $HOSTFILE; put the host names there in plan order, or set NODE_RANK" >&2
    exit 2
fi
MASTER_ADDR=${{MASTER_ADDR:-${{hosts[0]}}}}

{site}# shellcheck source=/dev/null
source "$here/env.sh"
{prepare}exec torchrun --nnodes "$nodes" --nproc-per-node {ranks} --node-rank "$NODE_RANK" \\
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
    {command} "$@"
"""

_SBATCH = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={ranks}
#SBATCH --exclusive{lines}
# Submit from this folder: sbatch job.sbatch.{missing}
# PLAN_DIR overrides the folder.
{literal}set -euo pipefail
here=${{PLAN_DIR:-${{SLURM_SUBMIT_DIR:-$PWD}}}}
{hosts}
MASTER_ADDR=${{MASTER_ADDR:-$(awk '!/^#/ && NF {{print $1; exit}}' "$HOSTFILE")}}
export HOSTFILE MASTER_ADDR
# Slurm orders nodes by its own table, so each task looks its node up in the host file.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 {container}bash "$here/launch_torchrun.sh" "$@"
"""

_SLURM_HOSTS_KNOWN = "HOSTFILE=${HOSTFILE:-$here/hostfile}"
_SLURM_HOSTS_ALIKE = """\
# All nodes are alike, so any order will do: take the one of the allocation.
if [[ -z ${HOSTFILE:-} ]]; then
    HOSTFILE=$here/hostfile.$SLURM_JOB_ID
    scontrol show hostnames "$SLURM_JOB_NODELIST" >"$HOSTFILE"
fi"""
_SLURM_HOSTS_MIXED = """\
# The plan mixes GPU types and does not know its hosts: node order decides which type runs which stage.
HOSTFILE=${HOSTFILE:-$here/hostfile}
if grep -q '# placeholder' "$HOSTFILE"; then
    echo "error: replace the placeholders in $HOSTFILE by the hosts of each GPU type, in the order given there" >&2
    exit 2
fi"""

_SSH = """\
#!/usr/bin/env bash
# Start the plan on every host of the host file over ssh. This folder must have the same path on all of them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HOSTFILE=${HOSTFILE:-$here/hostfile}
hosts=()
while read -r host _; do
    [[ -z $host || $host == \\#* ]] || hosts+=("$host")
done <"$HOSTFILE"
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM
for index in "${!hosts[@]}"; do
    command=(env "NODE_RANK=$index" "MASTER_ADDR=$MASTER_ADDR" "HOSTFILE=$HOSTFILE")
    for name in @SETTINGS@; do
        [[ -z ${!name:-} ]] || command+=("$name=${!name}")
    done
    command+=(bash "$here/launch_torchrun.sh" "$@")
    # shellcheck disable=SC2029  # the command is quoted for the remote shell on purpose
    ssh -o BatchMode=yes "${hosts[index]}" "$(printf '%q ' "${command[@]}")" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
"""


def launch_torchrun(nodes: Sequence[Node], program: Program, site: Site = NO_SITE) -> str:
    """The script that starts one node."""
    settings = program.settings
    chosen = {name: shlex.quote(value) for name, value in site.settings().items()}
    defaults = [(item.name, chosen.get(item.name, item.default)) for item in settings]
    return _TORCHRUN.format(
        nodes=len(nodes),
        ranks=nodes[0].ranks,
        port=MASTER_PORT,
        notes="".join(f"# {item.name:<12} {item.help}\n" for item in settings),
        literal=literal(*site.settings().values()),
        defaults="".join(f"{name}=${{{name}:-{value}}}\n" for name, value in defaults),
        check=f"\n{program.check}\n" if program.check else "",
        site='# shellcheck source=/dev/null\nsource "$here/site.sh"\n' if site.environment else "",
        prepare=f"{program.prepare}\n" if program.prepare else "",
        command=program.command,
    )


def launch_files(
    name: str, nodes: Sequence[Node], program: Program, launcher: str, site: Site = NO_SITE
) -> dict[str, str]:
    """Files that start ``program`` on ``nodes``: the script of one node, the host file, and what ``launcher`` adds."""
    environment = site.environment_file()
    return {
        "launch_torchrun.sh": launch_torchrun(nodes, program, site),
        "hostfile": hostfile(nodes),
        **({"site.sh": environment} if environment else {}),
        **LAUNCHERS[launcher](name, nodes, program, site),
    }


#: How the files of each launcher are started, for an export's README.
START = {
    "torchrun": "bash launch_torchrun.sh        # on every node",
    "slurm": "sbatch job.sbatch              # from this folder",
    "ssh": "bash launch_ssh.sh             # from a node that reaches all hosts",
    "kubernetes": "kubectl apply -f jobset.yaml   # after the steps named in its first lines",
    "pytorchjob": "kubectl apply -f pytorchjob.yaml   # after the steps named in its first lines",
}


def hostfile(nodes: Sequence[Node]) -> str:
    """Hosts in plan order, with GPU type, ranks and stages as a comment."""
    lines = ["# Hosts in plan order: line i is node rank i. The order decides which GPUs run which pipeline stage."]
    for node in nodes:
        stages = str(node.stages[0]) if len(node.stages) == 1 else f"{node.stages[0]}-{node.stages[-1]}"
        last = node.first_rank + node.ranks - 1
        note = f"{node.gpu}, ranks {node.first_rank}-{last}, stage {stages}"
        lines.append(f"{node.host} # {'' if node.known else 'placeholder: '}{note}")
    return "\n".join(lines) + "\n"


def _torchrun(name: str, nodes: Sequence[Node], program: Program, site: Site) -> dict[str, str]:
    return {}


def _slurm(name: str, nodes: Sequence[Node], program: Program, site: Site) -> dict[str, str]:
    known = all(node.known for node in nodes)
    alike = len({node.gpu for node in nodes}) == 1
    hosts = _SLURM_HOSTS_KNOWN if known else _SLURM_HOSTS_ALIKE if alike else _SLURM_HOSTS_MIXED
    lines = [f"#SBATCH --nodelist={','.join(shlex.quote(node.host) for node in nodes)}"] if known else []
    lines += site.sbatch_lines()
    given = {"account": site.account, "partition": site.partition, "time limit": site.time_limit}
    missing = [what for what, value in given.items() if value is None]
    text = _SBATCH.format(
        name=label(name),
        nodes=len(nodes),
        ranks=nodes[0].ranks,
        lines="".join(f"\n{line}" for line in lines),
        missing=f" Not set here: {', '.join(missing)}." if missing else "",
        hosts=hosts,
        literal=literal(*(mount.source or mount.target for mount in site.mounts)),
        container=site.container_options("$here"),
    )
    return {"job.sbatch": text}


def _ssh(name: str, nodes: Sequence[Node], program: Program, site: Site) -> dict[str, str]:
    names = " ".join([*(item.name for item in program.settings), "MASTER_PORT"])
    return {"launch_ssh.sh": _SSH.replace("@SETTINGS@", names)}


#: Files that a launcher adds to ``launch_torchrun.sh`` and ``hostfile``.
LAUNCHERS: dict[str, Callable[[str, Sequence[Node], Program, Site], dict[str, str]]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "ssh": _ssh,
    "kubernetes": jobset,
    "pytorchjob": pytorch_job,
}
