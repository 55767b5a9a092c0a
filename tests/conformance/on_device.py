"""Code written for CUDA, run on another device: tensors that would go to a GPU go there, and so do
those that a test makes on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

# What a GPU convolves in milliseconds takes a device without kernels minutes.
_LARGE_IMAGE, _IMAGE = (1, 1, 1000, 1000), (1, 1, 32, 32)


class _Move(TorchFunctionMode):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def there(self, value: Any) -> Any:
        """The device for what names a GPU: a text, a device or a number."""
        if isinstance(value, str) and value.startswith("cuda"):
            value = torch.device(value)
        if isinstance(value, torch.device) and value.type == "cuda":
            value = torch.accelerator.current_device_index() if value.index is None else value.index
        if type(value) is not int:
            return value
        return torch.device(self.kind, value % torch.accelerator.device_count())

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is torch.Tensor.cuda:
            return args[0].to(self.there("cuda" if len(args) == 1 else args[1]))
        if function is torch.ones and tuple(args) == _LARGE_IMAGE:
            args = _IMAGE
        if function is torch.Tensor.to:
            args = [self.there(value) for value in args]
        if "device" in named:
            named = {**named, "device": self.there(named["device"])}
        return function(*args, **named)


@contextlib.contextmanager
def everything(kind: str, rank: int) -> Iterator[None]:
    """The device `rank` modulo their number is the current one, and the default."""
    stay = _Move(kind)
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    torch.set_default_device(torch.device(kind, index))
    move, make_ddp = torch.nn.Module.to, DistributedDataParallel.__init__

    def module_to(module: torch.nn.Module, *args: Any, **named: Any) -> torch.nn.Module:
        return move(module, *map(stay.there, args), **named)

    def module_cuda(module: torch.nn.Module, device: Any = "cuda") -> torch.nn.Module:
        return move(module, stay.there(device))

    def ddp(this: Any, module: torch.nn.Module, device_ids: Any = None, *args: Any, **named: Any):
        named.pop("output_device", None)
        make_ddp(this, module, None, *args, **named)

    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(stay.there(device))

    def stream(given: Any) -> Any:
        return contextlib.nullcontext() if given is None else given

    with contextlib.ExitStack() as stack:
        for home, name, replacement in (
            (DistributedDataParallel, "__init__", ddp),
            (torch.cuda, "Stream", torch.Stream),
            (torch.cuda, "current_device", torch.accelerator.current_device_index),
            (torch.cuda, "current_stream", torch.accelerator.current_stream),
            (torch.cuda, "device", lambda device: contextlib.nullcontext(set_device(device))),
            (torch.cuda, "set_device", set_device),
            (torch.cuda, "stream", stream),
            (torch.cuda, "synchronize", lambda *_, **__: torch.accelerator.synchronize()),
            (torch.nn.Module, "cuda", module_cuda),
            (torch.nn.Module, "to", module_to),
        ):
            stack.enter_context(mock.patch.object(home, name, replacement))
        stack.enter_context(stay)
        yield
