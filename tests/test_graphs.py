"""Collectives in graphs of a device (torch.cuda.CUDAGraph), replayed also across the loss of ranks.
On the device `fake` a graph is a list of the stream's work (tests/fake_device)."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from conftest import DEVICE
from harness import raised
from peer_ranks import LIMIT, crew, run

import mooncake_backend

COUNT = 600


class Step:
    """A step of a program in a graph: a sum, a gather of doubled sums, a scattered maximum of what
    was gathered, and an asynchronous sum beside work of the caller's stream. None of them may see
    data of another round, or of another operation."""

    def __init__(self, me, group=None):
        self.me, self.group = me, group
        self.input, self.sums = torch.empty(COUNT), torch.empty(COUNT)
        self.gathered, self.part = torch.empty(me.size * COUNT), torch.empty(COUNT)
        self.late, self.beside = torch.empty(COUNT), torch.empty(COUNT)
        self.ramp = torch.arange(COUNT, dtype=torch.float32)
        dist.all_reduce(torch.ones(4), group=group)  # sets up the kernels
        self.graph = graphs().CUDAGraph()
        with graphs().graph(self.graph):
            self.body()

    def body(self):
        self.sums.copy_(self.input)
        dist.all_reduce(self.sums, group=self.group)
        doubled = self.sums * 2  # memory of the graph
        doubled += self.me.rank
        dist.all_gather_into_tensor(self.gathered, doubled, group=self.group)
        dist.reduce_scatter_tensor(self.part, self.gathered, op=dist.ReduceOp.MAX, group=self.group)
        self.late.copy_(self.input)
        work = dist.all_reduce(self.late, group=self.group, async_op=True)
        self.beside.copy_(self.input)
        self.beside.mul_(3)
        work.wait()
        self.late.add_(1)

    def replay(self, value):
        self.input.copy_(self.ramp * value)
        self.graph.replay()

    def check(self, values):
        """`values`: that of each rank, None of one that is lost."""
        alive = [value for value in values if value is not None]
        assert torch.equal(self.sums, self.ramp * sum(alive))
        parts = self.gathered.view(self.me.size, COUNT)
        for rank, value in enumerate(values):
            expected = self.ramp * 2 * sum(alive) + rank
            assert torch.equal(parts[rank], expected if value is not None else self.ramp * 0)
        assert torch.equal(self.part, parts[self.me.rank])
        assert torch.equal(self.late, self.ramp * sum(alive) + 1)
        assert torch.equal(self.beside, self.ramp * 3 * values[self.me.rank])


def graphs():
    return torch.get_device_module(DEVICE)


def value_of(rank, number):
    return float((rank + 1) * 100 + number)


def replays_on_rank(me):
    step = Step(me)
    for round in range(40):
        values = [value_of(rank, round) for rank in range(me.size)]
        step.replay(values[me.rank])
        if round % 3 == 0:  # calls between replays, without a wait of the host
            between = torch.full((50,), values[me.rank])
            dist.all_reduce(between)
            assert between.unique().tolist() == [sum(values)]
        step.check(values)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_replays(size):
    run(size, replays_on_rank)


def streams_on_rank(me):
    """Two graphs on two streams and calls on a third one, which wait for each other nowhere: they
    run in the program's order on all ranks."""
    totals = [torch.zeros(COUNT) for _ in range(3)]
    dist.all_reduce(torch.ones(4))
    streams = [torch.Stream(device=DEVICE) for _ in range(3)]
    recorded = [graphs().CUDAGraph(), graphs().CUDAGraph()]
    for graph, total in zip(recorded, totals, strict=False):
        with graphs().graph(graph):
            for _ in range(3):
                total.add_(1)
                dist.all_reduce(total, op=dist.ReduceOp.MAX)
    torch.accelerator.synchronize()
    works = []
    for round in range(60):
        which = (round * round) % 3
        with streams[which]:
            if which < 2:
                recorded[which].replay()
            else:
                totals[2].add_(1)
                works.append(dist.all_reduce(totals[2], op=dist.ReduceOp.MAX, async_op=True))
                if len(works) % 2:
                    works[-1].wait()
    torch.accelerator.synchronize()
    each = [[round for round in range(60) if (round * round) % 3 == which] for which in range(3)]
    assert totals[0].unique().tolist() == [3.0 * len(each[0])]
    assert totals[1].unique().tolist() == [3.0 * len(each[1])]
    assert all(work.is_success() for work in works)


def test_graphs_and_calls_on_several_streams_keep_the_programs_order():
    run(3, streams_on_rank)


def mixed_on_rank(me):
    """Some ranks replay what others call."""
    step = Step(me)
    for round in range(12):
        values = [value_of(rank, round) for rank in range(me.size)]
        if (round + me.rank) % 2:
            step.replay(values[me.rank])
        else:
            step.input.copy_(step.ramp * values[me.rank])
            step.body()
        step.check(values)


