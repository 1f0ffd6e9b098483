"""AMP: ``{model}_{machine}_{tp}.npy``, one forward time a layer at micro-batch 1.

AMP keeps its clusters in scripts, as two rates a node; there is no file of them to read.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from meshwright.specs.errors import Fault, SpecError
from meshwright.specs.hardware_profile import HardwareProfile, LayerPoint, Provenance
from meshwright.specs.imported import Imported

from .options import ImportOptions
from .reading import POINTER, nothing_found, require_folder

_FILE = re.compile(r"(.+)_([^_]+)_(\d{1,5})\.npy")
#: GPUs of the cloud machines that its files are named after.
_MACHINES = {"P3": "V100-16", "G4": "T4"}
#: Far more layers than any model has.
_MOST_LAYERS = 100_000
#: No layer runs as many seconds on one sample: a larger figure counts milliseconds.
SECONDS_BELOW = 0.5
_TOLD = (
    "the files name no unit: times whose median is below 0.5 are taken as seconds, others as milliseconds",
    "backward is assumed twice the forward pass there",
    "the layers count the embedding and the head among them",
)


def read(path: Path, options: ImportOptions) -> Imported:
    """The folder as a profile."""
    require_folder(path, "a folder with files such as gpt2_P3_1.npy")
    layers: list[LayerPoint] = []
    used = []
    for file in sorted(path.glob("*.npy")):
        match = _FILE.fullmatch(file.name)
        if match is None or not int(match[3]):
            continue
        used.append(file.name)
        times = _times(file)
        layers += [
            LayerPoint(
                model=match[1],
                kind="embedding" if index == 0 else "head" if index == len(times) - 1 else "decoder",
                index=index,
                gpu=_MACHINES.get(match[2], match[2]),
                tp=int(match[3]),
                forward_s=time,
            )
            for index, time in enumerate(times)
        ]
    if not layers:
        raise nothing_found(path, "MODEL_MACHINE_TP.npy, such as gpt2_P3_1.npy")
    provenance = Provenance(tool="AMP", sources=tuple(used), notes=_TOLD)
    notes = ("no cluster: the format has no file of it",)
    return Imported(format="amp", profile=HardwareProfile(provenance=provenance, layers=tuple(layers)), notes=notes)


def _times(file: Path) -> list[float]:
    try:
        values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SpecError(Fault(POINTER, f"{file.name} is no NumPy array file: {str(error)[:100]}")) from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "fiu":
        raise SpecError(Fault(POINTER, f"{file.name} must hold one row of numbers"))
    if not 1 <= len(values) <= _MOST_LAYERS:
        raise SpecError(Fault(POINTER, f"{file.name} must hold 1 to {_MOST_LAYERS} times, holds {len(values)}"))
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(wrong):
        raise SpecError(Fault(POINTER, f"{file.name}: {wrong[0]} must be a time of at least 0, is {values[wrong[0]]}"))
    scale = 1.0 if float(np.median(values)) < SECONDS_BELOW else 1e-3
    return [float(value) * scale for value in values]
