"""Groups that grow: processes with new ranks come to a running job."""

from __future__ import annotations

import os
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist

from mooncake import pg
from mooncake_backend import admit, join_token

APPLIED = pg.ProposalStatus.Applied


def total(rank: int) -> int:
    tensor = torch.tensor(2**rank)
    dist.all_reduce(tensor)
    return int(tensor)


def begin(me: harness.Rank, first: int, room: int) -> bool:
    """Makes the default group, with the first ranks. Returns whether this rank comes later."""
    is_late = me.rank >= first or "MOONCAKE_REJOIN" in os.environ
    os.environ.pop("MOONCAKE_REJOIN", None)
    if is_late:
        me.board.wait("begun")
    dist.init_process_group(
        "mooncake-cpu",
        store=dist.FileStore(str(me.folder / "store"), first),
        rank=me.rank,
        world_size=me.size if is_late else first,
        pg_options=pg.MooncakeBackendOptions(room, is_late),
    )
    if me.rank == 0:
        me.board.set("begun")
    return is_late


def every_call(size: int, rank: int) -> None:
    """All calls with lists, on as many ranks as there are."""
    assert dist.get_world_size() == size
    own = torch.full((3,), float(rank + 1))
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(parts, own)
    expected = (torch.arange(size) + 1.0).repeat_interleave(3)
    assert torch.equal(torch.cat(parts), expected)
    whole = torch.zeros(3 * size)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, expected)

    factor = sum(range(1, size + 1))
    given = torch.arange(3.0 * size) * (rank + 1)
    mine = torch.zeros(3)
    wanted = torch.arange(3.0 * size)[3 * rank :][:3] * factor
    dist.reduce_scatter_tensor(mine, given)
    assert torch.equal(mine, wanted)
    dist.reduce_scatter(mine.zero_(), list(given.chunk(size)))
    assert torch.equal(mine, wanted)

    got = torch.zeros(3 * size)
    dist.all_to_all_single(got, own.repeat(size))
    assert torch.equal(got, expected)
    splits = [r + 1 for r in range(size)]  # to rank r go r + 1 elements
    got = torch.zeros(size * (rank + 1))
    dist.all_to_all_single(got, torch.full((sum(splits),), float(rank)), [rank + 1] * size, splits)
    assert torch.equal(got, torch.arange(size).float().repeat_interleave(rank + 1))
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_to_all(parts, [own + r for r in range(size)])
    assert torch.equal(torch.cat(parts), expected + rank)

    for root in (0, size - 1):
        for elements in (3, 40_000):
            own = torch.full((elements,), float(rank))
            parts = [torch.zeros(elements) for _ in range(size)] if rank == root else None
            dist.gather(own, parts, root)
            assert parts is None or all((parts[r] == r).all() for r in range(size))
            lists = [own + 10 * r for r in range(size)] if rank == root else None
            mine = torch.zeros(elements)
            dist.scatter(mine, lists, root)
            assert (mine == root + 10 * rank).all()
        one = torch.tensor(float(rank))
        dist.broadcast(one, root)
        assert one.item() == root
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    left, right = (rank - 1) % size, (rank + 1) % size
    if size > 1:
        got = torch.zeros(2)
        works = [dist.irecv(got, left), dist.isend(torch.full((2,), float(rank)), right)]
        for work in works:
            work.wait()
        assert (got == left).all()
    dist.barrier()


def grows(me: harness.Rank, first: int, room: int):
    """From `first` ranks to all of the crew, one after the other."""
    is_late = begin(me, first, room)
    world = dist.group.WORLD
    if is_late:
        assert dist.get_world_size() == me.size
        assert total(me.rank) == 2**me.rank
        me.board.wait(f"size-{me.rank}")
        pg.join_group(world)
    size = me.rank + 1 if is_late else first
    while True:
        assert pg.get_active_ranks(world)[:size].tolist() == [1] * size
        every_call(size, me.rank)
        if size == me.size:
            break
        me.board.set(f"size-{size}")
        harness.until(lambda: pg.get_peer_state(world, [size]) == [True], "a new rank")  # noqa: B023
        assert pg.recover_ranks(world, [size]).status is APPLIED
        size += 1
    return pg.get_active_ranks(world).tolist()


