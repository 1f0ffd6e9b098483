"""Bridge's mixed-precision recipes by name, as the fields that decide time, memory and legality.

Source: bridge/training/mixed_precision.py of megatron-bridge 0.6.2. Every recipe has a twin for fp16 by the same rule.
"""

from __future__ import annotations

from typing import Any

_GATHERED = {"fp8_param_gather": True}
_FP8: dict[str, dict[str, Any]] = {
    "fp8_delayed_scaling": {"fp8": "hybrid", "fp8_recipe": "delayed", **_GATHERED},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8", **_GATHERED, "reuse_grad_buf_for_mxfp8_param_ag": True},
    "fp8_current_scaling": {"fp8": "hybrid", "fp8_recipe": "tensorwise", **_GATHERED},
    "fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True},
}
_BASES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True, "grad_reduce_in_fp32": True},
    "fp16": {"fp16": True, "grad_reduce_in_fp32": False},
}

#: Fields of every recipe by name, with underscores.
RECIPES: dict[str, dict[str, Any]] = {
    **{f"{base}_mixed": fields for base, fields in _BASES.items()},
    **{
        f"{base}_with_{kind}_mixed": {**fields, **more}
        for base, fields in _BASES.items()
        for kind, more in _FP8.items()
        if (base, kind) != ("fp16", "nvfp4")
    },
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {**_BASES["bf16"], **_FP8["fp8_current_scaling"]},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {
        **_BASES["bf16"],
        **_FP8["fp8_subchannel_scaling"],
        **_GATHERED,
    },
    "nemotron_3_super_bf16_with_nvfp4_mixed": {**_BASES["bf16"], **_FP8["nvfp4"]},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {**_BASES["bf16"], **_FP8["nvfp4"]},
}

#: The recipe that an export starts from, by the workload's precision.
RECIPE_OF = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


def fields_of(name: str) -> dict[str, Any] | None:
    """Fields of a recipe, hyphens or underscores; None for an unknown name."""
    return RECIPES.get(name.replace("-", "_"))
