"""``Rule``: one condition of a target, as data, and its evaluation on one or on many plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .facts import Facts
from .logic import Truth

#: When the framework itself refuses: parsing, validation, configuration, process groups, model build, first step.
Moment = Literal["parse", "validate", "config", "groups", "build", "step"]


@dataclass(frozen=True)
class Rule:
    """A condition that a plan must meet.

    ``holds`` is True where the plan is legal; it reads :class:`Facts` with operators that work on scalars and arrays
    alike. ``message`` is a format string over the facts (``{f.tp}``). ``alternatives`` lists near legal values of a
    scalar violation. A rule is not judged where one named in ``after`` is broken, since it would only echo it.
    ``source`` is the file and line of megatron-core (A = training/arguments.py, TC = transformer_config.py,
    MP = model_parallel_config.py, PS = parallel_state.py, PL = pipeline_parallel_layer_layout.py,
    SC = schedules.py, TL = tensor_parallel/layers.py, ML = moe_layer.py). It holds for framework versions from
    ``since`` on and before ``until``, where these are given.
    """

    id: str
    holds: Callable[[Facts], Truth]
    message: str
    source: str
    when: Moment
    alternatives: Callable[[Facts], tuple[str, ...]] | None = None
    after: tuple[str, ...] = ()
    since: tuple[int, ...] | None = None
    until: tuple[int, ...] | None = None

    def applies(self, version: tuple[int, ...]) -> bool:
        """Whether the rule is there in a version."""
        return (self.since is None or version >= self.since) and (self.until is None or version < self.until)


@dataclass(frozen=True)
class Violation:
    """A broken rule: its id, the message with the numbers of the plan, near legal values where they can be listed."""

    rule: str
    message: str
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.rule}: {self.message}"
        return f"{text} (valid: {', '.join(self.alternatives)})" if self.alternatives else text


def broken(rules: Iterable[Rule], facts: Facts) -> list[Violation]:
    """The rules that scalar ``facts`` break, in the order of the rules."""
    found: list[Violation] = []
    names: set[str] = set()
    for rule in rules:
        if not rule.applies(facts.version) or names.intersection(rule.after) or bool(rule.holds(facts)):
            continue
        names.add(rule.id)
        near = rule.alternatives(facts) if rule.alternatives else ()
        found.append(Violation(rule.id, rule.message.format(f=_Readable(facts)), near))
    return found


class _Readable:
    """Facts for messages: a tuple reads as ``32, 64``."""

    def __init__(self, facts: Facts):
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._facts, name)
        return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else value
