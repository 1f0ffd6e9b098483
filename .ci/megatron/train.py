#!/usr/bin/env python3
"""Plan, export, train with megatron-core on CPU, and compare losses with one process.

Usage: .ci/megatron/train.py VENV [--case NAME]... [--steps N] [PLAN.json...]

Without plans, a tiny GPT and a tiny mixture of experts are planned by ``meshwright plan`` for the CASES below. Every
plan is exported by ``meshwright export`` and its arguments train for three steps, one gloo process a rank; the same
arguments with every degree set to 1 train in one process. Prints one line a plan; 1 if any loss differs or any rank
holds other layers than the plan says. VENV comes from .ci/megatron/setup.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).parent
#: Equal to the printed digits in fp32: sums run in another order.
TOLERANCE = 2e-5
#: Seconds after which a rank that waits for a dead one is given up.
LIMIT_S = 300
_SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
GPT = _SHAPE | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 128,
    "num_hidden_layers": 5,
}
MOE = _SHAPE | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
#: name -> model, cluster, what is fixed
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "tp2": (GPT, "2xH100", "tp=2 pp=1"),
    "pp2-uneven": (GPT, "2xH100", "tp=1 pp=2"),
    "vpp2": (GPT | {"num_hidden_layers": 8}, "2xH100", "tp=1 pp=2 vpp=2"),
    "dp2-distributed-optimizer": (GPT, "2xH100", "tp=1 pp=1 sharding=zero1"),
    "tp2-pp2": (GPT, "4xH100", "tp=2 pp=2 sharding=zero1"),
    "ep2-tp2-etp1": (MOE, "2xH100", "tp=2 pp=1 ep=2 etp=1"),
    "ep2-dp2-pp2": (MOE, "4xH100", "tp=1 pp=2 ep=2 etp=1 sharding=zero1"),
    "ep2-tp2-pp2-vpp2": (MOE, "4xH100", "tp=2 pp=2 vpp=2 ep=2 etp=1"),
}
#: Flags that one process does not have, with how many values follow.
_ALONE = {
    "--sequence-parallel": 0,
    "--pipeline-model-parallel-layout": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--microbatch-group-size-per-virtual-pipeline-stage": 1,
    "--no-overlap-p2p-communication": 0,
    "--use-tp-pp-dp-mapping": 0,
    "--num-distributed-optimizer-instances": 1,
}
_DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)


def plan_of_case(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Let ``meshwright plan`` plan a case; the path of the document."""
    model, cluster, fixed = CASES[name]
    config, plan = folder / f"{name}-config.json", folder / f"{name}.json"
    config.write_text(json.dumps(model))
    fixes = [part for choice in (*fixed.split(), "micro_batch_size=1") for part in ("--fix", choice)]
    size = ["--cluster", cluster, "--global-batch-size", "8", "--seq-length", "32", "--precision", "fp32"]
    command = ["meshwright", "plan", str(config), *size, *fixes, "-o", str(plan)]
    run([shutil.which("meshwright") or command[0], *command[1:]])
    return plan


def arguments_of(plan: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """The arguments that ``meshwright export`` writes for a plan, as bash reads them."""
    out = folder / f"{plan.stem}-export"
    run([shutil.which("meshwright") or "meshwright", "export", str(plan), "--target", "megatron@0.19", "-o", str(out)])
    line = run(["bash", "-c", 'source "$1" && printf "%s\\0" "${MEGATRON_ARGS[@]}"', "-", str(out / "train_args.sh")])
    return line.split("\0")[:-1]


def alone(line: list[str]) -> list[str]:
    """The same training in one process."""
    out, position = [], 0
    while position < len(line):
        name = line[position]
        if name in _ALONE:
            position += 1 + _ALONE[name]
            continue
        out.append(name)
        position += 1
        if name in _DEGREES:
            out.append("1")
            position += 1
    return out


def train(venv: str, line: list[str], world: int, steps: int) -> dict[str, Any]:
    """What rank 0 of ``steps.py`` reports; processes meet on the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world)}
    ranks = [
        subprocess.Popen(
            [f"{venv}/bin/python", str(HERE / "steps.py"), str(steps), *line],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit("training failed:\n" + "\n".join(text[-3000:] for text in said))
    found: dict[str, Any] = json.loads(said[0].strip().splitlines()[-1])
    return found


def run(command: list[str]) -> str:
    """Standard output of a command; ends the program with its messages if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:8])} ... failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return done.stdout


def layers_of_ranks(document: dict[str, Any]) -> list[list[list[int]]]:
    """Decoder layers of every rank's chunks, from the plan document."""
    held: dict[int, list[list[int]]] = {}
    for stage in document["plan"]["stages"]:
        chunks = []
        for chunk in stage["chunks"]:
            blocks = [block.removeprefix("decoder:") for block in chunk["blocks"] if block.startswith("decoder:")]
            chunks.append([index for text in blocks for index in span(text)])
        for text in (text for group in stage["groups"] for text in group["ranks"]):
            held |= dict.fromkeys(span(text), chunks)
    return [held[rank] for rank in sorted(held)]


def span(text: str) -> range:
    """``range(3, 6)`` of ``3-5``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", help="virtual environment of .ci/megatron/setup")
    parser.add_argument("plans", nargs="*", type=pathlib.Path, help="plan documents of up to 8 ranks, in fp32")
    parser.add_argument("--case", action="append", choices=CASES, help="only these cases")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    failed = 0
    references: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        chosen = options.case or ([] if options.plans else list(CASES))
        plans = [*options.plans, *(plan_of_case(case, folder) for case in chosen)]
        for plan in plans:
            document = json.loads(plan.read_text())
            line = arguments_of(plan, folder)
            world = 1 + max(rank for ranks in document["plan"]["devices"] for rank in span(ranks["ranks"]))
            found = train(options.venv, line, world, options.steps)
            single = alone(line)
            key = json.dumps(single)
            if key not in references:
                references[key] = train(options.venv, single, 1, options.steps)
            wanted = references[key]
            far = max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"], strict=True))
            good = far <= TOLERANCE and found["layers"] == layers_of_ranks(document)
            failed += not good
            losses = " ".join(f"{loss:.5f}" for loss in found["losses"])
            sys.stdout.write(
                f"{'ok' if good else 'DIFFERS':8}{plan.stem:28}{world} ranks  losses {losses}  "
                f"largest difference to one process {far:.1e}\n"
            )
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
