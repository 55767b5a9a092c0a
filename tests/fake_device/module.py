"""torch.fake: the functions that torch and programs look for in a device's module, as torch.cuda
has them. Most are those of torch.accelerator, whose device is this one."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import torch

from fake_device.native import extension

_KIND = "fake"


# ---- devices


def _lazy_init() -> None:
    """torch counts a device as initialized only if its module has this function."""


def init() -> None:
    pass


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def current_device() -> int:
    return extension.current_device()


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    found = torch.device(device)
    if found.type != _KIND:
        raise ValueError(f"{found} is no fake device")
    return current_device() if found.index is None else found.index


def set_device(device: Any) -> None:
    extension.set_device(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Makes it the current device for the block; None and -1 change nothing."""
    before = current_device()
    set_device(_index(device))
    try:
        yield
    finally:
        set_device(before)


device_of = device


def get_device_name(device: Any = None) -> str:
    return f"{_KIND} {_index(device)}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (0, 0)


def get_device_properties(device: Any = None) -> None:
    return None


def can_device_access_peer(device: Any, peer: Any) -> bool:
    return True


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


# ---- streams and events


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Stream:
        if named:  # stream_id, device_index, device_type: an existing stream
            return super().__new__(cls, priority=priority, **named)
        return super().__new__(cls, device=torch.device(_KIND, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **named: Any) -> Event:
        return super().__new__(cls, device=_KIND, enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    kind = current_stream(device).device_type
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Makes it the current stream, and its device the current device; None changes nothing."""
    if stream is None:
        yield None
        return
    before, there = current_device(), current_stream(stream.device_index)
    torch.accelerator.set_stream(stream)
    set_device(stream.device_index)
    try:
        yield stream
    finally:
        torch.accelerator.set_stream(there)
        set_device(before)


StreamContext = stream


# ---- graphs


class CUDAGraph:
    """Work of a stream that was recorded, to be run again: as torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None
        self._number: int | None = None

    def capture_begin(self) -> None:
        """From here on, the work of the current stream is recorded and not run."""
        self._stream = current_stream()
        extension.begin_graph(self._stream.device_index, self._stream.stream_id)

    def capture_end(self) -> None:
        assert self._stream is not None
        self._number = extension.end_graph(self._stream.device_index, self._stream.stream_id)

    def replay(self) -> None:
        """Enqueues the work on the current stream."""
        here = current_stream()
        extension.replay_graph(self._number, here.device_index, here.stream_id)


@contextlib.contextmanager
def graph(graph: CUDAGraph, stream: torch.Stream | None = None) -> Iterator[None]:
    """Records the work of the block into the graph, on the stream or on one of its own."""
    synchronize()
    with StreamContext(stream or Stream()):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


# ---- memory


def empty_cache() -> None:
    extension.empty_cache()


def memory_stats(device: Any = None) -> dict[str, int]:
    return extension.memory_stats(_index(device))


def memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Any = None) -> int:
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Any = None) -> int:
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Any = None) -> None:
    extension.reset_peak_memory_stats(_index(device))


# ---- random numbers


def manual_seed(seed: int) -> None:
    extension.seed(current_device(), int(seed) % 2**64)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        extension.seed(index, int(seed) % 2**64)


def initial_seed() -> int:
    return extension.random_state(current_device())[0]


def get_rng_state(device: Any = _KIND) -> torch.Tensor:
    state = struct.pack("=QQ", *extension.random_state(_index(device)))
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = _KIND) -> None:
    extension.set_random_state(_index(device), *struct.unpack("=QQ", bytes(state.cpu().tolist())))


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# ---- types


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
