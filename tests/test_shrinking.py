"""torch.distributed.shrink_group: a smaller group takes the place of a group, while ranks live or
after they have died."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import cards
import harness
import pytest
import torch
import torch.distributed as dist
from harness import raised, until
from test_rejoin import KINDS, TOKENS, tokens
from torch.nn.parallel import DistributedDataParallel

import mooncake_backend as mb
from mooncake import pg
from mooncake_backend import extension
from mooncake_backend.group import backend_of

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "shrink_group"), reason="torch shrinks groups since 2.10"
)

SIZE = 4
LARGE = 200_000
# Longer than a test: a stopped rank is not taken for dead.
PATIENT = {"MOONCAKE_FAILURE_TIMEOUT_MS": "600000"}
MODES = ["continue", "raise"]


def over(transports: str, mode: str = "continue") -> dict[str, str]:
    return {**cards.over(transports), "MOONCAKE_ON_FAILURE": mode}


def check(me: harness.Rank, group, left: list[int], names: list[int] | None = None) -> None:
    """The group has these ranks of the crew, all of them in, and its calls work. `names`: their
    global ranks."""
    size, rank = len(left), left.index(me.rank)
    names = left if names is None else names
    assert (group.size(), group.rank()) == (size, rank)
    assert dist.get_process_group_ranks(group) == names
    assert mb.get_active_ranks(group).tolist() == [1] * size
    for count in (3, LARGE):
        tensor = torch.full((count,), 2.0**me.rank)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert (tensor == sum(2**r for r in left)).all()
        assert work.contributors == list(range(size))
        for root in range(size):
            tensor = torch.full((count,), float(me.rank))
            dist.broadcast(tensor, group_src=root, group=group)
            assert (tensor == left[root]).all()
            tensor = torch.full((count,), float(me.rank))
            is_default = group is dist.group.WORLD
            dist.broadcast(tensor, root if is_default else names[root], group=group)
            assert (tensor == left[root]).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": me.rank}, group=group)
    assert objects == [{"rank": r} for r in left]
    if size > 1:
        after, before = (rank + 1) % size, (rank - 1) % size
        got = torch.zeros(LARGE)
        work = dist.isend(torch.full((LARGE,), float(me.rank)), group_dst=after, group=group)
        dist.recv(got, group_src=before, group=group)
        assert (got == left[before]).all()
        work.wait()
    dist.barrier(group=group)


def check_default(me: harness.Rank, left: list[int]) -> None:
    """The default group has these ranks, and everything can be made of it."""
    world = dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(me.rank), len(left))
    check(me, world, left)
    for ranks in ([len(left) - 1], list(range(len(left))), list(range(1, len(left)))):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            check(me, group, [left[r] for r in ranks], ranks)
    part = world.split_group([0, len(left) - 1], group_name="part", opts=backend_of(world).options)
    if part is not None:
        tensor = torch.full((3,), 2.0**me.rank)
        part.allreduce([tensor]).wait()
        assert (tensor == sum({2 ** left[0], 2 ** left[-1]})).all()
    torch.manual_seed(me.rank)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((1, 3), float(me.rank))).sum().backward()
    mean = sum(left) / len(left)
    assert torch.allclose(model.module.weight.grad, torch.full((2, 3), mean))


def is_unblemished(crew: harness.Crew) -> bool:
    return not any("lost" in crew.log(rank) for rank in range(crew.size))


# ---- living ranks are excluded


def without_living(me: harness.Rank, excluded: list[int]):
    left = [r for r in range(me.size) if r not in excluded]
    dist.all_reduce(torch.ones(3))
    if me.rank in excluded:
        kind, text = raised(dist.shrink_group, excluded)
        assert (kind, "should not call shrink_group" in text) == ("RuntimeError", True), text
    else:
        old = dist.group.WORLD
        group = dist.shrink_group(excluded)
        assert group is dist.group.WORLD
        assert group is not old
        check_default(me, left)
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))
    return os.getpid()


@pytest.mark.parametrize("transports", ["shm", "tcp", "sim"])
@pytest.mark.parametrize("excluded", [[3], [1], [0, 2]])
def test_living_ranks_are_excluded(excluded, transports):
    if transports == "sim" and excluded != [1]:
        pytest.skip("one of them is enough")
    with harness.Crew(SIZE, env=over(transports)) as crew:
        crew.call(without_living, excluded)
        crew.call(destroys)
        assert is_unblemished(crew)


def destroys(me: harness.Rank) -> None:
    dist.destroy_process_group()


def goes_on(me: harness.Rank, excluded: list[int]):
    """The excluded ranks go on in the old group, without the rest."""
    left = [r for r in range(me.size) if r not in excluded]
    if me.rank in left:
        dist.shrink_group(excluded)
        me.board.set(f"shrunk-{me.rank}")
        check(me, dist.group.WORLD, left)
    else:
        me.board.wait_all("shrunk", left)
        work = dist.all_reduce(tensor := torch.full((3,), 2.0**me.rank), async_op=True)
        work.wait()
        assert work.contributors == excluded
        assert (tensor == sum(2**r for r in excluded)).all()
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


def test_excluded_ranks_go_on_among_themselves():
    harness.run_ranks(SIZE, goes_on, [1, 3])


# ---- after a loss


def init_over_tcp(me: harness.Rank) -> None:
    """Rank 0's process has the server of the store."""
    dist.init_process_group(
        "mooncake-cpu",
        store=me.tcp_store(),
        rank=me.rank,
        world_size=me.size,
        timeout=timedelta(seconds=harness.DEADLINE),
    )


