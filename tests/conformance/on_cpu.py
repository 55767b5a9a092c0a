"""Code written for GPUs, run on CPU tensors: what would go to a GPU stays where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
# What a GPU convolves in milliseconds takes a CPU minutes.
_LARGE_IMAGE, _IMAGE = (1, 1, 1000, 1000), (1, 1, 32, 32)


def _here(value: Any) -> Any:
    """The CPU for what names a GPU: a text, a device or a number."""
    gpu = (
        (isinstance(value, str) and value.startswith("cuda"))
        or (isinstance(value, torch.device) and value.type == "cuda")
        or type(value) is int
    )
    return CPU if gpu else value


class _Stay(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.ones and tuple(args) == _LARGE_IMAGE:
            args = _IMAGE
        if function is torch.Tensor.to:
            args = [_here(value) for value in args]
        if "device" in named:
            named = {**named, "device": _here(named["device"])}
        return function(*args, **named)


class _NoStream(mock.MagicMock):
    """Nothing runs beside the caller, so there is nothing to wait for."""


def _module_stays(module: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return module


@contextlib.contextmanager
def everything() -> Iterator[None]:
    move, make_ddp = torch.nn.Module.to, DistributedDataParallel.__init__

    def module_to(module: torch.nn.Module, *args: Any, **named: Any) -> torch.nn.Module:
        return move(module, *map(_here, args), **named)

    def ddp(this: Any, module: torch.nn.Module, device_ids: Any = None, *args: Any, **named: Any):
        named.pop("output_device", None)
        make_ddp(this, module, None, *args, **named)

    with contextlib.ExitStack() as stack:
        for home, name, replacement in (
            (DistributedDataParallel, "__init__", ddp),
            (torch, "Stream", _NoStream),
            (torch.cuda, "Stream", _NoStream),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "current_stream", _NoStream),
            (torch.cuda, "device", contextlib.nullcontext),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "stream", contextlib.nullcontext),
            (torch.cuda, "synchronize", lambda *_, **__: None),
            (torch.nn.Module, "cuda", _module_stays),
            (torch.nn.Module, "to", module_to),
        ):
            stack.enter_context(mock.patch.object(home, name, replacement))
        stack.enter_context(_Stay())
        yield
