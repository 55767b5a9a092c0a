"""Asynchronous operations: they return at once, go on by themselves, tell futures, and hold no
lock meanwhile."""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta

import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import ALL_LAYOUTS, BLOCKING_DEVICE_LAYOUT, layout_options
from harness import raised, until
from torch.nn.parallel import DistributedDataParallel

COUNTS = [8, 50_000]  # small and large


@pytest.fixture(params=[*ALL_LAYOUTS, BLOCKING_DEVICE_LAYOUT], scope="module")
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    return crews.get(layout, 3)


def calls(count):
    """Every verb as an asynchronous call of its own tensors."""
    n = dist.get_world_size()
    one, all_ = torch.ones(count), torch.ones(n * count)
    return {
        "all_reduce": lambda: dist.all_reduce(one.clone(), async_op=True),
        "broadcast": lambda: dist.broadcast(one.clone(), 0, async_op=True),
        "reduce": lambda: dist.reduce(one.clone(), 0, async_op=True),
        "all_gather": lambda: dist.all_gather([one.clone() for _ in range(n)], one, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            all_.clone(), one, async_op=True
        ),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            one.clone(), all_, async_op=True
        ),
        "all_to_all": lambda: dist.all_to_all(
            [one.clone() for _ in range(n)], [one] * n, async_op=True
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(all_.clone(), all_, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }


def returns_on_rank(me, name, count):
    """The calls of rank 0 return while all peers sleep: they wake only when it says that it is
    through."""
    works = {}
    if me.rank == 0:
        for verb, call in calls(count).items():
            works[verb] = call()
            if verb != "reduce":
                assert not works[verb].is_completed(), verb
        me.board.set(name)
    else:
        me.board.wait(name)
        works = {verb: call() for verb, call in calls(count).items()}
    for work in works.values():
        work.wait()
        until(work.is_completed, "its end: on a device, wait() does not wait on the host")


def progress_on_rank(me, name, count):
    """Rank 0 calls and then does nothing of ours at all; the others must get through."""
    tensor = torch.ones(count)
    work = dist.all_reduce(tensor, async_op=True)
    if me.rank == 0:
        me.board.wait_all(name, range(1, me.size))
    else:
        until(work.is_completed, "the operation")
        assert (tensor == me.size).all()
        me.board.set(f"{name}-{me.rank}")
    work.wait()
    assert (tensor == me.size).all()


def polled_on_rank(me, count):
    works = [call() for call in calls(count).values()]
    until(lambda: all(work.is_completed() for work in works), "the operations")
    assert all(work.is_success() for work in works)


def futures_on_rank(me, count):
    told = []
    tensor = torch.full((count,), float(me.rank))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    chained = future.then(lambda f: told.append(f.value()[0].clone()) or f.value()[0] * 2)
    doubled = chained.wait()
    total = sum(range(me.size))
    assert (doubled == 2 * total).all()
    assert (told[0] == total).all()
    # A callback that is added when all is over runs as well, and one that raises breaks nothing.
    late = []
    future.then(lambda f: late.append(1)).wait()
    assert late == [1]
    work = dist.barrier(async_op=True)
    broken = work.get_future().then(lambda f: 1 / 0)
    assert "division" in raised(broken.wait)[1]
    # A callback may call the next operation.
    again = torch.ones(count)
    first = dist.barrier(async_op=True).get_future()
    nested = first.then(lambda f: dist.all_reduce(again, async_op=True))
    nested.wait().wait()
    assert (again == me.size).all()
    oracle.exercise("all_reduce", count=count)


def nested_on_rank(me, depth):
    """A callback waits for an operation that it starts itself."""

    def add(level):
        work = dist.all_reduce(torch.ones(8), async_op=True)
        if level == depth:
            return work.get_future()
        return work.get_future().then(lambda f: f.value() + list(add(level + 1).wait()))

    sums = add(1).wait()
    assert len(sums) == depth
    assert all((t == me.size).all() for t in sums)


def ordered_on_rank(me, count):
    """Callbacks call operations, and some take long on some ranks."""
    called = []

    def call(number):
        def callback(future):
            assert (future.value()[0] == me.size).all()
            if number % me.size == me.rank:
                time.sleep(0.02)
            tensor = torch.full((8,), float(number))
            called.append((number, tensor, dist.all_reduce(tensor, async_op=True)))

        return callback

    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(count)]
    for future in [work.get_future().then(call(n)) for n, work in enumerate(works)]:
        future.wait()
    assert [number for number, _, _ in called] == list(range(count))
    for number, tensor, work in called:
        work.wait()
        assert (tensor == number * me.size).all(), (number, tensor[0])


