"""mooncake.engine.TransferEngine: what it moves, what it returns, whom it believes."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import socket
import struct
import threading
import time

import engines
import harness
import numpy as np
import pytest
from engines import BYTES, LOOPBACK, WIRES, pattern
from harness import raised, until

KEY = "a key that is shared by the two of them"


def over(wire, **more):
    return {"env": {"MOONCAKE_TRANSPORTS": wire, **more}, "backend": None}


@pytest.fixture(params=WIRES)
def wire(request):
    return request.param


# ---- what is moved


def moves(me, side, target, there):
    """Every way to say it. The peer's memory is pattern 0 at first."""
    from mooncake.engine import TransferNotify, TransferOpcode

    engine, here = side.engine, side.address
    assert engine.get_transport(target) == os.environ["MOONCAKE_TRANSPORTS"]
    theirs = pattern(BYTES, 0)

    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    assert (side.memory == theirs).all()
    side.fill(1)
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    ours = side.memory.copy()
    side.memory[:] = 0
    assert engine.transfer_sync(target, here, there, BYTES, TransferOpcode.Read) == 0
    assert (side.memory == ours).all()

    # Pieces of all sizes, in any order, one of them empty.
    places = [0, 1, 4096, 70_000, 400_000, 999_999]
    sizes = [1, 4095, 60_000, 0, 300_000, 17]
    from_here, to_there = [here + p for p in places], [there + p for p in places]
    side.memory[:] = 0
    assert engine.batch_transfer_sync_read(target, from_here, to_there, sizes) == 0
    for place, size in zip(places, sizes, strict=True):
        assert (side.memory[place : place + size] == ours[place : place + size]).all()
    side.fill(2)
    assert engine.batch_transfer_sync_write(target, from_here, to_there, sizes) == 0
    note = TransferNotify("layer 3", "all of it")
    opcode = TransferOpcode.Write
    assert engine.batch_transfer_sync(target, [here], [there], [BYTES], opcode, note) == 0

    # Asynchronous, and asked for in two ways.
    batch = engine.batch_transfer_async_read(target, from_here, to_there, sizes)
    assert batch > 0
    other = engine.batch_transfer_async(target, [here], [there], [BYTES], TransferOpcode.Write)
    assert engine.get_batch_transfer_status([batch, other]) == 0
    assert engine.get_batch_transfer_status([batch]) == -1  # released
    side.fill(3)
    batch = engine.transfer_submit_write(target, here, there, BYTES)
    assert batch > 0
    assert until(lambda: engine.transfer_check_status(batch), "the write") == 1
    assert engine.transfer_check_status(batch) == -1
    batch = engine.batch_transfer_async_write(target, [here], [there], [BYTES])
    assert engine.get_batch_transfer_status([batch]) == 0
    return side.memory.tobytes()


def test_what_is_read_and_written(wire):
    theirs, ours = harness.run_ranks(2, engines.serve, moves, **over(wire))
    assert theirs == ours == pattern(BYTES, 3).tobytes()


def to_itself(me):
    side = engines.make()
    side.fill(1)
    half = BYTES // 2
    for target in (side.session, f"localhost:{side.engine.get_rpc_port()}"):
        assert side.engine.transfer_sync_write(target, side.address, side.address + half, half) == 0
        assert (side.memory[:half] == side.memory[half:]).all()
        assert side.engine.get_transport(target) == "local"
    other = engines.make()
    assert side.engine.transfer_sync_write(other.session, side.address, other.address, BYTES) == 0
    assert (other.memory == side.memory).all()
    assert side.engine.get_transport(other.session) == "inproc"


def test_within_a_process():
    harness.run_ranks(1, to_itself, backend=None)


def by_v6(me, side, target, there):
    assert re.fullmatch(r"\[::1\]:\d+", target)
    assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
    return side.memory.tobytes()


def serve_by_v6(me):
    return engines.serve(me, by_v6, host="::1")


def test_session_ids_of_ipv6():
    theirs, ours = harness.run_ranks(2, serve_by_v6, **over("tcp"))
    assert theirs == ours


