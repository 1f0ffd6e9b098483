"""The documentation runs: every command in it, in order, each page in a folder of its own.

In a page, a block opened with ```` ```yaml title="cluster.yaml" ```` (or json) becomes that file, and every line of a
``bash`` block is run, unless it starts with one of ``ELSEWHERE``. A line that ends in ``# exit N`` must exit with N.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from meshwright.specs.cluster_io import load_cluster

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r'^```(\w+)(?: title="([\w./-]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
#: Install lines are run by .ci/run, servers by the tests of the REST interface; Docker is not at hand in CI.
ELSEWHERE = (
    "python3 -m venv",
    "pip ",
    "docker ",
    "meshwright serve",
    "curl ",
    ".ci/",
    "pytest",
    "ruff ",
    "mypy ",
    "git ",
)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(text: str) -> list[tuple[str, int]]:
    """Command lines of the bash blocks of a page with their expected exit codes; continued lines are joined."""
    found = []
    for language, _, body in BLOCK.findall(text):
        if language != "bash":
            continue
        for line in body.replace("\\\n", " ").splitlines():
            exit_code = re.search(r"# exit (\d+)$", line)
            if line.strip() and not line.startswith(("#", *ELSEWHERE)):
                found.append((line, int(exit_code[1]) if exit_code else 0))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, tmp_path: Path) -> None:
    text = read(page)
    for _, title, body in BLOCK.findall(text):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(body, encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", dirs_exist_ok=True)
    environment = {**os.environ, "PATH": sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]}
    for line, exit_code in commands(text):
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert result.returncode == exit_code, f"{line}\n{result.stdout[-2000:]}{result.stderr[-2000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_every_data_block_parses(page: str) -> None:
    for language, _, body in BLOCK.findall(read(page)):
        if language == "json":
            json.loads(body)
        elif language == "yaml":
            yaml.safe_load(body)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    folder = (ROOT / page).parent
    targets = [target for target, _ in LINK.findall(read(page)) if "://" not in target]
    assert [target for target in targets if not (folder / target).exists()] == []


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_every_python_example_runs(example: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "tp " in result.stdout


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.yaml")))
def test_every_cluster_example_loads(example: str) -> None:
    assert load_cluster(str(ROOT / "examples" / example)).num_gpus > 1


def test_readme_starts_with_install_and_plan_and_then_with_install_and_test() -> None:
    first, second = [body.strip() for language, _, body in BLOCK.findall(read("README.md")) if language == "bash"][:2]
    assert "pip install ." in first
    assert "meshwright plan llama-3.1-70b --cluster 64xH100" in first
    assert "\n" not in first
    assert "pip install -c constraints.txt -e '.[dev]' && pytest" in second
    assert "\n" not in second


def test_the_pages_are_not_empty_of_commands() -> None:
    """Guards the parser above: a change of the pages' form must not silently run nothing."""
    assert len(commands(read("README.md"))) >= 8
    for page in ("docs/model.md", "docs/cluster.md", "docs/workload.md", "docs/plan.md"):
        assert commands(read(page)), page