def ordered_futures_on_rank(me, rounds):
    """Rank 1 asks for the second future when both operations have ended, rank 0 before."""
    for number in range(rounds):
        called = []

        def call(value, called=called):
            def callback(future):
                tensor = torch.full((8,), float(value))
                called.append((value, tensor, dist.all_reduce(tensor, async_op=True)))

            return callback

        dist.barrier()
        if me.rank == 0:
            time.sleep(0.003)  # so that rank 1 waits in the operations
        works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(2)]
        futures = [works[0].get_future().then(call(1))]
        if me.rank == 1:
            while not works[1].is_completed():
                pass
        futures.append(works[1].get_future().then(call(2)))
        for future in futures:
            future.wait()
        for value, tensor, work in called:
            work.wait()
            assert (tensor == value * me.size).all(), (number, value, tensor[0])


def steps_on_rank(me, count):
    """What PowerSGD's gradient hook does with each of many buckets: two operations one after the
    other, each waited for in the callback that calls it."""
    # Else their order would be another one on a slow rank. With a device they run where they are
    # attached.
    are_attached, attaching = threading.Event(), threading.get_ident()

    def step(number):
        def callback(future):
            if threading.get_ident() != attaching:
                are_attached.wait()
            if number % me.size == me.rank:
                time.sleep(0.005)
            tensor = torch.full((8,), float(number))
            work = dist.all_reduce(tensor, async_op=True)
            # Work and future, both of them calls of ours.
            return work.get_future().wait()[0] if number % 2 else work.wait() and tensor

        return callback

    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(count)]
    first = [work.get_future().then(step(n)) for n, work in enumerate(works)]
    second = [future.then(step(100 + n)) for n, future in enumerate(first)]
    are_attached.set()
    for number, future in enumerate(first):
        assert (future.wait() == number * me.size).all()
    for number, future in enumerate(second):
        assert (future.wait() == (100 + number) * me.size).all()


def raced_on_rank(me, name):
    """A callback and the program each call an all_reduce of one shape. Rank 0 calls that of the
    callback first, the others that of the program, as with torch's PowerSGD hook of two buckets."""
    tensors = {who: torch.full((8,), float(me.rank)) for who in ("callback", "program")}
    works = {}

    def call(who):
        works[who] = dist.all_reduce(tensors[who], async_op=True)
        me.board.set(f"{name}-{who}-{me.rank}")

    def callback(future):
        if me.rank:
            me.board.wait(f"{name}-program-{me.rank}")
        call("callback")

    called = dist.all_reduce(torch.ones(8), async_op=True).get_future().then(callback)
    if me.rank == 0:
        me.board.wait(f"{name}-callback-0")
    call("program")
    called.wait()
    places = ["in a callback of a future", "in the program"]
    for who in ["program", "callback"] if me.rank else ["callback", "program"]:
        kind, text = raised(works[who].wait)
        assert kind == "DistBackendError"
        assert f"rank 0 called it {places[0]}" in text, text
        assert f"ranks 1, 2 called it {places[1]}" in text, text
        assert "give DDP a bucket_cap_mb that holds all gradients" in text, text
        assert (tensors[who] == me.rank).all()
        places.reverse()
    dist.all_reduce(tensors["program"])
    assert (tensors["program"] == 3).all()


