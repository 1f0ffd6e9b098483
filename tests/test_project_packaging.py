"""What pyproject.toml and constraints.txt promise, and what the wheel holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOMS = ("specs", "cost_models", "profiler", "planner", "megatron_export", "api")
DATA_SUFFIXES = {".json", ".yaml", ".sh", ".txt", ".html", ".typed"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (root / "constraints.txt").read_text().splitlines()]
    pairs = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line) for line in lines if line]
    assert all(pairs), "constraints.txt holds only NAME==VERSION lines"
    return {canonicalize_name(pair[1]): Version(pair[2]) for pair in pairs if pair}


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from what the image's build sees, and in a copy, since a build leaves files behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    lines = (root / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, copy)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, out], cwd=copy, check=True, capture_output=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def requirements(project: dict[str, Any]) -> list[Requirement]:
    table = project["project"]
    extras = [text for extra in table["optional-dependencies"].values() for text in extra]
    return [Requirement(text) for text in [*table["dependencies"], *extras, *project["build-system"]["requires"]]]


def test_every_requirement_is_pinned_within_its_range(project: dict[str, Any], pins: dict[str, Version]) -> None:
    for requirement in requirements(project):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(pin), f"{requirement} does not admit {pin}"


def test_the_oracles_are_pinned(pins: dict[str, Version]) -> None:
    """Expected values in tests come from these releases; another release would make other values."""
    assert pins["transformers"] == Version("5.24.0")
    assert pins["megatron-core"] == Version("0.19.2")
    assert pins["torch"] == Version("2.13.0")


def test_every_package_folder_is_listed(project: dict[str, Any], root: Path) -> None:
    found = {"meshwright"}
    for room in ROOMS:
        for init in (root / room).rglob("__init__.py"):
            found.add("meshwright." + ".".join(init.parent.relative_to(root).parts))
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_every_module_lies_in_a_package(sources: list[Path], root: Path) -> None:
    """A module in a folder without __init__.py would be importable from a checkout and missing from the wheel."""
    modules = [path for path in sources if path.suffix == ".py"]
    assert [str(path) for path in modules if not (root / path.parent / "__init__.py").exists()] == []


def test_the_wheel_holds_the_rooms_and_nothing_else(wheel: zipfile.ZipFile, sources: list[Path]) -> None:
    expected = {f"meshwright/{path}" for path in sources if path.suffix in {".py", *DATA_SUFFIXES}}
    expected.add("meshwright/__init__.py")
    held = {name for name in wheel.namelist() if not name.endswith("/")}
    info = {name for name in held if ".dist-info/" in name}
    assert held - info == expected


def test_no_data_file_is_left_out_of_the_wheel(sources: list[Path]) -> None:
    """A file of a kind that package-data does not name would work in a checkout and be missing when installed."""
    suffixes = {path.suffix for path in sources if path.name != "NOTICE"}
    assert suffixes <= {".py", ".md", *DATA_SUFFIXES}


def test_the_wheel_names_its_licence_and_command(wheel: zipfile.ZipFile) -> None:
    texts = {
        name.split(".dist-info/")[1]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name
    }
    assert "meshwright = meshwright.api.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Apache License" in texts["licenses/LICENSE"]
    assert {"licenses/NOTICE", "RECORD", "WHEEL"} <= set(texts)
