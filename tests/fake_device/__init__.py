"""torch's device type "fake", for tests: two devices whose memory is memory of the host and whose
streams are threads. Work runs later than the call that enqueued it, and freed memory is overwritten
and used again in the order of its stream. So a missing wait, a missing record_stream or a wrong
stream gives wrong data, as on a GPU.

Asynchronous are copies, fill_, zero_, and add, sub, mul and div with their variants. All other
operations run on the CPU, after the current stream's work so far.

The streams and the memory are those of mooncake_backend._C (csrc/device/fake/fake_devices.h)."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import torch

from fake_device import building


def build() -> Path:
    """Builds the C++ half for this torch, unless that is done: half a minute. register() does it,
    too; a test calls it first, so that no deadline of a rank runs meanwhile."""
    return building.built()


def register() -> ModuleType:
    """Registers the device with torch, for this process and for good. Returns the module control,
    by which tests hold streams and let devices fail."""
    control = importlib.import_module("fake_device.control")
    if not hasattr(torch, "fake"):
        torch.utils.rename_privateuse1_backend("fake")
        module = importlib.import_module("fake_device.module")
        torch._register_device_module("fake", module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        # Until torch has met the device, torch.accelerator.synchronize() does nothing.
        torch.empty(0, device="fake")
    return control