def from_threads(me, side, target, there):
    """Ten callers at once, as vLLM's pool is, beside asynchronous ones."""
    threads, rounds = 10, 20
    each = BYTES // threads
    failed = []

    def use(index):
        offset = index * each
        for turn in range(rounds):
            mine = pattern(each, 1000 * index + turn)
            side.memory[offset : offset + each] = mine
            here = side.address + offset
            if side.engine.transfer_sync_write(target, here, there + offset, each) != 0:
                failed.append((index, turn, "write"))
            side.memory[offset : offset + each] = 0
            sizes = [each // 2, each - each // 2]
            parts = [0, each // 2]
            batch = side.engine.batch_transfer_async_read(
                target, [here + p for p in parts], [there + offset + p for p in parts], sizes
            )
            if side.engine.get_batch_transfer_status([batch]) != 0:
                failed.append((index, turn, "read"))
            if not (side.memory[offset : offset + each] == mine).all():
                failed.append((index, turn, "bytes"))

    callers = [threading.Thread(target=use, args=(index,)) for index in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed


def test_many_threads_at_once(wire):
    harness.run_ranks(2, engines.serve, from_threads, **over(wire))


def many_small(me, side, target, there):
    """Each a batch of its own, all of them waiting at once."""
    count, size = 100_000, 4096
    slots = BYTES // size
    side.fill(5)
    before = resident()
    batches = [
        side.engine.transfer_submit_write(
            target, side.address + i % slots * size, there + i % slots * size, size
        )
        for i in range(count)
    ]
    assert all(batches)
    grown = resident() - before
    assert grown < 1500 * count, f"{grown} bytes for {count} transfers"
    assert side.engine.get_batch_transfer_status(batches) == 0
    return side.memory.tobytes()


def counts(me, side, target, there):
    """Before, and after a few transfers: what the counters say of them."""
    engine, here = side.engine, side.address
    before = engine.get_counters()
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    assert engine.batch_transfer_sync_write(target, [here] * 2, [there] * 2, [4096] * 2) == 0
    assert engine.transfer_sync_read(target, here, there + BYTES, 4096) == -1
    assert engine.transfer_sync_read(side.session, here, here, 8) == 0
    return before, engine.get_counters(), engine.get_limits()


def test_counters_and_limits(wire):
    env = {"MC_TCP_MAX_CONNECTIONS": "7", "MC_NUM_TCP_IO_THREADS": "3"}
    before, after, limits = harness.run_ranks(2, engines.serve, counts, **over(wire, **env))[1]
    assert set(before.values()) == {0}
    connections = after.pop("connections")
    assert 1 <= connections <= (3 if wire == "tcp" else 1)
    assert after.pop("reused") >= 0
    cards = ("cards_read", "cards_written", "cards_retried")
    nothing = dict.fromkeys(("pending", "retries", "collected", *cards), 0)
    moved = {"bytes_read": BYTES + 8, "bytes_written": 8192}
    assert after == {"opened": 1, "active": 1, **nothing, **moved}
    assert limits["transfers"] == 7
    assert limits["io_threads"] == 3
    assert limits["registrations"] >= 1 << 16


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_that_wait(wire):
    theirs, ours = harness.run_ranks(2, engines.serve, many_small, **over(wire))
    assert theirs == ours


# ---- memory


def own_memory(me):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", None) == 0
    own = f"{LOOPBACK}:{engine.get_rpc_port()}"
    pool = engine.get_first_buffer_address(own)
    assert pool != 0  # whoever only initializes has memory that others can use

    memory = np.zeros(3 * 4096, dtype=np.uint8)
    address = memory.ctypes.data
    assert engine.register_memory(address + 4096, 4096) == 0
    assert engine.get_first_buffer_address(own) == address + 4096  # the user's own comes first
    for start, size in ((4096, 4096), (4000, 200), (8191, 1), (0, 3 * 4096)):
        assert engine.register_memory(buffer_addr=address + start, capacity=size) == -7
    assert engine.register_memory(address, 4096, "cpu:0") == 0
    assert engine.register_memory(address + 2 * 4096, 4096, location="*") == 0
    assert engine.unregister_memory(address + 1) == -3
    assert engine.batch_unregister_memory([address, address + 2 * 4096]) == 0
    assert engine.unregister_memory(address) == -3
    assert engine.register_memory(0, 4096) == -1
    assert engine.register_memory(address, 0) == -1
    assert engine.register_memory(2**64 - 4096, 8192) == -1

    # All or none.
    assert engine.batch_register_memory([address, address + 6000], [4096, 100]) == -7
    assert engine.batch_register_memory([address], [4096, 1]) == -1
    assert engine.batch_register_memory([address, address + 8192], [4096, 4096]) == 0

    text = b"some bytes"
    assert engine.write_bytes_to_buffer(address, text, len(text)) == 0
    assert engine.read_bytes_from_buffer(address, len(text)) == text
    assert engine.write_bytes_to_buffer(address, text, len(text) + 1) < 0
    assert engine.write_bytes_to_buffer(address + 3 * 4096, text, len(text)) < 0
    assert raised(engine.read_bytes_from_buffer, 64, 8)[0] == "ValueError"

    managed = [engine.allocate_managed_buffer(size) for size in (1, 8192, 8193, 1 << 20, 256 << 20)]
    large = engine.allocate_managed_buffer((256 << 20) + 1)
    assert all([*managed, large])
    assert len(set(managed)) == len(managed)
    for start in (*managed, large):
        assert engine.write_bytes_to_buffer(start, text, len(text)) == 0
        assert engine.read_bytes_from_buffer(start, len(text)) == text
    assert engine.transfer_sync_write(own, managed[0], managed[1], 10) == 0
    assert engine.free_managed_buffer(large, (256 << 20) + 1) == 0
    for start, size in zip(managed, (1, 8192, 8193, 1 << 20, 256 << 20), strict=True):
        assert engine.free_managed_buffer(start, size) == 0
        assert engine.free_managed_buffer(start, size) == -1
    # What was split is whole again: all of it can be had.
    whole = [engine.allocate_managed_buffer(256 << 20) for _ in range(8)]
    assert all(whole)
    assert engine.allocate_managed_buffer(8192) == 0
    assert engine.allocate_managed_buffer(0) == 0
    assert engine.free_managed_buffer(whole[0] + 8192, 8192) == -1


def test_memory_and_its_codes():
    harness.run_ranks(1, own_memory, backend=None)


def bad_input(me, side, target, there):
    engine, here = side.engine, side.address
    before = pattern(BYTES, 0)
    # Nothing registered here, there; too long here, there; a range that wraps around.
    for local, remote, size in (
        (here - 1, there, 8),
        (here, there - 1, 8),
        (here, there, BYTES + 1),
        (here + 8, there, BYTES),
        (here, there + 8, BYTES),
        (here, 2**64 - 4, 8),
        (2**64 - 4, there, 8),
        (here, there, 2**64 - 1),
        (here, 0, 8),
    ):
        for transfer in (engine.transfer_sync_read, engine.transfer_sync_write):
            assert transfer(target, local, remote, size) == -1
        # Where one is wrong: asynchronous ones tell it at the latest at their end.
        batch = engine.batch_transfer_async_write(target, [local], [remote], [size])
        assert batch == 0 or engine.get_batch_transfer_status([batch]) == -1
    assert engine.batch_transfer_sync_write(target, [here], [there], [8, 8]) == -1
    assert engine.batch_transfer_sync_read(target, [here, here], [there], [8]) == -1
    assert engine.batch_transfer_async_read(target, [here], [], [8]) == 0
    assert engine.batch_transfer_sync_write(target, [], [], []) == 0
    for nobody in ("127.0.0.1:1", "127.0.0.1", "nowhere.invalid:15000", "", "[::1", "a:b:c:d e"):
        assert engine.transfer_sync_write(nobody, here, there, 8) == -1
        assert engine.batch_transfer_async_write(nobody, [here], [there], [8]) == 0
        assert engine.get_first_buffer_address(nobody) == 0
        assert engine.get_transport(nobody) == ""
        assert engine.send_probe(nobody) < 0
    assert engine.get_batch_transfer_status([4711]) == -1
    assert engine.transfer_check_status(4711) == -1
    assert engine.transfer_check_status(0) == -1
    # It is as it was, and all goes on.
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    assert (side.memory == before).all()
    assert engine.unregister_memory(here) == 0
    assert engine.transfer_sync_read(target, here, there, BYTES) == -1


def test_bad_input_moves_nothing(wire):
    with harness.Crew(2, **over(wire)) as crew:
        theirs, _ = crew.call(engines.serve, bad_input)
        assert theirs == pattern(BYTES, 0).tobytes()
        log = crew.log(1)
        assert "is not registered here" in log
        assert "Connection refused" in log
        assert "nowhere.invalid" in log


def registered_later(me):
    """What the peer registers after we have seen it is found, and what it takes back is not."""
    side = engines.make()
    memory = side.memory
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        more = pattern(4096, 7)
        me.board.wait("seen")
        assert side.engine.unregister_memory(side.address) == 0
        assert side.engine.register_memory(more.ctypes.data, 4096) == 0
        me.board.set("more", int(more.ctypes.data))
        me.board.wait("done")
        return
    target, there = me.board.wait("target")
    assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
    me.board.set("seen")
    more = me.board.wait("more")
    assert side.engine.transfer_sync_read(target, side.address, more, 4096) == 0
    assert (memory[:4096] == pattern(4096, 7)).all()
    assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == -1
    assert side.engine.transfer_sync_write(target, side.address, there, 8) == -1
    me.board.set("done")


def test_memory_that_comes_and_goes(wire):
    harness.run_ranks(2, registered_later, **over(wire))


# ---- notifications, probes


# Small ones come through a buffer, large ones straight out of a socket, or are read by the peer.
HOLES = (8, 4096, 64 << 10, BYTES)


def owns_what_is_gone(me, how):
    """Rank 0 takes memory away that stays registered; rank 1 writes to it and reads from it."""
    side = engines.make()
    gone = engines.Spoiled(how)
    if me.rank == 0:
        side.fill(0)
        assert side.engine.register_memory(gone.address, 3 * BYTES) == 0
        me.board.set("target", (side.session, side.address, gone.hole))
        me.board.wait("opened")
        gone.spoil()
        me.board.set("spoiled")
        me.board.wait("done")
        return side.memory.tobytes()
    target, there, hole = me.board.wait("target")
    engine, here = side.engine, side.address
    assert engine.transfer_sync_write(target, here, hole, BYTES) == 0
    me.board.set("opened")
    me.board.wait("spoiled")
    before = engine.get_counters()
    for size in HOLES:
        side.fill(size)
        good = engine.transfer_submit_write(target, here, there, BYTES)
        assert engine.transfer_sync_write(target, here, hole, size) == -1
        assert engine.transfer_sync_read(target, here, hole, size) == gone.read_code
        assert engine.get_batch_transfer_status([good]) == 0
    after = engine.get_counters()
    assert [after[name] - before[name] for name in ("opened", "retries")] == [0, 0]
    side.fill(1)
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    me.board.set("done")
    return side.memory.tobytes()


@pytest.mark.parametrize("how", engines.SPOILED)
def test_memory_of_the_target_that_is_not_there(wire, how):
    theirs, ours = harness.run_ranks(2, owns_what_is_gone, how, **over(wire))
    assert theirs == ours


def moves_what_is_gone(me, side, target, there, how):
    """The caller's own memory."""
    engine, here = side.engine, side.address
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    shared = engine.allocate_managed_buffer(BYTES)
    gone = engines.Spoiled(how)
    hole, code = gone.hole, gone.read_code
    assert engine.register_memory(gone.address, 3 * BYTES) == 0
    gone.spoil()
    before = engine.get_counters()
    for size in HOLES:
        good = engine.batch_transfer_async_read(target, [here], [there], [BYTES])
        assert engine.transfer_sync_write(target, hole, there, size) == code
        assert engine.transfer_sync_read(target, hole, there, size) == -1
        assert engine.get_batch_transfer_status([good]) == 0
        for own in (here, shared):
            assert engine.transfer_sync_write(side.session, hole, own, size) == code
            assert engine.transfer_sync_read(side.session, hole, own, size) == -1
    assert engine.write_bytes_to_buffer(hole, b"12345678", 8) == -1
    after = engine.get_counters()
    assert [after[name] - before[name] for name in ("opened", "retries")] == [0, 0]
    side.fill(1)
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    return side.memory.tobytes()


@pytest.mark.parametrize("how", engines.SPOILED)
def test_memory_of_the_caller_that_is_not_there(wire, how):
    theirs, ours = harness.run_ranks(2, engines.serve, moves_what_is_gone, how, **over(wire))
    assert theirs == ours


def registers_what_cannot_be(me):
    """Rank 0 registers memory that it may read only; rank 1 reads it."""
    side = engines.make(size=4096)
    none = engines.map_pages(3 * BYTES)
    engines.unmap_pages(none + BYTES, BYTES)
    hidden = engines.map_pages(BYTES, protection=0)
    for address, size in ((none, 3 * BYTES), (none + BYTES, 8), (hidden, BYTES), (16, 8)):
        assert side.engine.register_memory(address, size) == -1
    engine, here = side.engine, side.address
    if me.rank == 0:
        fixed = engines.map_pages(4096, mmap.PROT_READ)
        assert engine.register_memory(fixed, 4096) == 0
        assert engine.write_bytes_to_buffer(fixed, b"12345678", 8) == -1
        assert engine.transfer_sync_read(side.session, fixed, here, 8) == -1
        assert engine.transfer_sync_write(side.session, fixed, here, 8) == 0
        me.board.set("target", (side.session, fixed))
        me.board.wait("done")
        return
    target, there = me.board.wait("target")
    assert engine.transfer_sync_write(target, here, there, 4096) == -1
    side.fill(1)
    assert engine.transfer_sync_read(target, here, there, 4096) == 0
    assert (side.memory == 0).all()
    me.board.set("done")


def test_memory_that_cannot_be_registered_or_written(wire):
    harness.run_ranks(2, registers_what_cannot_be, **over(wire))


def notes(me):
    from mooncake.engine import TransferNotify, TransferOpcode

    side = engines.make()
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("done")
        got = side.engine.get_notifies()
        assert side.engine.get_notifies() == []
        return [(one.name, one.msg) for one in got]
    target, there = me.board.wait("target")
    note = TransferNotify()
    assert (note.name, note.msg) == ("", "")
    for i in range(50):
        note.name, note.msg = f"n{i}", "x" * i
        assert side.engine.transfer_sync(
            target, side.address, there, 8, TransferOpcode.Write, notify=note
        ) == 0  # fmt: skip
    note.msg = "x" * 100_000
    write = TransferOpcode.Write
    assert side.engine.transfer_sync(target, side.address, there, 8, write, note) == -1
    note = TransferNotify("a", "b")
    assert side.engine.transfer_sync(target, side.address, 1, 8, write, note) < 0
    assert side.engine.send_probe(target) == 0
    me.board.set("done")
    return None


def test_notifications_come_once_and_in_order(wire):
    got, _ = harness.run_ranks(2, notes, **over(wire))
    assert got == [(f"n{i}", "x" * i) for i in range(50)]


# ---- names of the interface


def names(me):
    from mooncake import engine as module
    from mooncake.engine import TransferEngine, TransferOpcode

    assert TransferOpcode.Read == TransferOpcode.READ == module.Read == module.READ == 0
    assert TransferOpcode.Write == TransferOpcode.WRITE == module.Write == module.WRITE == 1
    assert TransferEngine.TransferOpcode is TransferOpcode
    assert int(TransferOpcode.Write) | 2 == 3
    for name in ["EFA", "HIP", "MNNVL", "MUSA", "INTRA_NVLINK", "CUDA"]:
        assert getattr(module, f"SUPPORT_{name}") is False
    side = engines.make()
    engine, a = side.engine, side.address
    to = {"target_hostname": side.session}
    one = {"buffer": a, "peer_buffer_address": a + 64, "length": 8, "transport_hint": "tcp"}
    all_ = {"buffers": [a], "peer_buffer_addresses": [a + 64], "lengths": [8]}
    write = {"opcode": TransferOpcode.WRITE}
    assert engine.transfer_sync_write(**to, **one) == 0
    assert engine.transfer_sync_read(**to, **one) == 0
    assert engine.transfer_sync(**to, **one, **write, notify=None) == 0
    assert engine.batch_transfer_sync_write(**to, **all_, transport_hint="") == 0
    assert engine.batch_transfer_sync_read(**to, **all_) == 0
    assert engine.batch_transfer_sync(**to, **all_, **write, notify=None) == 0
    ids = [
        engine.batch_transfer_async_write(**to, **all_),
        engine.batch_transfer_async_read(**to, **all_),
        engine.batch_transfer_async(**to, **all_, **write),
        engine.transfer_submit_write(**to, **one),
    ]
    assert engine.get_batch_transfer_status(batch_ids=ids) == 0
    assert engine.warmup_efa_segment(segment_name=side.session) == 0
    assert '"cpu:0":[[' in engine.get_local_topology()
    assert engine.get_local_topology(device_name="mlx5_9") == engine.get_local_topology("mlx5_9")
    assert engine.get_engine_ptr() != 0
    assert type(engine.get_engine()).__name__ == "InnerTransferEngine"
    for name in ("transfer_write_on_cuda", "transfer_read_on_cuda"):
        assert raised(getattr(engine, name), **to, **one, stream_ptr=0)[0] == "RuntimeError"
    for name in ("batch_transfer_write_on_cuda", "batch_transfer_read_on_cuda"):
        assert raised(getattr(engine, name), **to, **all_, stream_ptr=0)[0] == "RuntimeError"
    assert "SharedSegment.create" in raised(module.SharedSegment.create, "x", 8, 1, 0)[1]
    assert not module.SharedSegment.supported(True, False)
    assert raised(module.RpcInterface)[0] == "NotImplementedError"
    assert engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "") == -1  # it is already
    early = TransferEngine()
    assert early.get_rpc_port() == -1
    assert early.register_memory(a, 8) == -1
    assert early.transfer_sync_write(side.session, a, a, 8) == -1
    assert early.get_notifies() == []
    assert raised(early.get_engine)[0] == "ValueError"


def test_names_keywords_and_defaults():
    harness.run_ranks(1, names, backend=None)


# ---- protocols, names of engines


def starts(me, host, metadata, protocol, ext=None):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if ext is not None:
        return engine.initialize_ext(host, metadata, protocol, "", ext)
    return engine.initialize(host, metadata, protocol, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("127.0.0.1", "P2PHANDSHAKE", "rdma"), "libfabric.*there is: tcp, shm"),
        (("127.0.0.1", "P2PHANDSHAKE", "efa"), "libfabric.*there is: tcp, shm"),
        (("127.0.0.1", "P2PHANDSHAKE", "nvlink"), "no wire for it; there is: tcp, shm"),
        (("127.0.0.1", "P2PHANDSHAKE", "nvlink_intra"), "libcuda.so.1.*; there is: tcp, shm"),
        (("127.0.0.1", "P2PHANDSHAKE", "xgmi"), "no wire for it"),
        (("127.0.0.1", "P2PHANDSHAKE", "TCP"), "no protocol is called so"),
        (("127.0.0.1", "127.0.0.1:2379", "tcp"), '"etcd".*not available'),
        (("127.0.0.1", "etcd://127.0.0.1:2379", "tcp"), '"etcd".*not available'),
        (("127.0.0.1", "redis://127.0.0.1:6379", "tcp"), '"redis".*not available'),
        (("127.0.0.1", "127.0.0.1:6379", "tcp", "redis"), '"redis".*not available'),
        (("192.0.2.1", "P2PHANDSHAKE", "tcp"), "MOONCAKE_HOST_IP"),
        (("no host", "P2PHANDSHAKE", "tcp"), "a host has no space"),
        (("127.0.0.1:port", "P2PHANDSHAKE", "tcp"), "a number from 1 to 65535"),
    ],
)
def test_what_cannot_be_had_is_refused_and_says_why(arguments, said):
    with harness.Crew(1, backend=None) as crew:
        assert crew.call(starts, *arguments) == [-1]
        assert re.search(said, crew.log(0)), crew.log(0)


