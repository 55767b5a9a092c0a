"""Collectives through host memory in graphs of a device: see test_graphs.py, which has the steps
that do not depend on the way of the data."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from datetime import timedelta

import devices
import harness
import pytest
import test_graphs as common
import torch
import torch.distributed as dist
from harness import raised
from peer_ranks import crew, run
from test_graphs import Step, graphs, value_of

import mooncake_backend

STAGED = {"MOONCAKE_PEER_BYTES": "0"}


def staged(size, function, *args, **options):
    return run(size, function, *args, env=STAGED | options.pop("env", {}), **options)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_replays(size):
    staged(size, common.replays_on_rank)


def test_wait_may_block_the_host():
    staged(2, common.replays_on_rank, env={"MOONCAKE_BLOCKING_WAIT": "1"})


def test_graphs_and_calls_on_several_streams_keep_the_programs_order():
    staged(3, common.streams_on_rank)


def test_a_rank_may_call_what_another_one_replays():
    staged(3, common.mixed_on_rank)


def test_a_late_rank_is_waited_for():
    staged(3, common.late_on_rank)


def test_arguments_are_checked():
    staged(2, common.arguments_on_rank)


def test_layouts_and_futures():
    staged(2, common.layouts_on_rank)


# ---- the order of calls


def cpu_calls_on_rank(me):
    """Calls with CPU tensors come between replays in the program's order, although the program
    waits for nothing: they have another size than the operations beside them."""
    step = Step(me)
    works, tensors = [], []
    for round in range(30):
        values = [value_of(rank, round) for rank in range(me.size)]
        step.replay(values[me.rank])
        tensors.append(torch.full((3 + round,), values[me.rank], device="cpu"))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
        if round % 4 == 0:
            called = torch.full((7,), values[me.rank])
            dist.all_reduce(called)
            dist.barrier()
            assert called.unique().tolist() == [sum(values)]
        if round % 7 == 0:
            objects = [None] * me.size
            dist.all_gather_object(objects, (me.rank, round))
            assert objects == [(rank, round) for rank in range(me.size)]
    step.check([value_of(rank, 29) for rank in range(me.size)])
    for round, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        expected = sum(value_of(rank, round) for rank in range(me.size))
        assert tensor.unique().tolist() == [expected]


def test_calls_with_cpu_tensors_keep_their_place_between_replays():
    staged(3, cpu_calls_on_rank)


def other_device_on_rank(me):
    """Calls on another device keep their place between replays. Its graphs take no calls."""
    step = Step(me)
    other = torch.device(common.DEVICE, 1 - torch.accelerator.current_device_index())
    tensors, works = [], []
    for round in range(12):
        values = [value_of(rank, round) for rank in range(me.size)]
        step.replay(values[me.rank])
        tensors.append(torch.full((3 + round,), values[me.rank], device=other))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
    step.check(values)
    for round, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        expected = sum(value_of(rank, round) for rank in range(me.size))
        assert tensor.unique().tolist() == [expected]
    with graphs().graph(graphs().CUDAGraph(), stream=graphs().Stream(device=other)):
        kind, text = raised(dist.all_reduce, torch.ones(3, device=other))
        assert kind == "NotImplementedError", (kind, text)
        assert "graphs of" in text, text


def test_calls_on_another_device():
    staged(2, other_device_on_rank)


# ---- operations


def verbs_on_rank(me):
    ranks, size = range(me.size), me.size
    shape = (3, 5)
    given = torch.empty(shape)
    summed, reduced, sent = torch.empty(shape), torch.empty(shape), torch.empty(shape)
    gathered = [torch.empty(shape) for _ in ranks]
    rooted = [torch.empty(shape) for _ in ranks] if me.rank == 0 else None
    part, scattered = torch.empty(shape), torch.empty(shape)
    parts = [torch.empty(shape) for _ in ranks]
    exchanged = [torch.empty(shape) for _ in ranks]
    single, line = torch.empty(size * 4), torch.empty(size * 4)
    uneven = [torch.empty(rank + 1) for rank in ranks]
    scaled = torch.empty(shape)
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        for tensor in (summed, reduced, sent, scaled):
            tensor.copy_(given)
        for rank in ranks:
            parts[rank].copy_(given)
            parts[rank].mul_(rank + 2)
        dist.all_reduce(summed, op=dist.ReduceOp.PRODUCT)
        dist.reduce(reduced, 1 % size)
        dist.broadcast(sent, size - 1)
        dist.all_gather(gathered, given)
        dist.gather(given, rooted, 0)
        dist.scatter(scattered, parts if me.rank == 0 else None, 0)
        dist.reduce_scatter(part, parts)
        dist.all_to_all(exchanged, parts)
        dist.all_to_all_single(single, line)
        dist.all_gather(uneven, given.flatten()[: me.rank + 1].contiguous())
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    for round in range(4):
        values = [float(2 * round + rank + 1) for rank in ranks]
        mine = values[me.rank]
        given.fill_(mine)
        line.fill_(2 * mine)
        graph.replay()

        def same(tensor, value):
            assert tensor.unique().tolist() == [value], (tensor, value)

        product = 1.0
        for value in values:
            product *= value
        same(summed, product)
        same(reduced, sum(values) if me.rank == 1 % size else mine)
        same(sent, values[-1])
        for rank in ranks:
            same(gathered[rank], values[rank])
            same(exchanged[rank], values[rank] * (me.rank + 2))
            same(uneven[rank], values[rank])
            if rooted:
                same(rooted[rank], values[rank])
        same(scattered, values[0] * (me.rank + 2))
        same(part, sum(values) * (me.rank + 2))
        assert single.view(size, 4)[:, 0].tolist() == [2 * value for value in values]
        same(scaled, sum(values) / 2)


def test_operations():
    staged(3, verbs_on_rank)


def odd_tensors_on_rank(me):
    ranks = range(me.size)
    empty, whole = torch.empty(0), torch.empty(6, dtype=torch.int64)
    number = torch.empty((2, 3), dtype=torch.complex64)
    row, three = torch.empty(1), torch.empty(3)
    spread = [torch.empty(4) for _ in ranks]
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        dist.all_reduce(empty)
        dist.all_reduce(whole)
        dist.all_reduce(number.t())
        dist.all_gather(spread, row.expand(4))
        dist.all_reduce_coalesced([three, row])
    for round in range(3):
        values = [rank + 1 + 10 * round for rank in ranks]
        whole.fill_(values[me.rank])
        number.copy_(torch.full((2, 3), complex(1, values[me.rank])))
        row.fill_(values[me.rank])
        three.fill_(2 * values[me.rank])
        graph.replay()
        assert whole.unique().tolist() == [sum(values)]
        assert three.unique().tolist() == [2 * sum(values)]
        assert row.item() == sum(values)
        assert set(number.flatten().tolist()) == {complex(me.size, sum(values))}
        assert [part.unique().tolist() for part in spread] == [[value] for value in values]


def test_odd_tensors():
    staged(2, odd_tensors_on_rank)


def large_on_rank(me):
    """Above 1 MiB the operation begins while its input is still copied. A rank may call an
    operation that another one replays."""
    count = 700_001
    ramp = torch.arange(count, dtype=torch.float32) % 1000
    tensor, factor = torch.empty(count), torch.empty(1)
    graph = graphs().CUDAGraph()

    def body():
        torch.mul(ramp, factor, out=tensor)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    with graphs().graph(graph):
        body()
    for round in range(6):
        values = [value_of(rank, round) for rank in range(me.size)]
        factor.fill_(values[me.rank])
        if (round + me.rank) % 3:
            graph.replay()
        else:
            body()
        assert torch.equal(tensor, ramp * sum(values))


def test_large_inputs():
    staged(3, large_on_rank)


def large_inputs_of_verbs_on_rank(me):
    count, root = 700_001, 1
    factor, ramp = torch.empty(1), torch.arange(me.size * count, dtype=torch.float32) % 1000
    x, y, part, sums = torch.empty_like(ramp), *(torch.empty(count) for _ in range(3))
    gathered = torch.empty_like(ramp)
    graph = graphs().CUDAGraph()

    def body():
        torch.mul(ramp, factor, out=x)
        y.copy_(x[:count])
        dist.broadcast(y, root)
        dist.all_gather_into_tensor(gathered, x[:count])
        dist.reduce_scatter_tensor(sums, x)
        dist.scatter(part, list(x.view(me.size, count)) if me.rank == root else None, root)

    with graphs().graph(graph):
        body()
    first, mine = ramp[:count], ramp.view(me.size, count)[me.rank]
    for round in range(6):
        values = [float(1 + round * (rank + 1)) for rank in range(me.size)]
        factor.fill_(values[me.rank])
        if (round + me.rank) % 3:
            graph.replay()
        else:
            body()
        assert torch.equal(y, first * values[root])
        assert torch.equal(gathered, torch.cat([first * value for value in values]))
        assert torch.equal(sums, mine * sum(values))
        assert torch.equal(part, mine * values[root])


def test_large_inputs_of_verbs():
    staged(3, large_inputs_of_verbs_on_rank)


# ---- losses


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank(victim):
    common.survive(victim, STAGED)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_between_replays(victim):
    ranks = crew(3, env=STAGED)
    ranks.start(common.idle_loss_on_rank, victim)
    ranks.results(dead=[victim])
    ranks.end()


def test_several_ranks_die_one_after_the_other():
    common.lose_three(STAGED)


ROUNDS = 12
PASS = 8  # of the step at which a rank ends; each replay has two operations


def ends_at_a_step(me, victim, step, stops):
    from mooncake_backend import _C

    given, tensor, doubled = torch.empty(500), torch.empty(500), torch.empty(500)
    dist.all_reduce(torch.ones(4))
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        tensor.copy_(given)
        dist.all_reduce(tensor)
        doubled.copy_(given)
        doubled.mul_(2)
        dist.all_reduce(doubled)
    torch.accelerator.synchronize()
    if me.rank == victim:
        _C.arm_failpoint(step, PASS, stops)
    results = []
    for round in range(ROUNDS):
        given.fill_(float((1 << me.rank) + 1000 * round))
        graph.replay()
        called = torch.full((9,), float((1 << me.rank) + 1000 * round))
        dist.all_reduce(called)
        results.append([set(x.tolist()) for x in (tensor, doubled, called)])
    torch.accelerator.synchronize()
    return results, mooncake_backend.get_active_ranks(dist.group.WORLD, on_host=True).tolist()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("step", ["graph-rung", "stage-ran", "stage-given-back"])
def test_a_rank_ends_between_two_steps(step, stops, victim):
    """The survivors have the same result of each operation, and no stream is left waiting."""
    size = 3
    ranks = crew(size, env=STAGED | {"MOONCAKE_FAILURE_TIMEOUT_MS": "1500"})
    try:
        ranks.start(ends_at_a_step, victim, step, stops)
        outcomes = [one for one in ranks.results(dead=[victim]) if one]
    finally:
        ranks.end()
    assert outcomes[0] == outcomes[1]
    results, active = outcomes[0]
    assert active == [rank != victim for rank in range(size)]
    lost = 0
    for round, seen in enumerate(results):
        for factor, values in zip((1, 2, 1), seen, strict=True):
            everybody = factor * (7 + 3000 * round)
            rest = factor * (7 - (1 << victim) + 2000 * round)
            assert values in ({everybody}, {rest}), (round, values)
            assert values == {rest} or not lost, "a lost rank took part"
            lost += values == {rest}
    assert lost


def ends_between_pieces(me, victim, stops):
    from mooncake_backend import _C

    base = torch.arange(2_000_003, dtype=torch.float32) % 1000
    tensor, factor = torch.empty_like(base), torch.empty(1)
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        torch.mul(base, factor, out=tensor)
        dist.all_reduce(tensor)
    if me.rank == victim:
        _C.arm_failpoint("fed-piece", 11, stops)  # in the second operation of eight pieces
    results = []
    for round in range(4):
        factor.fill_(float((1 << me.rank) * (round + 1)))
        graph.replay()
        factors = (tensor[1:] / (base[1:] * (round + 1))).cpu()
        results.append(sorted(set(factors[~factors.isnan()].tolist())))
    return results


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("stops", [False, True], ids=["killed", "stopped"])
def test_a_rank_ends_between_two_pieces(stops, victim):
    """An operation has one set of contributors, and its inputs are not lost."""
    ranks = crew(3, env=STAGED | {"MOONCAKE_FAILURE_TIMEOUT_MS": "1500"})
    try:
        ranks.start(ends_between_pieces, victim, stops)
        outcomes = [one for one in ranks.results(dead=[victim]) if one]
    finally:
        ranks.end()
    assert outcomes == [[[7.0]] + [[7.0 - (1 << victim)]] * 3] * 2


def lost_root_on_rank(me):
    """A broadcast without its root fails. The outputs keep their contents, and a later call tells
    the error, once."""
    given, tensor, total = torch.empty(9), torch.empty(9), torch.empty(9)
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        tensor.copy_(given)
        dist.broadcast(tensor, 2)
        total.copy_(tensor)
        dist.all_reduce(total)

    def replay(value):
        given.fill_(value)
        graph.replay()
        torch.accelerator.synchronize()
        return tensor.unique().tolist(), total.unique().tolist()

    assert replay(float(me.rank + 1)) == ([3.0], [9.0])
    dist.barrier()
    if me.rank == 2:
        os._exit(3)
    active = mooncake_backend.get_active_ranks(dist.group.WORLD, on_host=True)
    harness.until(lambda: not active[2], "the loss")
    for round in range(3):
        mine = 10.0 * round + me.rank
        assert replay(mine) == ([mine], [20.0 * round + 1])
    kind, text = raised(dist.all_reduce, torch.ones(3))
    assert kind == "PeerLostError", (kind, text)
    assert "rank 2" in text, text
    dist.all_reduce(torch.ones(3))


def test_an_operation_that_fails_leaves_its_outputs():
    ranks = crew(3, env=STAGED)
    ranks.start(lost_root_on_rank)
    ranks.results(dead=[2])
    ranks.end()


@devices.on_fake_only
def late_copy_on_rank(me):
    """The rescue of three outputs is given up after its second copy, which comes late.
    It overwrites the inputs of the next replay, which are copied again."""
    from fake_device import control

    tensor, given, summed = torch.ones(8), torch.empty(100), torch.empty(100)
    outputs = [torch.full((8,), -7.0) for _ in range(me.size)]
    first, second = graphs().CUDAGraph(), graphs().CUDAGraph()
    with graphs().graph(first):
        if me.rank == 0:
            dist.all_gather(outputs, tensor)
        else:
            dist.all_reduce(tensor)
    with graphs().graph(second):
        summed.copy_(given)
        dist.all_reduce(summed)
    given.fill_(me.rank + 1)
    torch.accelerator.synchronize()
    if me.rank == 0:
        control.slow_copies(tensor.nbytes / 1.5)
        control.inject("copy", n=3)
    first.replay()
    torch.accelerator.current_stream().synchronize()
    control.slow_copies(0)
    time.sleep(2.5 if me.rank else 0)
    second.replay()
    torch.accelerator.synchronize()
    assert summed.unique().tolist() == [6.0]
    text = attempt(lambda: dist.all_reduce(torch.ones(3)))
    assert "different operations" in text, text


def test_a_copy_that_is_late_spoils_no_later_replay():
    ranks = crew(3, env=STAGED)
    ranks.start(late_copy_on_rank)
    ranks.results()
    assert "that failed are undefined" in ranks.log(0)
    ranks.end()


def absent_on_rank(me):
    """A rank that lives does not come. The operations end at the timeout on the others, and later
    on that rank, too. All outputs keep their contents, and the next replay works."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    step = Step(me, group)
    values = [value_of(rank, 0) for rank in range(me.size)]
    step.replay(values[me.rank])
    step.check(values)
    before = step.gathered.clone()
    torch.accelerator.synchronize()
    if me.rank == 1:
        me.board.wait_all("raised", [0, 2])
    step.replay(1.0)
    torch.accelerator.synchronize()  # it does not hang
    assert torch.equal(step.gathered, before)
    assert torch.equal(step.sums, step.ramp)
    text = attempt(lambda: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait())
    assert "all_reduce" in text, text
    assert me.rank == 1 or "rank 1" in text, text
    me.board.set(f"raised-{me.rank}")
    torch.accelerator.synchronize()
    values = [value_of(rank, 5) for rank in range(me.size)]
    step.replay(values[me.rank])
    step.check(values)


