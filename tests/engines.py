"""Two processes with a transfer engine each, for tests: a target that gives memory and serves until
it is told to end, and whoever uses it."""

from __future__ import annotations

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
