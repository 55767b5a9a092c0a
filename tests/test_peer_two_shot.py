"""all_reduce by kernels in its two-shot form, for large inputs of three ranks and more: first each
rank reduces a segment, and then all ranks gather the segments."""

from __future__ import annotations

import os
import signal
import time

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from peer_ranks import crew, run, runs_kernels

SMALL = {"MOONCAKE_PEER_BYTES": "2048"}  # inputs above that go in pieces, and are two-shot
WHOLE = {"MOONCAKE_PEER_BYTES": str(1 << 20)}
COUNT = 200_003  # elements of 4 bytes: one piece, and two-shot on four ranks


def types_on_rank(me):
    for dtype in [*oracle.REAL, *oracle.COMPLEX]:
        size = torch.empty(0, dtype=dtype).element_size()
        for op in oracle.OPS:
            if oracle.reducible(dtype, op):
                for number in (2048 // size + 1, 7001 // size):
                    oracle.exercise("all_reduce", op=op, dtype=dtype, count=number, seed=5)


@pytest.mark.parametrize("size", [3, 4])
def test_types_and_reductions(size):
    run(size, types_on_rank, env=SMALL)


def layouts_on_rank(me):
    for layout in oracle.LAYOUTS:
        oracle.exercise("all_reduce", count=3001, layout=layout, seed=6)
    # The first kernel waits until all ranks have come.
    runs_kernels(lambda: oracle.exercise("all_reduce", count=3001), 2)


def test_layouts():
    run(3, layouts_on_rank, env=SMALL)


def whole_on_rank(me):
    for op in ("SUM", "AVG", "MAX"):
        runs_kernels(lambda op=op: oracle.exercise("all_reduce", op=op, count=COUNT, seed=8), 1)


def test_one_piece():
    run(4, whole_on_rank, env=WHOLE)


def only(tensor):
    """The value of all elements."""
    values = tensor.unique().tolist()
    assert len(values) == 1, values
    return int(values[0])


def sums_until_one_dies(me):
    """Returns the value of each sum, up to some without rank 3."""
    found, after = [], 0
    while after < 4:
        number = len(found)
        if number == 3:
            me.board.set(f"going-{me.rank}")
        mine = torch.full((COUNT,), float((1 << me.rank) + 100 * number))
        dist.all_reduce(mine)
        found.append(only(mine))
        after += found[-1] % 100 != 15
        assert number < 3000
    return found


def check(found, number_of_ranks=4):
    """One call has one set of contributors, which is the same on all survivors."""
    assert found[0] == found[1] == found[2]
    last = max(number for number, value in enumerate(found[0]) if value % 100 == 15)
    for number, value in enumerate(found[0]):
        ranks = number_of_ranks if number <= last else number_of_ranks - 1
        assert value == 2**ranks - 1 + 100 * ranks * number


@pytest.mark.parametrize("delay", [0.0, 0.011, 0.037])
def test_a_rank_dies_within_a_call_of_one_piece(delay):
    ranks = crew(4, env={"MOONCAKE_BLOCKING_WAIT": "1", **WHOLE})
    ranks.start(sums_until_one_dies)
    ranks.board.wait_all("going", range(4))
    time.sleep(delay)
    ranks.kill(3)
    results = ranks.results(dead=[3])
    ranks.end()
    check(results)


def replays_until_one_dies(me):
    module = torch.get_device_module(DEVICE)
    given, result = torch.empty(COUNT), torch.empty(COUNT)
    dist.all_reduce(torch.ones(4))  # sets up the kernels
    graph = module.CUDAGraph()
    with module.graph(graph):
        result.copy_(given)
        dist.all_reduce(result)
    found, after = [], 0
    while after < 4:
        number = len(found)
        given.fill_((1 << me.rank) + 100 * number)
        graph.replay()
        if me.rank == 3 and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        found.append(only(result))
        after += found[-1] % 100 != 15
        assert number < 3000
    return found


def test_a_rank_dies_between_replays():
    ranks = crew(4, env=WHOLE)
    ranks.start(replays_until_one_dies)
    results = ranks.results(dead=[3])
    ranks.end()
    check(results)