def falls_back(me):
    side = engines.make(protocol="rdma")
    other = engines.make(protocol="tcp")
    assert side.engine.transfer_sync_write(other.session, side.address, other.address, BYTES) == 0
    return side.engine.get_transport(other.session)


@pytest.mark.parametrize(
    ("variable", "wire"), [("MOONCAKE_ALLOW_FALLBACK", "inproc"), ("MC_FORCE_TCP", "tcp")]
)
def test_a_fallback_that_was_allowed_is_logged(variable, wire):
    with harness.Crew(1, env={variable: "1"}, backend=None) as crew:
        assert crew.call(falls_back) == [wire]
        assert re.search(f"rdma.*tcp is used instead, as asked for by {variable}", crew.log(0))


def ports(me, least, most):
    engines_ = [engines.make() for _ in range(most - least + 1)]
    taken = {side.engine.get_rpc_port() for side in engines_}
    assert taken == set(range(least, most + 1))
    assert starts(me, LOOPBACK, "P2PHANDSHAKE", "tcp") == -1  # none is left
    del engines_
    assert engines.make().engine.get_rpc_port() in taken


def test_ports_are_of_the_range():
    least = free_ports(3)
    env = {"MC_MIN_RPC_PORT": str(least), "MC_MAX_RPC_PORT": str(least + 2)}
    harness.run_ranks(1, ports, least, least + 2, env=env, backend=None)


