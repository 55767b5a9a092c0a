"""Processes without which the job went on, and which come back into it without a restart: stopped
ones that wake up, and the smaller side of a partition."""

from __future__ import annotations

import harness
import pytest
import torch
import torch.distributed as dist
from harness import raised, until
from test_recovery import begin, total

import mooncake_backend
from mooncake import pg

APPLIED = pg.ProposalStatus.Applied
SIZE = 4
FULL = 2**SIZE - 1
QUICK = {"MOONCAKE_FAILURE_TIMEOUT_MS": "1000"}


def states(group) -> list[bool]:
    return pg.get_peer_state(group, range(SIZE))


def sum_in(group, rank: int) -> int:
    tensor = torch.tensor(2**rank)
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def tried_in(group, rank: int) -> int:
    """0: the call ended with the loss of a rank, as in mode `raise`."""
    try:
        return sum_in(group, rank)
    except mooncake_backend.PeerLostError:
        return 0


def around(me: harness.Rank, group, turn: int) -> None:
    """A message to the next rank, and one from the rank before."""
    left, right = (me.rank - 1) % SIZE, (me.rank + 1) % SIZE
    got = torch.zeros(5000)
    sent = torch.full((5000,), float(me.rank + turn))
    works = [dist.irecv(got, left, group=group), dist.isend(sent, right, group=group)]
    for work in works:
        work.wait()
    assert (got == left + turn).all()


# ---- a process is stopped, wakes up, and comes back


def stopped_and_back(me: harness.Rank, victim: int, rounds: int):
    active = begin(me)
    world, other = dist.group.WORLD, dist.new_group()
    rest = FULL - 2**victim
    for turn in range(rounds):
        for group in (world, other):
            assert sum_in(group, me.rank) == FULL
            around(me, group, turn)
        me.board.set(f"whole{turn}-{me.rank}")
        if me.rank == victim:
            me.board.wait(f"woken{turn}")
            for group in (world, other):
                kind, text = raised(lambda: [sum_in(group, me.rank) for _ in range(1_000_000)])  # noqa: B023
                assert kind == "EvictedError", text
                assert "join_group" in text
            pg.join_group(world)
            assert sum_in(world, me.rank) == FULL
            kind, text = raised(dist.all_reduce, torch.ones(1), group=other)
            assert kind == "EvictedError", text
            pg.join_group(other)
        else:
            until(lambda: tried_in(world, me.rank) == rest, "that the stopped rank is out")
            until(lambda: tried_in(other, me.rank) == rest, "that the stopped rank is out")
            me.board.set(f"without{turn}-{me.rank}")
            until(lambda: states(world)[victim], "that it is back")
            assert pg.recover_ranks(world, [victim]).status is APPLIED
            assert sum_in(world, me.rank) == FULL
            until(lambda: states(other)[victim], "that it is back in the other group")
            assert pg.recover_ranks(other, [victim]).status is APPLIED
        assert active.tolist() == [1] * SIZE
        assert pg.get_num_synced_ranks(world) == SIZE
    for group in (world, other):
        assert sum_in(group, me.rank) == FULL
        around(me, group, rounds)
    late = dist.new_group([victim, (victim + 1) % SIZE])
    if me.rank in (victim, (victim + 1) % SIZE):
        assert sum_in(late, me.rank) == 2**victim + 2 ** ((victim + 1) % SIZE)
    return total(me.rank)


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
@pytest.mark.parametrize("victim", [2, 0])
def test_a_stopped_rank_comes_back(transports, on_failure, victim):
    rounds = 3
    environment = {"MOONCAKE_ON_FAILURE": on_failure, "MOONCAKE_TRANSPORTS": transports, **QUICK}
    with harness.Crew(SIZE, backend=None, env=environment) as crew:
        crew.start(stopped_and_back, victim, rounds)
        stay = [rank for rank in range(SIZE) if rank != victim]
        for turn in range(rounds):
            crew.board.wait_all(f"whole{turn}", range(SIZE))
            crew.stop(victim)
            crew.board.wait_all(f"without{turn}", stay)
            crew.cont(victim)
            crew.board.set(f"woken{turn}")
        assert crew.results() == [FULL] * SIZE
