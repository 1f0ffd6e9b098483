"""Reading a ``config.json`` field by field: every fault is kept, every value that was not stated is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import Fault, SpecError
from .defaults import TRANSFORMERS, class_defaults

#: Larger sizes are taken for a mistake: no published model is within five orders of magnitude.
MAX_SIZE = 10**9
#: A layer is an entry of a list, so a mistyped count must not fill the memory.
MAX_LAYERS = 10_000


@dataclass
class Report:
    """Faults and assumptions of one configuration, shared by the readers of its parts."""

    faults: list[Fault] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Raise :class:`SpecError` if anything was wrong so far."""
        if self.faults:
            raise SpecError(self.faults)

    def assume(self, text: str) -> None:
        """Name a value that the configuration did not state."""
        if text not in self.assumptions:
            self.assumptions.append(text)


class Fields:
    """Typed access to one JSON object of a configuration.

    A fault is recorded and a harmless stand-in returned, so that one reading finds all faults; call :meth:`settle`
    before computing with the values. Sizes that define the model (``size``) must be stated at the top level; in a
    ``nested`` object, from which Hugging Face leaves out what equals the class default, the default fills them.
    """

    def __init__(
        self, data: Mapping[str, Any], report: Report, pointer: str = "", model_type: str = "", nested: bool = False
    ):
        self.data = data
        self.report = report
        self.pointer = pointer
        self.model_type = model_type
        self.nested = nested
        self.class_name, self.defaults = class_defaults(model_type)

    # -- outcome

    def settle(self) -> None:
        """Raise :class:`SpecError` if anything was wrong so far."""
        self.report.settle()

    def fault(self, name: str, message: str, alternatives: Sequence[str] = ()) -> None:
        """Record a fault of the field ``name``."""
        fault = Fault(self.path(name), message, tuple(alternatives))
        if fault not in self.report.faults:
            self.report.faults.append(fault)

    def path(self, name: str) -> str:
        """JSON pointer of a field."""
        return f"{self.pointer}/{name}"

    def derived(self, name: str, value: object, rule: str) -> None:
        """Name a value that follows from other fields."""
        self.report.assume(f"{self._label(name)} = {value}: {rule}")

    # -- single values

    def has(self, *names: str) -> bool:
        """Whether one of the fields is stated and not null."""
        return any(self.data.get(name) is not None for name in names)

    def size(self, *names: str, maximum: int = MAX_SIZE) -> int:
        """A positive integer that defines the model's shape; the first name is the canonical one."""
        return self._integer(names, 1, maximum, required=not self.nested)

    def setting(self, *names: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """An integer that the class default may always fill."""
        return self._integer(names, minimum, maximum, required=False)

    def optional(self, *names: str, maximum: int = MAX_SIZE, minimum: int = 1) -> int | None:
        """An integer, or None where null is stated or is the class default."""
        name, value, stated = self._find(names)
        if stated and value is None:
            return None
        if not stated:
            value = self.defaults.get(name)
            if value is None:
                return None
            self._note_default(name, value)
        return self._check_integer(name, value, minimum, maximum)

    def stated(self, *names: str, minimum: int = 0, maximum: int = MAX_SIZE) -> int:
        """An integer that counts only where it is stated; 0 where absent or null (no default is applied)."""
        name, value, _ = self._find(names)
        return 0 if value is None else self._check_integer(name, value, minimum, maximum)

    def flag(self, name: str, absent: bool | None = None) -> bool:
        """A boolean. ``absent`` is its value where the model's own code gives none a default class."""
        if name not in self.data:
            value = self.defaults.get(name, absent)
            if value is None:
                self.fault(name, "is required: true or false")
                return False
            self._note_default(name, value, own=name not in self.defaults)
        else:
            value = self.data[name]
        if not isinstance(value, bool):
            self.fault(name, f"must be true or false, got {_show(value)}")
            return False
        return value

    def number(self, name: str, minimum: float = 0.0, maximum: float = float(MAX_SIZE)) -> float:
        """A finite number."""
        value = self.data.get(name)
        if value is None and name not in self.data and (value := self.defaults.get(name)) is not None:
            self._note_default(name, value)
        if value is None:
            self.fault(name, "is required: a number")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.fault(name, f"must be a number, got {_show(value)}")
        elif not minimum < value <= maximum:
            self.fault(name, f"must be above {minimum:g} and at most {maximum:g}, got {_show(value)}")
        else:
            return float(value)
        return 1.0

    def text(self, *names: str, absent: str = "") -> str:
        """A string; the class default or ``absent`` where it is not stated."""
        name, value, _ = self._find(names)
        if value is None:
            default = self.defaults.get(name)
            return default if isinstance(default, str) else absent
        if not isinstance(value, str):
            self.fault(name, f"must be a string, got {_show(value)}")
            return absent
        return value

    # -- lists and objects

    def words(self, name: str, length: int, allowed: Sequence[str]) -> tuple[str, ...] | None:
        """A list of ``length`` words, each one of ``allowed``; None where the field is absent or null."""
        values = self.items(name, length)
        if values is None:
            return None
        for index, value in enumerate(values):
            if value not in allowed:
                self.fault(f"{name}/{index}", f"{_show(value)} is not known", allowed)
        return tuple(value if value in allowed else allowed[0] for value in values)

    def integers(self, name: str, minimum: int = 0, maximum: int = MAX_SIZE) -> tuple[int, ...] | None:
        """A list of integers of any length (the wrong ones left out); None where the field is absent or null."""
        values = self.items(name)
        if values is None:
            return None
        out = []
        for index, value in enumerate(values):
            known = len(self.report.faults)
            number = self._check_integer(f"{name}/{index}", value, minimum, maximum)
            if len(self.report.faults) == known:
                out.append(number)
        return tuple(out)

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, of ``length`` entries where given; None where the field is absent or null."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fault(name, f"must be a list, got {_show(value)}")
            return None
        if length is not None and len(value) != length:
            if not self.report.faults:  # a wrong layer count would make this a second report of the same fault
                self.fault(name, f"has {len(value)} entries, but the model has {length} layers")
            return None
        return value

    def child(self, name: str, model_type: str = "", *, nested: bool = True, required: bool = False) -> Fields:
        """The object in field ``name`` as a reader; an empty one where it is absent."""
        value = self.data.get(name)
        if value is None:
            if required:
                self.fault(name, "is required: an object")
            value = {}
        elif not isinstance(value, dict):
            self.fault(name, f"must be an object, got {_show(value)}")
            value = {}
        stated = value.get("model_type")
        if stated is not None and not isinstance(stated, str):
            self.fault(f"{name}/model_type", f"must be a string, got {_show(stated)}")
            stated = None
        return Fields(value, self.report, self.path(name), model_type or stated or "", nested)

    def layer(self, index: int) -> Fields:
        """What ``per_layer_config`` states for a layer (its keys are layer numbers, with or without leading zeros)."""
        table = self.child("per_layer_config")
        for name in table.data:
            if name.isascii() and name.isdigit() and len(name) < 6 and int(name) == index:
                return table.child(name)
        return Fields({}, self.report, f"{table.pointer}/{index}", nested=True)

    # -- inside

    def _label(self, name: str) -> str:
        return self.path(name).strip("/").replace("/", ".")

    def _find(self, names: Sequence[str]) -> tuple[str, Any, bool]:
        """Name, value and whether it is stated; the canonical name where none of the names is."""
        for name in names:
            if self.data.get(name) is not None:
                return name, self.data[name], True
        for name in names:
            if name in self.data:
                return name, None, True
        for name in names:
            if name in self.defaults:
                return name, None, False
        return names[0], None, False

    def _integer(self, names: Sequence[str], minimum: int, maximum: int, required: bool) -> int:
        name, value, stated = self._find(names)
        if not stated:
            value = None if required else self.defaults.get(name)
            if value is None:
                others = f" (also read as {', '.join(names[1:])})" if names[1:] else ""
                self.fault(names[0], f"is required{others}")
                return minimum
            self._note_default(name, value)
        return self._check_integer(name, value, minimum, maximum)

    def _check_integer(self, name: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fault(name, f"must be an integer, got {_show(value)}")
        elif value < minimum:
            self.fault(name, f"must be at least {minimum}, got {_show(value)}")
        elif value > maximum:
            self.fault(name, f"must be at most {maximum}, got {_show(value)}")
        else:
            return value
        return minimum

    def _note_default(self, name: str, value: object, own: bool = False) -> None:
        source = "default of the model's own code" if own else f"default of {self.class_name} in {TRANSFORMERS}"
        self.report.assume(f"{self._label(name)} = {_show(value)}: {source}")


def _show(value: object) -> str:
    """A short form of a JSON value for a message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"an integer of {value.bit_length() * 3 // 10 + 1} digits or so"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
