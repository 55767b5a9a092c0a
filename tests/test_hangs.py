"""dump_state(): who is waited for, while the group is stuck."""

from __future__ import annotations

import os
import signal
import threading

import harness
import pytest
import torch
import torch.distributed as dist
from conftest import layout_options
from harness import raised, until

import mooncake_backend

CULPRIT = "rank 2, which has not called it"


def look_on_rank(me):
    """A thread of its own looks; the main thread stands in a wait of the native code."""

    def look():
        group = dist.group.WORLD
        until(lambda: CULPRIT in mooncake_backend.dump_state(group), "the other one to be named")
        me.board.set(f"state-{me.rank}", mooncake_backend.dump_state(group))

    mooncake_backend.dump_state_on_signal(signal.SIGUSR2)
    mooncake_backend.dump_state_on_signal(signal.SIGUSR2)  # changes nothing
    dist.all_reduce(torch.ones(4))
    looker = threading.Thread(target=look)
    if me.rank == 2:
        me.board.wait("call")
        assert "has not called" in mooncake_backend.dump_state(dist.group.WORLD)
    else:
        looker.start()
    ones = torch.ones(4)
    dist.all_reduce(ones)
    assert ones[0] == 3, "what looks changes nothing"
    if me.rank != 2:
        looker.join()
    dist.barrier()


@pytest.mark.parametrize("layout", ["shm", "tcp"])
def test_who_has_not_called_is_named_by_a_call_and_by_a_signal(layout, two_hosts):
    with harness.starting(3, look_on_rank, **layout_options(layout, 3, two_hosts)) as crew:
        for rank in (0, 1):
            state = crew.board.wait(f"state-{rank}")
            assert f"rank {rank} waits in all_reduce #3 for {CULPRIT}" in state
        expected = f"rank 1: group '0': rank 1 waits in all_reduce #3 for {CULPRIT}"
        os.kill(crew.processes[1].pid, signal.SIGUSR2)
        until(lambda: expected in crew.log(1), "the state of rank 1 in its log")
        assert "rank 2: begun #2" in crew.log(1)
        crew.board.set("call")
        crew.results()


def handlers_on_rank(me):
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    kind, text = raised(mooncake_backend.dump_state_on_signal, signal.SIGUSR1)
    assert (kind, "has a handler already" in text) == ("ValueError", True), text
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert raised(mooncake_backend.dump_state_on_signal, 4711)[0] == "ValueError"
    assert raised(mooncake_backend.dump_state_on_signal, signal.SIGKILL)[0] == "ValueError"


def test_the_handler_of_another_stays():
    harness.run_ranks(1, handlers_on_rank)
