"""How a job begins: what it prints, and what becomes of it where the system has no more to give."""

from __future__ import annotations

import re
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist


def start_late_and_sum(self: harness.Rank) -> float:
    """Over a TCPStore, as a launcher has it; the ranks come one after the other."""
    store = self.tcp_store()
    time.sleep(0.4 * self.rank)
    dist.init_process_group(
        "mooncake",
        store=store,
        rank=self.rank,
        world_size=self.size,
        timeout=timedelta(seconds=harness.DEADLINE),
    )
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.barrier(group=dist.new_group(list(range(self.size))))
    total = float(tensor[0])
    dist.destroy_process_group()
    return total


def test_a_job_that_goes_well_prints_nothing():
    with harness.Crew(3, backend=None) as crew:
        assert crew.call(start_late_and_sum) == [3.0] * 3
        assert [crew.log(rank) for rank in range(3)] == [""] * 3


def _pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0])


def receive_without_a_thread(self: harness.Rank) -> str:
    tensor = torch.zeros(4)
    if self.rank == 1:
        self.board.wait("failed")
        dist.send(tensor + 7, 0)
        return ""
    # The C library keeps stacks of threads that have ended, up to 40 MiB: these threads take them.
    release = threading.Event()
    idle = [threading.Thread(target=release.wait) for _ in range(8)]
    for thread in idle:
        thread.start()
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = _pages() * resource.getpagesize() + (2 << 20)  # a thread's stack takes 8 MiB
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        _, text = harness.raised(dist.irecv, tensor, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        release.set()
        for thread in idle:
            thread.join()
    self.board.set("failed")
    # Of the receive that failed nothing is left: this one gets the message.
    work = dist.irecv(tensor, 1)
    assert work is not None
    work.get_future().wait()
    assert tensor.tolist() == [7] * 4
    return text


def test_a_message_that_gets_no_thread_is_an_error_of_its_call():
    text, _ = harness.run_ranks(2, receive_without_a_thread)
    assert "cannot start thread mooncake-msg" in text


STOPPED_INIT = 3.0  # seconds that init may take where the store's process is stopped


def begin_over_a_stopped_store(self: harness.Rank, has_begun: bool) -> tuple[float, str]:
    """Rank 0 holds the store, and the test stops it: before its init, or in it."""
    store = self.tcp_store()
    self.board.set(f"connected-{self.rank}")
    if self.rank == 2 or not has_begun:
        self.board.wait("stopped")
    began = time.monotonic()
    _, text = harness.raised(
        dist.init_process_group,
        "mooncake",
        store=store,
        rank=self.rank,
        world_size=self.size,
        timeout=timedelta(seconds=STOPPED_INIT),
    )
    return time.monotonic() - began, text


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "half-way"])
def test_a_stopped_store_holds_init_up_until_its_timeout(has_begun: bool):
    with harness.Crew(3, backend=None) as crew:
        crew.start(begin_over_a_stopped_store, has_begun)
        crew.board.wait_all("connected", range(3))
        time.sleep(0.5 if has_begun else 0)  # ranks 0 and 1 wait for rank 2
        crew.stop(0)
        crew.board.set("stopped")
        ends = crew.outcomes(deadline=4 * STOPPED_INIT, dead=[0])
        crew.cont(0)
        # Calls that the other ranks left behind end now, and disturb nobody.
        assert crew.outcomes(dead=[1, 2])[0].error is None
        for end in ends[1:]:
            assert end.error is None, end.text
            seconds, text = end.value
            assert STOPPED_INIT - 1 < seconds < STOPPED_INIT + 2
            assert re.search(
                r"the store of the job at 127\.0\.0\.1:\d+ has not answered for \d\.\d s", text
            )
