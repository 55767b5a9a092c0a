"""Copies GPU tensors through the CPU and back, for Buffer(staged=True)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard, TypeVar

import torch

MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, "torch.Tensor | None")


def is_elsewhere(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu"


def refuse_elsewhere(where: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if is_elsewhere(tensor):
            raise ValueError(
                f"{where}: {name} is on {tensor.device}, and expert parallelism runs on the CPU in "
                "this version. Make the Buffer with staged=True to have GPU tensors copied through "
                "the CPU, or give CPU tensors"
            )


class NoStaging:
    """Uses CPU tensors as they are. A class of its own, so that a call of a few microseconds pays
    nothing for staging."""

    is_needed = False
    device = torch.device("cpu")
    last_steps: tuple[Callable[[], None], ...] = ()

    def read(self, tensor: MaybeTensor) -> MaybeTensor:
        return tensor

    def updated(self, tensor: torch.Tensor | None, count: int | None = None) -> torch.Tensor | None:
        return tensor

    def written(self, result: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        return result

    def result(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


NO_STAGING = NoStaging()


class Staging(NoStaging):
    """The tensors of one call. Its results go to the device of `x`.

    last_steps: copy the call's results back, once it has ended
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.is_needed = is_elsewhere(x)
        self.device = x.device
        self._steps: list[Callable[[], None]] = []

    @property
    def last_steps(self) -> tuple[Callable[[], None], ...]:  # type: ignore[override]
        return tuple(self._steps)

    def read(self, tensor: MaybeTensor) -> MaybeTensor:
        return tensor.cpu() if is_elsewhere(tensor) else tensor

    def updated(self, tensor: torch.Tensor | None, count: int | None = None) -> torch.Tensor | None:
        """A tensor that the call reads and writes; only the first `count` elements are written."""
        if not is_elsewhere(tensor):
            return tensor
        here, there = tensor.cpu(), tensor
        self._steps.append(lambda: _copy(there[:count], here[:count]))
        return here

    def written(self, result: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """A result that goes into the caller's tensor, if there is one."""
        if given is None:
            return self.result(result)
        if is_elsewhere(given):
            self._steps.append(lambda: _copy(given, result))
        return given

    def result(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_needed:
            return tensor
        there = torch.empty_like(tensor, device=self.device)
        self._steps.append(lambda: _copy(there, tensor))
        return there


def _copy(to: torch.Tensor, tensor: torch.Tensor) -> None:
    to.copy_(tensor)
