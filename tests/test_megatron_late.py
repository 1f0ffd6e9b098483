"""Rules that Megatron's validation does not know, each provoked in its groups, model build or first step.

Every line passes ``validate_args``; the legal line beside it must go through the same code to the end of a step.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.megatron_export.megatron import check_arguments

PYTHON = os.environ.get("MESHWRIGHT_MEGATRON_PYTHON")
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 16 --position-embedding-type rope "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --vocab-size 512 --attention-dropout 0 "
    "--hidden-dropout 0 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
)
PLAIN = "--disable-bias-linear "
MOE = PLAIN + "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 64 "
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel "
VPP = PLAIN + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "


class Late(NamedTuple):
    rule: str
    world: int
    refused: str
    legal: str
    when: str
    says: str


LATE = [
    Late("W2", 8, MOE + "--pipeline-model-parallel-size 4 --expert-model-parallel-size 4",
         MOE + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4", "groups", "not divisible"),
    Late("W5", 8, MOE + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-tp-pp-dp-mapping",
         MOE + "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", "groups", "rank ordering"),
    Late("W7", 8, PLAIN + "--use-distributed-optimizer --num-distributed-optimizer-instances 3",
         PLAIN + "--use-distributed-optimizer --num-distributed-optimizer-instances 2", "groups", "divisible"),
    Late("P20", 2, PLAIN + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-comm-backend ucc",
         PLAIN + "--pipeline-model-parallel-size 2", "groups", "CUDA_DEVICE_MAX_CONNECTIONS"),
    Late("T3", 4, PLAIN + TP4 + "--ffn-hidden-size 130", PLAIN + TP4 + "--ffn-hidden-size 132", "build", "divisible"),
    Late("T3", 4, MOE + TP4 + "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 130",
         MOE + TP4 + "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 132", "build", "divisible"),
    Late("T3e", 4, MOE + TP4 + "--moe-ffn-hidden-size 66 --expert-tensor-parallel-size 4",
         MOE + TP4 + "--moe-ffn-hidden-size 66 --expert-tensor-parallel-size 1", "build", "divisible"),
    Late("C3", 2, PLAIN + "--context-parallel-size 2 --transformer-impl local", PLAIN + "--transformer-impl local",
         "build", "Context parallelism"),
    Late("E2s", 1, MOE.replace(PLAIN, "") + "--moe-shared-expert-intermediate-size 64",
         MOE + "--moe-shared-expert-intermediate-size 64", "build", "bias"),
    Late("E3", 1, MOE + "--moe-layer-freq [1]*3", MOE + "--moe-layer-freq [1]*4", "build", "invalid length"),
    Late("E4", 1, MOE + "--moe-token-dispatcher-type flex", MOE, "build", "TPxEP > 1"),
    Late("T6", 4, PLAIN + TP4 + "--seq-length 30", PLAIN + TP4 + "--seq-length 28", "step", "divisible"),
    Late("T9", 2, MOE + "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
         MOE + "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel", "step",
         "sequence parallel"),
    Late("E9k", 1, MOE + "--moe-router-topk 5", MOE + "--moe-router-topk 4", "step", "out of range"),
    Late("P9", 2, VPP + "--global-batch-size 1", VPP + "--global-batch-size 4", "step", "contiguous micro-batches"),
    Late("P9r", 2, VPP + "--global-batch-size 5", VPP + "--global-batch-size 6", "step", "remainder"),
]  # fmt: skip


def rules(line: str, world: int) -> list[str]:
    return [item.rule.removeprefix("megatron.") for item in check_arguments(BASE + line, world)]


@pytest.mark.parametrize("case", LATE, ids=[f"{case.rule}-{index}" for index, case in enumerate(LATE)])
def test_the_rule_is_named_and_its_neighbour_is_legal(case: Late) -> None:
    assert rules(case.refused, case.world) == [case.rule]
    assert rules(case.legal, case.world) == []


@pytest.mark.megatron
@pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_MEGATRON_PYTHON names no python with megatron-core")
def test_megatrons_own_code_refuses_at_that_moment_and_runs_the_neighbour() -> None:
    lines = [(case, line) for case in LATE for line in (case.refused, case.legal)]
    requests = [{"args": BASE + line, "world_size": case.world} for case, line in lines]
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).parent.parent / ".ci/megatron/provoke.py")],
        input="\n".join(map(json.dumps, requests)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = [json.loads(text) for text in done.stdout.splitlines()]
    for (case, line), verdict in zip(lines, verdicts, strict=True):
        if line == case.legal:
            assert verdict["when"] == "passed", (case.rule, verdict)
        else:
            assert verdict["when"] == case.when, (case.rule, verdict)
            assert case.says.lower() in verdict["error"].lower(), (case.rule, verdict)
