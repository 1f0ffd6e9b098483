"""What is wrong with an input: one :class:`Fault` per fault, collected in one exception."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault of an input.

    ``pointer`` is an RFC 6901 JSON pointer into the input (``""`` is the whole input), ``message`` says what is
    wrong and what would be right, ``alternatives`` lists valid values where they can be listed.
    """

    pointer: str
    message: str
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        field = self.pointer.strip("/").replace("/", ".")
        text = f"{field}: {self.message}" if field else self.message
        return f"{text} (valid: {', '.join(self.alternatives)})" if self.alternatives else text


class SpecError(ValueError):
    """Bad input. Carries every fault that was found, in the order of the input."""

    def __init__(self, faults: Iterable[Fault] | Fault):
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        super().__init__("; ".join(str(fault) for fault in self.faults))
