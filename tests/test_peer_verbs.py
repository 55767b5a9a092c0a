"""The collectives that kernels do on tensors of a device: results, and verdicts after a loss."""

from __future__ import annotations

import os
import signal
import time

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import raised
from peer_ranks import LIMIT, crew, run, runs_kernels

REDUCING = ["all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter"]
MOVING = ["all_gather_into_tensor", "all_gather", "broadcast", "gather", "scatter"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]


def verbs_on_rank(me):
    for seed, count in enumerate([0, 1, 5, 64, 1000, 4000, 9001]):
        for verb in [*REDUCING, *MOVING]:
            for root in range(me.size if verb in ROOTED else 1):
                oracle.exercise(verb, count=count, seed=seed, root=root)
    for verb in [*REDUCING, *MOVING]:
        for layout in oracle.LAYOUTS:
            for count in [60, 5000]:
                oracle.exercise(verb, count=count, layout=layout, seed=7, root=me.size - 1)
        runs_kernels(lambda verb=verb: oracle.exercise(verb, count=8), 1)
        # Above the limit: a kernel waits until all ranks have come, and one does all pieces.
        runs_kernels(lambda verb=verb: oracle.exercise(verb, count=LIMIT), 2)
    runs_kernels(lambda: oracle.exercise("all_gather_coalesced", count=8), 0)
    runs_kernels(dist.barrier, 0)


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
    flat = torch.full((me.size, LIMIT), -1.0)  # pieces, with the input in an output of another rank
    flat[(me.rank + 1) % me.size] = torch.arange(LIMIT) + 7.0 * me.rank
    dist.all_gather(list(flat), flat[(me.rank + 1) % me.size])
    for rank in range(me.size):
        assert torch.equal(flat[rank], torch.arange(LIMIT) + 7.0 * rank)
    for longest in (1, 5, 2 * LIMIT):  # several lengths, and one of them may be 0
        uneven = [torch.full((rank * longest,), -1.0) for rank in range(me.size)]
        mine = torch.arange(float(me.rank * longest)) + 7.0 * me.rank
        runs_kernels(lambda uneven=uneven, mine=mine: dist.all_gather(uneven, mine), 1)
        for rank, part in enumerate(uneven):
            assert torch.equal(part, torch.arange(float(rank * longest)) + 7.0 * rank)
        mine = uneven[me.rank]  # the input is its own output
        mine += 1
        dist.all_gather(uneven, mine)
        for rank, part in enumerate(uneven):
            assert torch.equal(part, torch.arange(float(rank * longest)) + 7.0 * rank + 1)


def test_lists():
    run(3, lists_on_rank)


