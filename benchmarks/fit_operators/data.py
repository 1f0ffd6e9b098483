"""The measured operators and the GPU types they were measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from meshwright.specs.catalog import gpu

FOLDER = Path(__file__).resolve().parents[1] / "data" / "operators"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chip:
    """A measured GPU: the family its constants go to and the facts they are relative to."""

    family: str
    name: str

    def peak(self, dtype: str) -> float:
        return float(gpu(self.name).gpu.peak_flops.get({"fp8_block": "fp8"}.get(dtype, dtype), 0.0))  # type: ignore[call-overload]

    @property
    def bandwidth(self) -> float:
        return gpu(self.name).gpu.memory_bandwidth_bytes_per_s

    @property
    def sms(self) -> int:
        return gpu(self.name).gpu.num_sms


CHIPS = {
    "a100_sxm": Chip("a100", "A100-SXM-80GB"),
    "h100_sxm": Chip("h100", "H100-SXM"),
    "h200_sxm": Chip("h200", "H200-SXM"),
    "b200_sxm": Chip("b200", "B200"),
    "b300_sxm": Chip("b300", "B300"),
    "gb200": Chip("gb200", "GB200-NVL72"),
    "gb300": Chip("gb300", "GB300-NVL72"),
    "l40s": Chip("l40s", "L40S"),
    "rtx_pro_6000_server": Chip("rtx_pro_6000", "RTX-PRO-6000-Server"),
}
#: Bytes of an operand element.
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.03, "nvfp4": 0.5625}


def table(name: str) -> pd.DataFrame:
    return pd.read_parquet(FOLDER / f"{name}.parquet")


def profiles() -> pd.DataFrame:
    return pd.read_csv(FOLDER / "profiles.csv.gz")


def columns(rows: pd.DataFrame, *names: str) -> list[Floats]:
    return [rows[name].to_numpy(float) for name in names]


def errors(predicted: Any, measured: Any) -> dict[str, float]:
    """Median and 95th percentile of the absolute relative error, in percent, and the spread of its logarithm."""
    ratio = np.asarray(predicted) / np.asarray(measured)
    error = 100 * np.abs(ratio - 1)
    low, high = np.quantile(np.log(ratio), (0.16, 0.84))
    return {
        "n": len(error),
        "median": round(float(np.median(error)), 1),
        "p95": round(float(np.quantile(error, 0.95)), 1),
        "sigma": round(float(high - low) / 2, 3),
    }
