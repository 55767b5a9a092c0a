"""A transfer engine over network cards: libfabric's own provider over TCP stands for them, so the
same code runs here as on EFA, InfiniBand and RoCE. Two processes each, with the short ways within a
host taken away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import cards
import engines
import harness
import hosts
import numpy as np
import pytest
from cards import CARDS, SOFTWARE, WIRE
from engines import BYTES, LOOPBACK, pattern
from test_transfer import kill_when

TOOL = [sys.executable, "-m", "mooncake_backend.first_submit_probe"]

needs_cards = pytest.mark.skipif(bool(cards.why_none()), reason="libfabric has no tcp;ofi_rxm here")
needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))


def crew(**more):
    return {"env": {**WIRE, **more}, "backend": None}


def serve(me, user):
    return engines.serve(me, user, protocol="fabric")


# ---- doctor


@needs_cards
def test_doctor_takes_the_protocol_that_has_the_wires_which_are_asked_for():
    ended = subprocess.run(
        [sys.executable, "-m", "mooncake_backend", "doctor"],
        env={**os.environ, **WIRE, "MOONCAKE_HOST_IP": LOOPBACK},
        capture_output=True, text=True, timeout=harness.DEADLINE, check=False,
    )  # fmt: skip
    assert "BROKEN" not in ended.stdout
    assert ended.returncode == 0
    assert re.search("ok  transfer engine +protocol fabric", ended.stdout)


# ---- what is moved


def moves(me, side, target, there):
    engine, here = side.engine, side.address
    assert engine.get_transport(target) == "fabric"
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    assert (side.memory == pattern(BYTES, 0)).all()
    side.fill(1)
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    parts = 16
    each = BYTES // parts
    order = np.random.default_rng(2).permutation(parts)
    ours = [here + each * i for i in range(parts)]
    theirs = [there + each * int(i) for i in order]
    assert engine.batch_transfer_sync_write(target, ours, theirs, [each] * parts) == 0
    expected = np.empty_like(side.memory)
    for i, to in enumerate(order):
        expected[each * to : each * (to + 1)] = side.memory[each * i : each * (i + 1)]
    side.memory[:] = 0
    batch = engine.batch_transfer_async_read(target, ours, theirs, [each] * parts)
    assert engine.get_batch_transfer_status([batch]) == 0
    assert (side.memory == pattern(BYTES, 1)).all()
    assert engine.transfer_sync_read(target, here, there + BYTES, 8) == -1  # behind its end
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    return expected.tobytes()


@needs_cards
def test_reads_writes_and_batches():
    theirs, expected = harness.run_ranks(2, serve, moves, **crew())
    assert theirs == expected


def stops_while_it_reads(me):
    side = engines.make(protocol="fabric", size=64 << 20)
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("stopped")
        began = time.monotonic()
        assert side.engine.unregister_memory(side.address) == 0
        return time.monotonic() - began
    session, there = me.board.wait("target")
    while True:
        assert side.engine.transfer_sync_read(session, side.address, there, 64 << 20) == 0
        me.board.set("reading")


@needs_cards
def test_memory_is_free_again_although_its_reader_has_stopped():
    with harness.starting(2, stops_while_it_reads, **crew()) as ranks:
        ranks.board.wait("reading")
        ranks.signal(1, signal.SIGSTOP)
        ranks.board.set("stopped")
        took = ranks.results(dead=[1])[0]
    print(f"free after {took:.1f} s")


def takes_the_short_way(me, side, target, there):
    assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
    return side.engine.get_transport(target)


@needs_cards
def test_within_a_host_the_short_way_is_taken_unless_the_wire_is_asked_for():
    found = harness.run_ranks(2, serve, takes_the_short_way, env=CARDS, backend=None)
    assert found[1] == "shm"


def loses_its_target(me):
    """Rank 0 dies while rank 1 writes; rank 2 is another target, which goes on."""
    side = engines.make(protocol="fabric")
    if me.rank != 1:
        me.board.set(f"target-{me.rank}", (side.session, side.address))
        me.board.wait("done")
        return
    (dead, there), (other, elsewhere) = (me.board.wait(f"target-{rank}") for rank in (0, 2))
    engine, here = side.engine, side.address
    assert engine.transfer_sync_write(dead, here, there, BYTES) == 0
    me.board.set("moving")
    while engine.transfer_sync_write(dead, here, there, BYTES) == 0:
        pass
    me.board.wait("killed")
    assert engine.warmup_efa_segment(dead) < 0
    for _ in range(3):
        assert engine.transfer_sync_write(other, here, elsewhere, BYTES) == 0
    me.board.set("done")


@needs_cards
def test_a_peer_that_is_killed_costs_its_own_transfers_only():
    with harness.starting(3, loses_its_target, **crew()) as ranks:
        kill_when(ranks, "moving", 0)


# ---- warm-up


def warms_up(me, side, target, there):
    engine = side.engine
    assert engine.warmup_efa_segment(target) == 0
    assert engine.get_counters()["active"] == 1
    assert engine.warmup_efa_segment(target) == 0
    assert engine.warmup_efa_segment(f"{LOOPBACK}:9") < 0
    assert engine.warmup_efa_segment(side.session) == 0  # our own
    assert engine.get_counters()["opened"] == 1
    return engine.transfer_sync_read(target, side.address, there, BYTES)


@needs_cards
def test_a_warm_up_connects_once():
    assert harness.run_ranks(2, serve, warms_up, **crew())[1] == 0


@pytest.mark.parametrize("wire", engines.WIRES)
def test_a_warm_up_on_other_wires(wire):
    env = {"MOONCAKE_TRANSPORTS": wire}
    assert harness.run_ranks(2, engines.serve, warms_up, env=env, backend=None)[1] == 0


def goes_by_cards(me, side, target, there):
    """What cards have moved of the first read and of the first write."""
    engine, here = side.engine, side.address
    before = engine.get_counters()
    assert engine.transfer_sync_read(target, here, there, BYTES) == 0
    assert (side.memory == pattern(BYTES, 0)).all()
    assert engine.transfer_sync_write(target, here, there, BYTES) == 0
    moved = engine.get_counters()
    assert moved["cards_retried"] == 0
    return [moved[key] - before[key] for key in ("cards_read", "cards_written")]


def goes_by_cards_once_warm(me, side, target, there):
    assert side.engine.warmup_efa_segment(target) == 0
    return goes_by_cards(me, side, target, there)


@needs_cards
def test_what_was_warmed_up_goes_by_cards_from_the_first_byte_on():
    assert harness.run_ranks(2, serve, goes_by_cards_once_warm, **crew())[1] == [BYTES, BYTES]
    read, written = harness.run_ranks(2, serve, goes_by_cards, **crew())[1]
    assert read in (0, BYTES)
    assert written == 0  # it asks for the keys


@needs_cards
def test_the_first_submit_probe_over_cards():
    common = ["--protocol=fabric", f"--local_server_name={LOOPBACK}", f"--buffer_size={1 << 20}"]
    common += [f"--device_name={LOOPBACK}"]
    env = {**os.environ, **SOFTWARE, "MOONCAKE_TRANSPORTS": "fabric"}
    target = subprocess.Popen(
        [*TOOL, *common, "--mode=target"], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert target.stdout is not None
        ready = re.search(r"addr=(\S+)", target.stdout.readline())
        assert ready is not None
        ended = subprocess.run(
            [*TOOL, *common, f"--segment_id={ready[1]}", "--iters=2"], env=env,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert re.search(r"warmup: .*\(rc=0\)", ended.stdout)
        target.send_signal(signal.SIGTERM)
        assert target.wait(60) == 0
    finally:
        target.kill()
        target.communicate()


# ---- what cannot be had


def starts(me, protocol, devices=""):
    from mooncake.engine import TransferEngine

    return TransferEngine().initialize(LOOPBACK, "P2PHANDSHAKE", protocol, devices)


@needs_cards
@pytest.mark.parametrize(
    ("protocol", "devices", "env", "said"),
    [
        ("efa", "", SOFTWARE, "provider efa, which protocol efa asks for; libfabric .*tcp;ofi_rxm"),
        ("rdma", "", SOFTWARE, "verbs;ofi_rxm, which protocol rdma asks for; libfabric .*tcp;ofi"),
        ("fabric", "", {}, "no network card of provider efa, verbs;ofi_rxm; libfabric .*tcp;ofi"),
        ("fabric", "", {"MOONCAKE_FABRIC_REQUIRE": "efa"}, "MOONCAKE_FABRIC_REQUIRE asks for"),
        ("efa", "", {"MOONCAKE_FABRIC_REQUIRE": "sockets"}, "provider efa, and .*asks for sockets"),
        ("fabric", "eth77,eth78", SOFTWARE, "is called eth77, eth78; provider tcp;ofi_rxm has "),
        ("efa", "", {"MOONCAKE_LIBFABRIC": "/none.so"}, "libfabric cannot be opened .*/none.so"),
        ("tcp", "", {"MOONCAKE_TRANSPORTS": "fabric"}, 'no wire of protocol "tcp"'),
    ],
)
def test_cards_that_are_not_there_are_refused(protocol, devices, env, said):
    with harness.Crew(1, env=env, backend=None) as ranks:
        assert ranks.call(starts, protocol, devices) == [-1]
        assert re.search(said, ranks.log(0)), ranks.log(0)


# ---- hosts


def crosses(me, addresses):
    side = engines.make(protocol="fabric", host=addresses[me.rank])
    if me.rank == 0:
        side.fill(0)
        me.board.set("target", (side.session, side.address))
        me.board.wait("done")
        return side.memory.tobytes()
    try:
        target, there = me.board.wait("target")
        assert side.engine.get_transport(target) == "fabric"
        assert side.engine.transfer_sync_read(target, side.address, there, BYTES) == 0
        return side.memory.tobytes()
    finally:
        me.board.set("done")


@needs_cards
@needs_hosts
@pytest.mark.netns
def test_between_hosts_the_cards_carry_it():
    with hosts.Hosts(2, v6=False) as two:
        addresses = [host.v4[0] for host in two.hosts]
        theirs, ours = harness.run_ranks(
            2, crosses, addresses, backend=None, namespaces=two.spread(2), env=SOFTWARE
        )
    assert theirs == ours