def test_a_rank_may_call_what_another_one_replays():
    run(3, mixed_on_rank)


def until_one_dies(me, victim):
    """Replays and calls of which each has its own data, until the rank has been lost for a while.
    Returns the ranks of which each operation had data."""
    step = Step(me)
    active = mooncake_backend.get_active_ranks(dist.group.WORLD, on_host=True)
    seen, after, number = [], 0, 0
    while after < 15:
        step.replay(1 << me.rank)
        for tensor in (step.sums, step.late - 1):
            bits = {int(value) for value in (tensor[1:] / step.ramp[1:]).tolist()}
            assert len(bits) == 1, bits
            seen.append(bits.pop())
        if number % 4 == 3:
            called = torch.full((200,), float((1 << me.rank) + 1000 * number))
            dist.all_reduce(called)
            seen.append(int(called[0]) % 1000)
        if me.rank == victim and number == 20:
            step.replay(0)  # it dies with this under way
            os.kill(os.getpid(), signal.SIGKILL)
        after += seen[-1] != 2**me.size - 1
        number += 1
        assert number < 5000
    return seen, active.tolist()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank(victim):
    survive(victim)


def survive(victim, env=None):
    ranks = crew(3, env=env or {})
    ranks.start(until_one_dies, victim)
    results = ranks.results(dead=[victim])
    ranks.end()
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    assert survivors[0] == survivors[1]
    seen, active = survivors[0]
    everybody, rest = 7, 7 - (1 << victim)
    last = max(i for i, bits in enumerate(seen) if bits == everybody)
    assert set(seen[: last + 1]) <= {everybody, rest}  # the victim's last replay had zeros
    assert set(seen[last + 1 :]) == {rest}
    assert active == [rank != victim for rank in range(3)]


def idle_loss_on_rank(me, victim):
    """A rank dies while no operation is under way. The next ones are replays."""
    step = Step(me)
    values = [value_of(rank, 1) for rank in range(me.size)]
    step.replay(values[me.rank])
    step.check(values)
    me.board.set(f"ready-{me.rank}")
    if me.rank == victim:
        me.board.wait_all("ready", range(me.size))
        os.kill(os.getpid(), signal.SIGKILL)
    active = mooncake_backend.get_active_ranks(dist.group.WORLD, on_host=True)
    harness.until(lambda: not active[victim], "the loss")
    for round in range(2, 30):
        values = [value_of(r, round) if r != victim else None for r in range(me.size)]
        step.replay(values[me.rank])
        step.check(values)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_between_replays(victim):
    ranks = crew(3)
    ranks.start(idle_loss_on_rank, victim)
    ranks.results(dead=[victim])
    ranks.end()


def all_but_two_die(me):
    """Ranks die one after the other, while replays are enqueued far ahead."""
    group = dist.new_group()
    step = Step(me, group)
    history = torch.zeros(400, COUNT)
    for number in range(400):
        step.replay(1 << me.rank)
        history[number].copy_(step.sums)
        if number == 60 + 60 * me.rank and me.rank < 3:
            torch.accelerator.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
    torch.accelerator.synchronize()
    return [int(value) for value in history[:, 1].tolist()]


def test_several_ranks_die_one_after_the_other():
    lose_three()


def lose_three(env=None):
    ranks = crew(5, env=env or {})
    ranks.start(all_but_two_die)
    results = ranks.results(dead=[0, 1, 2])
    ranks.end()
    assert results[3] == results[4]
    assert [bits for i, bits in enumerate(results[3]) if i == 0 or bits != results[3][i - 1]] == [
        31,
        30,
        28,
        24,
    ]


def stopped_on_rank(me):
    group = dist.new_group(timeout=timedelta(seconds=2))
    step = Step(me, group)
    for round in range(10):
        values = [value_of(rank, round) for rank in range(me.size)]
        step.replay(values[me.rank])
        step.check(values)
    me.board.set(f"pid-{me.rank}", os.getpid())
    if me.rank == 1:
        me.board.wait("over")
        return
    me.board.wait("stopped")
    step.replay(1.0)
    began = time.monotonic()
    torch.accelerator.synchronize()  # it does not hang
    assert 1.5 < time.monotonic() - began < 10
    step.replay(1.0)
    torch.accelerator.synchronize()  # later ones end at once
    for call in (
        lambda: dist.all_reduce(torch.ones(4), group=group),
        lambda: dist.all_reduce(torch.ones(LIMIT), group=group),
    ):
        kind, text = raised(call)
        assert kind == "DistBackendError", kind
        for part in ("a replayed operation", "in the group's timeout", "it waits for rank 1"):
            assert part in text, text
    me.board.set(f"raised-{me.rank}")


