"""`from mooncake.allocator import NVLinkAllocator`: GPU memory, which this version lacks."""

from enum import IntEnum

from mooncake_backend.membership import not_yet

_CUDA = "memory of GPUs that other processes map"


class MemoryBackend(IntEnum):
    USE_CUDAMALLOC = 0
    USE_CUMEMCREATE = 1
    UNKNOWN = -1
    UNSUPPORTED = -2


class NVLinkAllocator:
    get_allocator = staticmethod(not_yet("NVLinkAllocator.get_allocator", _CUDA))

    @staticmethod
    def detect_mem_backend() -> MemoryBackend:
        return MemoryBackend.UNSUPPORTED


class BarexAllocator:
    get_allocator = staticmethod(not_yet("BarexAllocator.get_allocator", _CUDA))


__all__ = ["BarexAllocator", "MemoryBackend", "NVLinkAllocator"]