def test_a_rank_that_does_not_come():
    staged(3, absent_on_rank)


def attempt(call, *args):
    """Makes the call, and returns the text of the error that it raises: its own, or an earlier
    one's."""
    try:
        call(*args)
    except dist.DistBackendError as error:
        return str(error)
    return ""


def differs_on_rank(me):
    """A later call tells the errors of replays. The ranks stay together."""
    step = Step(me)
    told = []
    if me.rank == 1:
        for _ in range(4):
            outputs = [torch.empty(7), torch.empty(7)]
            told.append(attempt(dist.all_gather, outputs, torch.ones(7)))
    else:
        step.replay(1.0)
    torch.accelerator.synchronize()
    told += [attempt(dist.all_reduce, torch.ones(4)) for _ in range(2)]
    named = "".join(told)
    for part in ("all_reduce", "all_gather", f"rank {1 - me.rank}"):
        assert part in named, named
    values = [value_of(rank, 0) for rank in range(me.size)]
    step.replay(values[me.rank])
    step.check(values)


def test_another_operation_is_named():
    staged(2, differs_on_rank)


# ---- the end of a group


def outlives_on_rank(me):
    """Replays before the end of the group are done. Later replays do not hang."""
    group = dist.new_group()
    step = Step(me, group)
    step.replay(value_of(me.rank, 0))
    dist.destroy_process_group(group)
    step.check([value_of(rank, 0) for rank in range(me.size)])
    step.group = group = None
    common.gc.collect()
    for _ in range(3):
        step.replay(5.0)
    torch.accelerator.synchronize()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 4


