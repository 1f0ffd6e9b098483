"""The cases of the suite, read from ``cases.yaml`` beside this file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from meshwright.specs.cluster import ClusterSpec
from meshwright.specs.cluster_io import cluster_from_data, load_cluster

PATH = Path(__file__).with_name("cases.yaml")


@dataclass(frozen=True)
class Case:
    """A planning case; fields as ``cases.yaml`` explains them. ``form`` is its cluster where one word cannot say it."""

    model: str
    cluster: str
    batch: int
    seq: int
    tags: tuple[str, ...]
    precision: str = "bf16"
    recipes: tuple[str, ...] = ()
    refused: str | None = None
    form: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Short, and different for every case."""
        words = [self.model, self.cluster, f"{self.batch}x{self.seq}"]
        words += [self.precision] if self.precision != "bf16" else []
        return " ".join([*words, "scaling"] if "scaling" in self.tags else words)

    def spec(self) -> ClusterSpec:
        """The cluster as the planner sees it."""
        return load_cluster(self.cluster) if self.form is None else cluster_from_data(self.form)

    def command(self, folder: Path) -> list[str]:
        """Arguments of ``meshwright plan``; a cluster that no word says is written into ``folder``."""
        cluster = self.cluster
        if self.form is not None:
            path = folder / f"{self.cluster}.json"
            path.write_text(json.dumps(self.form), encoding="utf-8")
            cluster = str(path)
        options = {"--cluster": cluster, "--global-batch-size": self.batch, "--seq-length": self.seq}
        words = [word for name, value in options.items() for word in (name, str(value))]
        return [self.model, *words, "--precision", self.precision]


@lru_cache(maxsize=1)
def _read() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    return found


def cases() -> tuple[Case, ...]:
    """Every case of the suite."""
    return _cases("cases")


def scaling() -> tuple[Case, ...]:
    """The cases that show how a search grows with the GPUs."""
    return _cases("scaling")


def case_named(name: str) -> Case:
    """The case of a name; KeyError if there is none."""
    return {case.name: case for case in (*cases(), *scaling())}[name]


def _cases(part: str) -> tuple[Case, ...]:
    forms = _read()["clusters"]
    lists = ("tags", "recipes")
    return tuple(
        Case(
            **{name: value for name, value in each.items() if name not in lists},
            **{name: tuple(each.get(name, ())) for name in lists},
            form=forms.get(each["cluster"]),
        )
        for each in _read()[part]
    )
