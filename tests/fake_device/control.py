"""Holds streams, records graphs, and lets devices fail: for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fake_device.module import CUDAGraph
from fake_device.native import extension

# inject(call, n=1, times=1, code="system"): calls of this name in csrc/device/accelerator.h fail,
# from the n-th on.
inject = extension.inject
# lose_context(): every later call fails, and work that streams hold does not run.
lose_context = extension.lose_context
# callers(): names of the threads that have called the devices.
callers = extension.callers
# kernels_run(): number of kernels that have begun.
kernels_run = extension.kernels_run
# blocks_run(): number of their blocks.
blocks_run = extension.blocks_run
# slow_copies(bytes_per_second): copies from and to the host take so much longer, without a core.
slow_copies = extension.slow_copies
# hide_handles(): torch tells no handles of streams any more, as before 2.10.
hide_handles = extension.hide_handles
# limit_memory(bytes): allocations beyond it fail.
limit_memory = extension.limit_memory


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[extension.Gate]:
    """Holds a stream, the current one by default: its work from here on runs only after the block,
    or after open() of the gate that the block gets. Until then nothing may wait for the stream."""
    stream = stream or torch.accelerator.current_stream()
    gate = extension.Gate(stream.device_index, stream.stream_id)
    try:
        yield gate
    finally:
        gate.open()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Operations that run on the CPU run at their place in the stream, and the host does not wait,
    unless it has to know their data: as on a GPU."""
    extension.set_deferred(True)
    try:
        yield
    finally:
        extension.set_deferred(False)


@contextlib.contextmanager
def recorded(stream: torch.Stream) -> Iterator[CUDAGraph]:
    """Makes the stream the current one, and records its work into a graph in place of running
    it."""
    graph = CUDAGraph()
    with stream:
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()