def free_ports(count):
    """The first of some that nobody listens at."""
    for first in range(21_000, 31_000, count):
        listeners = [socket.socket() for _ in range(count)]
        try:
            for i, listener in enumerate(listeners):
                listener.bind((LOOPBACK, first + i))
        except OSError:
            continue
        finally:
            for listener in listeners:
                listener.close()
        return first
    raise AssertionError("no free ports")


def only_shm(me, side, target, there):
    assert side.engine.get_transport(target) == "shm"
    assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
    return side.memory.tobytes()


def serve_shm(me):
    return engines.serve(me, only_shm, protocol="shm")


def test_protocol_shm():
    theirs, ours = harness.run_ranks(2, serve_shm, backend=None)
    assert theirs == ours


# ---- faults


def kill_when(crew, word, rank):
    """Kills it when the word stands on the board, and waits for what the others do then."""
    crew.board.wait(word)
    crew.kill(rank)
    crew.board.set("killed")
    crew.results(dead=[rank])


def loses_its_target(me):
    """Rank 0 dies in the middle; rank 2 is another target, which goes on."""
    side = engines.make()
    if me.rank != 1:
        me.board.set(f"target-{me.rank}", (side.session, side.address))
        me.board.wait("done")
        return
    (dead, there), (other, elsewhere) = (me.board.wait(f"target-{r}") for r in (0, 2))
    engine, here = side.engine, side.address
    assert engine.transfer_sync_write(dead, here, there, BYTES) == 0
    assert engine.transfer_sync_write(other, here, elsewhere, BYTES) == 0
    batches = []
    me.board.set("moving")
    while not me.board.has("killed"):
        batches.append(engine.batch_transfer_async_write(dead, [here], [there], [BYTES]))
        assert engine.get_batch_transfer_status([batches.pop()]) in (0, -1)
    start = time.monotonic()
    assert engine.transfer_sync_write(dead, here, there, BYTES) == -1
    assert engine.send_probe(dead) < 0
    assert time.monotonic() - start < 10
    assert engine.transfer_sync_read(other, here, elsewhere, BYTES) == 0
    assert engine.send_probe(other) == 0
    me.board.set("done")


