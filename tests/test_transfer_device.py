"""The transfer engine on memory of devices, between processes of one host: over the wire of shared
memory and over TCP."""

from __future__ import annotations

import contextlib
import itertools
import os

import devices
import engines
import harness
import pytest
import test_transfer
import torch
from conftest import DEVICE
from harness import raised

SIZE = 3_000_017  # many pieces, and no multiple of one
HERE = f"{DEVICE}:0"

needs_handles = pytest.mark.skipif(
    not hasattr(torch.Stream, "native_handle"), reason="this torch does not tell streams' handles"
)


WIRES = (*engines.WIRES, "mapped")


def over(wire, **more):
    """`mapped`: devices read memory of the other process, in place of its pinned buffers."""
    if wire == "mapped":
        return test_transfer.over("shm", MOONCAKE_CUDA_IPC="1", **more)
    return test_transfer.over(wire, **more)


@pytest.fixture(params=WIRES)
def wire(request):
    devices.prepare(DEVICE)
    return request.param


def other() -> str:
    """The last device, which may be the only one. For ranks only: CUDA does not survive a fork."""
    return f"{DEVICE}:{torch.accelerator.device_count() - 1}"


def noise(seed: int) -> torch.Tensor:
    return torch.from_numpy(engines.pattern(SIZE, seed))


def put(memory: torch.Tensor, values: torch.Tensor) -> None:
    """The engine waits for no stream of the program, so the program does."""
    memory.copy_(values)
    if memory.device.type != "cpu":
        torch.accelerator.synchronize(memory.device)


def registered(engine, place: str) -> torch.Tensor:
    memory = torch.zeros(SIZE, dtype=torch.uint8, device=place)
    put(memory, noise(0))
    assert engine.register_memory(memory.data_ptr(), SIZE, place.replace(DEVICE, "cuda")) == 0
    return memory


def serving(me, body, *arguments):
    """Rank 0 registers memory in each place, and the others use it."""
    devices.register(DEVICE)
    side = engines.make(size=4096)
    if me.rank == 0:
        tensors = [registered(side.engine, place) for place in ("cpu", HERE, other())]
        me.board.set("target", (side.session, [tensor.data_ptr() for tensor in tensors]))
        for rank in range(1, me.size):
            me.board.wait(f"done-{rank}")
        taken = [(note.name, note.msg) for note in side.engine.get_notifies()]
        return [tensor.cpu() for tensor in tensors], taken
    target, addresses = me.board.wait("target")
    try:
        return body(me, side.engine, target, addresses, *arguments)
    finally:
        me.board.set(f"done-{me.rank}")


# ---- what is moved


