"""Functions of the ranks in tests of network cards. They are apart from the tests, because
importing
those asks libfabric for its cards."""

from __future__ import annotations

import random

import engines
import numpy as np
from engines import pattern

BYTES, PIECES = 1 << 18, 8  # for moves_until_told()
SIZE = 3  # ranks that run lives()
AREA = 1 << 20  # bytes of a rank's memory for each of the others
STEPS = 20


def moves_until_told(me, addresses):
    """Rank 1 writes to rank 0 and reads back, with other bytes each time, and checks each byte."""
    side = engines.make(protocol="fabric", host=addresses[me.rank], size=BYTES * PIECES)
    if me.rank == 0:
        me.board.set("target", (side.session, side.address))
        me.board.wait("done")
        return None
    target, there = me.board.wait("target")
    ours = [side.address + BYTES * i for i in range(PIECES)]
    theirs = [there + BYTES * i for i in range(PIECES)]
    sizes = [BYTES] * PIECES
    base = pattern(BYTES * PIECES, 1)
    rounds = 0
    try:
        while not me.board.has("enough"):
            rounds += 1
            expected = base ^ np.uint8(rounds % 251)
            side.memory[:] = expected
            assert side.engine.batch_transfer_sync_write(target, ours, theirs, sizes) == 0
            side.memory[:] = 0
            assert side.engine.batch_transfer_sync_read(target, ours, theirs, sizes) == 0
            assert (side.memory == expected).all()
            me.board.set("rounds", rounds)
    finally:
        me.board.set("done")
    return rounds


def lives(me, seed, protocol, address):
    """Moves bytes to others and back. A transfer may fail only if the test has killed its
    target."""
    dice = random.Random(f"{seed} {me.rank}")
    side = engines.make(protocol, host=address, size=AREA * (SIZE + 1))
    me.board.set(f"target-{me.rank}", (side.session, side.address))
    targets = dict(enumerate(me.board.wait_all("target", range(SIZE))))
    del targets[me.rank]
    bench, moved = AREA * SIZE, 0

    def exchange(peer, size, at):
        session, there = targets[peer]
        here, place = side.address + bench, there + AREA * me.rank + at
        expected = pattern(size, dice.getrandbits(30))
        side.memory[bench : bench + size] = expected
        good = side.engine.transfer_sync_write(session, here, place, size) == 0
        side.memory[bench : bench + size] = 0
        good = good and side.engine.transfer_sync_read(session, here, place, size) == 0
        if good:
            assert np.array_equal(side.memory[bench : bench + size], expected)
            return size
        assert me.board.has(f"killed-{peer}"), f"rank {peer} lives"
        del targets[peer]
        return 0

    for step in range(STEPS):
        if not targets:
            break
        size = int(2 ** dice.uniform(0, 20))
        moved += exchange(dice.choice(list(targets)), size, dice.randrange(AREA - size + 1))
        me.board.set(f"step-{me.rank}", step)
    me.board.wait("calm")
    for peer in list(targets):
        moved += exchange(peer, AREA, 0)
    me.board.set(f"done-{me.rank}")
    me.board.wait("end")
    return moved
