"""Arguments of a site in place of an export's placeholders: data, tokenizer, learning rate, length of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from meshwright.planner.rules import Facts, violations
from meshwright.specs.errors import Fault, SpecError

from ..launch import Site
from .arguments import read_arguments
from .interpret import facts_from_arguments
from .model_flags import Flags

#: Flags that name data, of which ``--mock-data`` is one (arguments.py, ``_add_data_args``).
_DATA = frozenset({"--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path", "--mock-data"})
#: Facts that the run decides, not the plan.
_OF_THE_RUN = frozenset({"data_sources", "train_iters_and_samples", "attention_dropout", "hidden_dropout"})
#: Section of an export with the placeholders, and with what takes their place.
RUN = "Run: placeholders that a plan does not decide"


def with_site(sections: Mapping[str, Flags], site: Site, world_size: int, version: str) -> dict[str, Flags]:
    """The sections of an export with the site's arguments last and the placeholders that they replace gone.

    Raises :class:`SpecError` below ``/site/arguments`` for one that Megatron does not have, that the plan decides, or
    that breaks a rule.
    """
    if not site.arguments:
        return dict(sections)
    given = _flags(site.arguments)
    names = {name for name, *_ in given}
    decided = {name for title, flags in sections.items() if title != RUN for name, *_ in flags}
    clash = sorted(names & decided)
    if clash:
        raise SpecError(Fault("/site/arguments", f"{name} is decided by the plan") for name in clash)
    gone = names | (_DATA if names & _DATA else set())
    gone |= {"--train-iters"} if "--train-samples" in names else set()
    out = {**sections, RUN: [flag for flag in sections[RUN] if flag[0] not in gone], "Run: from the site": given}
    before, after = _facts(sections, world_size, version), _facts(out, world_size, version)
    changed = [item.name for item in fields(Facts) if getattr(before, item.name) != getattr(after, item.name)]
    known = {item.rule for item in violations(before)}
    faults = [
        Fault("/site/arguments", f"change {name.replace('_', ' ')}, which the plan decides")
        for name in changed
        if name not in _OF_THE_RUN
    ] or [
        Fault("/site/arguments", f"{item.rule}: {item.message}", item.alternatives)
        for item in violations(after)
        if item.rule not in known
    ]
    if faults:
        raise SpecError(faults)
    return out


def _flags(arguments: tuple[str, ...]) -> Flags:
    out: list[list[str]] = []
    for index, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        if text.startswith("--") and " " not in name:
            out.append([name, value] if equals else [name])
        elif out:
            out[-1].append(text)
        else:
            raise SpecError(Fault(f"/site/arguments/{index}", f"{text[:60]!r} belongs to no flag"))
    return [tuple(flag) for flag in out]


def _facts(sections: Mapping[str, Flags], world_size: int, version: str) -> Facts:
    tokens = [token for flags in sections.values() for flag in flags for token in flag]
    try:
        return facts_from_arguments(read_arguments(tokens, version), world_size)
    except SpecError as error:
        raise SpecError(
            Fault("/site/arguments", f"{fault.pointer.lstrip('/')} {fault.message}".strip(), fault.alternatives)
            for fault in error.faults
        ) from None