def test_a_graph_may_outlive_its_group():
    staged(2, outlives_on_rank)


def aborted_on_rank(me):
    """A replay under way ends with the group, and so do calls that wait for their place."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    step = Step(me, group)
    if me.rank == 0:
        step.replay(1.0)  # the other rank does not come
        work = dist.all_reduce(torch.ones(4, device="cpu"), group=group, async_op=True)
        time.sleep(0.2)
        group._get_backend(torch.device(common.DEVICE)).abort()
        kind, _ = raised(work.wait)
        assert kind == "DistBackendError", kind
        torch.accelerator.synchronize()
        for _ in range(3):
            step.replay(5.0)
        torch.accelerator.synchronize()
        assert torch.equal(step.sums, step.ramp * 5)
    dist.barrier()


def test_an_aborted_group_leaves_no_stream_waiting():
    staged(2, aborted_on_rank)


# ---- calls outside of a capture that goes on


@devices.on_fake_only
def beside_a_capture_on_rank(me):
    """Threads of the group look at events while the program captures in torch's default mode, in
    which a look of torch's would spoil the capture. The calls were made before, and by a thread."""
    from fake_device import control

    other = dist.new_group()
    there, tag = 1 - me.rank, 7
    sums, sent, received, more = (torch.full((5,), float(me.rank)) for _ in range(4))
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=other)
    torch.accelerator.synchronize()
    calls = torch.Stream()
    with control.held(calls) as gate:
        with calls:
            works = [
                dist.all_reduce(sums, async_op=True),
                dist.isend(sent, there, tag=tag),
                dist.irecv(received, there, tag=tag),
            ]
        recorded = torch.ones(3)
        thread_stream = torch.Stream()

        def call():
            with thread_stream:
                works.append(dist.all_reduce(more, group=other, async_op=True))

        with control.recorded(torch.Stream()) as graph:
            caller = threading.Thread(target=call)
            caller.start()
            caller.join()
            gate.open()
            harness.until(lambda: all(work.is_completed() for work in works), "the calls' ends")
            recorded.add_(1)
    graph.replay()
    torch.accelerator.synchronize()
    assert recorded.tolist() == [2.0] * 3
    assert sums.tolist() == more.tolist() == [1.0] * 5
    assert received.tolist() == [float(there)] * 5


