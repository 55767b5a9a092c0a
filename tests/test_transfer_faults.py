"""A transfer engine whose peers die, whose links are cut and whose connections break in
mid-transfer: real processes, real sockets, two hosts where a link is cut."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import engines
import harness
import hosts
import numpy as np
import pytest
from engines import pattern
from harness import until
from test_transfer import kill_when, over, resident

BIG = 32 << 20
BLOCKS = 128
TURNS = 4
PEERS = int(os.environ.get("MOONCAKE_TEST_PEERS") or 60)

needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))


@pytest.fixture(params=engines.WIRES)
def wire(request):
    return request.param


def of_hosts(two, **more):
    """Ranks of their own on two hosts; each engine listens where the others reach it."""
    rank_env = {rank: {"MOONCAKE_HOST_IP": two[rank].v4[0]} for rank in range(2)}
    env = {"MOONCAKE_TRANSPORTS": "tcp", **more}
    return {"backend": None, "namespaces": two.spread(2), "rank_env": rank_env, "env": env}


def between_hosts(me, addresses, user):
    """Rank 0 gives memory until it is done; rank 1 uses it."""
    side = engines.make(size=BIG, host=addresses[me.rank])
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("done")
        return side.memory.tobytes()
    try:
        return user(me, side, *me.board.wait("target"))
    finally:
        me.board.set("done")


# ---- who writes dies


def dies_while_it_writes(me):
    """Rank 1 fills the lower half with ones until it is killed; rank 2 works in the upper half."""
    side = engines.make(size=BIG)
    half = BIG // 2
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("checked")
        assert (side.memory[half:] == 2).all(), "the honest writer's half was touched"
        before = side.memory.copy()
        assert side.engine.unregister_memory(side.address) == 0
        assert (side.memory == before).all()
        assert set(np.unique(before[:half])) <= {0, 1}
        return
    target, there = me.board.wait("target")
    side.memory[:] = me.rank
    while me.rank == 1:
        assert side.engine.transfer_sync_write(target, side.address, there, half) == 0
        if not me.board.has("writing"):
            me.board.set("writing")
    me.board.wait("writing")
    while not me.board.has("killed"):
        assert side.engine.transfer_sync_write(target, side.address, there + half, half) == 0
    for _ in range(3):
        assert side.engine.transfer_sync_write(target, side.address, there + half, half) == 0
        assert side.engine.transfer_sync_read(target, side.address, there + half, half) == 0
    me.board.set("checked")


def test_a_writer_that_is_killed_in_the_middle_disturbs_nobody(wire):
    with harness.starting(3, dies_while_it_writes, **over(wire)) as crew:
        kill_when(crew, "writing", 1)


# ---- connections and links break


def moves_on(me, side, target, there):
    """Writes and reads back until told to end: each of them is good, whatever breaks meanwhile."""
    rounds = 0
    while not me.board.has("enough"):
        ours = side.fill(rounds % 3 + 1)[: 4 << 20].copy()
        assert side.engine.transfer_sync_write(target, side.address, there, BIG) == 0
        side.memory[: 4 << 20] = 0
        assert side.engine.transfer_sync_read(target, side.address, there, BIG) == 0
        assert (side.memory[: 4 << 20] == ours).all()
        rounds += 1
        me.board.set(f"round-{rounds}")
    return rounds, side.engine.get_counters()


@needs_hosts
@pytest.mark.netns
def test_connections_that_are_reset_in_mid_transfer():
    with hosts.Hosts(2, v6=False) as two:
        addresses = [host.v4[0] for host in two.hosts]
        with harness.starting(2, between_hosts, addresses, moves_on, **of_hosts(two)) as crew:
            for turn in range(1, 6):
                crew.board.wait(f"round-{turn}")
                two.reset(turn % 2)
            crew.board.wait("round-8")
            crew.board.set("enough")
            _, counters = crew.results()[1]
        assert counters["retries"] >= 1, counters


def outlives_cuts(me, side, target, there):
    engine, here = side.engine, side.address
    assert engine.transfer_sync_write(target, here, there, BIG) == 0
    me.board.set("cut")  # for a moment: in the middle of what follows
    deadline = time.monotonic() + 60
    while not me.board.has("mended"):
        assert time.monotonic() < deadline
        assert engine.transfer_sync_write(target, here, there, BIG) == 0
    assert engine.transfer_sync_read(target, here, there, BIG) == 0
    me.board.set("cut for good")
    me.board.wait("is cut for good")
    start = time.monotonic()
    assert engine.transfer_sync_write(target, here, there, BIG) == -1
    took = time.monotonic() - start
    # The dead connection is collected by a timer: nobody transfers any more.
    until(lambda: engine.get_counters()["active"] == 0, "the end of a dead connection")
    me.board.set("plug in")
    me.board.wait("plugged in")
    ours = side.fill(5).copy()
    assert engine.transfer_sync_write(target, here, there, BIG) == 0
    return took, ours.tobytes()


@needs_hosts
@pytest.mark.netns
def test_a_link_that_is_cut_in_mid_transfer_and_for_good():
    with hosts.Hosts(2, v6=False) as two:
        two.limit(2_000_000_000)
        addresses = [host.v4[0] for host in two.hosts]
        settings = of_hosts(two, MC_TRANSFER_TIMEOUT="5")
        with harness.starting(2, between_hosts, addresses, outlives_cuts, **settings) as crew:
            crew.board.wait("cut")
            two.link(0, up=False)
            end = time.monotonic() + 1
            until(lambda: time.monotonic() > end, "a second without a link")
            two.link(0, up=True)
            crew.board.set("mended")
            crew.board.wait("cut for good")
            two.link(0, up=False)
            crew.board.set("is cut for good")
            crew.board.wait("plug in")
            two.link(0, up=True)
            crew.board.set("plugged in")
            theirs, (took, ours) = crew.results()
        assert took < 15
        assert theirs == ours


# ---- slow readers


def writes_to_a_slow_one(me):
    """Rank 1 has more under way to rank 0, which is stopped in the middle, than an engine carries
    at a time, and writes to rank 2 meanwhile."""
    side = engines.make(size=BIG)
    if me.rank != 1:
        me.board.set(f"target-{me.rank}", (side.session, side.address))
        me.board.wait("done")
        return side.memory.tobytes()
    engine, block = side.engine, BIG // BLOCKS
    starts = range(0, BIG, block)

    def blocks(target, there):
        here = [side.address + at for at in starts]
        return target, here, [there + at for at in starts], [block] * BLOCKS

    slow, other = (blocks(*me.board.wait(f"target-{rank}")) for rank in (0, 2))
    side.fill(1)
    assert engine.batch_transfer_sync_write(*slow) == 0
    assert engine.batch_transfer_sync_write(*other) == 0
    before = resident()
    for turn in range(TURNS):
        batches = [engine.batch_transfer_async_write(*slow) for _ in range(4)]
        me.board.set(f"begun-{turn}")
        me.board.wait(f"stopped-{turn}")
        batches += [engine.batch_transfer_async_write(*slow) for _ in range(4)]
        assert engine.batch_transfer_sync_write(*other) == 0
        meanwhile = engine.batch_transfer_async_write(*other)
        assert engine.get_batch_transfer_status([meanwhile]) == 0
        grown = resident() - before
        assert grown < 64 << 20, f"{grown} bytes for a reader that is slow"
        me.board.set(f"moved-{turn}")
        assert engine.get_batch_transfer_status(batches) == 0
    me.board.set("done")
    return side.memory.tobytes()


def test_a_slow_reader_holds_up_nothing_but_its_own(wire):
    with harness.starting(3, writes_to_a_slow_one, **over(wire)) as crew:
        for turn in range(TURNS):
            crew.board.wait(f"begun-{turn}")
            crew.stop(0)
            crew.board.set(f"stopped-{turn}")
            crew.board.wait(f"moved-{turn}")
            crew.cont(0)
        slow, ours, other = crew.results()
    assert slow == ours == other


def works_beside_the_stopped(me, count):
    """Rank 0 holds so many targets and is stopped; rank 1 has more under way to each of them than
    an engine carries, and works with rank 2 meanwhile."""
    pieces, piece = 64, 4096
    if me.rank != 1:
        sides = [engines.make(size=pieces * piece) for _ in range(count if me.rank == 0 else 1)]
        me.board.set(f"targets-{me.rank}", [(side.session, side.address) for side in sides])
        me.board.wait("done")
        return [side.memory.tobytes() for side in sides]
    side = engines.make(size=pieces * piece)
    side.fill(1)
    engine = side.engine

    def blocks(target, there):
        starts = range(0, pieces * piece, piece)
        here = [side.address + at for at in starts]
        return target, here, [there + at for at in starts], [piece] * pieces

    stopped = [blocks(*target) for target in me.board.wait("targets-0")]
    (live,) = (blocks(*target) for target in me.board.wait("targets-2"))
    for target, here, there, _ in [*stopped, live]:
        assert engine.transfer_sync_write(target, here[0], there[0], 8) == 0
    me.board.set("opened")
    me.board.wait("stopped")
    batches = [engine.batch_transfer_async_write(*one) for one in stopped]
    codes: list[int] = []
    caller = threading.Thread(
        target=lambda: codes.append(engine.batch_transfer_sync_write(*stopped[0]))
    )
    caller.start()
    for _ in range(20):
        assert engine.transfer_sync_write(live[0], live[1][0], live[2][0], piece) == 0
        assert engine.batch_transfer_sync_write(*live) == 0
        meanwhile = engine.batch_transfer_async_write(*live)
        assert engine.get_batch_transfer_status([meanwhile]) == 0
    assert [engine.transfer_check_status(batch) for batch in batches] == [0] * count
    assert caller.is_alive()
    me.board.set("moved")
    assert engine.get_batch_transfer_status(batches) == 0
    caller.join()
    assert codes == [0]
    me.board.set("done")
    return [side.memory.tobytes()] * count


def test_stopped_targets_take_no_slot_from_others(wire):
    """The first transfers to them would hold all slots until their deadline."""
    with harness.starting(3, works_beside_the_stopped, 5, **over(wire)) as crew:
        crew.board.wait("opened")
        crew.stop(0)
        crew.board.set("stopped")
        crew.board.wait("moved")
        crew.cont(0)
        stopped, ours, live = crew.results()
    assert stopped == ours
    assert live == ours[:1]


# ---- many


def has_many_peers(me, count):
    """Rank 0 holds all the peers; rank 1 moves to and from each, forth and back."""
    if me.rank == 0:
        sides = [engines.make(size=4096) for _ in range(count)]
        for i, side in enumerate(sides):
            side.fill(i)
        me.board.set("targets", [(side.session, side.address) for side in sides])
        me.board.wait("done")
        return [side.memory[:8].tobytes() for side in sides]
    side = engines.make(size=4096 * count)
    targets = me.board.wait("targets")
    for i, (target, there) in enumerate(targets):
        here = side.address + 4096 * i
        assert side.engine.transfer_sync_read(target, here, there, 4096) == 0
        assert (side.memory[4096 * i : 4096 * (i + 1)] == pattern(4096, i)).all()
    assert side.engine.get_counters()["active"] == count
    side.fill(7)
    batches = [
        side.engine.transfer_submit_write(target, side.address + 4096 * i, there, 4096)
        for i, (target, there) in enumerate(targets)
    ]
    assert side.engine.get_batch_transfer_status(batches) == 0
    me.board.set("done")
    return [side.memory[4096 * i : 4096 * i + 8].tobytes() for i in range(count)]


def test_many_peers_of_one_engine(wire):
    """MOONCAKE_TEST_PEERS=1000 is the long run."""
    env = {"MC_NUM_TCP_IO_THREADS": "1", "MC_MAX_RPC_PORT": "20000"}
    theirs, ours = harness.run_ranks(2, has_many_peers, PEERS, **over(wire, **env))
    assert theirs == ours


# ---- who is asked and does not answer


def asks_the_silent(me, count):
    """Engines of rank 1 are gone, and somebody listens at their ports who says nothing."""
    if me.rank == 1:
        sides = [engines.make(size=4096) for _ in range(count)]
        me.board.set("doomed", [(side.session, side.address) for side in sides])
        return me.board.wait("never")
    side = engines.make(size=4096)
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        return me.board.wait("done")
    engine, here = side.engine, side.address
    doomed = me.board.wait("doomed")
    live = me.board.wait("target")
    for target, there in [*doomed, live]:
        assert engine.transfer_sync_write(target, here, there, 4096) == 0
    me.board.set("opened")
    me.board.wait("silent")
    until(lambda: engine.get_counters()["active"] == 1, "the ends of those that are gone")
    batches = [engine.transfer_submit_write(target, here, there, 4096) for target, there in doomed]
    start = time.monotonic()
    assert (
        engine.get_batch_transfer_status([engine.transfer_submit_write(live[0], here, live[1], 8)])
        == 0
    )
    took = time.monotonic() - start
    assert engine.get_batch_transfer_status(batches) != 0
    me.board.set("done")
    return took


def test_who_does_not_answer_holds_up_nobody_else():
    """More of them than an engine has threads that carry out transfers."""
    patience = 6
    env = {"MC_HANDSHAKE_CONNECT_TIMEOUT": str(patience)}
    with harness.starting(3, asks_the_silent, 5, **over("tcp", **env)) as crew:
        crew.board.wait("opened")
        crew.kill(1)
        with contextlib.ExitStack() as stack:
            for session, _ in crew.board.wait("doomed"):
                host, _, port = session.rpartition(":")
                stack.enter_context(socket.create_server((host, int(port))))
            crew.board.set("silent")
            took = crew.results(dead=[1])[2]
    assert took < patience / 2


# ---- the question who is there


class Breaker:
    """A port that resets so many of its first connections, and leads the later ones on."""

    def __init__(self, session: str, resets: int) -> None:
        host, _, port = session.rpartition(":")
        self.target, self.left = (host, int(port)), resets
        self.listener = socket.create_server((engines.LOOPBACK, 0))
        self.session = f"{engines.LOOPBACK}:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accepts, daemon=True).start()

    def accepts(self) -> None:
        while True:
            caller, _ = self.listener.accept()
            if self.left > 0:
                self.left -= 1
                caller.recv(1)  # it has begun to speak
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                caller.close()
                continue
            there = socket.create_connection(self.target)
            for ends in ((caller, there), (there, caller)):
                threading.Thread(target=self.carries, args=ends, daemon=True).start()

    @staticmethod
    def carries(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def asks_through_a_breaker(me, side, session, there, resets):
    breaker = Breaker(session, resets)
    code = side.engine.transfer_sync_write(breaker.session, side.address, there, 4096)
    return code, breaker.left


@pytest.mark.parametrize(("resets", "code"), [(2, 0), (100, -1)])
def test_a_question_outlives_connections_that_break(resets, code):
    found = harness.run_ranks(2, engines.serve, asks_through_a_breaker, resets, **over("tcp"))
    assert found[1] == (code, max(0, resets - 4))
