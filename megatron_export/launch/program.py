"""``Program``: what every node of a plan starts, whatever starts the nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """An environment variable that the user of the scripts may set. ``help`` continues ``NAME  ...`` in a comment."""

    name: str
    help: str
    default: str


@dataclass(frozen=True)
class Program:
    """The part of the launch scripts that differs by framework.

    ``command`` is what follows torchrun's own options, as bash; it may use ``$here``, the folder of the files, and
    variables of ``settings`` and ``prepare``. ``check`` are bash lines that exit with 2 and a message where something
    is missing; ``prepare`` runs after ``env.sh`` was read. ``image`` is what the user of a manifest must name.
    """

    name: str
    command: str
    settings: tuple[Setting, ...] = ()
    check: str = ""
    prepare: str = ""
    image: str = "IMAGE"
