"""Sandboxes that refuse futex_waitv(2), or kill the thread that calls it: only what a process
does, never what becomes of one of its threads, says whether a rank lives."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import time
from pathlib import Path

import harness
import oracle
import pytest
import torch.distributed as dist

import mooncake_backend

FUTEX_WAITV, SECCOMP = 449, 317  # x86-64; the first is the same everywhere
KILL_THREAD, REFUSE, ALLOW = 0x00000000, 0x00050000, 0x7FFF0000
SANDBOXED, VICTIM = 1, 2
SHM = {"MOONCAKE_TRANSPORTS": "shm", "MOONCAKE_FAILURE_TIMEOUT_MS": "60000"}

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def filter_futex_waitv(action: int) -> None:
    """For this thread, for all that are there and for all that it starts."""
    load_number, jump_if_equal, give = 0x20, 0x15, 0x06
    code = b"".join(
        struct.pack("HBBI", *line)
        for line in [
            (load_number, 0, 0, 0),
            (jump_if_equal, 0, 1, FUTEX_WAITV),
            (give, 0, 0, action),
            (give, 0, 0, ALLOW),
        ]
    )
    libc = ctypes.CDLL(None, use_errno=True)
    set_filter, all_threads, no_new_privileges = 1, 1, 38
    program = Program(len(code) // 8, code)
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    if libc.syscall(SECCOMP, set_filter, all_threads, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filters here")


def liveness_thread() -> Path | None:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            if (task / "comm").read_text().strip() == "mooncake-live":
                return task
    return None


def cpu_seconds(task: Path) -> float:
    """Of a thread."""
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def evidence_of(rank: int) -> mooncake_backend.Evidence | None:
    seen = mooncake_backend.get_evidence(dist.group.WORLD)
    return next((one for one in seen if one.rank == rank), None)


def find_the_victim() -> str:
    return harness.until(lambda: evidence_of(VICTIM), "evidence").kind


def working_in_a_sandbox(me, action):
    if me.rank == SANDBOXED:
        filter_futex_waitv(action)
    me.init()
    oracle.exercise("all_reduce", count=8)
    task = harness.until(liveness_thread, "the liveness thread")
    before = cpu_seconds(task)
    time.sleep(1)  # an interval to measure, not a wait for something
    used = cpu_seconds(task) - before
    oracle.exercise("all_reduce", count=8)
    me.board.set(f"worked-{me.rank}")
    me.board.wait_all("worked", range(me.size))
    if me.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return used, find_the_victim(), evidence_of(1 - me.rank)


@pytest.mark.parametrize(
    "action", [REFUSE | errno.EPERM, KILL_THREAD], ids=["EPERM", "thread killed"]
)
def test_a_rank_without_futex_waitv_works(action):
    """It burns no core, finds out who dies, and is found well."""
    crew = {"env": SHM, "backend": None}
    with harness.starting(3, working_in_a_sandbox, action, **crew) as ranks:
        for used, victim, other in ranks.results(dead=[VICTIM])[:VICTIM]:
            assert used < 0.1
            assert victim == "exited"
            assert other is None


def losing_its_liveness_thread(me):
    harness.until(liveness_thread, "the liveness thread")
    me.board.set(f"watched-{me.rank}")
    me.board.wait_all("watched", range(me.size))
    if me.rank == VICTIM:
        filter_futex_waitv(KILL_THREAD)
        harness.until(lambda: liveness_thread() is None, "the end of the liveness thread")
        me.board.set("killed")
    me.board.wait("killed")
    for _ in range(200):
        oracle.exercise("all_reduce", count=8)
    alive = evidence_of(VICTIM)
    me.board.set(f"looked-{me.rank}")
    me.board.wait_all("looked", range(me.size))
    if me.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return alive, find_the_victim()


def test_a_process_lives_on_without_its_liveness_thread():
    """The kernel marks the thread's robust futex, and the process still lives: nobody says that it
    has exited, before it does."""
    with harness.starting(3, losing_its_liveness_thread, env=SHM) as ranks:
        assert ranks.results(dead=[VICTIM])[:VICTIM] == [(None, "exited")] * 2