def test_a_target_that_is_killed(wire):
    with harness.starting(3, loses_its_target, **over(wire)) as crew:
        kill_when(crew, "moving", 0)


def comes_back(me):
    side = engines.make()
    if me.rank != 1:
        side.fill(me.rank)
        me.board.set(f"target-{me.rank}", (side.session, side.address))
        me.board.wait("done")
        return
    target, there = me.board.wait("target-0")
    engine, here = side.engine, side.address
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    me.board.set("seen")
    me.board.wait("killed")
    assert engine.transfer_sync_read(target, here, there, BYTES) == -1
    me.board.set("restart")
    again, there = me.board.wait("target-2")
    assert again == target
    # What is known of it is of the dead one: asked for again, by the same name.
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    assert (side.memory == pattern(BYTES, 2)).all()
    me.board.set("done")


def comes_back_later(me):
    if me.rank == 2:
        me.board.wait("restart")
    comes_back(me)


def test_a_target_that_is_restarted_under_its_name(wire):
    port = str(free_ports(1))
    fixed = {"MC_MIN_RPC_PORT": port, "MC_MAX_RPC_PORT": port}
    with harness.starting(3, comes_back_later, rank_env={0: fixed, 2: fixed}, **over(wire)) as crew:
        kill_when(crew, "seen", 0)


