"""Rules of FlagScale: those of the Megatron that it carries, and those of its heterogeneous process meshes.

FlagScale also lets TP and DP differ by mesh. Plans for it have one (TP, CP, EP, DP) for all stages, as Megatron's rules
ask; what FlagScale asks beyond of meshes that differ (equal CP, samples of a micro-step divisible by every DP, equal TP
at both ends with tied embeddings or MTP) then holds by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .facts import Facts
from .logic import Truth, implies
from .rule import Rule

#: The Megatron-Core that FlagScale da4935ec (2025-11) patches.
MEGATRON_VERSION = (0, 15)


def _whole_stages(f: Facts) -> Truth:
    """A decoder layer on every stage, the embedding with the first and the loss with the last."""
    if f.layout is None:
        return f.num_layers >= f.pp
    chunks = f.layout.chunks
    return all("t" in chunk for chunk in chunks) and "E" in chunks[0] and "L" in chunks[-1]


def _pools_in_order(f: Facts) -> Truth:
    """One pool a stage, and the stages of a pool side by side: ranks are sorted by device type."""
    if any(len(pools) != 1 for pools in f.stage_pools):
        return False
    order = [pools[0] for pools in f.stage_pools]
    runs = [pool for index, pool in enumerate(order) if index == 0 or order[index - 1] != pool]
    return len(set(runs)) == len(runs)


OWN: tuple[Rule, ...] = (
    Rule(
        "flagscale.H1",
        lambda f: implies(f.pp > 1, f.vpp == 1),
        "virtual stages ({f.vpp} a rank) do not run on process meshes",
        "flagscale/train/arguments.py:80-224",
        "validate",
        lambda f: ("--forbid vpp",),
    ),
    Rule(
        "flagscale.H2",
        _whole_stages,
        "a stage has no decoder layer: hetero_pipeline_layer_split counts these, and embedding and loss sit with those "
        "of the first and the last of {f.pp} stages",
        "flagscale/train/arguments.py:80-224, hetero/parallel_context.py:114-177",
        "validate",
    ),
    Rule(
        "flagscale.H3",
        _pools_in_order,
        "a stage mixes pools, or stages of a pool are not side by side: meshes take ranks sorted by device type",
        "hetero/parallel_context.py:114-177",
        "groups",
    ),
)


def flagscale_rules(megatron: Iterable[Rule]) -> tuple[Rule, ...]:
    """Megatron's rules of that version, whatever FlagScale's own version is, and the meshes'."""
    kept = (rule for rule in megatron if rule.applies(MEGATRON_VERSION))
    return (*(replace(rule, since=None, until=None) for rule in kept), *OWN)
