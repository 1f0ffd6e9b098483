"""What can be wrong with a request once its inputs are valid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ViolationLike(Protocol):
    """The parts of a rule violation that a message needs."""

    @property
    def rule(self) -> str: ...

    @property
    def message(self) -> str: ...


class IllegalPlan(ValueError):  # noqa: N818  named for what it says
    """The target refuses the plan; ``violations`` names each broken rule."""

    def __init__(self, violations: Sequence[ViolationLike]):
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{item.rule}: {item.message}" for item in self.violations))


class DeadlineExceeded(RuntimeError):  # noqa: N818  named for what it says
    """Time was up before any plan was found."""