def timed_out_in_callback_on_rank(me, name):
    """A wait that ends by its own timeout, in a callback, takes its turn again."""
    kinds = []

    def callback(future):
        work = dist.barrier(async_op=True)
        if me.rank == 0:
            kinds.append(raised(work.wait, timedelta(milliseconds=30))[0])
            me.board.set(name)
        work.wait()

    if me.rank:
        dist.all_reduce(torch.ones(8))
        me.board.wait(name)
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(8), async_op=True).get_future().then(callback).wait()
        assert kinds == ["DistBackendError"]


def many_on_rank(me, name):
    """A queue of operations, started while nobody else is there, keeps its order."""
    if me.rank == 0:
        me.board.wait(name)
    tensors = [torch.full((size,), float(me.rank)) for size in [3, 20_000, 1] * 30]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if me.rank == 1:
        me.board.set(name)
    total = sum(range(me.size))
    synchronous = torch.ones(4)
    dist.all_reduce(synchronous)  # queues up behind all others
    assert (synchronous == me.size).all()
    assert all(work.is_completed() for work in works)
    for work, tensor in zip(reversed(works), reversed(tensors), strict=True):
        work.wait()
        assert (tensor == total).all()


def dropped_on_rank(me, count):
    """The caller forgets the work and the tensors: nothing may write into freed memory."""
    for _ in range(20):
        dist.all_reduce(torch.ones(count), async_op=True)
        dist.all_gather_into_tensor(torch.empty(me.size * count), torch.ones(count), async_op=True)
    oracle.exercise("all_reduce", count=count)


def strided_on_rank(me, count):
    for verb in oracle.VERBS:
        oracle.exercise(verb, count=count, layout="strided", asynchronous=True)
    held = oracle.Placed(torch.full((count,), float(me.rank)), "transposed")
    work = dist.all_reduce(held.view, async_op=True)
    until(work.is_completed, "the operation")
    held.check(torch.full((count,), float(sum(range(me.size)))), "a polled all_reduce")


def timeout_on_rank(me, name, count):
    tensor = torch.ones(count)
    if me.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        kind, text = raised(work.wait, timedelta(milliseconds=30))
        assert kind == "DistBackendError", kind
        assert "30 ms" in text
        assert not work.is_completed()
        me.board.set(name)
        assert work.wait()
    else:
        me.board.wait(name)
        dist.all_reduce(tensor)
    assert (tensor == me.size).all()


def gil_on_rank(me, name, what):
    """While the main thread waits for the peers, another Python thread counts; only then do the
    peers come."""
    calls = {
        "call": lambda: dist.all_reduce(torch.ones(8)),
        "wait": lambda: dist.all_reduce(torch.ones(8), async_op=True).wait(),
        "timed wait": lambda: dist.barrier(async_op=True).wait(timedelta(seconds=harness.DEADLINE)),
        "future": lambda: dist.all_reduce(torch.ones(8), async_op=True).get_future().wait(),
        "recv": lambda: dist.recv(torch.ones(8), 1),
        "new_group": lambda: dist.new_group(),
    }
    if me.rank == 0:
        steps = []
        blocked = threading.Event()

        def count():
            blocked.wait()
            for i in range(10_000):
                steps.append(i)
            me.board.set(name)

        thread = threading.Thread(target=count)
        thread.start()
        blocked.set()
        calls[what]()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # a call with a device's tensors waits on the stream
        # Nobody came before the count was over, so it ran while we waited.
        assert len(steps) == 10_000
        thread.join()
    else:
        me.board.wait(name)
        if what != "recv":
            calls[what]()
        elif me.rank == 1:
            dist.send(torch.ones(8), 0)


def model_and_data(rank):
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300),
        torch.nn.Tanh(), torch.nn.Linear(300, 7),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(100 + rank)
    return model, torch.randn(6, 40, generator=generator), torch.randn(6, 7, generator=generator)


