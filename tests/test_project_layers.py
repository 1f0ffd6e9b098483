"""The import linter of CI: it accepts the code as it is and catches each kind of wrong import."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = ("specs", "cost_models", "profiler", "planner", "megatron_export", "api")


def lint(repo: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([repo / ".ci/layers", sys.executable], capture_output=True, text=True, check=False)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """The rooms and the linter's settings, free to be spoilt."""
    for folder in (*ROOMS, "src", ".ci"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_code_keeps_the_arrows(root: Path) -> None:
    result = lint(root)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("specs", "import meshwright.planner"),
        ("specs", "from meshwright import cost_models"),
        ("cost_models", "import meshwright.profiler"),
        ("profiler", "import meshwright.cost_models"),
        ("planner", "def late():\n    from meshwright import megatron_export"),
        ("megatron_export", "import meshwright.api"),
        ("planner", "def late():\n    import torch"),
        ("cost_models", "import rich"),
    ],
)
def test_a_wrong_import_is_caught(copy: Path, room: str, line: str) -> None:
    (copy / room / "wrong.py").write_text(line + "\n")
    result = lint(copy)
    assert result.returncode != 0
    assert f"meshwright.{room}.wrong" in result.stdout


def test_a_new_room_must_be_given_its_place(copy: Path) -> None:
    (copy / ".ci/tree").write_text(
        (copy / ".ci/tree").read_text().replace("megatron_export api;", "megatron_export api loft;")
    )
    (copy / "loft").mkdir()
    (copy / "loft/__init__.py").write_text("")
    result = lint(copy)
    assert result.returncode != 0
    assert "loft" in result.stdout
