"""Groups that are split off of a group that has changed: it has grown, or a rank was replaced."""

from __future__ import annotations

import os
import signal

import harness
import pytest
import torch
import torch.distributed as dist
from harness import until

import mooncake_backend as mb
from mooncake import pg
from mooncake_backend.group import backend_of

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "split_group"), reason="torch splits groups since 2.9"
)

LARGE = 200_000


def check(me: harness.Rank, group, ranks: list[int]) -> None:
    assert (group.size(), group.rank()) == (len(ranks), ranks.index(me.rank))
    assert mb.get_active_ranks(group).tolist() == [1] * len(ranks)
    for count in (3, LARGE):
        tensor = torch.full((count,), 2.0**me.rank)
        work = group.allreduce([tensor])
        work.wait()
        assert (tensor == sum(2**r for r in ranks)).all()
        assert work.contributors == list(range(len(ranks)))
    if len(ranks) > 1:
        got = torch.zeros(LARGE)
        sent = group.send(
            [torch.full((LARGE,), float(me.rank))], (group.rank() + 1) % group.size(), 0
        )
        group.recv([got], (group.rank() - 1) % group.size(), 0).wait()
        sent.wait()
        assert (got == ranks[group.rank() - 1]).all()


def split(me: harness.Rank) -> None:
    """On all ranks of the default group: by the process group, and by torch.distributed."""
    world = dist.group.WORLD
    size = world.size()
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    mine = halves[me.rank % 2]
    opts = backend_of(world).options
    group = world.split_group(mine, group_name=f"half-{me.rank % 2}", opts=opts)
    check(me, group, mine)
    one = group.split_group([len(mine) - 1], group_name=f"one-{me.rank % 2}", opts=opts)
    assert (one is None) == (me.rank != mine[-1])
    if one is not None:
        check(me, one, mine[-1:])
    # torch.distributed splits only groups that are bound to an accelerator. No tensor is there.
    world.bound_device_id = torch.device("cuda", 0)
    group = dist.split_group(split_ranks=halves)
    check(me, group, mine)
    assert dist.get_process_group_ranks(group) == mine
    tensor = torch.full((3,), float(me.rank))
    dist.broadcast(tensor, mine[-1], group=group)
    assert (tensor == mine[-1]).all()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == size


def grown(me: harness.Rank, first: int):
    is_late = me.rank >= first
    if is_late:
        me.board.wait("begun")
    dist.init_process_group(
        "mooncake",
        store=dist.FileStore(str(me.folder / "store"), first),
        rank=me.rank,
        world_size=me.size if is_late else first,
        pg_options=pg.MooncakeBackendOptions(me.size + 2, is_late),
    )
    world = dist.group.WORLD
    if is_late:
        pg.join_group(world)
    else:
        me.board.set("begun")
        late = list(range(first, me.size))
        until(lambda: all(pg.get_peer_state(world, late)), "new ranks")
        pg.recover_ranks(world, late)
    split(me)
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


@pytest.mark.parametrize("first", [3, 2])
def test_a_group_that_has_grown_splits(first):
    harness.run_ranks(4, grown, first, backend=None)


def renewed(me: harness.Rank, victim: int):
    is_new = "MOONCAKE_REJOIN" in os.environ
    me.init()
    world = dist.group.WORLD
    if is_new:
        pg.join_group(world)
    else:
        me.board.set(f"up-{me.rank}")
        if me.rank == victim:
            signal.pause()
        until(lambda: mb.get_active_ranks(world)[victim] == 0, "the loss")
        until(lambda: pg.get_peer_state(world, [victim]) == [True], "a newcomer")
        pg.recover_ranks(world, [victim])
    split(me)
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


@pytest.mark.parametrize("mode", ["continue", "raise"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_group_with_a_replaced_rank_splits(victim, mode):
    with harness.Crew(4, backend=None, env={"MOONCAKE_ON_FAILURE": mode}) as crew:
        crew.start(renewed, victim)
        crew.board.wait_all("up", range(4))
        crew.kill(victim)
        crew.replace(victim, renewed, victim)
        crew.results()