@pytest.mark.parametrize(("first", "size", "room"), [(2, 4, 4), (1, 3, 6), (3, 4, 8)])
def test_ranks_come_one_after_the_other(first, size, room):
    with harness.Crew(size, backend=None) as crew:
        expected = [1] * size + [0] * (room - size)
        assert crew.call(grows, first, room) == [expected] * size


def at_once(me: harness.Rank, room: int):
    is_late = begin(me, 2, room)
    world = dist.group.WORLD
    if is_late:
        pg.join_group(world)
    else:
        every_call(2, me.rank)
        new = list(range(2, me.size))
        me.board.set(f"began-{me.rank}")
        harness.until(lambda: all(pg.get_peer_state(world, new)), "new ranks")
        if me.rank == 0:
            assert pg.recover_ranks(world, new).status is APPLIED
        harness.until(lambda: dist.get_world_size() == me.size, "that the group has grown")
        pg.get_active_ranks(world)
    every_call(me.size, me.rank)
    for ranks in (None, [1, me.size - 1], list(range(2, me.size))):
        group = dist.new_group(ranks)
        if ranks is None or me.rank in ranks:
            one = torch.ones(1)
            dist.all_reduce(one, group=group)
            assert one.item() == dist.get_world_size(group) == len(ranks or range(me.size))
    # If the last rank is taken out by plan, the group shrinks. If it is lost, it does not.
    if me.rank == me.size - 1:
        assert pg.deactivate_ranks(world, [me.rank]).status is APPLIED
        return
    harness.until(lambda: dist.get_world_size() == me.size - 1, "that the group has shrunk")
    every_call(me.size - 1, me.rank)
    if me.rank == me.size - 2:
        me.board.set("next")
        me.board.wait("never")
    me.board.wait("killed")
    assert total(me.rank) == 2 ** (me.size - 2) - 1
    assert dist.get_world_size() == me.size - 1


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_three_ranks_come_at_once_and_one_leaves(transports):
    with harness.Crew(5, backend=None, env={"MOONCAKE_TRANSPORTS": transports}) as crew:
        crew.start(at_once, 6)
        crew.board.wait("next")
        crew.kill(3)
        crew.board.set("killed")
        crew.results(dead=[3])
        crew.broken = True


def admits(me: harness.Rank):
    is_late = begin(me, 3, 5)
    world = dist.group.WORLD
    step = torch.zeros(1)
    if is_late:
        pg.join_group(world)
    sizes: list[int] = []
    while True:
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
        step += 1
        tensor = torch.tensor(2**me.rank)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert int(tensor) == sum(2**rank for rank in work.contributors)
        assert set(range(3)) <= set(work.contributors)
        sizes.append(dist.get_world_size())
        ends = torch.tensor(int(sizes.count(me.size) > 2))
        dist.all_reduce(ends, op=dist.ReduceOp.MIN)
        if ends:
            return sizes[-1]
        admit(world)


def test_a_loop_that_admits_grows():
    with harness.Crew(5, backend=None) as crew:
        assert crew.call(admits) == [5] * 5


def by_token(me: harness.Rank):
    """The new ranks know no store, the last one no founding rank either."""
    options = pg.MooncakeBackendOptions(4)
    if me.rank < 2:
        dist.init_process_group(
            "mooncake-cpu",
            store=dist.FileStore(str(me.folder / "store"), 2),
            rank=me.rank,
            world_size=2,
            pg_options=options,
        )
    else:
        url = f"mooncake://{me.board.wait(f'token-{me.rank}')}"
        dist.init_process_group(
            "mooncake-cpu", init_method=url, rank=me.rank, world_size=me.rank + 1,
            pg_options=options,
        )  # fmt: skip
        pg.join_group(dist.group.WORLD)
    world = dist.group.WORLD
    for size in range(max(2, me.rank + 1), me.size):
        every_call(size, me.rank)
        if me.rank == size - 1:
            me.board.set(f"token-{size}", join_token(world))
        harness.until(lambda: pg.get_peer_state(world, [size]) == [True], "a new rank")  # noqa: B023
        assert pg.recover_ranks(world, [size]).status is APPLIED
    every_call(me.size, me.rank)


