"""What users may hand over that is not a plain tensor in plain memory, from where they may call,
and how long they may want to wait."""

from __future__ import annotations

import threading
from datetime import timedelta

import devices
import harness
import mistakes
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from conftest import BLOCKING_DEVICE_LAYOUT
from harness import raised

import mooncake_backend

LARGE = 20_000  # elements beyond what travels in a slot


@pytest.fixture(params=["shm", "tcp", BLOCKING_DEVICE_LAYOUT], scope="module")
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    return crews.get(layout, 3)


@pytest.fixture
def on_the_host(layout):
    """For tests of memory of the host alone."""
    if layout.startswith("device"):
        pytest.skip("memory of a device is copied to the host within the call")


def backend_of(group=None):
    return mooncake_backend.group.backend_of(group or dist.group.WORLD)


def total(size):
    return float(sum(range(1, size + 1)))


# ---- views


def lazy_views_on_rank(me, count):
    """A view that conjugates or negates when it is read lies in memory as something else."""
    backend, n = backend_of(), me.size

    def given(rank):
        return oracle.contents(5, rank, count, torch.complex64)

    def conjugated(rank):
        return torch.conj(given(rank))

    def negated(rank):
        return torch._neg_view(given(rank).real.contiguous())

    for make in (conjugated, negated):
        mine, dtype = make(me.rank), make(0).dtype
        everybody = torch.cat([make(r).resolve_conj().resolve_neg() for r in range(n)])
        outputs = [torch.zeros(count, dtype=dtype) for _ in range(n)]
        backend.allgather([outputs], [mine]).wait()
        oracle.same(torch.cat(outputs), everybody, "all_gather")
        gathered = functional.all_gather_tensor(mine, 0, dist.group.WORLD)
        oracle.same(functional.wait_tensor(gathered), everybody, "functional all_gather")
        tensor = make(me.rank)
        backend.allreduce([tensor]).wait()
        parts = list(everybody.split(count))
        oracle.same(tensor.resolve_conj().resolve_neg(), oracle.reduced("SUM", parts), "all_reduce")
        tensor = mine if me.rank == 1 else torch.zeros(count, dtype=dtype)
        backend.broadcast(tensor, 1).wait()
        oracle.same(tensor.resolve_conj().resolve_neg(), parts[1], "broadcast")
        to, source = (me.rank + 1) % n, (me.rank - 1) % n
        got = make(me.rank).clone()
        works = [backend.recv([got], source, 0), backend.send([make(me.rank)], to, 0)]
        for work in works:
            work.wait()
        oracle.same(got, parts[source], "a message")


@pytest.mark.parametrize("count", [6, LARGE])
def test_views_that_conjugate_or_negate(crew, count):
    crew.call(lazy_views_on_rank, count)


def parts_of_complex_on_rank(me):
    numbers = oracle.contents(6, me.rank, 100, torch.complex128)
    real = numbers.real.clone()
    dist.all_reduce(numbers.imag)
    expected = [oracle.contents(6, r, 100, torch.complex128).imag for r in range(me.size)]
    oracle.same(numbers.imag.clone(), oracle.reduced("SUM", expected), "imaginary parts")
    assert torch.equal(numbers.real, real)


def test_parts_of_complex_numbers(crew):
    crew.call(parts_of_complex_on_rank)


def formats_on_rank(me):
    """The same elements, on every rank in another order in memory."""
    image = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    last = torch.channels_last
    mine = [
        image.clone(),
        image.contiguous(memory_format=last),
        image.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ][me.rank % 3]
    dist.all_reduce(mine)
    assert torch.equal(mine, me.size * image)
    outputs = [torch.zeros_like(image).contiguous(memory_format=last) for _ in range(me.size)]
    dist.all_gather(outputs, mine + me.rank)
    for rank, output in enumerate(outputs):
        assert torch.equal(output, me.size * image + rank)
        assert output.is_contiguous(memory_format=last)


def test_memory_formats(crew):
    crew.call(formats_on_rank)


