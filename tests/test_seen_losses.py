"""Mode `raise`: when a loss counts as seen, so that the survivors go on with the same operation."""

from __future__ import annotations

import signal
import threading

import cards
import harness
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT
from harness import raised, until
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

import mooncake_backend

LAYERS = 4
SIZE = 64 * 64  # float32 elements: each layer has a bucket of its own
LAST_GOOD, STEPS = 1, 6


@pytest.fixture(params=["shm", BLOCKING_DEVICE_LAYOUT])
def env(request):
    return {**cards.over(request.param), "MOONCAKE_ON_FAILURE": "raise"}


def die():
    signal.raise_signal(signal.SIGKILL)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))

    def forward(self, x, gradient):
        return x + (self.weight * gradient).sum()


class Layers(torch.nn.Module):
    """The gradient of each layer is a number that tells rank, step and layer."""

    def __init__(self, between):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.between = between

    def forward(self, x, rank, step):
        for number, layer in enumerate(self.layers):
            x = layer(x, gradient_of(rank, step, number))
            x.register_hook(lambda grad, number=number: self.between(step, number))
        return x


def gradient_of(rank, step, layer):
    return float((rank + 1) * (LAYERS * step + layer + 1))


def slower_backward_on_rank(me, hook):
    """Rank 2 dies in a step. Rank 1 has its error before it calls what rank 0 has called."""
    futures = []

    def between(step, number):
        # Called before the layer's own gradient is there; the last layer comes first.
        if step != LAST_GOOD + 1:
            return
        if me.rank == 2:
            me.board.wait("called-0")
            me.board.wait("called-1")
            die()
        if me.rank == 1 and number == LAYERS - 2:
            me.board.set("called-1")
            until(futures[-1].done, "the error of the first bucket")
        if me.rank == 0 and number == 0:
            me.board.set("called-0")

    def keep(state, bucket):
        futures.append(hook(state, bucket))
        return futures[-1]

    model = DistributedDataParallel(Layers(between), bucket_cap_mb=SIZE * 4 / (1 << 20))
    model.register_comm_hook(None, keep)
    lost = []
    for step in range(STEPS):
        futures.clear()
        model.zero_grad()
        try:
            model(torch.zeros((), requires_grad=True), me.rank, step).backward()
        except RuntimeError as error:
            lost.append((step, type(error).__name__, "rank 2" in str(error)))
            continue
        who = range(3) if step <= LAST_GOOD else range(2)
        for number, layer in enumerate(model.module.layers):
            expected = sum(gradient_of(rank, step, number) for rank in who) / me.size
            assert (layer.weight.grad == expected).all(), (step, number, layer.weight.grad[0])
    return lost


def two_callbacks(state, bucket):
    first = dist.all_reduce(bucket.buffer() / 3, async_op=True).get_future()
    return first.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() / 2)


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, two_callbacks])
def test_a_callback_does_not_see_a_loss_for_the_program(env, hook):
    """torch's own hook reads the failed future in a callback, while the backward goes on."""
    with harness.starting(3, slower_backward_on_rank, hook, env=env) as crew:
        found = crew.results(dead=[2])
        assert found[0] == found[1] == [(LAST_GOOD + 1, "PeerLostError", True)]


def another_thread_on_rank(me):
    """A thread that only waits sees a loss for itself: the one that calls is to see it, too."""
    dist.barrier()
    if me.rank == 2:
        me.board.wait_all("called", [0, 1])
        die()
    work = dist.all_reduce(torch.ones(8), async_op=True)
    me.board.set(f"called-{me.rank}")
    errors = []
    thread = threading.Thread(target=lambda: errors.append(raised(work.wait)))
    thread.start()
    thread.join()
    held = dist.all_reduce(torch.ones(8), async_op=True)
    errors.append(raised(held.wait))
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    return [kind for kind, _ in errors]


def test_a_thread_that_only_waits_does_not_see_a_loss_for_the_one_that_calls(env):
    with harness.starting(3, another_thread_on_rank, env=env) as crew:
        assert crew.results(dead=[2])[:2] == [["PeerLostError"] * 2] * 2


def other_caller_on_rank(me):
    """The program waits where it does not call: it has to say that it goes on."""

    def call():
        works = []
        issue = lambda: works.append(dist.all_reduce(torch.ones(8), async_op=True))  # noqa: E731
        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()
        return works[0]

    call().wait()
    if me.rank == 2:
        me.board.wait_all("called", [0, 1])
        die()
    works = [call(), call()]
    me.board.set(f"called-{me.rank}")
    kinds = [raised(work.wait)[0] for work in [*works, call()]]
    acknowledged = [mooncake_backend.acknowledge_loss(dist.group.WORLD) for _ in range(2)]
    last = call()
    last.wait()
    return kinds, acknowledged, last.result()[0].tolist()


