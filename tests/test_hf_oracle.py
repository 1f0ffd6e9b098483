"""The stored counts and class defaults again, from transformers itself (development only).

Runs where transformers and torch are installed, or with MESHWRIGHT_ORACLE_PYTHON naming a Python that has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .hf_cases import DATA, oracle

SCRIPTS = Path(__file__).parent / "oracle"
PYTHON = os.environ.get("MESHWRIGHT_ORACLE_PYTHON") or (sys.executable if find_spec("transformers") else None)

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(PYTHON is None, reason="needs transformers; see MESHWRIGHT_ORACLE_PYTHON"),
]


def run(script: str, folder: Path) -> None:
    assert PYTHON is not None
    done = subprocess.run([PYTHON, str(SCRIPTS / script), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_stored_counts_are_what_transformers_builds(tmp_path: Path) -> None:
    run("count_hf.py", tmp_path)
    made = json.loads((tmp_path / "active_param_oracle.json").read_text(encoding="utf-8"))
    assert made == oracle("active_param_oracle")
    assert {name: entry["params"] for name, entry in made["configs"].items()} == {
        name: entry["params"] for name, entry in oracle("param_oracle")["models"].items()
    }
    assert (tmp_path / "class_param_oracle.json").read_text() == (DATA / "class_param_oracle.json").read_text()


def test_the_stored_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    run("make_hf_defaults.py", tmp_path)
    stored = Path(__file__).parents[1] / "specs" / "hf" / "defaults.json"
    assert (tmp_path / "defaults.json").read_text() == stored.read_text()