def waits_for_a_stopped_one(me):
    side = engines.make()
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("done")
        return None
    target, there = me.board.wait("target")
    engine, here = side.engine, side.address
    assert engine.transfer_sync_write(target, here, there, 8) == 0
    me.board.set("ready")
    me.board.wait("stopped")
    start = time.monotonic()
    batch = engine.transfer_submit_write(target, here, there, BYTES)
    assert engine.transfer_check_status(batch) == 0
    assert engine.transfer_sync_write(target, here, there, BYTES) == -1
    took = time.monotonic() - start
    status = until(lambda: engine.transfer_check_status(batch), "its end")
    assert status == -1
    me.board.set("late")
    me.board.wait("on")
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    me.board.set("done")
    return took


def test_a_target_that_does_not_answer_in_time():
    env = {"MC_TRANSFER_TIMEOUT": "1"}  # 5 at least
    with harness.starting(2, waits_for_a_stopped_one, **over("tcp", **env)) as crew:
        crew.board.wait("ready")
        crew.stop(0)
        crew.board.set("stopped")
        crew.board.wait("late")
        crew.cont(0)
        crew.board.set("on")
        assert 4.9 < crew.results()[1] < 15


def closes_in_the_middle(me, side, target, there):
    for _ in range(10):
        own = engines.make()
        for _ in range(20):
            own.engine.batch_transfer_async_write(
                target, [own.address] * 8, [there] * 8, [BYTES] * 8
            )
        del own.engine
    return side.engine.transfer_sync_read(target, side.address, there, BYTES)