def premultiplied_on_rank(me):
    """The bits of the CPU's operation, with a number or a tensor of any device as the factor."""
    calls = {
        "all_reduce": lambda given, out, op: dist.all_reduce(given, op) or given,
        "reduce": lambda given, out, op: dist.reduce(given, 1, op) or given,
        "reduce_scatter_tensor": lambda given, out, op: dist.reduce_scatter_tensor(out, given, op),
        "reduce_scatter": lambda given, out, op: dist.reduce_scatter(
            out, list(given.view(me.size, -1)), op
        ),
    }
    on_cpu = dist.new_group(backend="mooncake-cpu")
    factors = [0.37 + me.rank, torch.tensor(1.7), torch.tensor([2.3], device="cpu")]
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]:
        for factor in factors:
            for count in (12, me.size * LIMIT):
                summed = oracle.contents(3, me.rank, count, dtype)
                host = summed.cpu()
                host_factor = factor.cpu() if isinstance(factor, torch.Tensor) else factor
                dist.all_reduce(host, dist._make_nccl_premul_sum(host_factor), group=on_cpu)
                op = dist._make_nccl_premul_sum(factor)
                for verb, call in calls.items():
                    given = summed.clone()
                    out = torch.empty(count // me.size, dtype=dtype)
                    runs_kernels(
                        lambda call=call, given=given, out=out, op=op: call(given, out, op),
                        1 + (count > 12),
                    )
                    if verb == "reduce" and me.rank != 1:
                        oracle.same(given.cpu(), summed.cpu(), "the input of reduce")
                    elif "scatter" in verb:
                        part = host.view(me.size, -1)[me.rank]
                        oracle.same(out.cpu(), part, f"{verb} of {dtype}")
                        oracle.same(given.cpu(), summed.cpu(), f"the input of {verb}")
                    else:
                        oracle.same(given.cpu(), host, f"{verb} of {dtype}")
    # A graph multiplies anew in each replay.
    module = torch.get_device_module(DEVICE)
    summed, graph = torch.empty(8), module.CUDAGraph()
    on_device = dist._make_nccl_premul_sum(torch.tensor(2.0))
    with module.graph(graph):
        kind, text = raised(dist.all_reduce, summed, on_device)
        assert kind == "NotImplementedError"
        assert "the factor of PREMUL_SUM is on a device" in text
        dist.all_reduce(summed, dist._make_nccl_premul_sum(2.0))
    for number in range(3):
        summed.fill_(float(me.rank + number))
        graph.replay()
        assert summed.tolist() == [2.0 * sum(rank + number for rank in range(me.size))] * 8


def test_premultiplied_sums():
    run(2, premultiplied_on_rank)


def only(tensor):
    """The value of all elements."""
    values = tensor.unique().tolist()
    assert len(values) == 1, values
    return int(values[0])


def call(verb, root, number, me, count=60):
    """Calls a verb with a root. Returns what this rank has afterwards, as a list. After an error
    the outputs must have their old contents."""
    mine = torch.full((count,), float((1 << me.rank) + 1000 * number))
    is_root = me.rank == root
    parts = [mine + 100 * rank for rank in range(me.size)] if is_root else None
    places = [torch.full((count,), -1.0) for _ in range(me.size)] if is_root else None
    place = torch.full((count,), -1.0)
    try:
        if verb == "broadcast":
            dist.broadcast(mine, root)
            return [only(mine)]
        if verb == "reduce":
            dist.reduce(mine, root)
            return [only(mine)]
        if verb == "gather":
            dist.gather(mine, places, root)
            return [only(place) for place in places or []]
        dist.scatter(place, parts, root)
        return [only(place)]
    except dist.DistBackendError:
        assert only(mine) == (1 << me.rank) + 1000 * number
        assert only(place) == -1
        raise


def until_the_root_is_lost(me, verb, victim, count):
    """Calls with all ranks as roots, of which one dies. Returns what each call gave: a list, or the
    kind of its error and the text's beginning."""
    found, after = [], 0
    while after < 12:
        number = len(found)
        if me.rank == victim and number == 31:
            os.kill(os.getpid(), signal.SIGKILL)
        root = number % me.size
        try:
            found.append(call(verb, root, number, me, count))
        except dist.DistBackendError as error:
            found.append((type(error).__name__, str(error)[:300]))
        after += dist.get_world_size() > 0 and isinstance(found[-1], tuple)
        assert number < 3000
    return found


WAYS = {
    "kernels": ({}, 60),
    "pieces": ({}, 3 * LIMIT),
    "staged": ({"MOONCAKE_PEER_BYTES": "0"}, 60),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ROOTED)
def test_a_root_is_lost(verb, way):
    """Each call with the lost root fails on all survivors. Others go on. It is the same where the
    calls are staged."""
    victim = 1
    env, count = WAYS[way]
    ranks = crew(3, env={"MOONCAKE_BLOCKING_WAIT": "1", **env})
    ranks.start(until_the_root_is_lost, verb, victim, count)
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


def large_until_one_dies(me, verb, after):
    """Calls of many pieces. Returns the value of each result, whose elements must all be equal: one
    call has one set of contributors."""
    found = []
    while not found or found[-1] % 100 == 2**me.size - 1 or len(found) < after:
        number = len(found)
        if number == 5:
            me.board.set(f"going-{me.rank}")
        mine = torch.full((me.size if verb != "all_reduce" else 1, 5 * LIMIT), float(1 << me.rank))
        mine += 100 * number
        if verb == "all_reduce":
            dist.all_reduce(mine)
            result = mine
        else:
            result = torch.zeros(5 * LIMIT)
            dist.reduce_scatter_tensor(result, mine)
        found.append(only(result))
        assert number < 3000
    return found


@pytest.mark.parametrize("delay", [0.0, 0.004, 0.011, 0.023])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_tensor"])
def test_a_rank_dies_within_a_call_of_many_pieces(verb, delay):
    ranks = crew(3, env={"MOONCAKE_BLOCKING_WAIT": "1"})
    ranks.start(large_until_one_dies, verb, 8)
    ranks.board.wait_all("going", [0, 1, 2])
    time.sleep(delay)
    ranks.kill(2)
    results = ranks.results(dead=[2])
    ranks.end()
    assert results[0] == results[1]
    for number, value in enumerate(results[0]):
        assert value in (7 + 300 * number, 3 + 200 * number), (number, value)


def large_with_a_late_rank(me):
    for number in range(10):
        mine = torch.full((5 * LIMIT,), float((1 << me.rank) + 100 * number))
        work = dist.all_reduce(mine, async_op=True)
        if me.rank == 1 and number == 5:
            me.board.set("going")
        work.wait()
        assert only(mine) == 7 + 300 * number


@pytest.mark.parametrize("delay", [0.0, 0.007])
def test_a_rank_stops_within_a_call_of_many_pieces(delay):
    ranks = crew(3)
    ranks.start(large_with_a_late_rank)
    ranks.board.wait("going")
    time.sleep(delay)
    ranks.stop(1)
    time.sleep(0.3)
    ranks.cont(1)
    ranks.results()
    ranks.close()
