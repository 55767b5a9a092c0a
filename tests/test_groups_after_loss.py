"""Groups that are made after ranks were lost, or while they are: of those who are left."""

from __future__ import annotations

import signal
from datetime import timedelta

import cards
import devices
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, DEVICE_LAYOUT
from harness import raised, until

import mooncake_backend as mb
from mooncake_backend import MooncakeBackendOptions
from mooncake_backend.group import backend_of

LARGE = 200_000
SPLITS = hasattr(dist.ProcessGroup, "split_group")


def over(transports, **more):
    return {"env": {**cards.over(transports), **more}}


def lose(me, victim):
    """The victim is killed; returns, on the others, when all of them know it."""
    me.board.set(f"up-{me.rank}")
    if me.rank == victim:
        signal.pause()
    world = dist.group.WORLD
    until(lambda: mb.get_active_ranks(world)[victim] == 0, f"the loss of {victim}")
    me.board.set(f"knows-{me.rank}")
    me.board.wait_all("knows", [r for r in range(me.size) if r != victim])


def check(me, group, ranks, lost):
    """The group is of these ranks without the lost ones, from the beginning."""
    if me.rank not in ranks:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return
    left = [r for r in ranks if r not in lost]
    assert group.size() == len(ranks)
    assert group.rank() == ranks.index(me.rank)
    assert mb.get_active_ranks(group).tolist() == [int(r in left) for r in ranks]
    assert mb.get_current_epoch(group) == mb.get_current_epoch(dist.group.WORLD)
    for count in (10, LARGE):
        tensor = torch.full((count,), 2.0**me.rank)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert (tensor == sum(2**r for r in left)).all()
        assert work.contributors == [ranks.index(r) for r in left]
        assert mb.get_local_success(work)
        parts = [torch.full((count,), -1.0) for _ in ranks]
        dist.all_gather(parts, torch.full((count,), float(me.rank + 1)), group=group)
        for r, part in zip(ranks, parts, strict=True):
            assert (part == (r + 1 if r in left else 0)).all()
    for r in lost:
        if r in ranks:
            for call in (dist.send, dist.recv, dist.broadcast):
                assert raised(call, torch.ones(3), r, group=group)[0] == "PeerLostError"
    if len(left) > 1:
        low, high = left[0], left[-1]
        tensor = torch.full((LARGE,), 7.0)
        if me.rank == low:
            dist.send(tensor, high, group=group)
        elif me.rank == high:
            received = torch.zeros(LARGE)
            dist.recv(received, low, group=group)
            assert (received == 7).all()


def groups_on_rank(me, victim):
    lose(me, victim)
    everybody = list(range(me.size))
    left = [r for r in everybody if r != victim]
    on_failure = backend_of(dist.group.WORLD).on_failure
    mode = {"pg_options": MooncakeBackendOptions(on_failure=on_failure)}
    # First: torch names these by the number of groups that a rank is in. The same name twice.
    for _ in range(2):
        group = dist.new_group(everybody, use_local_synchronization=True, **mode)
        check(me, group, everybody, [victim])
        dist.destroy_process_group(group)
    for ranks in (everybody, left, [1, victim], [victim, 3]):
        ranks = sorted(ranks)
        check(me, dist.new_group(ranks, **mode), ranks, [victim])
    if SPLITS:
        half = dist.group.WORLD.split_group(sorted([1, 3, victim]), group_name="half")
        if me.rank in (1, 3):
            tensor = torch.full((LARGE,), 2.0**me.rank)
            half.allreduce([tensor]).wait()
            assert (tensor == 10).all()
        else:
            assert half is None
    if on_failure == "raise":  # in the group that had the lost rank
        assert raised(dist.all_reduce, torch.ones(1))[0] == "PeerLostError"
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work.contributors == left
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["continue", "raise"])
@pytest.mark.parametrize("transports", ["shm", "tcp", "sim", BLOCKING_DEVICE_LAYOUT])
def test_groups_are_made_of_the_survivors(transports, mode):
    options = over(transports, MOONCAKE_ON_FAILURE=mode)
    with harness.starting(4, groups_on_rank, 2, **options) as crew:
        crew.board.wait_all("up", range(4))
        crew.kill(2)
        crew.results(dead=[2])


def lost_meanwhile_on_rank(me, turns):
    """Rank 2 is there for some of the groups, and dies anywhere between them."""
    sums = []
    for turn in range(turns):
        me.board.set(f"turn-{turn}-{me.rank}")
        group = dist.new_group()
        work = dist.all_reduce(
            tensor := torch.full((10,), 2.0**me.rank), group=group, async_op=True
        )
        work.wait()
        assert (tensor == sum(2**r for r in work.contributors)).all()
        sums.append(work.contributors)
    return sums


@pytest.mark.parametrize("transports", ["shm", "tcp", DEVICE_LAYOUT])
@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_is_lost_while_a_group_is_made(transports, waits):
    function = waited_for_on_rank if waits else lost_meanwhile_on_rank
    with harness.starting(4, function, 6, **over(transports)) as crew:
        if waits:
            crew.board.wait_all("waiting", (0, 1, 3))
        else:
            crew.board.wait("turn-3-2")
        crew.kill(2)
        found = crew.results(dead=[2])
        assert found[0] == found[1] == found[3]
        assert found[0][-1] == [0, 1, 3]


