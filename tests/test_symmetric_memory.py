"""torch's symmetric memory by the backend "MOONCAKE": memory of a device that the ranks of a host
map, and signals between them by kernels."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from harness import raised
from peer_ranks import crew, run

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11),
    reason="torch's interface has this form since 2.11",
)


def shared(count, dtype=torch.float32):
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("MOONCAKE")
    tensor = symmetric.empty(count, dtype=dtype, device=torch.accelerator.current_accelerator())
    return tensor, symmetric.rendezvous(tensor, dist.group.WORLD.group_name)


def exchanges(me):
    """Each rank writes to its neighbour, and reads what all have written, round by round."""
    tensor, handle = shared(1000)
    assert (handle.rank, handle.world_size) == (me.rank, me.size)
    assert handle.buffer_size == 4000
    assert tensor.data_ptr() == handle.buffer_ptrs[me.rank]
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for round in range(8):
        handle.get_buffer(right, (1000,), torch.float32).fill_(me.rank + 10 * round)
        handle.barrier(channel=round % 3)
        assert tensor.unique().tolist() == [left + 10 * round]
        of_all = [handle.get_buffer(rank, (5,), torch.float32, 995) for rank in range(me.size)]
        of_all = torch.stack([part.clone() for part in of_all])
        assert of_all[:, 0].tolist() == [(r - 1) % me.size + 10 * round for r in range(me.size)]
        handle.barrier(channel=1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_read_and_write(size):
    run(size, exchanges)


def passes_signals(me):
    """A chain of ranks: each waits for the rank before it, and so has the sum of all before."""
    tensor, handle = shared(64, torch.int64)
    for round in range(6):
        tensor.fill_(round)
        if me.rank > 0:
            handle.wait_signal(me.rank - 1, channel=2)
            tensor.add_(handle.get_buffer(me.rank - 1, (64,), torch.int64))
        if me.rank + 1 < me.size:
            handle.put_signal(me.rank + 1, channel=2)
        assert tensor.unique().tolist() == [round * (me.rank + 1)]
        handle.barrier()


def test_signals_between_two_ranks():
    run(3, passes_signals)


def several_on_rank(me):
    """Several tensors, a second rendezvous of one, and a group of a part of the ranks."""
    import torch.distributed._symmetric_memory as symmetric

    first, handle = shared(100)
    second, other = shared((10, 30), torch.bfloat16)
    again = symmetric.rendezvous(first, dist.group.WORLD.group_name)
    assert again.buffer_ptrs == handle.buffer_ptrs
    first.fill_(me.rank)
    second.fill_(me.rank + 50)
    handle.barrier()
    for rank in range(me.size):
        assert handle.get_buffer(rank, (100,), torch.float32).tolist() == [rank] * 100
        assert other.get_buffer(rank, (10, 30), torch.bfloat16).unique().tolist() == [rank + 50]
    handle.barrier()
    part = dist.new_group([0, 2])
    if me.rank != 1:
        of_part = symmetric.rendezvous(first, part.group_name)
        assert of_part.world_size == 2
        of_part.barrier()
        theirs = of_part.get_buffer(1 - of_part.rank, (100,), torch.float32)
        assert theirs.unique().tolist() == [2 - me.rank]
        of_part.barrier()
    handle.barrier()
    # The handle keeps the memory of a tensor that is gone.
    del first
    handle.barrier()
    assert handle.get_buffer(0, (100,), torch.float32).unique().tolist() == [0]


def test_several_tensors_and_groups():
    run(3, several_on_rank)


def wrong_arguments(me):
    import torch.distributed._symmetric_memory as symmetric

    tensor, handle = shared(100)
    group = dist.group.WORLD.group_name
    fresh = symmetric.empty(100, device=tensor.device)
    for foreign in (tensor + 0, fresh if me.rank else tensor + 0):  # on all ranks, and on one
        kind, text = raised(symmetric.rendezvous, foreign, group)
        assert "was not allocated" in text, (kind, text)
    for channel in (10**6, -1):
        kind, text = raised(handle.barrier, channel)
        assert (kind, "channel" in text) == ("ValueError", True), text
    for rank in (7, -1):
        kind, text = raised(handle.put_signal, rank)
        assert (kind, f"rank {rank}" in text) == ("ValueError", True), text
    for more in (28, 10**6):  # of one page, or not
        uneven = symmetric.empty(100 + more * me.rank, device=tensor.device)
        kind, text = raised(symmetric.rendezvous, uneven, group)
        assert "has allocated" in text, (kind, text)
    of_fresh = symmetric.rendezvous(fresh, group)
    fresh.fill_(me.rank)
    of_fresh.barrier()
    assert of_fresh.get_buffer(1 - me.rank, (100,), torch.float32).tolist() == [1 - me.rank] * 100
    handle.barrier()


def test_wrong_arguments_are_errors():
    run(2, wrong_arguments)


def loses_a_rank(me, victim):
    tensor, handle = shared(256)
    tensor.fill_(me.rank + 1)
    handle.barrier()
    if me.rank == victim:
        torch.accelerator.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    handle.barrier(channel=1)
    torch.accelerator.synchronize()  # ends, although the rank does not come
    kind, text = raised(handle.barrier)
    assert kind == "PeerLostError", text
    # Its memory is still there.
    assert handle.get_buffer(victim, (256,), torch.float32).unique().tolist() == [victim + 1]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == me.size - 1
    return text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_lost(victim):
    with crew(3) as ranks:
        ranks.start(loses_a_rank, victim)
        errors = [one for one in ranks.results(dead=[victim]) if one]
        ranks.broken = True
    assert len(errors) == 2
    for error in errors:
        assert f"rank {victim}" in error
        assert "lost" in error


def misses_a_rank(me):
    handle = shared(256)[1]
    handle.barrier()
    if me.rank == 0:
        handle.barrier(channel=1, timeout_ms=300)
        torch.accelerator.synchronize()
        text = raised(handle.barrier)[1]
        assert "rank 1" in text
        assert "within the timeout" in text
    dist.barrier()


def test_a_late_rank_is_named():
    run(2, misses_a_rank)


def destroys_while_a_signal_waits(me):
    tensor, handle = shared(256)
    handle.barrier()
    torch.accelerator.synchronize()
    if me.rank == 0:
        handle.barrier(channel=1)
    dist.destroy_process_group()
    torch.accelerator.synchronize()
    assert "destroyed" in raised(handle.barrier)[1]
    del tensor, handle


def test_destroy_ends_a_wait():
    run(2, destroys_while_a_signal_waits)