def test_new_ranks_come_by_a_token():
    with harness.Crew(4, backend=None, env={"MOONCAKE_JOB_KEY": "a key of sixteen bytes"}) as crew:
        crew.call(by_token)


def refusals(me: harness.Rank):
    is_late = me.rank >= 2
    if is_late:
        me.board.wait_all("began", [0, 1])
        kind, text = harness.raised(begin, me, 2, 8)
        assert "the job has 3 ranks, not 4" in text, (kind, text)
        me.board.set(f"refused-{me.rank}")
        return
    begin(me, 2, 3)
    world = dist.group.WORLD
    assert total(me.rank) == 3
    me.board.set(f"began-{me.rank}")
    me.board.wait_all("refused", [2, 3])
    if me.rank == 0:
        kind, text = harness.raised(pg.recover_ranks, world, [3])
        assert (kind, "which has room for 3" in text) == ("ValueError", True), (kind, text)
        assert harness.raised(pg.get_peer_state, world, [3])[0] == "RuntimeError"
        assert harness.raised(pg.extend_group_size_to, world, 4)[0] == "ValueError"
        pg.extend_group_size_to(world, 3)
    every_call(2, me.rank)


def test_there_is_no_room():
    with harness.Crew(4, backend=None) as crew:
        crew.call(refusals)


def calls_of_other_sizes(me: harness.Rank):
    """A call for the ranks of before, where there are more by now, is an error on all."""
    is_late = begin(me, 2, 3)
    world = dist.group.WORLD
    if is_late:
        pg.join_group(world)
    else:
        harness.until(lambda: pg.get_peer_state(world, [2]) == [True], "a new rank")
        pg.recover_ranks(world, [2])
    size = 3
    for parts in (2, 3):
        own = torch.ones(1)
        for call in (
            lambda: dist.all_gather(list(torch.zeros(parts, 1)), own),  # noqa: B023
            lambda: dist.reduce_scatter(torch.zeros(1), list(torch.zeros(parts, 1))),  # noqa: B023
        ):
            if parts == size:
                call()
                continue
            kind, text = harness.raised(call)
            assert "parts for 2 ranks" in text or "has 2" in text, (kind, text)
    assert total(me.rank) == 7


def test_a_call_with_parts_for_fewer_ranks():
    with harness.Crew(3, backend=None) as crew:
        crew.call(calls_of_other_sizes)


# ---- groups within the default group


# Ranks of the job, by rank of the group. Ranks from 2 on come later.
LISTS = [[0, 2], [1, 3], [0, 1, 2, 3]]


def make_groups(me: harness.Rank, is_late: bool) -> list[tuple[list[int], dist.ProcessGroup]]:
    """The groups of LISTS that have this rank, of the ranks that are there."""
    made = []
    for ranks in LISTS:
        there = ranks if is_late else [rank for rank in ranks if rank < 2]
        options = pg.MooncakeBackendOptions(len(ranks), is_late)
        group = dist.new_group(there, pg_options=options)
        if me.rank in there:
            made.append((ranks, group))
    return made


