"""Processes with a transfer engine each, for tests: a target that registers memory and serves until
it is told to end, and its users."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

LOOPBACK = "127.0.0.1"
WIRES = ("shm", "tcp")
BYTES = 1 << 20


@dataclass
class Side:
    """An engine, and memory that is registered with it."""

    engine: Any
    memory: np.ndarray
    session: str

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def fill(self, seed: int) -> np.ndarray:
        self.memory[:] = pattern(len(self.memory), seed)
        return self.memory


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


# Far from where the kernel places mappings, so that an unmapped range is not reused.
_places = itertools.count(1 << 44, 1 << 30)
_FIXED_NOREPLACE = 0x100000


def map_pages(size: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    """Maps memory that unmap_pages() may unmap."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    place = next(_places)
    assert _libc.mmap(place, size, protection, flags, -1, 0) == place, "mmap"
    return place


def unmap_pages(address: int, size: int) -> None:
    assert _libc.munmap(address, size) == 0, "munmap"


# How a program takes memory away that stays registered.
SPOILED = ("unmapped", "hidden", "read-only", "truncated")


class Spoiled:
    """Three MiB. spoil() takes the one in the middle away, which begins at `hole`."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._file = os.memfd_create("spoiled")
        os.ftruncate(self._file, 3 * BYTES)
        self.address = next(_places)
        flags = mmap.MAP_SHARED | _FIXED_NOREPLACE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mmap(self.address, 3 * BYTES, rights, flags, self._file, 0) == self.address
        self.hole = self.address + BYTES

    def spoil(self) -> None:
        if self._how == "unmapped":
            unmap_pages(self.hole, BYTES)
        elif self._how == "truncated":
            os.ftruncate(self._file, BYTES)
        else:
            rights = mmap.PROT_READ if self._how == "read-only" else 0
            assert _libc.mprotect(self.hole, BYTES, rights) == 0, "mprotect"

    @property
    def read_code(self) -> int:
        """What a transfer returns that reads the hole."""
        return 0 if self._how == "read-only" else -1


def pattern(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def make(protocol: str = "tcp", size: int = BYTES, host: str = LOOPBACK) -> Side:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(host, "P2PHANDSHAKE", protocol, "") == 0
    memory = np.zeros(size, dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, size) == 0
    bracketed = f"[{host}]" if ":" in host else host
    return Side(engine, memory, f"{bracketed}:{engine.get_rpc_port()}")


def serve(me, user, *arguments, **make_arguments):
    """Rank 0 is the target; the others call user(me, side, target's session, its address, ...)."""
    side = make(**make_arguments)
    if me.rank == 0:
        side.fill(0)
        me.board.set("target", (side.session, side.address))
        for rank in range(1, me.size):
            me.board.wait(f"done-{rank}")
        return side.memory.tobytes()
    session, address = me.board.wait("target")
    try:
        return user(me, side, session, address, *arguments)
    finally:
        me.board.set(f"done-{me.rank}")
