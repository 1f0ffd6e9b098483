"""Starting a plan: which host runs which ranks, and the scripts and manifests that see to it, for any target."""

from __future__ import annotations

from .checked import legal_nodes, plan_in, require_launcher
from .hosts import Hosts, hosts_of, in_plan_order, read_hosts
from .program import Program
from .scripts import LAUNCHERS, START, launch_files
from .site import NO_SITE, Site

__all__ = [
    "LAUNCHERS",
    "NO_SITE",
    "START",
    "Hosts",
    "Program",
    "Site",
    "hosts_of",
    "in_plan_order",
    "launch_files",
    "legal_nodes",
    "plan_in",
    "read_hosts",
    "require_launcher",
]
