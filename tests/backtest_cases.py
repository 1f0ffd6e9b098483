"""Small tables of runs for the tests of backtest and calibrate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: A dense model of a few layers and one of experts, in the schema of models files.
MODELS: dict[str, Any] = {
    "small": {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16,
              "num_query_groups": 16, "vocab_size": 32000, "gated_linear_unit": False},
    "large": {"num_layers": 16, "hidden_size": 4096, "ffn_hidden_size": 16384, "num_attention_heads": 32,
              "num_query_groups": 32, "vocab_size": 32000, "gated_linear_unit": False},
    "experts": {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16,
                "num_query_groups": 16, "vocab_size": 32000, "gated_linear_unit": True, "num_experts": 8, "topk": 2,
                "moe_ffn_hidden_size": 4096},
}  # fmt: skip
ROW = {"id": "a", "framework": "Megatron-LM", "release": "0.12", "model": "small", "gpu_type": "H100-SXM-80GB",
       "num_gpus": "8", "gpus_per_node": "8", "precision": "bf16", "seq_len": "4096", "micro_batch": "1",
       "global_batch": "64", "tp": "1", "pp": "1", "cp": "1", "sharding": "zero1", "recompute": "none",
       "step_time_s": "1.0"}  # fmt: skip


def row(**cells: object) -> dict[str, str]:
    """A run of the small model on 8 H100, with other cells as given."""
    return ROW | {name: str(value) for name, value in cells.items()}


def write_runs(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """A CSV file of rows without commas in their cells."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(columns), *(",".join(row.get(name, "") for name in columns) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_models(path: Path, models: Mapping[str, Any] = MODELS) -> Path:
    path.write_text(json.dumps(models), encoding="utf-8")
    return path