def bytes_of_bools_on_rank(me):
    """Anything but zero is true, in whatever bits; the result is 0 or 1."""
    for name, expected in {
        "SUM": True, "MAX": True, "BOR": True, "MIN": True, "PRODUCT": True, "BAND": True,
        "BXOR": me.size % 2 == 1,
    }.items():  # fmt: skip
        tensor = torch.full((9,), 1 << me.rank, dtype=torch.uint8).view(torch.bool)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        assert tensor.view(torch.uint8).tolist() == [int(expected)] * 9, name


def test_bytes_of_bools(crew):
    crew.call(bytes_of_bools_on_rank)


def read_only_on_rank(me, count):
    """What is only read may lie where nothing can be written."""
    path = me.folder / f"numbers-{me.rank}-{count}"
    numbers = torch.arange(count, dtype=torch.float32)
    numbers.numpy().tofile(path)
    mine = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))  # torch warns, once
    outputs = [torch.zeros(count) for _ in range(me.size)]
    dist.all_gather(outputs, mine)
    assert all(torch.equal(output, numbers) for output in outputs)
    tensor = mine if me.rank == 0 else torch.zeros(count)
    dist.broadcast(tensor, 0)
    assert torch.equal(tensor, numbers)
    tensor = mine.clone() if me.rank == 0 else mine
    dist.reduce(tensor, 0)
    assert torch.equal(tensor, me.size * numbers if me.rank == 0 else numbers)
    got = torch.zeros(count)
    sent = dist.isend(mine, (me.rank + 1) % me.size)
    dist.recv(got, (me.rank - 1) % me.size)
    sent.wait()
    assert torch.equal(got, numbers)


@pytest.mark.parametrize("count", [9, 3 * LARGE])
@pytest.mark.usefixtures("on_the_host")
def test_read_only_memory(crew, count):
    crew.call(read_only_on_rank, count)


# ---- autograd


