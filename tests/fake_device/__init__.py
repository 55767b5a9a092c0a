"""torch's device type "fake", for tests: two devices whose memory is memory of the host and whose
streams are threads. Work runs later than the call that enqueued it, and freed memory is overwritten
and used again in the order of its stream. So a missing wait, a missing record_stream or a wrong
stream gives wrong data, as on a GPU.

To import it registers the device with torch, for this process and for good. Asynchronous are
copies, fill_, zero_, and add, sub, mul and div with their variants. All other operations run on the
CPU, after the current stream's work so far.

The streams and the memory are those of mooncake_backend._C (csrc/device/fake/fake_devices.h)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fake_device import build

native = build.load()

from fake_device import module  # noqa: E402

torch.utils.rename_privateuse1_backend("fake")
torch._register_device_module("fake", module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

inject = native.inject
lose_context = native.lose_context
limit_memory = native.limit_memory


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[native.Gate]:
    """Holds a stream, the current one by default: its work from here on runs only after the block,
    or after open() of the gate that the block gets. The block must not wait for the stream."""
    stream = stream or torch.accelerator.current_stream()
    gate = native.Gate(stream.device_index, stream.stream_id)
    try:
        yield gate
    finally:
        gate.open()


class Graph:
    """Work of a stream that was recorded, to be run again."""

    def __init__(self) -> None:
        self.number: int | None = None

    def replay(self) -> None:
        """Enqueues the work on the current stream."""
        stream = torch.accelerator.current_stream()
        native.replay_graph(self.number, stream.device_index, stream.stream_id)


@contextlib.contextmanager
def recorded(stream: torch.Stream) -> Iterator[Graph]:
    """Makes the stream the current one, and records its work into a graph in place of running it."""
    graph = Graph()
    where = (stream.device_index, stream.stream_id)
    with stream:
        native.begin_graph(*where)
        try:
            yield graph
        finally:
            graph.number = native.end_graph(*where)
