"""What a link kind reaches: constants and measured collective curves from ``data/collectives.json``.

A curve holds the seconds of an operation by buffer size and group size on a reference link, as measured. Another
link of the same family reads it at a scaled size: t = alpha + V/B depends on V/B alone, so a link of bandwidth B takes
for V what the reference link takes for V * B_ref / B.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from meshwright.specs.batch import FloatArray
from meshwright.specs.cluster import LinkKind, NetworkLevel

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, eq=False)
class Curve:
    """Measured seconds of one family of links, asymptotes included.

    ``log2_us[op]`` is [len(groups) * sizes] log2 of microseconds at buffers of 2**first_log2 bytes and each doubling;
    group sizes are powers of two from 2. ``slope_s[op]`` [groups] are seconds a byte beyond the last size.
    ``pair_share`` is what one pair of GPUs reaches of a GPU's link bandwidth. ``in_switch``: the switches add up for
    all-reduce (NVLS), so that it occupies next to no SMs.
    """

    bandwidth_bytes_per_s: float
    first_log2: int
    sizes: int
    groups: int
    log2_us: dict[str, FloatArray]
    slope_s: dict[str, FloatArray]
    pair_share: float
    in_switch: bool

    @property
    def bus_share(self) -> float:
        """Bus bandwidth of large all-gathers among the largest measured group, over the link's bandwidth."""
        most = 2**self.groups
        return float((most - 1) / most / self.slope_s["all_gather"][-1] / self.bandwidth_bytes_per_s)

    def seconds(self, op: Collective, scaled: FloatArray, size: FloatArray) -> FloatArray:
        """[...] seconds of ``op`` on buffers of ``scaled`` bytes (already in terms of the reference link).

        Between measured points linear in the logarithms. Smaller buffers cost what the smallest does; larger ones go
        on at the last bandwidth; larger groups move (n-1)/n more and are not given a start-up here.
        """
        most = float(2**self.groups)
        over = np.maximum(size, 1.0)
        scaled = np.where(over > most, scaled * ((over - 1) / over * most / (most - 1)), scaled)
        at = np.log2(np.maximum(scaled, 1.0)) - self.first_log2
        at = np.minimum(np.maximum(at, 0.0), self.sizes - 1.0)
        low = np.minimum(at.astype(np.int64), self.sizes - 2)
        part = at - low
        row = np.minimum(np.maximum(np.log2(over) - 1.0, 0.0), self.groups - 1.0)
        upper = np.minimum(np.ceil(row).astype(np.int64), self.groups - 1)
        lower = np.minimum(row.astype(np.int64), self.groups - 1)
        between = row - lower
        table = self.log2_us[op]

        def of(group: Any) -> Any:
            first = group * self.sizes + low
            return table[first] * (1 - part) + table[first + 1] * part

        log2_us = of(lower) * (1 - between) + of(upper) * between
        beyond = np.maximum(scaled - 2.0 ** (self.first_log2 + self.sizes - 1), 0.0)
        slope = self.slope_s[op]
        out: FloatArray = 1e-6 * np.exp2(log2_us) + beyond * (slope[lower] * (1 - between) + slope[upper] * between)
        return out


@cache
def data() -> dict[str, Any]:
    """The constants as they stand in the file."""
    text = files("meshwright.cost_models.data").joinpath("collectives.json").read_text()
    out: dict[str, Any] = json.loads(text)
    return out


@cache
def curves() -> dict[str, Curve]:
    """All measured curves by name."""
    entries: dict[str, dict[str, Any]] = data()["curves"]
    # An entry with ``as`` reads another family's measurements.
    return {name: curve_from({**entries.get(entry.get("as", ""), {}), **entry}) for name, entry in entries.items()}


def curve_from(entry: dict[str, Any]) -> Curve:
    """A curve from its JSON form: ``us[op][group][size]``."""
    log2_us, slopes = {}, {}
    for op, rows in entry["us"].items():
        table = np.array(rows, dtype=float)
        log2_us[op] = np.log2(table).ravel()
        last = 2.0 ** (entry["first_log2"] + table.shape[1] - 1)
        slopes[op] = 1e-6 * (table[:, -1] - table[:, -2]) / (last / 2)
    shape = np.array(next(iter(entry["us"].values()))).shape
    return Curve(
        bandwidth_bytes_per_s=entry["bandwidth_bytes_per_s"],
        first_log2=entry["first_log2"],
        sizes=shape[1],
        groups=shape[0],
        log2_us=log2_us,
        slope_s=slopes,
        pair_share=entry["pair_share"],
        in_switch=entry.get("in_switch", False),
    )


def link_constants(level: NetworkLevel) -> dict[str, float]:
    """Start-up, per-step and size-dependent constants of the level's link kind."""
    return link_constants_of(level.kind)


def link_constants_of(kind: str) -> dict[str, float]:
    """As :func:`link_constants`, of a link kind."""
    links: dict[str, dict[str, float]] = data()["links"]
    return links[kind]


def curve_of(level: NetworkLevel) -> Curve | None:
    """The measured curve for a level inside a node or rack; None for fabrics between nodes."""
    name = _curve_name(level.kind, level.name, level.bandwidth_bytes_per_s, level.peer_to_peer)
    return curves()[name] if name else None


@cache
def _curve_name(kind: LinkKind, name: str, bandwidth_bytes_per_s: float, peer_to_peer: bool) -> str | None:
    if kind == "pcie" and not peer_to_peer:
        return "pcie-host"
    family: dict[str, str] = data()["curves_of"].get(kind, {})
    if not family:
        return None
    # The catalog's link names tell the generation (nvlink4-h800 has an Ampere's bandwidth); else the nearest one.
    for prefix in sorted(family, key=len, reverse=True):
        if name.startswith(prefix) and prefix != kind:
            return family[prefix]
    known = set(family.values())
    return min(known, key=lambda n: (abs(np.log(curves()[n].bandwidth_bytes_per_s / bandwidth_bytes_per_s)), n))


def usable_bandwidth(level: NetworkLevel) -> float:
    """Bytes/s per GPU and direction that a large ring across ``level`` reaches: ``busbw_eff`` of the link kind, or the
    bus bandwidth of the largest measured all-gather where the kind has none."""
    share, curve = link_constants(level).get("busbw_eff"), curve_of(level)
    if share is None:
        if curve is None:
            raise KeyError(f"link kind {level.kind} has neither busbw_eff nor a curve")
        share = curve.bus_share
    return level.bandwidth_bytes_per_s / level.oversubscription * share


def pair_bandwidth(level: NetworkLevel) -> float:
    """Bytes/s that one pair of GPUs reaches across ``level``: not every board joins a pair by all its links, and round
    a ring bytes go one way."""
    curve = curve_of(level)
    share = curve.pair_share if curve else link_constants(level)["busbw_eff"]
    return level.bandwidth_bytes_per_s / level.oversubscription * (share / 2 if level.ring else share)
