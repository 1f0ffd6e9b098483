"""Let torchtitan run on a machine without a GPU: its device is the CPU, and what only a GPU has answers politely.

Importing it installs it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any


class _Nothing(type):
    """Class of a stand-in for anything of triton: it can be called, indexed, decorated with, and asked for parts."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else (lambda *a, **k: a[0] if a else cls)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Nothing(metaclass=_Nothing):
    """The stand-in itself."""


def _stand_in(name: str) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def part(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return Nothing

    module.__getattr__ = part  # type: ignore[method-assign]
    module.__version__ = "3.0.0"  # type: ignore[attr-defined]
    sys.modules[name] = module


#: Whether a run is asked for; torchtitan's manager takes the arguments as they are when it is imported.
TRAINS = sys.argv[1:2] == ["--train"]


def install() -> None:
    """Patch torch and, where triton is missing, put a stand-in for it."""
    if TRAINS:
        del sys.argv[1]
    os.environ.setdefault("LOCAL_RANK", "0")
    import torch
    import torch._utils
    import torch.distributed

    torch.set_num_threads(1)
    if importlib.util.find_spec("triton") is None:
        # Torch must find out first that there is none; it remembers.
        import torch._dynamo
        import torch._inductor.codecache
        import torch._inductor.runtime.triton_compat
        import torch.utils._triton

        torch.utils._triton.has_triton_package()
        for name in ("triton", "triton.language", "triton.language.extra", "triton.language.core", "triton.runtime"):
            _stand_in(name)
        sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
    torch._utils._get_available_device_type = lambda: "cpu"
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    import torch.distributed.tensor._random as random

    random.manual_seed = lambda seed, mesh: torch.manual_seed(seed)
    properties = types.SimpleNamespace(name="cpu", total_memory=80 << 30, major=9, minor=0)
    answers = {
        "get_device_properties": lambda *a, **k: properties,
        "get_device_name": lambda *a, **k: "cpu",
        "reset_peak_memory_stats": lambda *a, **k: None,
        "empty_cache": lambda *a, **k: None,
        "memory_stats": lambda *a, **k: {},
        "max_memory_reserved": lambda *a, **k: 0,
        "memory_allocated": lambda *a, **k: 0,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    torch.cpu.set_device = lambda *a, **k: None


install()