def test_calls_beside_a_capture():
    staged(2, beside_a_capture_on_rank)


def test_calls_beside_a_capture_without_words():
    staged(2, beside_a_capture_on_rank, env={"MOONCAKE_STREAM_WORDS": "0"})


# ---- torch before 2.10 does not tell the handles of streams


@devices.on_fake_only
def without_handles(me, function, *args):
    from fake_device import control

    control.hide_handles()
    function(me, *args)


@pytest.mark.parametrize("env", [STAGED, {}], ids=["staged", "kernels"])
def test_captures_are_seen_without_handles(env):
    run(2, without_handles, common.replays_on_rank, env=env)
    run(3, without_handles, common.streams_on_rank, env=env)


def captures_at_a_time_on_rank(me):
    """Two threads capture, and both make calls that no graph takes."""
    from fake_device import control

    tensors = [torch.full((4,), float(number)) for number in range(2)]
    dist.all_reduce(torch.ones(1))
    torch.accelerator.synchronize()
    together = threading.Barrier(2)

    def capture(tensor, stream):
        with control.recorded(stream) as graph:
            for _ in range(3):
                together.wait()
                kind, text = raised(lambda: dist.send(tensor, 1 - me.rank))
                assert (kind, "no graph takes this" in text) == ("NotImplementedError", True), text
                tensor.add_(1)
            together.wait()
        return graph

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        recorded = list(threads.map(capture, tensors, [torch.Stream(), torch.Stream()]))
    for round in range(1, 3):
        for number, graph in enumerate(recorded):
            graph.replay()
            torch.accelerator.synchronize()
            assert tensors[number].tolist() == [number + 3.0 * round] * 4
            sums = torch.full((4,), float(round))
            dist.all_reduce(sums)
            assert sums.tolist() == [2.0 * round] * 4


