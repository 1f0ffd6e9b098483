"""Values out of a configuration of plain data: each is of its kind, or a fault says which is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: What Hugging Face's trainer fills in from its own arguments.
AUTO = "auto"


class Fields:
    """Reads a mapping by dotted names (``zero_optimization.stage``) and collects faults in words.

    The value ``auto`` counts as not given; its name is kept in ``automatic``.
    """

    def __init__(self, data: Mapping[str, Any]):
        self._data = data
        self.faults: list[str] = []
        self.automatic: list[str] = []

    def section(self, name: str, known: Iterable[str] = ()) -> Mapping[str, Any]:
        """A mapping ({} where it is not given); fields that are not ``known`` are faults, unless none is listed."""
        value = self._raw(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.faults.append(f"{name} must be a mapping")
            return {}
        names = set(known)
        self.faults += [f"{name}.{str(key)[:60]} is unknown" for key in value if names and key not in names]
        return value

    def integer(self, name: str, default: int | None = None, low: int = 0, high: int = 10**9) -> int | None:
        """A whole number of the range; written with a point (5e8) it counts too."""
        value = self._given(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.faults.append(f"{name} must be a whole number from {low}, got {_shown(value)}")
            return default
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number of the range."""
        value = self._given(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.faults.append(f"{name} must be a number from {low:g} to {high:g}, got {_shown(value)}")
            return default
        return float(value)

    def truth(self, name: str, default: bool | None = False) -> bool | None:
        """True or false, also written as a word."""
        value = self._given(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.faults.append(f"{name} must be true or false, got {_shown(value)}")
        return default

    def word(self, name: str, default: str, choices: Iterable[str]) -> str:
        """One of ``choices``, in any case of letters."""
        value = self._given(name)
        if value is None:
            return default
        valid = tuple(choices)
        found = next((each for each in valid if str(value).lower() == each.lower()), None)
        if found is None or isinstance(value, Mapping | list):
            self.faults.append(f"{name} must be one of {', '.join(valid)}, got {_shown(value)}")
            return default
        return found

    def _given(self, name: str) -> Any:
        value = self._raw(name)
        if value == AUTO:
            self.automatic.append(name)
            return None
        return value

    def _raw(self, name: str) -> Any:
        value: Any = self._data
        for step in name.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(step)
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
