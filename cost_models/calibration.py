"""``Calibration``: bounded corrections worked out from measured runs, as a document that is used only when named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from meshwright.specs.base import Document, digest_of
from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.estimate import Estimate

from .learned import Traits, shipped, shipped_multipliers
from .multipliers import CORRECTED, HIGHEST_HOST, LOWEST, NEUTRAL, Multipliers

PrecisionClass = Literal["32-bit", "16-bit", "8-bit", "4-bit"]
#: Precisions that run on the same units at about the same rate share an entry.
PRECISION_CLASS: dict[str, PrecisionClass] = {
    "fp32": "32-bit",
    "tf32": "32-bit",
    "bf16": "16-bit",
    "fp16": "16-bit",
    "fp8": "8-bit",
    "mxfp8": "8-bit",
    "nvfp4": "4-bit",
}
#: Standard deviations on either side that hold 80% of a normal distribution.
NORMAL_80 = 1.2816


Cell = tuple[str, str, PrecisionClass, bool]


@cache
def rung() -> str:
    """What the factors of this version multiply: the shipped corrections, by digest. A calibration that was made on
    other ones is refused, for its factors would mean something else."""
    return f"shipped corrections {digest_of(shipped()['levels'])[7:19]}"


@dataclass(frozen=True)
class Setting:
    """Where an estimate stands: what an entry must match. ``release`` None is any; ``shape`` is
    :func:`~meshwright.cost_models.learned.shape_of`."""

    traits: Traits
    release: str | None
    shape: str

    @property
    def cell(self) -> Cell:
        """All but release and model; stacks that run the same code share their entries."""
        return self.traits.family, self.traits.gpu, PRECISION_CLASS[self.traits.precision], self.traits.moe


class Match(Document):
    """What an entry is for: a family of stacks (``stack``), GPU type, precision class, dense or moe.

    Without ``release`` it serves releases, without ``model`` models that have no entry of their own.
    """

    stack: str
    gpu: str
    precision: PrecisionClass
    moe: bool
    model: str | None = None
    release: str | None = None

    @property
    def cell(self) -> Cell:
        """All but release and model."""
        return self.stack, self.gpu, self.precision, self.moe

    @property
    def level(self) -> str:
        """How near to its runs an entry stands."""
        return "stack" if self.model is None else "model" if self.release is None else "model and release"


class Entry(Document):
    """Factors of named terms (:class:`~meshwright.cost_models.multipliers.Multipliers`) for the runs that ``match``.

    ``on`` says what they multiply: ``physics`` alone, in place of the shipped corrections, where the entry is for one
    model and release; the ``shipped`` corrections of wherever it serves, for other models and releases.
    ``runs`` is how many it was worked out from; ``residual_spread`` the standard deviation of the logarithm of
    predicted over measured time of these runs under the factors, 0 for one run; ``largest_residual`` the largest
    |predicted / measured - 1| among them.
    """

    match: Match
    on: Literal["physics", "shipped"]
    multipliers: dict[str, PositiveFloat]
    runs: PositiveInt
    residual_spread: NonNegativeFloat
    largest_residual: NonNegativeFloat


class Source(Document):
    """Where the runs came from: the table's name and SHA-256, and how many of its rows were used."""

    name: str
    sha256: str
    rows: NonNegativeInt
    used: NonNegativeInt


