"""Let Megatron-Bridge's configuration classes load and validate on a machine without GPU or TransformerEngine.

Import before ``megatron``. Modules that the configuration only imports, and never asks anything at validation time,
are replaced by empty ones whose every name is a class. Written for megatron-bridge 0.6.2, megatron-core 0.19.2, CPU
torch 2.13.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "megatron"))
import shims as core  # .ci/megatron/shims.py, by the path above
import torch

#: Packages that models and data of Bridge import; none takes part in a configuration.
ABSENT = (
    "accelerate",
    "causal_conv1d",
    "comet_ml",
    "datasets",
    "diffusers",
    "fla",
    "flash_attn",
    "flashinfer",
    "mamba_ssm",
    "megatron.energon",
    "mistral_common",
    "mlflow",
    "modelopt",
    "nvdlfw_inspect",
    "open_clip",
    "PIL",
    "peft",
    "qwen_vl_utils",
    "timm",
    "torchvision",
    "transformer_engine",
    "transformer_engine_torch",
    "wandb",
)


class _Named(type):
    """A class in which every name is a class, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class(name, cls.__module__)


class FusedAdam:
    """TransformerEngine's optimizer, whose signature megatron-core inspects."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ): ...


def _class(name: str, module: str) -> Any:
    if name == "FusedAdam":
        return FusedAdam
    return _Named(name, (torch.nn.Module,), {"__module__": module})


class _Module(types.ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _class(name, self.__name__)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages and everything below them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == top or name.startswith(f"{top}.") for top in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = "2.12.0"  # type: ignore[attr-defined]  # TransformerEngine's is asked for
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Stub what is not installed, then load Bridge."""
    import transformers  # noqa: F401  # before the stubs, which it would take for the real packages

    sys.meta_path.append(_Finder())
    core.set_gpu(9.0)
