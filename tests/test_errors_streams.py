"""Standard streams that are closed or full: a short message and a documented exit code, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("meshwright"))


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``line``, in which $0 is the command."""
    return subprocess.run(
        ["/bin/sh", "-c", line, COMMAND], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_closed_standard_error_changes_nothing_else(tmp_path: Path) -> None:
    plan = '"$0" plan llama-3.1-8b --cluster 8xH100 --global-batch-size 8 --seq-length 1024 --work-limit 4'
    assert shell(f"{plan} --json 2>&-", tmp_path).returncode == 0
    done = shell('"$0" describe no-such-model --json 2>&-', tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["errors"][0]["pointer"] == "/model"


def test_a_closed_standard_input_is_named(tmp_path: Path) -> None:
    done = shell('"$0" export - -o out <&-', tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: PLAN: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("tail", ["catalog gpus --json", "catalog gpus", "describe no-such-model --json", "--help"])
def test_a_full_standard_output_is_told_once(tmp_path: Path, tail: str) -> None:
    done = shell(f'"$0" {tail} >/dev/full', tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error: standard output: No space left on device\n") == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    assert shell('"$0" catalog gpus >&-', tmp_path).returncode == 0