def test_closing_with_transfers_under_way(wire):
    assert harness.run_ranks(2, engines.serve, closes_in_the_middle, **over(wire))[1] == 0


def in_a_child(me, side, target, there):
    assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
    child = os.fork()
    if child == 0:
        code = side.engine.transfer_sync_read(target, side.address, there, BYTES)
        del side.engine
        os._exit(0 if code < 0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return side.engine.transfer_sync_read(target, side.address, there, BYTES)


def test_a_forked_child_is_refused(wire):
    assert harness.run_ranks(2, engines.serve, in_a_child, **over(wire))[1] == 0


# ---- strangers


def tries(me, side, target, there):
    codes = [side.engine.transfer_sync_write(target, side.address, there, 8)]
    return [*codes, side.engine.send_probe(target)]


@pytest.mark.parametrize(
    ("keys", "codes"),
    [
        ((KEY, KEY), [0, 0]),
        ((KEY, "another key, just as long as the first"), [-1, -104]),
        ((KEY, ""), [-1, -104]),
        (("", KEY), [-1, -104]),
        (("", ""), [0, 0]),
    ],
)
def test_who_does_not_know_the_key_is_refused(keys, codes):
    env = {rank: {"MOONCAKE_JOB_KEY": key} for rank, key in enumerate(keys)}
    assert harness.run_ranks(2, engines.serve, tries, rank_env=env, **over("tcp"))[1] == codes


STRANGERS = {
    "http": b"GET /metadata HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100f8010000f40303") + bytes(200),
    "upstream": struct.pack("<Q", 30) + b'{"name":"x","rpc":"handshake"}',
    "nothing": b"",
    "zeros": bytes(10_000),
    "noise": np.random.default_rng(1).bytes(100_000),
}


