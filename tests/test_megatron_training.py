"""Plans of a tiny GPT and a tiny mixture of experts, exported and trained on CPU: the losses of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("MESHWRIGHT_MEGATRON_PYTHON")
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_MEGATRON_PYTHON names no python with megatron-core"),
]


def test_every_case_trains_to_the_losses_of_one_process():
    script = Path(__file__).parent.parent / ".ci/megatron/train.py"
    done = subprocess.run(
        [sys.executable, str(script), str(Path(str(PYTHON)).parent.parent)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 8