def ddp_on_rank(me, accumulate):
    """Gradients of several buckets against the mean over all ranks' data in one process;
    replicas agree."""
    model, inputs, targets = model_and_data(me.rank)
    if me.rank:  # DDP must hand out rank 0's weights
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.1, gradient_as_bucket_view=accumulate)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if accumulate:
            with parallel.no_sync():
                torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
        torch.nn.functional.mse_loss(parallel(inputs), targets).backward()
        if step == 0:
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()

    alone, _, _ = model_and_data(0)
    for rank in range(me.size):
        _, x, y = model_and_data(rank)
        for _ in range(2 if accumulate else 1):
            (torch.nn.functional.mse_loss(alone(x), y) / me.size).backward()
    for mine, parameter in zip(gradients, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-6)
    flat = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    return oracle.digest(flat)


@pytest.mark.parametrize("count", COUNTS)
def test_calls_return_while_peers_sleep(crew, count):
    crew.call(returns_on_rank, f"returns-{count}", count)


@pytest.mark.parametrize("count", COUNTS)
def test_progress_without_the_caller(crew, count):
    crew.call(progress_on_rank, f"progress-{count}", count)


@pytest.mark.parametrize("count", COUNTS)
def test_polling(crew, count):
    crew.call(polled_on_rank, count)


@pytest.mark.parametrize("count", COUNTS)
def test_futures(crew, count):
    crew.call(futures_on_rank, count)


@pytest.mark.parametrize("depth", [2, 4])
def test_callbacks_that_wait_for_operations(crew, depth):
    crew.call(nested_on_rank, depth)


def test_callbacks_run_in_the_order_of_their_operations(crew):
    crew.call(ordered_on_rank, 12)


def test_a_future_of_an_ended_operation_does_not_overtake(crew):
    crew.call(ordered_futures_on_rank, 100)


def test_many_callbacks_that_wait(crew):
    crew.call(steps_on_rank, 12)


def test_a_race_of_callbacks_and_the_program_is_named(layout, two_hosts):
    with harness.starting(
        3, raced_on_rank, "raced", **layout_options(layout, 3, two_hosts)
    ) as crew:
        crew.results()


def test_a_timeout_in_a_callback(layout, two_hosts):
    with harness.starting(
        3, timed_out_in_callback_on_rank, "timed-out", **layout_options(layout, 3, two_hosts)
    ) as crew:
        crew.results()


def threadless_on_rank(me):
    """No thread can be started: its stack would be larger than any memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(256)
    assert libc.pthread_getattr_default_np(attributes) == 0
    size = ctypes.c_size_t()
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 48)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    tensor = torch.ones(8)
    work = dist.all_reduce(tensor, async_op=True)
    kind, text = raised(work.get_future)
    assert (kind, "cannot start thread mooncake-done" in text) == ("DistBackendError", True), text
    work.wait()
    assert (tensor == me.size).all()
    assert libc.pthread_attr_setstacksize(attributes, size) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    again = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] + 1)
    assert (again.wait() == me.size**2 + 1).all()


def test_no_thread_to_be_had():
    """Neither ends the process nor leaves an operation that nothing runs."""
    env = {"MOONCAKE_TRANSPORTS": "shm"}
    harness.run_ranks(2, threadless_on_rank, env=env)


def test_a_queue_of_operations(crew):
    crew.call(many_on_rank, "queue")


@pytest.mark.parametrize("count", COUNTS)
def test_forgotten_operations(crew, count):
    crew.call(dropped_on_rank, count)


@pytest.mark.parametrize("count", [8, 5_000])
def test_strided_tensors(crew, count):
    crew.call(strided_on_rank, count)


@pytest.mark.parametrize("count", COUNTS)
def test_timeout_of_wait(crew, count):
    crew.call(timeout_on_rank, f"timeout-{count}", count)


@pytest.mark.parametrize("what", ["call", "wait", "timed wait", "future", "recv", "new_group"])
def test_python_runs_while_we_wait(crew, what):
    crew.call(gil_on_rank, f"gil-{what}", what)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
def test_ddp(layout, two_hosts, accumulate):
    """Twice the same run gives the same bits on every rank."""
    chosen = layout_options(layout, 3, two_hosts)
    digests = [d for _ in range(2) for d in harness.run_ranks(3, ddp_on_rank, accumulate, **chosen)]
    assert len(set(digests)) == 1
