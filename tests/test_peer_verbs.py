"""The collectives that kernels do on tensors of a device: results, and verdicts after a loss."""

from __future__ import annotations

import os
import signal
import time

import oracle
import pytest
import torch
import torch.distributed as dist
from peer_ranks import LIMIT, crew, run, runs_kernels

REDUCING = ["all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter"]
MOVING = ["all_gather_into_tensor", "all_gather", "broadcast", "gather", "scatter"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]


def verbs_on_rank(me):
    for seed, count in enumerate([0, 1, 5, 64, 1000, 4000, 9000]):
        for verb in [*REDUCING, *MOVING]:
            for root in range(me.size if verb in ROOTED else 1):
                oracle.exercise(verb, count=count, seed=seed, root=root)
    for verb in [*REDUCING, *MOVING]:
        for layout in oracle.LAYOUTS:
            oracle.exercise(verb, count=60, layout=layout, seed=7, root=me.size - 1)
        runs_kernels(lambda verb=verb: oracle.exercise(verb, count=8), 1)
    for verb in ["all_to_all_single", "all_to_all", "all_gather_coalesced"]:
        runs_kernels(lambda verb=verb: oracle.exercise(verb, count=8), 0)
    runs_kernels(dist.barrier, 0)
    runs_kernels(lambda: dist.all_reduce(torch.ones(LIMIT)), 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_verbs(size):
    run(size, verbs_on_rank)


def types_on_rank(me):
    for dtype in [*oracle.REAL, *oracle.COMPLEX]:
        for op in oracle.OPS:
            if oracle.reducible(dtype, op):
                for verb in REDUCING if op == "AVG" else ["all_reduce", "reduce_scatter_tensor"]:
                    oracle.exercise(verb, op=op, dtype=dtype, count=37, seed=3, root=1)
    for dtype in oracle.MOVED_ONLY:
        for verb in MOVING:
            oracle.exercise(verb, dtype=dtype, count=37, seed=3, root=2)


def test_types_and_reductions():
    run(3, types_on_rank)


def lists_on_rank(me):
    """The parts of a list lie anywhere: among other elements, or in the place of the input."""
    matrix = torch.arange(12.0).reshape(4, 3) + 100 * me.rank
    columns = [torch.zeros(4, 3) for _ in range(me.size)]
    dist.all_gather([whole[:, 1] for whole in columns], matrix[:, 2])
    for rank, whole in enumerate(columns):
        assert whole[:, 1].tolist() == [2 + 3 * i + 100 * rank for i in range(4)]
        assert whole[:, 0].tolist() == whole[:, 2].tolist() == [0.0] * 4
    flat = torch.full((me.size * 4,), float(me.rank))
    parts = list(flat.split(4))
    dist.all_gather(parts, parts[me.rank])
    assert flat.tolist() == [float(i // 4) for i in range(me.size * 4)]
    # Lists of other sizes are staged, on all ranks.
    uneven = [torch.zeros(rank + 1) for rank in range(me.size)]
    runs_kernels(lambda: dist.all_gather(uneven, torch.full((me.rank + 1,), float(me.rank))), 0)
    assert [part.unique().tolist() for part in uneven] == [[float(r)] for r in range(me.size)]


def test_lists():
    run(3, lists_on_rank)


def call(verb, root, number, me):
    """Calls a verb with a root. Returns what this rank has afterwards, as a list."""
    mine = torch.full((60,), float((1 << me.rank) + 1000 * number))
    is_root = me.rank == root
    if verb == "broadcast":
        dist.broadcast(mine, root)
        return [int(mine[0])]
    if verb == "reduce":
        dist.reduce(mine, root)
        return [int(mine[0])]
    if verb == "gather":
        places = [torch.full((60,), -1.0) for _ in range(me.size)] if is_root else None
        dist.gather(mine, places, root)
        return [int(place[59]) for place in places or []]
    parts = [mine + 100 * rank for rank in range(me.size)] if is_root else None
    place = torch.full((60,), -1.0)
    dist.scatter(place, parts, root)
    return [int(place[30])]


def until_the_root_is_lost(me, verb, victim):
    """Calls with all ranks as roots, of which one dies. Returns what each call gave: a list, or the
    kind of its error and the text's beginning."""
    found, after = [], 0
    while after < 12:
        number = len(found)
        if me.rank == victim and number == 31:
            os.kill(os.getpid(), signal.SIGKILL)
        root = number % me.size
        try:
            found.append(call(verb, root, number, me))
        except dist.DistBackendError as error:
            found.append((type(error).__name__, str(error)[:300]))
        after += dist.get_world_size() > 0 and isinstance(found[-1], tuple)
        assert number < 3000
    return found


@pytest.mark.parametrize("env", [{}, {"MOONCAKE_PEER_BYTES": "0"}], ids=["kernels", "staged"])
@pytest.mark.parametrize("verb", ROOTED)
def test_a_root_is_lost(verb, env):
    """Each call with the lost root fails on all survivors. Others go on. It is the same where the
    calls are staged."""
    victim = 1
    ranks = crew(3, env={"MOONCAKE_BLOCKING_WAIT": "1", **env})
    ranks.start(until_the_root_is_lost, verb, victim)
    results = ranks.results(dead=[victim])
    ranks.end()
    survivors = [0, 2]
    last = max(i for i, one in enumerate(results[0]) if not isinstance(one, tuple) and i % 3 == 1)
    for rank in survivors:
        for number, one in enumerate(results[rank]):
            root = number % 3
            if root == victim and number > last:
                assert isinstance(one, tuple), (rank, number, one)
                assert one[0] == "PeerLostError"
                assert "the root, rank 1, is lost" in one[1], one
            else:
                assert not isinstance(one, tuple), (rank, number, one)
                check(verb, rank, root, number, one, number > last + 2)
    assert len(results[0]) == len(results[2])


def check(verb, rank, root, number, one, is_after):
    given = [(1 << r) + 1000 * number for r in range(3)]
    if verb == "broadcast":
        assert one == [given[root]]
    elif verb == "scatter":
        assert one == [given[root] + 100 * rank]
    elif rank != root:
        assert one == ([given[rank]] if verb == "reduce" else [])
    elif is_after:
        assert one == ([given[0] + given[2]] if verb == "reduce" else [given[0], 0, given[2]])
    else:
        assert one in (
            [[sum(given)], [given[0] + given[2]]] if verb == "reduce"
            else [given, [given[0], 0, given[2]]]
        )  # fmt: skip


def later_call_raises(me):
    """The root's loss is known after wait() has returned: a later call raises it, once."""
    tensor = torch.full((40,), float(me.rank))
    dist.broadcast(tensor, 1)
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.set("going")
        os.kill(os.getpid(), signal.SIGKILL)
    me.board.wait("going")
    tensor = torch.full((7, 6), float(me.rank + 5)).t()
    errors = []
    for count in range(2000):
        try:
            dist.broadcast(tensor, 1) if not count else dist.all_reduce(torch.ones(4))
        except dist.DistBackendError as error:
            errors.append((type(error).__name__, "the root, rank 1, is lost" in str(error)))
        if errors and count > 50:
            break
        time.sleep(0.001)
    torch.accelerator.synchronize()
    assert errors == [("PeerLostError", True)]
    assert tensor.unique().tolist() == [float(me.rank + 5)]


def test_a_later_call_raises_that_a_root_is_lost():
    ranks = crew(3)
    ranks.start(later_call_raises)
    ranks.results(dead=[1])
    ranks.end()


def late_root(me, verb):
    for number in range(18):
        if me.rank == 2 and number == 8:
            me.board.set("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        root = number % me.size
        check(verb, me.rank, root, number, call(verb, root, number, me), False)


@pytest.mark.parametrize("verb", ROOTED)
def test_a_stopped_root_is_waited_for(verb):
    ranks = crew(3)
    ranks.start(late_root, verb)
    ranks.board.wait("stopping")
    time.sleep(0.4)  # longer than the patience of kernels
    ranks.cont(2)
    ranks.results()
    ranks.close()