def moves(me, engine, target, addresses):
    from mooncake.engine import TransferNotify, TransferOpcode

    assert engine.get_transport(target) == os.environ["MOONCAKE_TRANSPORTS"]
    mine = [registered(engine, place) for place in ("cpu", HERE, other())]
    seed = itertools.count(1)
    for here in mine:
        for there in addresses:
            values = noise(next(seed))
            put(here, values)
            assert engine.transfer_sync_write(target, here.data_ptr(), there, SIZE) == 0
            put(here, noise(next(seed)))
            assert engine.transfer_sync_read(target, here.data_ptr(), there, SIZE) == 0
            assert torch.equal(here.cpu(), values)
    # Parts at odd places, all of a batch, from all places to all places.
    values = noise(next(seed))
    sources, targets, lengths = [], [], []
    for at in range(0, SIZE - 999, 99_991):
        turn = at // 99_991
        sources.append(mine[turn % 3].data_ptr() + at)
        targets.append(addresses[turn // 3 % 3] + at)
        lengths.append(999 + turn)
    for here in mine:
        put(here, values)
    note = TransferNotify("layer", "is there")
    write = TransferOpcode.Write
    assert engine.batch_transfer_sync(target, sources, targets, lengths, write, note) == 0
    batch = engine.batch_transfer_async_read(target, sources, targets, lengths)
    assert engine.get_batch_transfer_status([batch]) == 0
    for here in mine:
        assert torch.equal(here.cpu(), values)
        assert engine.unregister_memory(here.data_ptr()) == 0
        assert engine.transfer_sync_read(target, here.data_ptr(), addresses[0], 8) != 0
    return values, targets, lengths, addresses


def test_what_is_read_and_written(wire):
    (tensors, notes), moved = harness.run_ranks(2, serving, moves, **over(wire))
    values, targets, lengths, addresses = moved
    assert notes == [("layer", "is there")]
    for address, length in zip(targets, lengths, strict=True):
        place, at = next(
            (i, address - start) for i, start in enumerate(addresses) if 0 <= address - start < SIZE
        )
        assert torch.equal(tensors[place][at : at + length], values[at : at + length])


def to_itself(me):
    devices.register(DEVICE)
    side = engines.make(size=4096)
    here, there = (registered(side.engine, place) for place in (HERE, other()))
    put(here, noise(1))
    engine, target = side.engine, side.session
    assert engine.transfer_sync_write(target, here.data_ptr(), there.data_ptr(), SIZE) == 0
    assert torch.equal(there.cpu(), noise(1))
    assert engine.write_bytes_to_buffer(here.data_ptr() + 7, b"seven", 5) == 0
    assert engine.read_bytes_from_buffer(here.data_ptr() + 7, 5) == b"seven"
    assert bytes(here.cpu()[7:12].tolist()) == b"seven"


def test_within_an_engine():
    devices.prepare(DEVICE)
    harness.run_ranks(1, to_itself, backend=None)


# ---- failures


@devices.on_fake_only
def fails_once(me, engine, target, addresses):
    from fake_device import control

    here, there = registered(engine, HERE), addresses[1]
    # A device that maps the peer's memory reads all of it at once, and the peer reads for a write.
    is_mapped = "MOONCAKE_CUDA_IPC" in os.environ
    for n in (1,) if is_mapped else (1, 4, 7):
        control.inject("copy", n=n)
        transfer = engine.transfer_sync_read if is_mapped else engine.transfer_sync_write
        assert transfer(target, here.data_ptr(), there, SIZE) == -1
        put(here, noise(n))
        assert engine.transfer_sync_write(target, here.data_ptr(), there, SIZE) == 0
    return noise(n)


def test_a_copy_that_fails(wire):
    (tensors, _), last = harness.run_ranks(2, serving, fails_once, **over(wire))
    assert torch.equal(tensors[1], last)


@devices.on_fake_only
def loses_its_context(me, engine, target, addresses):
    from fake_device import control

    here = registered(engine, HERE)
    host = registered(engine, "cpu")
    assert engine.transfer_sync_write(target, here.data_ptr(), addresses[1], SIZE) == 0
    control.lose_context()
    assert engine.transfer_sync_write(target, here.data_ptr(), addresses[1], SIZE) == -1
    assert engine.transfer_sync_read(target, here.data_ptr(), addresses[0], SIZE) == -1
    host.copy_(noise(3))
    assert engine.transfer_sync_write(target, host.data_ptr(), addresses[2], SIZE) == 0
    assert engine.unregister_memory(here.data_ptr()) == 0
    return noise(3)


def test_a_lost_context_ends_its_own_transfers_only(wire):
    (tensors, _), last = harness.run_ranks(2, serving, loses_its_context, **over(wire))
    assert torch.equal(tensors[2], last)


def survives_targets(me):
    """Rank 0 stays, rank 1 is killed or stopped while rank 2 writes to both."""
    devices.register(DEVICE)
    side = engines.make(size=4096)
    if me.rank != 2:
        memory = registered(side.engine, other())
        me.board.set(f"target-{me.rank}", (side.session, memory.data_ptr()))
        me.board.wait("done")
        return memory.cpu()
    here = registered(side.engine, HERE)
    (good, there), (bad, elsewhere) = (me.board.wait(f"target-{rank}") for rank in range(2))
    engine = side.engine
    assert engine.transfer_sync_write(bad, here.data_ptr(), elsewhere, SIZE) == 0
    batches = [
        engine.batch_transfer_async_write(bad, [here.data_ptr()], [elsewhere], [SIZE])
        for _ in range(20)
    ]
    me.board.set("under way")
    me.board.wait("gone")
    batches.append(engine.batch_transfer_async_read(bad, [here.data_ptr()], [elsewhere], [SIZE]))
    mine = registered(engine, other())
    for seed in range(5):
        put(mine, noise(seed))
        assert engine.transfer_sync_write(good, mine.data_ptr(), there, SIZE) == 0
    assert engine.get_batch_transfer_status(batches) == -1
    put(here, noise(9))  # nothing lands there any more
    assert engine.transfer_sync_write(good, mine.data_ptr(), there, SIZE) == 0
    assert torch.equal(here.cpu(), noise(9))
    assert engine.unregister_memory(here.data_ptr()) == 0
    me.board.set("done")
    return noise(4)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_target_that_dies_or_stops(wire, how):
    more = {"MC_TRANSFER_TIMEOUT": "5"}
    with harness.starting(3, survives_targets, **over(wire, **more)) as crew:
        crew.board.wait("under way")
        getattr(crew, how)(1)
        crew.board.set("gone")
        stayed, _, written = crew.results(dead=[1])
        assert torch.equal(stayed, written)


# ---- in the order of a stream


def held(stream):
    """On the device `fake`, the stream runs nothing meanwhile."""
    if DEVICE != "fake":
        return contextlib.nullcontext()
    from fake_device import control

    return control.held(stream)


def follows_a_stream(me, engine, target, addresses):
    here, kept = registered(engine, HERE), torch.zeros(SIZE, dtype=torch.uint8, device=HERE)
    stream = torch.Stream(device=HERE)
    handle, there = stream.native_handle, addresses[1]
    first, second = noise(1).to(HERE), noise(2).to(HERE)
    torch.accelerator.synchronize(first.device)
    with stream:
        with held(stream):
            here.copy_(first)
            engine.transfer_write_on_cuda(target, here.data_ptr(), there, SIZE, handle)
            here.copy_(second)  # after the write has read it
            engine.transfer_read_on_cuda(target, here.data_ptr(), there, SIZE, stream_ptr=handle)
            kept.copy_(here)  # after the read has filled it
            assert DEVICE != "fake" or not stream.query()  # and the calls have returned
        stream.synchronize()
        assert torch.equal(kept.cpu(), noise(1))
        here.copy_(second)
        all_ = [[here.data_ptr(), here.data_ptr() + 5], [there, addresses[0] + 5], [5, SIZE - 5]]
        engine.batch_transfer_write_on_cuda(target, *all_, handle)
        here.copy_(first)
        engine.batch_transfer_read_on_cuda(target, *all_, handle)
        stream.synchronize()
    assert torch.equal(here.cpu(), noise(2))
    # The null stream is the device's default one.
    engine.transfer_write_on_cuda(target, here.data_ptr(), addresses[2], SIZE)
    torch.accelerator.synchronize(here.device)
    return noise(2)


@needs_handles
def test_transfers_follow_a_stream(wire):
    (tensors, _), values = harness.run_ranks(2, serving, follows_a_stream, **over(wire))
    assert torch.equal(tensors[2], values)
    assert torch.equal(tensors[1][:5], values[:5])
    assert torch.equal(tensors[0][5:], values[5:])


@devices.on_fake_only
def fails_on_a_stream(me, engine, target, addresses):
    from fake_device import control

    here, host = registered(engine, HERE), registered(engine, "cpu")
    stream = torch.Stream(device=HERE)
    handle, there = stream.native_handle, addresses[1]

    def write(memory, to=there, length=SIZE):
        engine.transfer_write_on_cuda(target, memory.data_ptr(), to, length, handle)

    write(here, to=1 << 40)  # the peer has no such memory
    stream.synchronize()  # the stream goes on all the same
    kind, text = raised(write, here)
    assert kind == "RuntimeError"
    assert "an earlier transfer on a stream has failed" in text
    write(here)
    assert "memory of the host" in raised(write, host)[1]
    assert "not registered" in raised(write, here, length=2 * SIZE)[1]
    lists = [[here.data_ptr()], [there], [1, 2]]
    assert raised(engine.batch_transfer_write_on_cuda, target, *lists, handle)[0] == "RuntimeError"
    nowhere = ["no such engine", here.data_ptr(), there, 8]
    assert raised(engine.transfer_write_on_cuda, *nowhere)[0] == "RuntimeError"
    with control.recorded(stream):
        assert "recorded into a graph" in raised(write, here)[1]
    stream.synchronize()


@needs_handles
def test_failures_on_a_stream(wire):
    harness.run_ranks(2, serving, fails_on_a_stream, **over(wire))


@devices.on_fake_only
def closes_before_the_stream_comes(me, engine, target, addresses):
    """The stream goes on when the engine is closed, without the transfer."""
    from fake_device import control

    from mooncake_backend import _C

    here = registered(engine, HERE)
    stream = torch.Stream(device=HERE)
    with control.held(stream):
        engine.transfer_write_on_cuda(
            target, here.data_ptr(), addresses[1], SIZE, stream.native_handle
        )
        _C.close_transfer_engines()
    stream.synchronize()
    return noise(0)


@needs_handles
def test_an_engine_that_is_closed_before_the_stream_comes(wire):
    (tensors, _), old = harness.run_ranks(2, serving, closes_before_the_stream_comes, **over(wire))
    assert torch.equal(tensors[1], old)
