"""Let Megatron build models and train on a machine without GPU: what it places on a GPU goes to another device.

``stand_in("meta")`` is for building only, ``stand_in("cpu")`` also runs, with gloo between processes. Everything is
synchronous, so streams and events do nothing. Written for megatron-core 0.19.2 with a CPU build of torch 2.13.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Silent:
    """A stream or event on which nothing waits."""

    def __init__(self, *_: Any, **__: Any): ...

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class _OnDevice(TorchFunctionMode):
    """Sends every request for a CUDA device to ``device``."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def _here(self, value: Any) -> Any:
        is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return self.device if is_cuda else value

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: self._here(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return function(*map(self._here, args), **named)


def stand_in(device: str) -> None:
    """Answer ``torch.cuda`` from ``device`` for the rest of the process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: device
    cuda.device_count = lambda: 1
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.Stream = cuda.Event = _Silent
    cuda.current_stream = cuda.default_stream = _Silent
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = torch.manual_seed
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    torch.Tensor.cuda = lambda self, *_, **__: self.to("meta") if device == "meta" else self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    # The gradient clipping accepts only tensors whose type reads torch.cuda.FloatTensor.
    real_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return real_type(self, *(a.replace(".cuda", "") if isinstance(a, str) else a for a in args), **kwargs)
        name = real_type(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]
    # The expert dispatcher turns split sizes into lists only for tensors on a GPU.
    real_exchange = torch.distributed.all_to_all_single

    def exchange(*args: Any, **kwargs: Any) -> Any:
        listed = [
            item.tolist() if index in (2, 3) and isinstance(item, torch.Tensor) else item
            for index, item in enumerate(args)
        ]
        named = {
            name: item.tolist() if name.endswith("_split_sizes") and isinstance(item, torch.Tensor) else item
            for name, item in kwargs.items()
        }
        return real_exchange(*listed, **named)

    torch.distributed.all_to_all_single = exchange
    _OnDevice(device).__enter__()