def test_acknowledged_losses(env):
    with harness.starting(3, other_caller_on_rank, env=env) as crew:
        expected = (["PeerLostError"] * 3, [True, False], [2.0] * 8)
        assert crew.results(dead=[2])[:2] == [expected] * 2


def shifted_on_rank(me):
    """Rank 0 has given up an operation more than rank 1 when both go on."""
    dist.barrier()
    if me.rank == 2:
        me.board.wait_all("called", [0, 1])
        die()
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(3 if me.rank == 0 else 2)]
    me.board.set(f"called-{me.rank}")
    assert {raised(work.wait)[0] for work in works} == {"PeerLostError"}
    tensor = torch.full((8,), float(me.rank))
    error = raised(dist.all_reduce, tensor)
    assert (tensor == me.rank).all()
    assert mooncake_backend.acknowledge_loss(dist.group.WORLD)
    dist.all_reduce(tensor)
    assert (tensor == 1).all()
    return error


def test_a_shift_after_a_loss_is_named(env):
    with harness.starting(3, shifted_on_rank, env=env) as crew:
        for kind, text in crew.results(dead=[2])[:2]:
            assert kind == "DistBackendError"
            assert "rank 0 called its operation 3 since the group" in text, text
            assert "rank 1 called its operation 2 since the group" in text, text
            assert "acknowledge_loss" in text


def done_future(me, how, other):
    """A future that is done before the loss, and is of no collective of the default group."""
    if how == "other group":
        return dist.all_reduce(torch.ones(8), async_op=True, group=other).get_future()
    if how == "message":
        if me.rank == 2:
            return None
        received = dist.irecv(torch.ones(8), 1 - me.rank)
        dist.isend(torch.ones(8), 1 - me.rank).wait()
        return received.get_future()
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as batch:
        dist.all_reduce(torch.ones(8), async_op=True)
    return batch.works[-1].get_future()


def callbacks_around_a_loss_on_rank(me, how):
    """The first callback runs on rank 0 before its program has seen the loss, on rank 1 afterwards.
    So its operation ends with the loss on rank 0 only."""
    other = dist.new_group(list(range(me.size)))
    dist.barrier()
    futures = [done_future(me, how, other) for _ in range(2)]
    for future in futures:
        if future is not None:
            future.wait()
    if me.rank == 2:
        me.board.wait_all("called", [0, 1])
        die()
    lost = dist.all_reduce(torch.ones(8), async_op=True)
    me.board.set(f"called-{me.rank}")
    until(lost.is_completed, "the loss")
    called = []

    def call(number):
        def callback(future):
            tensor = torch.full((8,), float(10 * number))
            called.append((number, tensor, dist.all_reduce(tensor, async_op=True)))

        return callback

    if me.rank == 0:
        futures[0].then(call(1)).wait()
    assert raised(lost.wait)[0] == "PeerLostError"
    if me.rank == 1:
        futures[0].then(call(1)).wait()
    futures[1].then(call(2)).wait()
    for number, tensor, work in called:
        try:
            work.wait()
        except dist.DistError:
            continue
        assert (tensor == 20 * number).all(), (number, tensor[0])
    return True


@pytest.mark.parametrize("how", ["other group", "message", "batch"])
def test_callbacks_of_other_works_do_not_shift(env, how):
    with harness.starting(3, callbacks_around_a_loss_on_rank, how, env=env, timeout=10.0) as crew:
        assert crew.results(dead=[2])[:2] == [True, True]


def acknowledged_late_on_rank(me):
    """The loss has been seen, and a callback of a later operation has still to run on rank 1."""
    dist.barrier()
    if me.rank == 2:
        me.board.wait_all("called", [0, 1])
        die()
    lost = dist.all_reduce(torch.ones(8), async_op=True)
    me.board.set(f"called-{me.rank}")
    assert raised(lost.wait)[0] == "PeerLostError"
    called = []

    def callback(future):
        if me.rank == 1:
            me.board.wait("called by 0")
        tensor = torch.full((8,), 100.0)
        called.append((tensor, dist.all_reduce(tensor, async_op=True)))
        me.board.set(f"called by {me.rank}")

    first = dist.all_reduce(torch.ones(8), async_op=True)
    future = first.get_future().then(callback)
    first.wait()
    assert mooncake_backend.acknowledge_loss(dist.group.WORLD)
    last = torch.ones(8)
    dist.all_reduce(last)
    future.wait()
    tensor, work = called[0]
    work.wait()
    return tensor[0].item(), last[0].item()


def test_a_loss_that_was_seen_is_acknowledged_behind_callbacks(env):
    with harness.starting(3, acknowledged_late_on_rank, env=env, timeout=10.0) as crew:
        assert crew.results(dead=[2])[:2] == [(200, 2)] * 2
