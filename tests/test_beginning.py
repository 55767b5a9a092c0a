"""How a job begins: what it prints, and what becomes of it where the system has no more to give."""

from __future__ import annotations

import resource
from pathlib import Path

import harness
import torch
import torch.distributed as dist


def _pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0])


def receive_without_a_thread(self: harness.Rank) -> str:
    tensor = torch.zeros(4)
    if self.rank == 1:
        self.board.wait("failed")
        dist.send(tensor + 7, 0)
        return ""
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = _pages() * resource.getpagesize() + (2 << 20)  # a thread's stack takes 8 MiB
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        _, text = harness.raised(dist.irecv, tensor, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
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