def calls_of(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Calls of all ranks of a group, which has these ranks of the job."""
    # A new process may have named further ones.
    assert dist.get_process_group_ranks(group)[: len(ranks)] == ranks
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    assert size == len(ranks)
    assert ranks[rank] == dist.get_rank()
    assert pg.get_active_ranks(group)[:size].tolist() == [1] * size
    own = torch.tensor([float(dist.get_rank())])
    parts = list(torch.zeros(size, 1))
    dist.all_gather(parts, own, group=group)
    assert [int(part) for part in parts] == ranks
    mine = torch.zeros(1)
    dist.reduce_scatter_tensor(mine, torch.arange(float(size)), group=group)
    assert mine.item() == size * rank
    got = torch.zeros(size)
    dist.all_to_all_single(got, own.repeat(size), group=group)
    assert got.tolist() == ranks
    for root in ranks:
        one = own.clone()
        dist.broadcast(one, root, group=group)
        assert one.item() == root
    left, right = ranks[(rank - 1) % size], ranks[(rank + 1) % size]
    if size > 1:
        got = torch.zeros(1)
        works = [dist.irecv(got, left, group=group), dist.isend(own, right, group=group)]
        for work in works:
            work.wait()
        assert got.item() == left
    dist.barrier(group=group)


def let_in(group, ranks: list[int]) -> None:
    harness.until(lambda: all(pg.get_peer_state(group, ranks)), f"ranks {ranks}")
    assert pg.recover_ranks(group, ranks).status is APPLIED


def subgroups(me: harness.Rank, steps: list[list[int]]):
    """`steps`: the ranks that come at once."""
    is_late = begin(me, 2, 4)
    groups = make_groups(me, is_late)
    world = dist.group.WORLD
    there = {0, 1}

    def check() -> None:
        every_call(len(there), me.rank)
        for ranks, group in groups:
            calls_of(group, [rank for rank in ranks if rank in there])

    if not is_late:
        check()
    for new in steps:
        if me.rank in new:
            for _, group in groups:
                assert pg.get_active_ranks(group).sum() == 1
            pg.join_group(world)
            for _, group in groups:
                pg.join_group(group)
        elif me.rank in there:
            let_in(world, new)
            for ranks, group in groups:
                places = [place for place, rank in enumerate(ranks) if rank in new]
                if places:
                    let_in(group, places)
        there |= set(new)
        if me.rank in there:
            check()
    return sorted(there)


@pytest.mark.parametrize("steps", [[[2, 3]], [[2], [3]]], ids=str)
@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
def test_groups_within_the_default_group_grow(steps, transports):
    with harness.Crew(4, backend=None, env={"MOONCAKE_TRANSPORTS": transports}) as crew:
        assert crew.call(subgroups, steps) == [[0, 1, 2, 3]] * 4


def other_ranks(me: harness.Rank):
    """The new process makes its group with other ranks than the members have."""
    is_late = begin(me, 2, 3)
    ranks = [0, 2] if is_late else [0, 1]
    options = pg.MooncakeBackendOptions(3, is_late)
    group = dist.new_group(ranks, pg_options=options, timeout=timedelta(seconds=2))
    world = dist.group.WORLD
    if is_late:
        pg.join_group(world)
        kind, text = harness.raised(pg.join_group, group)
        assert "was not let into group" in text, (kind, text)
        me.board.set("refused")
    else:
        let_in(world, [2])
        me.board.wait("refused")
        assert pg.get_peer_state(group, [1, 2]) == [True, False]
        calls_of(group, [0, 1])
    every_call(3, me.rank)


def test_a_new_process_with_other_ranks_is_not_let_in():
    with harness.Crew(3, backend=None) as crew:
        crew.call(other_ranks)
        text = crew.log(0)
    assert "rank 2 does not come into a group that has ranks 0, 1 here and ranks 0, 2 there" in text


def in_a_full_job(me: harness.Rank):
    """A group has room, and no rank of the job is missing."""
    me.init("mooncake-cpu")
    options = pg.MooncakeBackendOptions(max_group_size=3)
    group = dist.new_group([0, 1], pg_options=options)
    if me.rank < 2:
        calls_of(group, [0, 1])
        assert pg.get_active_ranks(group).tolist() == [1, 1, 0]
        assert pg.get_peer_state(group, [0, 1, 2]) == [True, True, False]
    return total(me.rank)


def test_a_group_with_room_in_a_full_job():
    with harness.Crew(3, backend=None) as crew:
        assert crew.call(in_a_full_job) == [7] * 3


def larger_room(me: harness.Rank):
    """A new process asks for more room than the job has."""
    is_late = begin(me, 2, 6 if me.rank == 2 else 3)
    world = dist.group.WORLD
    if is_late:
        pg.join_group(world)
    else:
        let_in(world, [2])
    every_call(3, me.rank)


def test_a_new_process_with_a_larger_room():
    with harness.Crew(3, backend=None) as crew:
        crew.call(larger_room)
