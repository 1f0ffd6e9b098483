"""``Site``: what a place of work adds to a launch and no plan knows: account, image, mounts, environment, data."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from meshwright.specs.base import Document
from meshwright.specs.errors import Fault, SpecError

from .shell import exports, literal

#: Slurm's forms of a time limit (sbatch manual): minutes, with seconds, with hours, and days-hours with the rest.
_TIME_LIMIT = r"^(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2})$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
#: Set by the scripts from the plan's host list; a fixed value would give every node the same place.
_OWN = frozenset({"NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HOSTFILE"})


def _word(text: str) -> str:
    if not text.isprintable() or re.search(r"[\s'\"#\\]", text) or text.startswith("-"):
        raise ValueError("must be one word without quotes, spaces, # and backslashes")
    return text


def _no_null(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a null character")
    return text


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isprintable() or re.search(r"[,:]", text):
        raise ValueError("must be an absolute path without commas, colons and control characters")
    return text


#: A value of an ``#SBATCH`` line, which no quoting protects, or an image.
Word = Annotated[str, StringConstraints(min_length=1, max_length=512), AfterValidator(_word)]
Text = Annotated[str, AfterValidator(_no_null)]
AbsolutePath = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_path)]


class Mount(Document):
    """A folder of the host (``source``), or on Kubernetes a volume claim (``claim``), inside the container."""

    source: AbsolutePath | None = None
    claim: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")] | None = None
    target: AbsolutePath
    read_only: bool = False


class Site(Document):
    """What the scripts need of a place of work.

    ``account``, ``partition``, ``qos``, ``reservation``, ``time_limit`` go to Slurm. ``image`` and ``mounts`` go to
    Kubernetes and, under Slurm, to Pyxis (``srun --container-image``). ``environment`` is exported on every node before
    the plan's own. ``megatron_path`` is the checkout of Megatron-LM. ``arguments`` are the framework's own for data,
    tokenizer, learning rate and length; they replace the placeholders of an export.
    """

    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    time_limit: Annotated[str, StringConstraints(pattern=_TIME_LIMIT)] | None = None
    image: Word | None = None
    mounts: tuple[Mount, ...] = ()
    environment: dict[Annotated[str, StringConstraints(pattern=_VARIABLE)], Text] = Field(default_factory=dict)
    megatron_path: Text | None = None
    arguments: tuple[Text, ...] = ()

    @classmethod
    def read(cls, data: Any, pointer: str = "/site") -> Site:
        """A site from plain data; :class:`SpecError` with one fault per wrong field."""
        site = cls.parse(data, pointer)
        faults = [
            Fault(f"{pointer}/environment/{name}", "is set by the launch scripts for each node")
            for name in sorted(_OWN.intersection(site.environment))
        ]
        for index, mount in enumerate(site.mounts):
            if (mount.source is None) == (mount.claim is None):
                faults.append(Fault(f"{pointer}/mounts/{index}", "needs either a source or a claim"))
        if faults:
            raise SpecError(faults)
        return site

    def settings(self) -> dict[str, str]:
        """Defaults of the launch scripts' variables."""
        return {} if self.megatron_path is None else {"MEGATRON_LM": self.megatron_path}

    def environment_file(self) -> str:
        """``site.sh``: exports that every node reads first; empty where there are none."""
        if not self.environment:
            return ""
        head = "# shellcheck shell=bash\n# Environment of this site; what the plan needs comes after it.\n"
        return head + literal(*self.environment.values()) + exports(dict(sorted(self.environment.items())))

    def sbatch_lines(self) -> list[str]:
        """``#SBATCH`` lines."""
        named = {
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
            "reservation": self.reservation,
            "time": self.time_limit,
        }
        return [f"#SBATCH --{name}={value}" for name, value in named.items() if value is not None]

    def container_options(self, here: str) -> str:
        """Options of ``srun`` (Pyxis) that run a task in the image, with ``here`` mounted at its own path."""
        if self.image is None:
            return ""
        for index, mount in enumerate(self.mounts):
            if mount.source is None:
                raise SpecError(Fault(f"/site/mounts/{index}/claim", "is a volume claim, which only Kubernetes has"))
        mounts = [f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in self.mounts]
        after = shlex.quote("".join(f",{mount}" for mount in mounts)) if mounts else ""
        return f'--container-image={shlex.quote(self.image)} --container-mounts="{here}:{here}"{after} '


#: A place of work that nothing is known of.
NO_SITE = Site()
