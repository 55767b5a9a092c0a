"""Transfers between devices of two processes of one host, by mappings of each other's memory
(MOONCAKE_CUDA_IPC). tests/test_transfer_device.py runs this way, too."""

from __future__ import annotations

import os

import devices
import engines
import harness
import pytest
import torch
from conftest import DEVICE
from test_transfer_device import HERE, SIZE, noise, other, over, put, registered, serving

pytestmark = pytest.mark.usefixtures("built")

WIRE = over("mapped")


@pytest.fixture(scope="module")
def built():
    devices.prepare(DEVICE)


def both_ways(engine, target, addresses, here, seed):
    """Writes and reads between all devices."""
    for there in addresses[1:]:
        values = noise(seed)
        put(here, values)
        assert engine.transfer_sync_write(target, here.data_ptr(), there, SIZE) == 0
        put(here, noise(seed + 1))
        assert engine.transfer_sync_read(target, here.data_ptr(), there, SIZE) == 0
        assert torch.equal(here.cpu(), values)
    return values


@devices.on_fake_only
def without_buffers(me, engine, target, addresses):
    from fake_device import control

    here = registered(engine, other())
    # Transfers through host memory would fail. The first calls are for the words that find queues.
    control.inject("allocatePinned", n=3, times=1000)
    return both_ways(engine, target, addresses, here, 1)


def test_no_byte_goes_through_the_host():
    (tensors, _), values = harness.run_ranks(2, serving, without_buffers, **WIRE)
    assert torch.equal(tensors[1], values)
    assert torch.equal(tensors[2], values)


@devices.on_fake_only
def with_a_failure(me, engine, target, addresses, call):
    from fake_device import control

    control.inject(call, times=1000)
    here = registered(engine, other())
    return both_ways(engine, target, addresses, here, 3)


@pytest.mark.parametrize("call", ["exportMemory", "importMemory"])
def test_memory_that_cannot_be_mapped_goes_through_buffers(call):
    with harness.starting(2, serving, with_a_failure, call, **WIRE) as crew:
        (tensors, _), values = crew.results()
        assert torch.equal(tensors[1], values)
        assert "goes through pinned buffers" in crew.log(1)


def read_of(engine, here, target, there):
    return engine.transfer_sync_read(target, here.data_ptr(), there, SIZE)


def renews_memory(me):
    """Rank 0 frees its memory and registers other, several times."""
    devices.register(DEVICE)
    side = engines.make(size=4096)
    if me.rank == 0:
        for seed in range(4):
            memory = registered(side.engine, HERE)
            put(memory, noise(seed))
            me.board.set(f"memory-{seed}", (side.session, memory.data_ptr()))
            me.board.wait(f"read-{seed}")
            assert side.engine.unregister_memory(memory.data_ptr()) == 0
            del memory
            if hasattr(torch.accelerator, "empty_cache"):
                torch.accelerator.empty_cache()
            me.board.set(f"freed-{seed}", True)
            me.board.wait(f"refused-{seed}")
        return
    here = registered(side.engine, other())
    for seed in range(4):
        target, there = me.board.wait(f"memory-{seed}")
        assert read_of(side.engine, here, target, there) == 0
        assert torch.equal(here.cpu(), noise(seed))
        me.board.set(f"read-{seed}", True)
        me.board.wait(f"freed-{seed}")
        put(here, noise(77))
        assert read_of(side.engine, here, target, there) != 0
        assert torch.equal(here.cpu(), noise(77))
        me.board.set(f"refused-{seed}", True)


def test_memory_that_is_freed_and_allocated_anew():
    harness.run_ranks(2, renews_memory, **WIRE)


def reads_and_waits(me):
    """Rank 1 reads from rank 0, which is killed or stopped."""
    devices.register(DEVICE)
    side = engines.make(size=4096)
    if me.rank == 0:
        memory = registered(side.engine, HERE)
        put(memory, noise(5))
        me.board.set("target", (side.session, memory.data_ptr()))
        me.board.wait("never")
    here = registered(side.engine, other())
    target, there = me.board.wait("target")
    assert read_of(side.engine, here, target, there) == 0
    assert torch.equal(here.cpu(), noise(5))
    me.board.set("read", True)
    how = me.board.wait("ended")

    def fails():
        put(here, noise(6))
        code = read_of(side.engine, here, target, there)
        assert torch.equal(here.cpu(), noise(6 if code else 5))
        return code != 0

    # The owner of the memory takes no part in a read. Reads of mapped memory go on until the engine
    # has seen its death.
    if how == "stop":
        assert not fails()
    else:
        harness.until(fails, "a read has failed")
    # The device works on.
    put(here, noise(8))
    assert torch.equal(here.cpu(), noise(8))
    assert side.engine.unregister_memory(here.data_ptr()) == 0


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_owner_that_dies_or_stops(how):
    env = dict(WIRE["env"], MC_TRANSFER_TIMEOUT="5")
    with harness.starting(2, reads_and_waits, env=env, backend=None) as crew:
        crew.board.wait("read")
        getattr(crew, how)(0)
        crew.board.set("ended", how)
        crew.results(dead=[0])


@devices.on_fake_only
def has_other_settings(me):
    """Only one of the two maps memory: it goes through buffers."""
    if me.rank == 1:
        os.environ["MOONCAKE_CUDA_IPC"] = "0"
    devices.register(DEVICE)
    side = engines.make(size=4096)
    if me.rank == 0:
        memory = registered(side.engine, HERE)
        me.board.set("target", (side.session, memory.data_ptr()))
        me.board.wait("done")
        return memory.cpu()
    from fake_device import control

    here = registered(side.engine, other())
    control.inject("importMemory", times=1000)
    target, there = me.board.wait("target")
    put(here, noise(9))
    assert side.engine.transfer_sync_write(target, here.data_ptr(), there, SIZE) == 0
    me.board.set("done", True)
    return noise(9)


def test_engines_of_which_one_maps_nothing():
    memory, values = harness.run_ranks(2, has_other_settings, **WIRE)
    assert torch.equal(memory, values)