def test_captures_at_a_time_without_handles():
    staged(2, without_handles, captures_at_a_time_on_rank)


@pytest.mark.parametrize("reason", ["no graph takes this operation", "a barrier waits on the host"])
def test_refused_without_handles(reason):
    staged(2, without_handles, refused_on_rank, reason)


# ---- refusals


def refused_on_rank(me, reason):
    """A call that no graph takes is refused at once, and the capture goes on."""
    small = torch.ones(4)
    dist.all_reduce(small)
    torch.accelerator.synchronize()
    calls = {
        "the group is in mode raise": lambda: dist.all_reduce(small),
        "its streams have no words": lambda: dist.all_reduce(small),
        "MOONCAKE_GRAPH_MEMORY": lambda: dist.all_reduce(torch.ones(100_000)),
        "a barrier waits on the host": dist.barrier,
        "no graph takes this operation": lambda: dist.send(small, 1 - me.rank),
        "the call is part of a batch": coalesced,
        "the factor of PREMUL_SUM is on a device": lambda: dist.all_reduce(
            small, op=dist._make_nccl_premul_sum(torch.ones(1))
        ),
    }
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        kind, text = raised(calls[reason])
        assert kind == "NotImplementedError" or reason == "MOONCAKE_GRAPH_MEMORY", (kind, text)
        assert reason in text, text
        kind, text = raised(dist.new_group)
        assert "the construction of a process group cannot be recorded" in text, text
        small.add_(1)
    graph.replay()
    dist.all_reduce(small)
    torch.accelerator.synchronize()
    assert len(small.unique()) == 1


def coalesced():
    with dist._coalescing_manager(device=torch.device(common.DEVICE), async_ops=True):
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("reason", "env"),
    [
        ("the group is in mode raise", {"MOONCAKE_ON_FAILURE": "raise"}),
        ("its streams have no words", {"MOONCAKE_STREAM_WORDS": "0"}),
        ("MOONCAKE_GRAPH_MEMORY", {"MOONCAKE_GRAPH_MEMORY": "65536"}),
        ("a barrier waits on the host", {}),
        ("no graph takes this operation", {}),
        ("the factor of PREMUL_SUM is on a device", {}),
        ("the call is part of a batch", {}),
    ],
)
def test_refused(reason, env):
    staged(2, refused_on_rank, reason, env=env)
