"""Memory of asynchronous calls: it lasts until the call has ended, whatever the caller drops, and
is freed afterwards. Each tensor lies in a mapping of its own, which ends with its last reference: a
later access ends the process."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from datetime import timedelta

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, layout_options
from harness import raised, until

SMALL, LARGE = 1000, 300_000  # bytes; a message of more than 8 KiB is fetched
LAYOUTS = [
    "shm", pytest.param("shm-no-cma", marks=pytest.mark.slow), "tcp", BLOCKING_DEVICE_LAYOUT,
]  # fmt: skip
PEER = 1


# The sanitizer knows the memory of its own malloc; a mapping ends by itself.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")


class Block(bytearray):
    """Can be watched, which a bytearray cannot."""


class Memory:
    """Makes tensors, and knows which of them are still there."""

    def __init__(self):
        self.left = 0
        self.lock = threading.Lock()

    def tensor(self, count, value=0):
        mapping = Block(count) if SANITIZED else mmap.mmap(-1, count)
        with self.lock:
            self.left += 1
        weakref.finalize(mapping, self._freed).atexit = False
        return torch.frombuffer(mapping, dtype=torch.uint8, count=count).fill_(value)

    def _freed(self):
        with self.lock:
            self.left -= 1

    def is_free(self):
        gc.collect()
        return self.left == 0


class DeviceMemory:
    """The same on a device: the number of all blocks that are referred to or that streams use."""

    def __init__(self):
        self.before = self._blocks()

    @property
    def left(self):
        return self._blocks() - self.before

    def tensor(self, count, value=0):
        return torch.full((count,), value, dtype=torch.uint8)

    def is_free(self):
        gc.collect()
        return self.left == 0

    @staticmethod
    def _blocks():
        torch.empty(1)  # then the allocator looks at the streams
        return torch.get_device_module(devices.kind()).memory_stats()["active.all.current"]


def own_memory():
    return Memory() if devices.kind() == "cpu" else DeviceMemory()


def contents(seed, count):
    return (torch.arange(count) * 7 + seed * 31).remainder(251).to(torch.uint8)


def strided(memory, count):
    """Every second element of a tensor: results are copied into it at the end."""
    return memory.tensor(2 * count)[::2]


# ---- every asynchronous call. Each takes (rank, memory, count) and returns its work and what to
# check on the other ranks. The tensors of rank 0 are known to `memory` only.


def filled(memory, count, value=1):
    return memory.tensor(count, value)


def many(memory, count, value=1):
    return [memory.tensor(count, value) for _ in range(dist.get_world_size())]


COLLECTIVES = {
    "all_reduce": lambda m, n: dist.all_reduce(filled(m, n), async_op=True),
    "all_reduce, strided": lambda m, n: dist.all_reduce(strided(m, n), async_op=True),
    "broadcast from 0": lambda m, n: dist.broadcast(filled(m, n), 0, async_op=True),
    "broadcast from 1": lambda m, n: dist.broadcast(strided(m, n), 1, async_op=True),
    "reduce": lambda m, n: dist.reduce(filled(m, n), 0, async_op=True),
    "all_gather": lambda m, n: dist.all_gather(many(m, n), filled(m, n), async_op=True),
    "all_gather_into_tensor": lambda m, n: dist.all_gather_into_tensor(
        filled(m, n * dist.get_world_size()), filled(m, n), async_op=True
    ),
    "gather": lambda m, n: dist.gather(
        filled(m, n), many(m, n) if dist.get_rank() == 0 else None, 0, async_op=True
    ),
    "scatter": lambda m, n: dist.scatter(
        filled(m, n), many(m, n) if dist.get_rank() == 1 else None, 1, async_op=True
    ),
    "reduce_scatter": lambda m, n: dist.reduce_scatter(filled(m, n), many(m, n), async_op=True),
    "reduce_scatter_tensor": lambda m, n: dist.reduce_scatter_tensor(
        filled(m, n), filled(m, n * dist.get_world_size()), async_op=True
    ),
    "all_to_all": lambda m, n: dist.all_to_all(many(m, n), many(m, n), async_op=True),
    "all_to_all_single": lambda m, n: dist.all_to_all_single(
        filled(m, n * dist.get_world_size()), filled(m, n * dist.get_world_size()), async_op=True
    ),
    "coalesced": lambda m, n: coalesced(m, n),
}


def coalesced(memory, count):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(filled(memory, count))
        dist.all_reduce(filled(memory, count))
    return manager


def batch(memory, count, peer):
    """Two messages each way, as works."""
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, filled(memory, count), peer, tag=3),
            dist.P2POp(dist.irecv, strided(memory, count), peer, tag=4),
            dist.P2POp(dist.isend, filled(memory, count), peer, tag=3),
            dist.P2POp(dist.isend, strided(memory, count), peer, tag=4),
        ]
    )


MESSAGES = {
    "irecv": lambda m, n, peer: dist.irecv(filled(m, n), peer, tag=1),
    "irecv, strided": lambda m, n, peer: dist.irecv(strided(m, n), peer, tag=1),
    "irecv from any": lambda m, n, peer: dist.irecv(filled(m, n), None, tag=1),
    "isend": lambda m, n, peer: dist.isend(filled(m, n), peer, tag=2),
    "isend, strided": lambda m, n, peer: dist.isend(strided(m, n), peer, tag=2),
    "batch": batch,
}


def answer(name, count, peer):
    """The other side of a message; checks what it gets."""
    got = torch.zeros(count, dtype=torch.uint8)
    value = 0 if "strided" in name else 1
    if name == "batch":
        for tag, value in ((3, 1), (4, 0)):
            dist.recv(got, peer, tag=tag)
            assert (got == value).all(), tag
            dist.send(contents(tag, count), peer, tag=tag)
    elif "irecv" in name:
        dist.send(contents(1, count), peer, tag=1)
    else:
        dist.recv(got, peer, tag=2)
        assert (got == value).all()


def works_of(work):
    return work if isinstance(work, list) else [work]


def waited_in_vain(work, may_end):
    """`may_end`: a small message that is sent may end while this looks at it."""
    if work.is_completed():
        return
    try:
        work.wait(timedelta(milliseconds=20))
    except dist.DistBackendError as error:
        message = str(error)
    else:
        assert may_end, "the call ended before the others came"
        return
    assert "20 ms" in message


def dropped_on_rank(me, name, count, how):
    """Rank 0 calls, and drops the tensors and, as `how` says, the work; the others come later."""
    board = f"{name}, {count}, {how}"
    memory = own_memory()
    is_message = name in MESSAGES
    if me.rank == 0:
        if is_message:
            work = MESSAGES[name](memory, count, PEER)
        else:
            work = COLLECTIVES[name](memory, count)
        if how == "timed out" and name != "coalesced":
            for one in works_of(work):
                waited_in_vain(one, count == SMALL and ("isend" in name or name == "batch"))
        if how == "future" and name != "coalesced":
            for one in works_of(work):
                one.get_future()
        one = None
        if how != "work kept":
            work = None
        held = memory.is_free()
        # A small message that was sent stands in the other's mailbox: its tensor may go.
        assert not held or (count == SMALL and "isend" in name), "freed before the end"
        me.board.set(board)
        until(memory.is_free if work is None else lambda: all_done(work), "the end of the call")
        work = None
        until(memory.is_free, "the memory of a call that has ended to be freed")
    else:
        me.board.wait(board)
        if not is_message:
            work = COLLECTIVES[name](memory, count)
            work.wait()
        elif me.rank == PEER:
            answer(name, count, 0)


def all_done(work):
    if not hasattr(work, "is_completed"):
        return all(one.is_completed() for one in getattr(work, "works", work))
    return work.is_completed()


def every_on_rank(me, names, count, hows):
    for name in names:
        for how in hows:
            dropped_on_rank(me, name, count, how)


def kept_tensor_on_rank(me, count):
    """The work is dropped, the tensor is not: the message arrives."""
    if me.rank == 0:
        memory = own_memory()
        tensors = [memory.tensor(count), strided(memory, count)]
        for tag, tensor in enumerate(tensors):
            dist.irecv(tensor, PEER, tag=tag)
        me.board.set(f"posted, {count}")
        for tag, tensor in enumerate(tensors):
            until(lambda tag=tag, tensor=tensor: tensor.equal(contents(tag, count)), "the message")
        me.board.wait(f"sent, {count}")
        first = strided(memory, count)
        dist.irecv(first, PEER, tag=3)
        until(lambda: first.equal(contents(3, count)), "the message that came first")
    elif me.rank == PEER:
        me.board.wait(f"posted, {count}")
        for tag in range(2):
            dist.send(contents(tag, count), 0, tag=tag)
        work = dist.isend(contents(3, count), 0, tag=3)
        me.board.set(f"sent, {count}")
        work.wait()


def timed_out_on_rank(me, count):
    """The message itself times out: nothing lands in its tensor any more, and the next receive
    gets what comes then."""
    if me.rank == 0:
        memory = own_memory()
        harness.set_timeout(0.2)
        kept = [memory.tensor(count), strided(memory, count)]
        works = [dist.irecv(tensor, PEER, tag=7) for tensor in kept]
        dist.irecv(memory.tensor(count), PEER, tag=7)
        if count == LARGE:
            dist.isend(memory.tensor(count), PEER, tag=8)
        for work in works:
            assert "timed out" in raised(work.wait)[1]
        until(lambda: memory.left == 2, "the memory of the messages that timed out")
        harness.set_timeout(harness.DEADLINE)
        me.board.set(f"gave up, {count}")
        got = torch.zeros(count, dtype=torch.uint8)
        for seed in range(3):
            dist.recv(got, PEER, tag=7)
            assert got.equal(contents(seed, count)), seed
        assert not any(tensor.any() for tensor in kept)
    elif me.rank == PEER:
        me.board.wait(f"gave up, {count}")
        for seed in range(3):
            dist.send(contents(seed, count), 0, tag=7)


def half_a_batch_on_rank(me):
    """There is no memory for the copy of the last tensor. Of a block nothing is posted.
    batch_isend_irecv() has posted what stands before that, and keeps its memory."""
    if me.rank == 0:
        huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 47)
        memory = own_memory()

        def block():
            with dist._coalescing_manager(device=torch.get_default_device(), async_ops=True):
                dist.irecv(memory.tensor(SMALL), PEER)
                dist.isend(huge, PEER)

        assert "memory" in raised(block)[1]
        until(memory.is_free, "the tensors of the block to be freed")
        operations = [
            dist.P2POp(dist.irecv, memory.tensor(SMALL), PEER),
            dist.P2POp(dist.isend, huge, PEER),
        ]
        assert "memory" in raised(dist.batch_isend_irecv, operations)[1]
        del operations
        assert not memory.is_free()
        me.board.set("half a batch")
        got = torch.zeros(SMALL, dtype=torch.uint8)
        dist.recv(got, PEER)
        assert got.equal(contents(4, SMALL))
        del got
        until(memory.is_free, "the tensor of the message that came")
    elif me.rank == PEER:
        me.board.wait("half a batch")
        for seed in (3, 4):
            dist.send(contents(seed, SMALL), 0)


def destroyed_on_rank(me):
    """The group goes while messages and an operation of it are under way."""
    group = dist.new_group()
    if me.rank == 0:
        memory = own_memory()
        works = [dist.irecv(memory.tensor(SMALL), PEER, group=group)]
        dist.irecv(strided(memory, LARGE), PEER, group=group)
        works += [dist.isend(memory.tensor(LARGE), PEER, group=group)]
        assert memory.left == 3
        dist.destroy_process_group(group)
        until(lambda: memory.left == 2, "the memory of the message that nobody holds")
        for work in works:
            assert raised(work.wait)[0] == "DistBackendError"
        del work, works
        until(memory.is_free, "the memory of the group's messages")
        me.board.set("destroyed")
    else:
        me.board.wait("destroyed")
        dist.destroy_process_group(group)


def lost_on_rank(me, count):
    """Everything is under way when rank 1 dies, and rank 0 holds nothing of it."""
    if me.rank == PEER:
        me.board.wait("never")
    memory = own_memory()
    if me.rank == 0:
        for name in MESSAGES:
            if name != "irecv from any":
                MESSAGES[name](memory, count, PEER)
    for name in COLLECTIVES:
        COLLECTIVES[name](memory, count)
    me.board.set(f"posted-{me.rank}", memory.left)
    until(memory.is_free, "the memory of calls with a lost rank")


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    return crews.get(layout, 3)


HOWS = ["work dropped", "work kept", "timed out", "future"]


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_collectives_keep_their_memory(crew, count):
    crew.call(every_on_rank, list(COLLECTIVES), count, HOWS)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_messages_keep_their_memory(crew, count):
    crew.call(every_on_rank, list(MESSAGES), count, HOWS)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_receive_goes_on_without_its_work(crew, count):
    crew.call(kept_tensor_on_rank, count)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_nothing_lands_after_a_timeout(crew, count):
    crew.call(timed_out_on_rank, count)


def test_half_a_batch(crew):
    crew.call(half_a_batch_on_rank)


def test_a_group_that_is_destroyed(crew):
    crew.call(destroyed_on_rank)


@pytest.mark.parametrize("mode", ["raise", "continue"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_peer_that_dies(layout, two_hosts, mode, count):
    options = layout_options(layout, 3, two_hosts)
    options["env"] = {**options["env"], "MOONCAKE_ON_FAILURE": mode}
    with harness.starting(3, lost_on_rank, count, **options) as crew:
        assert all(left > 0 for left in crew.board.wait_all("posted", [0, 2]))
        crew.kill(PEER)
        crew.results(dead=[PEER])
