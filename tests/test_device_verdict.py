"""The ranks in an operation on tensors of a device, as its work says: its wait() returns before the
operation has ended, and reading the work's ranks waits for that."""

from __future__ import annotations

import os
import signal

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE

FORMS = {
    "words": {},
    "host": {"MOONCAKE_STREAM_WORDS": "0"},
    "kernels": {"MOONCAKE_PEER_BYTES": "16384"},
}


@pytest.fixture(params=FORMS)
def crew(request):
    devices.prepare(DEVICE)
    env = {"MOONCAKE_TRANSPORTS": "shm", devices.VARIABLE: DEVICE, **FORMS[request.param]}
    with harness.Crew(3, env=env) as ranks:
        yield ranks


def without_a_loss(me):
    from mooncake_backend import get_failed_ranks_hint, get_local_success

    for round in range(5):
        tensor = torch.full((100,), float(me.rank + round))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        tensor /= len(work.contributors)
        assert get_local_success(work)
        assert (work.contributors, work.failed_ranks, work.lost_ranks) == ([0, 1, 2], [], [])
        assert get_failed_ranks_hint(work).tolist() == [0, 0, 0]
        assert work.epoch > 0
        assert work.exception() is None
        assert tensor.unique().tolist() == [1.0 + round]


def test_without_a_loss(crew):
    crew.call(without_a_loss)


def with_a_loss(me, victim):
    from mooncake_backend import get_current_epoch, get_failed_ranks_hint, get_local_success

    seen = []
    while len(seen) < 2 or seen[-2][1] == [0, 1, 2]:
        number = len(seen)
        tensor = torch.full((100,), float(1 << me.rank))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        hint = get_failed_ranks_hint(work).tolist()
        total = tensor[0].item()
        assert total == sum(1 << rank for rank in work.contributors)
        assert get_local_success(work) == (hint == [0, 0, 0])
        seen.append((work.epoch, work.contributors, work.failed_ranks, hint))
        if me.rank == victim and number == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        assert number < 5000
    assert work.epoch == get_current_epoch(dist.group.WORLD)
    return seen


@pytest.mark.parametrize("victim", [0, 2])
def test_with_a_loss(crew, victim):
    """The first operation without the lost rank tells the loss, and later ones do not."""
    crew.start(with_a_loss, victim)
    first, second = (seen for seen in crew.results(dead=[victim]) if seen)
    crew.broken = True
    assert first == second
    survivors = [rank for rank in range(3) if rank != victim]
    lost = [int(rank == victim) for rank in range(3)]
    before, (at, after) = first[:-2], first[-2:]
    assert {tuple(map(str, one)) for one in before} == {
        (str(before[0][0]), "[0, 1, 2]", "[]", "[0, 0, 0]")
    }
    assert at[1:] == (survivors, [victim], lost)
    assert after == (at[0], survivors, [victim], [0, 0, 0])
    assert at[0] > before[0][0]


def a_stream_of_the_caller(me):
    """Work.block_current_stream(): the current stream waits for the outputs, and the host does
    not need to."""
    other = torch.Stream(device=DEVICE)
    for round in range(10):
        tensor = torch.full((4000,), float(me.rank + round))
        work = dist.all_reduce(tensor, async_op=True)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            work.block_current_stream()
            copy = tensor.clone()
        other.synchronize()
        assert copy.unique().tolist() == [3.0 + 3 * round]
        work.wait()


@pytest.mark.skipif(
    not hasattr(dist.Work, "block_current_stream"), reason="this torch has no such call"
)
def test_block_current_stream(crew):
    crew.call(a_stream_of_the_caller)