def waited_for_on_rank(me, turns):
    """Rank 2 never comes."""
    if me.rank == 2:
        signal.pause()
    me.board.set(f"waiting-{me.rank}")
    return lost_meanwhile_on_rank(me, turns)


# ---- the store goes with rank 0


def with_store_in_rank_0(me):
    soon = timedelta(seconds=2)  # so long it tries to connect
    if me.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        me.board.set("port", store.port)
    else:
        store = dist.TCPStore("127.0.0.1", me.board.wait("port"), is_master=False, timeout=soon)
    dist.init_process_group(
        devices.served_by("mooncake"), store=store, rank=me.rank, world_size=me.size,
        timeout=timedelta(seconds=harness.DEADLINE),
    )  # fmt: skip
    lose(me, 0)
    ranks = list(range(me.size))
    for named in ({}, {"use_local_synchronization": True}):
        check(me, dist.new_group(**named), ranks, [0])
    check(me, dist.new_group([0, 2]), [0, 2], [0])
    if SPLITS:
        part = dist.group.WORLD.split_group([0, 1, 2], group_name="part")
        assert (part is None) == (me.rank == 3)
        if part is not None:
            part.allreduce([tensor := torch.ones(LARGE)]).wait()
            assert (tensor == 2).all()
        # torch itself asks the store that it is given, to number who comes.
        call = dist.group.WORLD.merge_remote_group
        store = dist.distributed_c10d._get_default_store()
        error = raised(call, dist.PrefixStore("merged", store), 3, timedelta(seconds=60))
        assert error[0] in ("DistNetworkError", "DistStoreError"), error
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == 3


@pytest.mark.parametrize("transports", ["shm", "tcp", BLOCKING_DEVICE_LAYOUT])
def test_groups_are_made_without_the_store(transports):
    with harness.starting(4, with_store_in_rank_0, backend=None, **over(transports)) as crew:
        crew.board.wait_all("up", range(4))
        crew.kill(0)
        crew.results(dead=[0])


# ---- torch's own barrier in the store, where somebody wants it


def barrier_on_rank(me):
    lose(me, 2)
    for named in ({}, {"use_local_synchronization": True}):
        check(me, dist.new_group(**named), list(range(me.size)), [2])
    check(me, dist.new_group([1, 3]), [1, 3], [2])


def test_torchs_barrier_after_making_a_group():
    with harness.starting(4, barrier_on_rank, **over("shm", TORCH_DIST_INIT_BARRIER="1")) as crew:
        crew.board.wait_all("up", range(4))
        crew.kill(2)
        crew.results(dead=[2])


# ---- groups that are merged

LONG = timedelta(seconds=10 * harness.DEADLINE)


def merge_of(me, name, size, group=None):
    group = group or dist.group.WORLD
    return group.merge_remote_group(me.store(name), size, LONG, group_name=name)


def sum_over(group):
    group.allreduce([tensor := torch.ones(LARGE)]).wait()
    assert (tensor == tensor[0]).all()
    return int(tensor[0])


def merge_after_a_loss_on_rank(me):
    lose(me, 2)
    error = raised(merge_of, me, "with the lost one", 4)
    assert error[0] == "DistBackendError", error
    assert "merge_remote_group of 4 ranks cannot be complete: rank 2 of group" in error[1]
    assert "3 of the ranks" in error[1]
    assert sum_over(merge_of(me, "of who is left", 3)) == 3
    dist.barrier()


def merge_while_one_dies_on_rank(me):
    if me.rank == 2:
        signal.pause()
    me.board.set(f"merges-{me.rank}")
    error = raised(merge_of, me, "while it dies", 4)
    assert error[0] == "DistBackendError", error
    assert "cannot be complete: rank 2 of group" in error[1]


def merge_of_two_groups_on_rank(me):
    """Ranks 0 and 1 know nothing of how many the others are, or that one of them is lost."""
    mine = [0, 1] if me.rank < 2 else [2, 3, 4]
    group = dist.new_group([0, 1]), dist.new_group([2, 3, 4])
    lose(me, 4)
    error = raised(merge_of, me, "two", 5, group[me.rank > 1])
    assert "rank 2 (global rank 4) of group" in error[1], (mine, error)
    assert sum_over(merge_of(me, "four", 4, group[me.rank > 1])) == 4


@pytest.mark.skipif(not SPLITS, reason="torch merges groups since 2.9")
@pytest.mark.parametrize("transports", ["shm", "tcp", DEVICE_LAYOUT])
@pytest.mark.parametrize(
    ("function", "size", "victim"),
    [
        (merge_after_a_loss_on_rank, 4, 2),
        (merge_while_one_dies_on_rank, 4, 2),
        (merge_of_two_groups_on_rank, 5, 4),
    ],
)
def test_merging_groups_that_have_lost_ranks(transports, function, size, victim):
    with harness.starting(size, function, **over(transports)) as crew:
        others = [r for r in range(size) if r != victim]
        if function is merge_while_one_dies_on_rank:
            crew.board.wait_all("merges", others)
        else:
            crew.board.wait_all("up", range(size))
        crew.kill(victim)
        crew.results(dead=[victim])
