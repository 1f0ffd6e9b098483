"""Let Megatron's argument validation run on a machine without GPU, Triton or TransformerEngine.

Import before ``megatron``; :func:`use_release` picks an older release before that. Only what validation asks
at import and configuration time is answered; nothing here can train. Written for megatron-core 0.16.1 to 0.19.2 with a
CPU build of torch 2.13.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import sys
import types
import typing
import warnings
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("NO_VCS_VERSION", "1")  # package_info.py would run git
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

if not hasattr(typing, "override"):  # Python 3.11: the only newer name that Megatron imports
    typing.override = lambda method: method  # type: ignore[attr-defined]

import torch  # noqa: E402

#: Fused kernels whose presence the configuration asks for; they come with TransformerEngine.
FUSED = {
    "megatron.core.models.common.embeddings.rope_utils": (
        "fused_apply_rotary_pos_emb",
        "fused_apply_rotary_pos_emb_thd",
    ),
    "megatron.core.transformer.moe.moe_utils": (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ),
}


#: The release that the virtual environment itself holds.
NEWEST = "0.19"


def use_release(version: str) -> None:
    """Import ``megatron`` of a release that ``setup`` put beside the newest one."""
    if version == NEWEST:
        return
    folder = pathlib.Path(sys.prefix, "megatron-core", version)
    if not folder.is_dir():
        raise SystemExit(f"no megatron-core {version} in {folder}; run .ci/megatron/setup")
    sys.path.insert(0, str(folder))


class _Nothing:
    """Stands in for any Triton name: callable, subscriptable, usable as a decorator."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name)

    def __getitem__(self, key: Any) -> Any:
        return self


def _stub_triton() -> None:
    """Megatron imports triton without condition in one file; torch must first have found that there is none."""
    if importlib.util.find_spec("triton") is not None:
        return
    import torch._dynamo
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    for name in ("triton", "triton.language", "triton.language.extra", "triton.runtime"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__version__ = "3.0.0"  # type: ignore[attr-defined]

        def fallback(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return _Nothing(attribute)

        module.__getattr__ = fallback  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def set_gpu(compute_capability: float) -> None:
    """Answer questions about the device as a GPU of this compute capability would."""
    major = int(compute_capability)
    minor = round(10 * (compute_capability - major))
    torch.cuda.get_device_capability = lambda *_, **__: (major, minor)
    properties = types.SimpleNamespace(
        major=major, minor=minor, name="stated", multi_processor_count=132, total_memory=80 << 30
    )
    torch.cuda.get_device_properties = lambda *_, **__: properties


def set_transformer_engine(version: str | None) -> None:
    """Answer configuration-time questions about TransformerEngine; None means that it is not installed."""
    if version is None:
        return
    import megatron.core.utils as utils
    from packaging.version import Version

    utils._te_version = Version(version)
    for name, kernels in FUSED.items():
        module = importlib.import_module(name)
        for kernel in kernels:
            if getattr(module, kernel, None) is None:
                setattr(module, kernel, _Nothing(kernel))


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Let the optimizer's configuration find TransformerEngine's FusedAdam, whose signature it inspects."""
    import megatron.core.utils as utils

    if getattr(utils, "_te_version", None) is None:
        yield
        return

    class FusedAdam:
        def __init__(
            self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
        ): ...

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


_stub_triton()
torch.compile = lambda model=None, *_, **__: model if callable(model) else (lambda function: function)
set_gpu(9.0)