def test_a_stopped_rank():
    ranks = crew(3)
    try:
        ranks.start(stopped_on_rank)
        victim = ranks.board.wait("pid-1")
        ranks.board.wait_all("pid", range(3))
        harness.stop_process(victim)
        try:
            ranks.board.set("stopped")
            ranks.board.wait_all("raised", [0, 2])
        finally:
            os.kill(victim, signal.SIGCONT)
        ranks.board.set("over")
        ranks.results()
    finally:
        ranks.end()


def late_on_rank(me):
    """Longer than the patience of kernels, and less than the timeout."""
    step = Step(me)
    for round in range(6):
        values = [value_of(rank, round) for rank in range(me.size)]
        if round == me.rank:
            time.sleep(0.3)
        step.replay(values[me.rank])
        step.check(values)


def test_a_late_rank_is_waited_for():
    run(3, late_on_rank)


def differs_on_rank(me):
    step = Step(me)
    if me.rank == 1:
        dist.all_reduce(torch.ones(7))
    else:
        step.replay(1.0)
    torch.accelerator.synchronize()

    def fails():
        kind, text = "", ""
        try:
            dist.all_reduce(torch.ones(4))
        except dist.DistBackendError as error:
            kind, text = "DistBackendError", str(error)
        return kind and "another operation" in text

    harness.until(fails, "the error")


def test_another_operation_is_named():
    run(3, differs_on_rank)


def refused_on_rank(me, reason):
    """What cannot be recorded is refused, and the capture goes on."""
    small, large = torch.ones(4), torch.ones(LIMIT)
    if reason != "not set up":
        dist.all_reduce(small)
    graph = graphs().CUDAGraph()
    torch.accelerator.synchronize()
    with graphs().graph(graph):
        call = dist.all_reduce
        tensor = large if reason == "larger than MOONCAKE_PEER_BYTES (16384)" else small
        kind, text = raised(call, tensor)
        assert kind == "NotImplementedError", (kind, text)
        assert "is being recorded into a graph" in text, text
        assert reason in text, text
        kind, text = raised(dist.new_group)
        assert "the construction of a process group cannot be recorded" in text, text
        small.add_(1)
    graph.replay()
    dist.all_reduce(small)
    expected = 2.0 if reason == "not set up" else me.size + 1.0
    assert small.unique().tolist() == [me.size * expected]


@pytest.mark.parametrize(
    ("reason", "env"),
    [
        ("not set up", {}),
        ("larger than MOONCAKE_PEER_BYTES (16384)", {}),
        ("mode raise", {"MOONCAKE_ON_FAILURE": "raise"}),
        ("its streams have no words", {"MOONCAKE_STREAM_WORDS": "0"}),
    ],
)
def test_refused(reason, env):
    run(2, refused_on_rank, reason, env=env)


def arguments_on_rank(me):
    """A call whose arguments are refused leaves the capture as it was."""
    dist.all_reduce(torch.ones(4))
    tensor, total = torch.ones(1).expand(3), torch.ones(3)
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        kind, _ = raised(dist.all_reduce, tensor)
        assert kind == "ValueError"
        dist.all_reduce(total)
    graph.replay()
    assert total.tolist() == [float(me.size)] * 3


def test_arguments_are_checked():
    run(2, arguments_on_rank)


def outlives_on_rank(me):
    """What is replayed before the group ends is done. Later replays harm nothing."""
    group = dist.new_group()
    step = Step(me, group)
    step.replay(value_of(me.rank, 0))
    dist.destroy_process_group(group)
    step.check([value_of(rank, 0) for rank in range(me.size)])
    step.group = group = None
    gc.collect()
    before = step.gathered.clone()
    step.replay(5.0)
    torch.accelerator.synchronize()
    assert torch.equal(step.gathered, before)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 4


def test_a_graph_may_outlive_its_group():
    run(2, outlives_on_rank)


def layouts_on_rank(me):
    """Tensors that the kernel cannot take as they are: the copies are in the graph, too."""
    square = torch.zeros(6, 5)
    given = torch.zeros(6, 5)
    dist.all_reduce(torch.ones(4))
    graph = graphs().CUDAGraph()
    with graphs().graph(graph):
        square.copy_(given)
        view = square.t()
        dist.all_reduce(view)
        future = dist.all_reduce(square, async_op=True).get_future()
        square.mul_(future.wait()[0] * 0 + 2)
    for round in range(3):
        given.fill_(float(me.rank + round))
        graph.replay()
        total = sum(rank + round for rank in range(me.size))
        assert square.unique().tolist() == [2.0 * total * me.size]


def test_layouts_and_futures():
    run(2, layouts_on_rank)
