"""Who is gone, how that is known, and what forked children have to do with it."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist

import mooncake_backend

VICTIM = 1


def evidence_of(rank):
    for seen in mooncake_backend.get_evidence(dist.group.WORLD):
        if seen.rank == rank:
            return seen
    return None


def die(me, how):
    if how == "crash with a core dump":
        os.chdir(me.folder)
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
        filled = np.ones(32 << 20)  # 256 MiB, so that the dump takes a while
        os.kill(os.getpid(), signal.SIGSEGV)
        return float(filled[0])
    if how == "killed with children":
        for _ in range(4):
            if os.fork() == 0:
                me.board.wait("over")
                os._exit(0)
    if how in ("killed", "killed with children"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "os._exit":
        os._exit(3)
    raise AssertionError(how)


def is_watched():
    """Whether the kernel would tell the others of our end: the thread that holds the word for it
    has taken its name."""
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return "mooncake-live" in names


def watching_on_rank(me, how):
    oracle.exercise("all_reduce", count=8)
    if me.rank == VICTIM:
        harness.until(is_watched, "the liveness thread")
        me.board.wait_all("watching", [0, 2])
        me.board.set("died", time.monotonic())
        return die(me, how)
    me.board.set(f"watching-{me.rank}")
    seen = harness.until(lambda: evidence_of(VICTIM), "evidence")
    others = [r for r in range(me.size) if r != VICTIM and evidence_of(r)]
    # Who accuses is not alone with it: the view follows.
    harness.until(
        lambda: mooncake_backend.get_current_epoch(dist.group.WORLD) == 2, "the view without it"
    )
    me.board.set(f"seen-{me.rank}")
    me.board.wait_all("seen", [0, 2])
    return seen, others, me.board.wait("died")


WAYS = ["killed", "killed with children", "crash with a core dump", "os._exit"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_every_survivor_knows_who_died(transports, how):
    """On one host shared memory makes it certain; a broken connection alone does not. The survivors
    are idle: nobody has to wait for the victim to find out."""
    chosen = {"env": {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1"}}
    with harness.starting(3, watching_on_rank, how, **chosen) as crew:
        try:
            found = crew.results(dead=[VICTIM])
        finally:
            crew.board.set("over")
        for rank in (0, 2):
            seen, others, died = found[rank]
            # A core dump may take longer than the failure timeout.
            suspicions = ["refused", "unreachable", "silent"]
            assert seen.kind in (["exited"] if transports == "shm" else suspicions)
            assert seen.rank == VICTIM
            assert seen.detail
            assert died < seen.monotonic < time.monotonic()
            assert others == []
            # One line for a human. The evidence is there for who asks for it.
            lines = [line for line in crew.log(rank).splitlines() if " mooncake " in line]
            assert len(lines) == 1, lines
            what = r"died \(process exited\)" if transports == "shm" else r"lost \(.*\)"
            assert re.search(
                rf" W rank {rank}: rank {VICTIM} {what}; ranks 0, 2 continue, epoch 2$", lines[0]
            )


def leaving_on_rank(me):
    oracle.exercise("all_reduce", count=8)
    if me.rank == VICTIM:
        dist.destroy_process_group()
        return None
    return harness.until(lambda: evidence_of(VICTIM), "evidence").kind


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_rank_that_leaves_is_not_accused(transports):
    chosen = {"env": {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1"}}
    with harness.starting(3, leaving_on_rank, **chosen) as crew:
        assert crew.results() == ["goodbye", None, "goodbye"]
        assert " mooncake " not in crew.log(0) + crew.log(2)


def forking_on_rank(me):
    oracle.exercise("all_reduce", count=8)
    work = dist.all_reduce(torch.ones(8), async_op=True)
    work.wait()
    if me.rank == VICTIM:
        child = os.fork()
        if child == 0:
            error = harness.raised(dist.all_reduce, torch.ones(8))
            again = harness.raised(dist.send, torch.ones(8), 0)
            dist.destroy_process_group()
            me.board.set("child", (error, again))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    oracle.exercise("all_reduce", count=8)
    return me.board.wait("child")


def test_a_forked_child_is_told_and_disturbs_nobody():
    for error, again in harness.run_ranks(3, forking_on_rank):
        assert error[0] == again[0] == "DistBackendError"
        assert "forked" in error[1]
        assert f"rank {VICTIM}" in error[1]


FORKS_AND_EXITS = """
import os, sys, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("mooncake", store=dist.FileStore(store, 2), rank=rank, world_size=2)
dist.all_reduce(torch.ones(8))
child = os.fork()
if child == 0:
    sys.exit(0)  # a whole interpreter's exit, with the parent's group in it
assert os.waitpid(child, 0)[1] == 0
for _ in range(100):
    total = torch.ones(8)
    dist.all_reduce(total)
    assert total[0] == 2
dist.destroy_process_group()
"""


def test_a_forked_child_may_exit_like_any_program(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FORKS_AND_EXITS, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            _, stderr = process.communicate(timeout=harness.DEADLINE)
            assert process.returncode == 0, stderr
    finally:
        for process in processes:
            process.kill()
            process.communicate()
