"""The device that a rank's functions make their tensors on. TEST_DEVICE names it: "fake"
(tests/fake_device), or a type that torch has itself, such as "cuda". Without it, it is the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch

Function = TypeVar("Function", bound=Callable[..., object])

VARIABLE = "TEST_DEVICE"
# Layouts with tensors of a device begin with "device".
TESTED = os.environ.get(VARIABLE, "fake")  # the device of these layouts


# Hardware queues that the streams of the fake device share (csrc/device/fake/fake_env.h).
QUEUES = "FAKE_QUEUES"
# For programs with streams that wait for each other's messages: these may not share a queue.
OWN_QUEUES = {QUEUES: "0"}


def skip_without_queues(env: Mapping[str, str], least: int = 3) -> None:
    """Skips a test if streams share fewer hardware queues: three for streams that wait for words,
    and for collectives by kernels and graphs, two for kernels of experts
    (csrc/device/stream_queues.h)."""
    queues = int(env.get(QUEUES, os.environ.get(QUEUES, "8")))
    if TESTED == "fake" and 0 < queues < least:
        pytest.skip(f"needs {least} hardware queues, and streams share {queues}")


def kind() -> str:
    return os.environ.get(VARIABLE, "cpu")


def settings(layout: str) -> dict[str, str]:
    """The variables of ranks with tensors of the device, for a layout that begins with "device"."""
    prepare(TESTED)
    return {
        VARIABLE: TESTED,
        "MOONCAKE_BLOCKING_WAIT": str(int("blocking" in layout)),
        "MOONCAKE_EP_STREAM_WORDS": str(int(layout != "device-host")),
        "MOONCAKE_EP_KERNELS": str(int("kernels" in layout)),
    }


def on_fake_only(function: Function) -> Function:
    """Marks a function of ranks that holds a stream, makes calls fail, or uses a second device.
    Crews skip tests that run it on another device."""
    function.on_fake_only = True  # type: ignore[attr-defined]
    return function


def why_not(kind: str, *functions: object) -> str | None:
    """Why ranks cannot run one of the functions with tensors of the device."""
    for function in functions if kind not in ("cpu", "fake") else ():
        if getattr(function, "on_fake_only", False):
            name = getattr(function, "__name__", "a function")
            return f"{name} needs what only the device `fake` has, and {kind} has not"
    return None


def prepare(kind: str) -> None:
    """Builds what ranks need for the device, before their deadlines begin."""
    if kind == "fake":
        import fake_device

        fake_device.build()


def register(kind: str) -> None:
    """Makes torch know the device."""
    if kind == "fake":
        import fake_device

        fake_device.register()


def use(rank: int) -> None:
    """Makes the rank's device the default of everything that makes tensors."""
    if kind() == "cpu":
        return
    register(kind())
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    torch.set_default_device(torch.device(kind(), index))


def served_by(backend: str) -> str:
    """The name for init_process_group() of a group that serves the CPU and the device."""
    if kind() in ("cpu", "cuda") or ":" in backend:
        return backend
    return f"cpu:{backend},{kind()}:{backend}"