def meets_strangers(me, side, target, there):
    """Each says its piece, some hang up at once, others stay."""
    host, _, port = target.rpartition(":")
    staying = []
    for turn in range(5):
        for text in STRANGERS.values():
            stranger = socket.create_connection((host, int(port)), timeout=10)
            with contextlib.suppress(OSError):  # dropped already
                stranger.sendall(text[: len(text) // (1 + turn % 2)])
            if turn % 2:
                stranger.close()
            else:
                staying.append(stranger)
        assert side.engine.send_probe(target) == 0
        assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
    for stranger in staying:
        stranger.settimeout(15)
        # Nobody is left hanging: what does not prove itself is dropped.
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
        stranger.close()


def test_strangers_at_the_session_port():
    with harness.Crew(2, **over("tcp", MOONCAKE_LOG_LEVEL="info")) as crew:
        crew.call(engines.serve, meets_strangers)
        for name in ("an HTTP request", "a TLS hello", "these are not the bytes"):
            assert f"connection to the session port is rejected: {name}" in crew.log(0), crew.log(0)


def test_a_foreign_peer_is_refused_by_name():
    """It takes connections, and does not speak our handshake."""
    with socket.socket() as foreign:
        foreign.bind((LOOPBACK, 0))
        foreign.listen()
        name = f"{LOOPBACK}:{foreign.getsockname()[1]}"
        served = threading.Thread(target=hang_up, args=(foreign,))
        served.start()
        try:
            with harness.Crew(1, backend=None) as crew:
                assert crew.call(asks, name) == [[-1, -104]]
                assert "engine of another make" in crew.log(0)
        finally:
            foreign.shutdown(socket.SHUT_RDWR)
            served.join()


def hang_up(listener):
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        caller.recv(8)
        caller.close()


def asks(me, name):
    side = engines.make()
    return [
        side.engine.transfer_sync_write(name, side.address, 4096, 8),
        side.engine.send_probe(name),
    ]


def test_the_log_says_how_an_engine_ends():
    """Ctrl-C or not: the peer hears a goodbye, and counts nobody as dead."""
    with harness.starting(2, leaves_at_the_end, **over("tcp", MOONCAKE_LOG_LEVEL="info")) as crew:
        crew.results()
        crew.signal(1, signal.SIGTERM)


def leaves_at_the_end(me):
    side = engines.make()
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("done")
        return
    target, there = me.board.wait("target")
    assert side.engine.transfer_sync_write(target, side.address, there, 8) == 0
    me.board.set("done")


# ---- doctor


def examined(me, side, target, there, peer):
    from mooncake_backend import doctor

    lines = []
    code = doctor.examine(trial=False, show=lines.append, peer=peer or target)
    return code, [line for line in lines if "peer " in line or "transfer engine" in line]


def test_doctor_tells_the_wire_to_a_peer(wire):
    code, (engine, peer) = harness.run_ranks(2, engines.serve, examined, None, **over(wire))[1]
    assert code == 0
    assert re.search(r"ok  transfer engine .*64 transfers under way", engine)
    assert re.search(rf"ok  peer 127.0.0.1:\d+ +over {wire}; answered in", peer)


def test_doctor_tells_that_a_peer_is_not_there():
    code, (_, peer) = harness.run_ranks(
        2, engines.serve, examined, "127.0.0.1:9", backend=None
    )[1]  # fmt: skip
    assert code == 1
    assert re.search(r"BROKEN  peer 127.0.0.1:9 +cannot be reached \(-102\)", peer)