def without_dead(me: harness.Rank, victim: int, mode: str):
    init_over_tcp(me)
    world = dist.group.WORLD
    assert backend_of(world).on_failure == mode
    pair = dist.new_group([victim, 3])
    dist.all_reduce(torch.ones(3))
    me.board.set(f"up-{me.rank}")
    if me.rank == victim:
        signal.pause()
    if mode == "raise":
        until(lambda: mb.get_active_ranks(world)[victim] == 0, "the loss")
        assert raised(dist.all_reduce, torch.ones(3))[0] == "PeerLostError"
    elif me.rank == 1:  # the rest shrinks without a look whether it lives
        me.board.wait("dead")
    dist.shrink_group([victim])
    if me.rank == 3:
        assert raised(dist.all_reduce, torch.ones(1), group=pair)[0] == "ValueError"
    check_default(me, [r for r in range(me.size) if r != victim])
    dist.destroy_process_group()


@pytest.mark.parametrize("victim", [2, 0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_dead_rank_is_excluded(transports, mode, victim):
    """Also with the store, which is in rank 0's process."""
    with harness.starting(
        SIZE, without_dead, victim, mode, backend=None, env=over(transports, mode)
    ) as crew:
        crew.board.wait_all("up", range(SIZE))
        crew.kill(victim)
        crew.board.set("dead")
        crew.results(dead=[victim])


def with_a_hole(me: harness.Rank, victim: int, excluded: list[int]):
    """The victim dies while it shrinks the group, and stays in its place."""
    left = [r for r in range(me.size) if r not in excluded]
    if me.rank in excluded:
        me.board.wait("never")
    if me.rank == victim:
        extension.load().arm_failpoint("part-told", me.board.wait("pass"), False)
    group = dist.shrink_group(excluded)
    work = dist.all_reduce(tensor := torch.full((3,), 2.0**me.rank), async_op=True)
    work.wait()
    alive = [r for r in left if r != victim]
    until(lambda: mb.get_active_ranks(group)[left.index(victim)] == 0, "the loss")
    work = dist.all_reduce(tensor := torch.full((3,), 2.0**me.rank), async_op=True)
    work.wait()
    assert work.contributors == [left.index(r) for r in alive]
    assert (tensor == sum(2**r for r in alive)).all()
    assert group.size() == len(left)


@pytest.mark.parametrize("nth", [1, 2])  # while the lists are compared, while the group is made
@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_dies_while_the_group_shrinks(victim, nth):
    with harness.starting(SIZE + 1, with_a_hole, victim, [2]) as crew:
        crew.board.set("pass", nth)
        crew.results(dead=[victim, 2])


# ---- again, and other groups


def again(me: harness.Rank):
    """Ranks 1, then 0, then 4 of the crew leave: by the numbers of the group before."""
    left = list(range(me.size))
    for gone in (1, 0, 4):
        excluded = left.index(gone)
        if me.rank == gone:
            break
        dist.shrink_group([excluded])
        left.remove(gone)
        check_default(me, left)
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


def test_a_group_shrinks_again():
    with harness.Crew(6) as crew:
        crew.call(again)
        crew.call(destroys)
        assert is_unblemished(crew)


def subgroups(me: harness.Rank):
    """Two groups shrink while the default group goes on. Then the default group shrinks, and torch
    aborts both."""
    for ranks, excluded in (([1, 2, 3], [0]), ([0, 1, 3], [1])):
        group = dist.new_group(ranks)
        left = [r for i, r in enumerate(ranks) if i not in excluded]
        if me.rank in left:
            smaller = dist.shrink_group(excluded, group)
            check(me, smaller, left)
            if len(left) > 1:
                smallest = left[1:]
                if me.rank in smallest:
                    smaller = dist.shrink_group([0], smaller)
                    check(me, smaller, smallest)
        check(me, dist.group.WORLD, list(range(me.size)))
    if me.rank == 0:
        return
    dist.shrink_group([0])
    check_default(me, list(range(1, me.size)))


def test_groups_beside_the_default_one():
    with harness.Crew(SIZE) as crew:
        crew.call(subgroups)
        assert is_unblemished(crew)


def with_grown(me: harness.Rank, late: int):
    """A rank that came later is as good as any other."""
    is_late = me.rank == late
    if is_late:
        me.board.wait("begun")
    dist.init_process_group(
        "mooncake-cpu",
        store=dist.FileStore(str(me.folder / "store"), late),
        rank=me.rank,
        world_size=late + int(is_late),
        pg_options=pg.MooncakeBackendOptions(6, is_late),
    )
    world = dist.group.WORLD
    if is_late:
        pg.join_group(world)
    else:
        if me.rank == 0:
            me.board.set("begun")
            until(lambda: pg.get_peer_state(world, [late]) == [True], "a new rank")
            pg.recover_ranks(world, [late])
        until(lambda: dist.get_world_size() == me.size, "that the group has grown")
    if me.rank != 1:
        dist.shrink_group([1])
        check_default(me, [r for r in range(me.size) if r != 1])
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


def test_a_group_that_has_grown_shrinks():
    harness.run_ranks(SIZE, with_grown, SIZE - 1, backend=None)


def with_renewed(me: harness.Rank, victim: int):
    """A process in the place of a dead rank is as good as any other."""
    is_new = "MOONCAKE_REJOIN" in os.environ
    me.init("mooncake-cpu")
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
    if me.rank != 1:
        dist.shrink_group([1])
        check_default(me, [r for r in range(me.size) if r != 1])
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


def test_a_group_with_a_replaced_rank_shrinks():
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(with_renewed, 2)
        crew.board.wait_all("up", range(SIZE))
        crew.kill(2)
        crew.replace(2, with_renewed, 2)
        crew.results()


def renews_the_small(me: harness.Rank, victim: int):
    """A new process in a group that has been shrunk: it makes the same calls before it joins."""
    is_new = "MOONCAKE_REJOIN" in os.environ
    me.init("mooncake-cpu")
    if me.rank == 1:
        me.board.wait_all("done", [0, 2, 3])
        return
    left = [0, 2, 3]
    group = dist.shrink_group([1])
    if is_new:
        pg.join_group(group)
    else:
        me.board.set(f"up-{me.rank}")
        if me.rank == victim:
            signal.pause()
        place = left.index(victim)
        until(lambda: mb.get_active_ranks(group)[place] == 0, "the loss")
        until(lambda: pg.get_peer_state(group, [place]) == [True], "a newcomer")
        pg.recover_ranks(group, [place])
    check_default(me, left)
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", left)


@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_of_a_smaller_group_is_replaced(victim):
    with harness.Crew(SIZE, backend=None) as crew:
        crew.start(renews_the_small, victim)
        crew.board.wait_all("up", [0, 2, 3])
        crew.kill(victim)
        crew.replace(victim, renews_the_small, victim)
        crew.results()


# ---- works of the old group


def aborts(me: harness.Rank, is_over: bool):
    """Rank 2 is stopped in the middle: calls with it would not end by themselves. `is_over`: the
    group has been aborted before."""
    if me.rank == 2:
        me.board.set("stops", os.getpid())
        me.board.wait("never")
    me.board.wait("stopped")
    works = [
        dist.all_reduce(torch.ones(LARGE), async_op=True),
        dist.irecv(torch.zeros(3), 2),
    ]
    if is_over:
        dist.group.WORLD.abort()
        group = dist.shrink_group([2])
    else:
        group = dist.shrink_group([2], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    for work in works:
        assert "the process group was aborted" in raised(work.wait)[1]
    check(me, group, [0, 1, 3])
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", [0, 1, 3])


@pytest.mark.parametrize("is_over", [False, True])
def test_abort_ends_calls_with_a_stopped_rank(is_over):
    with harness.starting(SIZE, aborts, is_over, env=PATIENT) as crew:
        crew.board.wait("stops")
        crew.stop(2)
        crew.board.set("stopped")
        crew.results(dead=[2])


def waits_later(me: harness.Rank):
    """By default the works of the old group end as they do."""
    tensors = [torch.full((LARGE,), 2.0**me.rank) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if me.rank == 3:
        for work in works:
            work.wait()
        dist.destroy_process_group()
        return
    dist.shrink_group([3])
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert (tensor == 2.0**me.size - 1).all()
        assert work.contributors == list(range(me.size))
    check(me, dist.group.WORLD, [0, 1, 2])


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_works_are_waited_for_afterwards(transports):
    harness.run_ranks(SIZE, waits_later, env=over(transports))


# ---- experts


def with_experts(me: harness.Rank, kind: str):
    """A Buffer of the smaller group, while the program still holds a Buffer of the old one."""
    before = KINDS[kind](me)
    if me.rank in (1, 3):
        dist.shrink_group([0, 2])
        calls = KINDS[kind](harness.Rank(dist.get_rank(), 2, me.folder))
        weights, active = torch.full((TOKENS, 2), 0.5), torch.ones(2, dtype=torch.int32)
        for turn in range(3):
            x, chosen = tokens(me.rank, turn)
            # Each expert gives the row back as it is.
            assert torch.equal(calls.turn(turn, x, chosen, weights, active), x)
    del before
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_a_smaller_group(kind):
    harness.run_ranks(SIZE, with_experts, kind)


# ---- mistakes


def different_lists(me: harness.Rank):
    if me.rank == 3:
        me.board.wait_all("done", range(3))
        return
    before = dist.group.WORLD
    kind, text = raised(dist.shrink_group, [2, 3] if me.rank == 0 else [3])
    assert kind == "DistBackendError", text
    for words in ("rank 0", "without ranks 2, 3", "without rank 3", "ranks_to_exclude"):
        assert words in text, text
    # Nothing has changed, and the right call works.
    assert dist.group.WORLD is before
    me.board.set(f"done-{me.rank}")
    dist.shrink_group([3])
    check(me, dist.group.WORLD, [0, 1, 2])


def test_ranks_exclude_different_ranks():
    harness.run_ranks(SIZE, different_lists)


def nobody_comes(me: harness.Rank):
    if me.rank == 1:
        harness.set_timeout(1)
        kind, text = raised(dist.shrink_group, [2])
        assert kind == "DistBackendError", text
        assert "/shrink': rank 0 of 3 did not come to make it in time" in text, text
        harness.set_timeout(harness.DEADLINE)
        me.board.set("told")
    elif me.rank == 0:
        me.board.wait("told")
    check(me, dist.group.WORLD, list(range(me.size)))


def test_a_rank_that_does_not_come_is_named():
    harness.run_ranks(3, nobody_comes)


def refusals(me: harness.Rank):
    backend = backend_of(dist.group.WORLD)
    assert backend.supports_shrinking
    for excluded, words in (
        ([7], "rank 7 is not in a group of 2"),
        ([-1], "rank -1 is not in a group of 2"),
        ([me.rank], f"rank {me.rank} excludes itself"),
    ):
        kind, text = raised(backend.shrink, excluded)
        assert (kind, words in text) == ("ValueError", True), text
    assert raised(dist.shrink_group, [1 - me.rank], None, 2)[0] == "ValueError"
    if me.rank == 0:
        alone = dist.shrink_group([1], pg_options=backend.options)
        check(me, alone, [0])
        kind, text = raised(backend.shrink, [1])
        assert kind == "DistBackendError", text
    me.board.set(f"done-{me.rank}")
    me.board.wait_all("done", range(me.size))


def test_wrong_calls():
    harness.run_ranks(2, refusals)


# ---- nothing is left behind


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of memory."""
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        len(list(Path("/proc/self/task").iterdir())),
        len(Path("/proc/self/maps").read_text().splitlines()),
    )


def many_times(me: harness.Rank, turns: int):
    found = []
    for _ in range(turns):
        group = dist.new_group()
        if me.rank != me.size - 1:
            group = dist.shrink_group([me.size - 1], group)
            dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        found.append(resources())
    return found


def test_nothing_is_left_of_many_groups():
    for found in harness.run_ranks(3, many_times, 60):
        early, late = found[20], found[-1]
        assert late[:2] == early[:2], found
        assert late[2] <= early[2] + 10, found


# ---- docs


def test_the_program_of_the_page(tmp_path):
    page = (Path(__file__).parent.parent / "docs/changing.md").read_text(encoding="utf-8")
    program = re.search(r"<!-- shrink\.py.*?```python\n(.*?)```", page, re.DOTALL)
    shown = re.search(
        r"```bash\n(mooncake-run [^`]*? shrink\.py)\n```\n\n```text\n(.*?)```", page, re.DOTALL
    )
    assert program
    assert shown
    (tmp_path / "shrink.py").write_text(program[1], encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "mooncake_backend.run", *shown[1].split()[1:]],
        cwd=tmp_path, capture_output=True, text=True, timeout=harness.scaled(120),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lost" not in ended.stderr
    steps = [line for line in ended.stdout.splitlines(True) if line.startswith("step ")]
    assert "".join(steps) == shown[2]