class Calibration(Document):
    """A calibration file. ``id`` is the digest of everything else."""

    schema_version: Literal[1] = 1
    id: str
    source: Source
    rung: str
    entries: tuple[Entry, ...] = Field(min_length=1)

    @classmethod
    def of(cls, source: Source, entries: tuple[Entry, ...]) -> Self:
        """A calibration with its id."""
        draft = cls(id="", source=source, rung=rung(), entries=entries)
        return draft.model_copy(update={"id": draft.content_id()})

    def content_id(self) -> str:
        """The digest of everything but the id."""
        return digest_of(self.model_dump(mode="json", exclude={"id"}))

    @classmethod
    def parse(cls, data: Any, pointer: str = "") -> Self:
        """Validate a document; :class:`SpecError` for wrong fields, unknown or unbounded factors, an id that does not
        fit the content, or another rung than this version stands on."""
        found = super().parse(data, pointer)
        faults = [
            Fault(f"{pointer}/entries/{i}/multipliers/{name}", message, alternatives)
            for i, entry in enumerate(found.entries)
            for name, value in entry.multipliers.items()
            for message, alternatives in _factor_faults(name, value)
        ]
        if found.id != found.content_id():
            faults.append(Fault(f"{pointer}/id", "does not fit the content; make the file again with calibrate"))
        if found.rung != rung():
            message = f"is {found.rung[:60]!r}, this version has {rung()!r}; make the file again with calibrate"
            faults.append(Fault(f"{pointer}/rung", message))
        if faults:
            raise SpecError(faults)
        return found

    def find(self, setting: Setting) -> Entry | None:
        """The nearest entry for a setting: its model and release, its model, its stack. Where the release is open, the
        only release of the model counts as its own."""
        cell = [entry for entry in self.entries if entry.match.cell == setting.cell]
        own = [entry for entry in cell if entry.match.model == setting.shape]
        exact = [entry for entry in own if entry.match.release is not None]
        if setting.release is not None or len(exact) > 1:
            exact = [entry for entry in exact if entry.match.release == setting.release]
        nearest = (*exact, *(e for e in own if e.match.release is None), *(e for e in cell if e.match.model is None))
        return next(iter(nearest), None)

    def releases(self) -> frozenset[str]:
        """Releases that have entries of their own."""
        return frozenset(entry.match.release for entry in self.entries if entry.match.release is not None)

    def describe(self, entry: Entry) -> str:
        """One line for the assumptions of an estimate."""
        match = entry.match
        release = f" {match.release}" if match.release else ""
        kind = match.model or ("moe" if match.moe else "dense")
        runs = f"{entry.runs} run" + ("s" if entry.runs > 1 else "")
        return (
            f"calibration {self.id[7:19]} on {'physics' if entry.on == 'physics' else self.rung}: "
            f"{match.stack}{release}, {match.gpu}, {match.precision}, {kind}, from {runs}"
        )


def _factor_faults(name: str, value: float) -> list[tuple[str, tuple[str, ...]]]:
    if name not in CORRECTED:
        return [("is no corrected term", CORRECTED)]
    if not LOWEST <= value <= HIGHEST_HOST:
        return [(f"must be from {LOWEST} to {HIGHEST_HOST}, got {value}", ())]
    return []


def corrected(base: Multipliers, factors: Mapping[str, float]) -> Multipliers:
    """``base`` with factors on it, each product inside its bounds."""
    values = asdict(base)
    return Multipliers.bounded({name: value * factors.get(name, 1.0) for name, value in values.items()})


def multipliers_under(setting: Setting, entry: Entry | None) -> Multipliers:
    """What an entry makes of the terms in a setting; without one the shipped corrections."""
    shipped_there = shipped_multipliers(setting.traits)
    if entry is None:
        return shipped_there
    return corrected(NEUTRAL if entry.on == "physics" else shipped_there, entry.multipliers)


@cache
def _spread() -> dict[str, Any]:
    out: dict[str, Any] = json.loads(files("meshwright.cost_models.data").joinpath("calibration.json").read_text())
    return out


def calibrated(estimate: Estimate, calibration: Calibration, entries: Sequence[Entry | None]) -> Estimate:
    """An estimate that was priced under the ``entries`` of its pools (None: a pool without one), saying so, with the
    interval that suits it; with a pool that has no entry the interval stays.

    The interval is as wide as predictions of other runs from anchors of this level were wrong, no wider than the
    shipped one, no narrower than the anchors' own residuals, and lies evenly around the step time: what shifts the
    shipped one to one side, the calibration has removed.
    """
    found = [entry for entry in entries if entry is not None]
    notes = [calibration.describe(entry) for entry in found]
    if len(found) < len(entries):
        place = "this stack, GPU, precision and model" if len(entries) == 1 else "one of the pools"
        notes.append(f"calibration {calibration.id[7:19]} has no entry for {place}: not applied there")
        return estimate.model_copy(update={"assumptions": (*estimate.assumptions, *notes)})
    spread, (low, high) = _spread(), estimate.interval_s
    width = min(max(spread["log_half_width"][e.match.level] for e in found), (math.log(high) - math.log(low)) / 2)
    width = max(width, *(NORMAL_80 * entry.residual_spread for entry in found))
    step = estimate.step_time_s
    return estimate.model_copy(
        update={
            "assumptions": (*estimate.assumptions, *notes),
            "interval_s": (step * math.exp(-width), step * math.exp(width)),
            "interval_level": spread["level"],
        }
    )