def losses_on_rank(me):
    """As Gloo: what requires a gradient is reduced as data, and backward knows nothing of it."""
    for asynchronous in (False, True):
        weights = torch.nn.Parameter(torch.ones(4))
        loss = (2 * weights).sum()
        work = dist.all_reduce(loss, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert loss.item() == 8.0 * me.size
        loss.backward()
        assert weights.grad.tolist() == [2.0] * 4
        dist.all_reduce(weights)
        assert weights.tolist() == [float(me.size)] * 4
        assert weights.is_leaf
        assert weights.requires_grad
        # A column of what autograd knows: copied, summed and copied back.
        products = weights.detach().requires_grad_().expand(3, 4).mul(torch.ones(3, 4))
        dist.all_reduce(products[:, 1])
        assert products[:, 1].tolist() == [float(me.size**2)] * 3
        assert products[:, 0].tolist() == [float(me.size)] * 3
    sparse = torch.eye(3).to_sparse().requires_grad_()
    dist.all_reduce(sparse)
    assert sparse.is_leaf
    assert torch.equal(sparse.detach().to_dense(), me.size * torch.eye(3))


def test_a_loss_that_is_reduced(crew):
    crew.call(losses_on_rank)


def hooks_on_rank(me):
    """Operations of backward's own thread."""
    weights = torch.nn.Parameter(torch.ones(4))
    works = []

    def summed(gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

    weights.register_hook(summed)
    weights.register_post_accumulate_grad_hook(
        lambda w: works.append(dist.all_reduce(w.grad, async_op=True))
    )
    (2 * weights).sum().backward()
    for work in works:
        work.wait()
    assert weights.grad.tolist() == [2.0 * me.size**2] * 4


def test_calls_from_hooks(crew):
    crew.call(hooks_on_rank)


def inference_on_rank(me, count):
    """Tensors that may be written in one mode of one thread only: results are written in it."""
    with torch.inference_mode():
        inside = [torch.ones(count), torch.ones(2 * count)[::2]]
        for tensor in inside:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
    for times, tensor in enumerate(inside):
        # Outside of the mode torch refuses the first to everybody; the second goes through a copy.
        if times == 1:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
        assert (tensor == float(me.size ** (2 + 2 * times))).all()
    with torch.inference_mode():
        got = torch.ones(2 * count)[::2]
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    told = threading.Event()
    taken = dist.irecv(got, source)
    taken.get_future().add_done_callback(lambda _: told.set())
    sent = dist.isend(torch.full((count,), float(me.rank)), to)
    assert told.wait(harness.DEADLINE)
    sent.wait()
    assert (got == source).all()


@pytest.mark.parametrize("count", [5, LARGE])
def test_inference_tensors(crew, count):
    crew.call(inference_on_rank, count)


# ---- memory that is taken away meanwhile


def resized_on_rank(me, name, asynchronous):
    """The result has no place any more: an error here, of this operation only."""
    if me.rank != 0:
        me.board.wait(name)
        tensor = torch.ones(6)
        dist.all_reduce(tensor)
        assert (tensor == me.size).all()
        if me.rank == 1:
            me.board.wait(f"{name}-posted")  # a message that is there already is taken at once
            dist.send(torch.ones(3), 0)
    else:
        columns = torch.ones(6, 2)[:, 0]
        work = dist.all_reduce(columns, async_op=True)
        columns.resize_(0)
        me.board.set(name)
        if asynchronous:
            harness.until(work.is_completed, "the operation")
        kind, message = raised(work.wait)
        assert kind == "DistBackendError", message
        assert "ALLREDUCE" in message, message
        assert "on rank 0 failed in torch, on this rank: shape '[0]' is invalid" in message
        got = torch.zeros(3, 2)[:, 0]
        taken = dist.irecv(got, 1)
        got.resize_(0)
        me.board.set(f"{name}-posted")
        assert "shape '[0]' is invalid" in raised(taken.get_future().wait)[1]
    oracle.exercise("all_reduce", count=10)
    oracle.exercise("all_reduce", count=10, asynchronous=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.usefixtures("on_the_host")
def test_a_tensor_that_is_resized_meanwhile(crew, asynchronous):
    crew.call(resized_on_rank, f"resized-{asynchronous}", asynchronous)


# ---- subclasses


class NamedTensor(torch.Tensor):
    pass


def subclasses_on_rank(me):
    tensor = torch.ones(4).as_subclass(NamedTensor)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(me.size)] * 4
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(devices.kind(), (me.size,))
    sharded = distribute_tensor(torch.arange(2.0 * me.size), mesh, [Shard(0)])
    assert raised(dist.all_reduce, sharded)[0] in mistakes.KINDS
    kind, message = raised(backend_of().allreduce, [sharded])
    assert (kind, "no memory" in message) == ("ValueError", True), message
    assert sharded.sum().full_tensor() == sum(range(2 * me.size))
    dist.all_reduce(sharded.to_local())
    assert sharded.sum().full_tensor() == me.size * sum(range(2 * me.size))


def test_subclasses(crew):
    crew.call(subclasses_on_rank)


# ---- sizes


def nothing_on_rank(me):
    """Tensors without elements in every layout, and of no dimension."""
    for verb in oracle.VERBS:
        for layout in oracle.LAYOUTS:
            for asynchronous in (False, True):
                oracle.exercise(verb, count=0, layout=layout, asynchronous=asynchronous)
    n, one = me.size, torch.tensor(float(me.rank))
    to, source = (me.rank + 1) % n, (me.rank - 1) % n
    for given, got in [(torch.empty(0, 3), torch.empty(3, 0)), (one, torch.tensor(-1.0))]:
        sent = dist.isend(given, to)
        dist.recv(got, source)
        sent.wait()
    assert got == source
    outputs = [torch.tensor(-1.0) for _ in range(n)] if me.rank == 0 else None
    dist.gather(one, outputs, 0)
    if outputs:
        assert [output.item() for output in outputs] == list(range(n))
    dist.scatter(got, [torch.tensor(r + 5.0) for r in range(n)] if me.rank == 0 else None, 0)
    assert got == me.rank + 5
    dist.reduce_scatter(got, [torch.tensor(r + 1.0) for r in range(n)])
    assert got == n * (me.rank + 1)
    scalar = torch.sparse_coo_tensor(torch.empty(0, 1, dtype=torch.int64), torch.ones(1), ())
    dist.all_reduce(scalar)
    assert scalar.to_dense() == n


def test_nothing_and_numbers(crew):
    crew.call(nothing_on_rank)


def many_on_rank(me, count):
    tensors = [torch.full((i % 3,), float(me.rank + 1)) for i in range(count)]
    dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    assert all((tensor == total(me.size)).all() for tensor in tensors)
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    got = [torch.zeros(2) for _ in range(count // 10)]
    operations = [dist.P2POp(dist.irecv, tensor, source) for tensor in got]
    operations += [dist.P2POp(dist.isend, torch.full((2,), float(i)), to) for i in range(len(got))]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert all((tensor == i).all() for i, tensor in enumerate(got))


def test_twenty_thousand_tensors(crew):
    crew.call(many_on_rank, 20_000)


def alone_on_rank(me):
    groups = [dist.new_group([r]) for r in range(me.size)]
    group = groups[me.rank]
    for verb in oracle.VERBS:
        for count in (0, 7, LARGE):
            oracle.exercise(verb, group=group, count=count)
    dist.barrier(group)
    group.monitored_barrier(timedelta(seconds=harness.DEADLINE), True)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse, group=group)
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    mistakes.check(group)
    dist.destroy_process_group(group)


def test_a_group_of_one(crew):
    crew.call(alone_on_rank)


# ---- threads


def threads_on_rank(me):
    """Groups of their own for collectives, tags of their own for messages."""
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    groups = [dist.new_group() for _ in range(4)]
    errors = []

    def work(number):
        try:
            for turn in range(15):
                verb = oracle.VERBS[(number + turn) % len(oracle.VERBS)]
                named = {"group": groups[number], "asynchronous": turn % 3 > 0, "seed": turn}
                oracle.exercise(verb, count=[5, 9_000][turn % 2], **named)
                got = torch.zeros([5, 5_000][turn % 2])
                sent = dist.isend(torch.full_like(got, 100.0 * number + turn), to, tag=number)
                dist.recv(got, source, tag=number)
                sent.wait()
                assert (got == 100 * number + turn).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for group in groups:
        dist.destroy_process_group(group)


def test_several_threads(crew):
    crew.call(threads_on_rank)


# ---- timeouts


def for_ever_on_rank(me, name):
    """A timeout that no clock of nanoseconds can hold is none. (Of timedelta.max torch makes a
    negative one: it counts microseconds.)"""
    for timeout in (timedelta(days=10**8), timedelta(days=400 * 365)):
        group = dist.new_group(timeout=timeout)
        for count in (5, LARGE):
            oracle.exercise("all_reduce", group=group, count=count)
            oracle.exercise("all_reduce", group=group, count=count, asynchronous=True)
        group.monitored_barrier(timeout, True)
        named = {"group": group, "tag": 3}
        got = torch.zeros(4)
        if me.rank == 0:
            taken = dist.irecv(got, 1, **named)
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            me.board.set(f"{name}-{timeout.days}")
            taken.wait(timeout)
            work.wait(timeout)
        else:
            me.board.wait(f"{name}-{timeout.days}")
            if me.rank == 1:
                dist.send(got, 0, **named)
            dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group(group)


def test_timeouts_beyond_every_clock(crew):
    crew.call(for_ever_on_rank, "for-ever")


def at_once_on_rank(me, name, timeout):
    """No time at all is too little: an error on every rank, and the group goes on."""
    options = dist.AllreduceOptions()
    options.timeout = timeout
    if me.rank == 0:
        kind, message = raised(lambda: dist.group.WORLD.allreduce([torch.ones(3)], options).wait())
        me.board.set(name)
    else:
        me.board.wait(name)
        kind, message = raised(dist.all_reduce, torch.ones(3))
    assert kind == "DistBackendError"
    assert "timed out" in message, message
    oracle.exercise("all_reduce", count=10)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-5)], ids=str)
def test_no_time_at_all(crew, timeout):
    crew.call(at_once_on_rank, f"at-once-{timeout.days}", timeout)
