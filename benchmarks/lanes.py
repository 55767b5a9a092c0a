"""A lane is one backend in the race: the group (or communicator) that carries its ranks' calls.

All lanes live in the same processes, so they share tensors, CPU caches and the noise of the
machine. A lane's name is the name of a backend, or ``mpi``. ``/K`` after the name means a group of
the first K ranks only.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import operations
import torch.distributed as dist
from operations import Buffers, Call
from ranks import COLLECTIVE_TIMEOUT_S, Rank, is_registered

FLOOR = "fake"  # torch's own backend that moves nothing: its time is torch's dispatch
FLOOR_BYTES = 1 << 10  # fake's all_gather copies its input: a larger copy would count as dispatch
CHECKS_IN_A_ROW = 3  # calls without a barrier between them, to detect a slot reused too early


@dataclass
class Lane:
    """One backend, ready to be called by the ranks that belong to it."""

    name: str
    ranks: int
    member: bool
    bind: Callable[
        [str, Buffers], Call | None
    ]  # makes the call for an operation; None if the lane does not have it

    @property
    def moves_data(self) -> bool:
        return not self.name.startswith(FLOOR)


@contextlib.contextmanager
def open_lanes(me: Rank, lane_names: list[str], alone: bool = False):
    """Makes the world and every lane's group, and destroys them at the end. Gloo only coordinates
    new_group. alone: there is one lane, and its group is the world."""
    for name in lane_names:
        backend = name.split("/")[0]
        if backend != "mpi" and not is_registered(backend):
            raise RuntimeError(
                f"torch.distributed does not know the backend {backend!r}: "
                "is its package installed?"
            )
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if alone and lane_names == ["mpi"]:
        yield [_open(me, "mpi", timeout)]
        return
    store = dist.PrefixStore("world", me.open_store())
    world = lane_names[0] if alone else "gloo"
    dist.init_process_group(world, store=store, rank=me.rank, world_size=me.size, timeout=timeout)
    try:
        yield [_open(me, name, timeout, alone) for name in lane_names]
        me.meeting.barrier()
    finally:
        dist.destroy_process_group()


def _open(me: Rank, name: str, timeout: timedelta, alone: bool = False) -> Lane:
    backend, _, part = name.partition("/")
    ranks = int(part or me.size)
    member = me.rank < ranks
    if backend == "mpi":
        comm = me.mpi.COMM_WORLD.Split(0 if member else 1, me.rank)

        def bind_mpi(operation: str, buffers: Buffers) -> Call | None:
            make = operations.OPERATIONS[operation].mpi
            return make(buffers, comm, me.mpi) if make else None

        return Lane(name, ranks, member, bind_mpi)
    if alone:
        group = dist.group.WORLD
    else:
        group = dist.new_group(list(range(ranks)), backend=backend, timeout=timeout)
    return Lane(
        name, ranks, member, lambda operation, b: operations.OPERATIONS[operation].torch(b, group)
    )


@dataclass
class Entry:
    """A lane in one cell: its call, and the times of its turns."""

    lane: Lane
    call: Call | None
    buffers: Buffers | None
    error: str | None = None
    calls: int = 0
    turns_us: list[float] | None = None  # of this rank: microseconds per call, one value per round


class Cell:
    """One operation at one size: all lanes take turns on the same tensors.

    A turn is: barrier (Meeting, no spinning), a few calls that are not timed, then ``calls`` calls
    timed as one block. No other lane runs meanwhile: the other libraries' threads sleep.
    """

    def __init__(self, me: Rank, lanes: list[Lane], operation: str, size: int, device: str = "cpu"):
        self.me, self.operation, self.size = me, operation, size
        self.settle: Call = lambda: None
        if device == "cuda":
            import torch

            self.settle = torch.cuda.synchronize
        shared: dict[tuple[int, int], Buffers] = {}
        self.entries = []
        for lane in lanes:
            key = (lane.ranks, size if lane.moves_data else min(size, FLOOR_BYTES))
            if lane.member and key not in shared:
                shared[key] = operations.allocate(operation, key[1], me.rank, lane.ranks, device)
            buffers = shared.get(key) if lane.member else None
            call = lane.bind(operation, buffers) if lane.member else None
            self.entries.append(Entry(lane, call, buffers))
        self.entries = [e for e in self.entries if e.call or not e.lane.member]
        self.entries = [e for e in self.entries if self._all_have(e)]

    def _all_have(self, entry: Entry) -> bool:
        return all(self.me.meeting.exchange(entry.call is not None or not entry.lane.member))

    def check(self) -> None:
        """Compares the results of every lane with the plain model. A lane that fails on any rank
        leaves the cell."""
        for entry in self.entries:
            if entry.error:
                continue
            self.me.meeting.barrier()
            problem = self._check_here(entry) if entry.lane.member else None
            problems = [
                f"rank {r}: {text}"
                for r, text in enumerate(self.me.meeting.exchange(problem))
                if text
            ]
            entry.error = problems[0] if problems else None

    def _check_here(self, entry: Entry) -> str | None:
        try:
            for salt in range(CHECKS_IN_A_ROW):
                operations.fill(self.operation, entry.buffers, salt)
                entry.call()
                self.settle()
                if entry.lane.moves_data and not operations.is_right(
                    self.operation, entry.buffers, salt
                ):
                    return "wrong result"
        except (
            Exception
        ) as error:  # any failure of a backend is this cell's result, and shown in the table
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return None

    def race(self, rounds: int, turn_s: float, warm_up: int = 4, most_calls: int = 5000) -> None:
        """Determines the number of calls per turn, then lets the lanes take turns for some rounds.

        turn_s: length of a turn in seconds; a call slower than half of it is still made twice. Each
        round starts with another lane, and every second round has the reverse order, so no lane
        always follows the same one.
        """
        live = [entry for entry in self.entries if not entry.error]
        with self.me.turn():
            for entry in live:
                if entry.buffers:
                    operations.reset(entry.buffers)
            for entry in live:
                per_call_us = self._turn(entry, warm_up // 2, warm_up)
                slowest_us = max(self.me.meeting.exchange(per_call_us))
                entry.calls = round(min(max(turn_s * 1e6 / max(slowest_us, 0.1), 2), most_calls))
                entry.turns_us = []
        for number in range(rounds):
            shift = number % max(1, len(live))
            order = live[shift:] + live[:shift]
            with self.me.turn():
                for entry in reversed(order) if number % 2 else order:
                    entry.turns_us.append(self._turn(entry, max(1, entry.calls // 8), entry.calls))

    def _turn(self, entry: Entry, warm_up: int, calls: int) -> float:
        """Runs one lane's turn. Microseconds per call on this rank, 0 on ranks outside the lane."""
        call, settle = entry.call, self.settle
        self.me.meeting.barrier()
        if not entry.lane.member:
            return 0.0
        for _ in range(warm_up):
            call()
        settle()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        settle()
        return (time.perf_counter() - start) * 1e6 / calls

    def results(self) -> list[dict[str, Any]]:
        """One row per lane, the same on all ranks.

        A round's time is that of its slowest rank, because an operation ends when all ranks have
        it. In the floor's rounds no rank waits for another one, and the slowest rank is just the
        last to get the CPU. So the mean over the ranks is used there.
        """
        rows = []
        for entry in self.entries:
            of_ranks = self.me.meeting.exchange(entry.turns_us)
            of_round = max if entry.lane.moves_data else statistics.fmean
            rounds_us = (
                [of_round(turn) for turn in zip(*of_ranks, strict=True)] if entry.turns_us else []
            )
            rows.append(
                {
                    "backend": entry.lane.name,
                    "op": self.operation,
                    "bytes": self.size,
                    "correct": None if not entry.lane.moves_data else entry.error is None,
                    "error": entry.error,
                    "calls_per_turn": entry.calls,
                    "rounds_us": [round(value, 3) for value in rounds_us],
                }
            )
        return rows
