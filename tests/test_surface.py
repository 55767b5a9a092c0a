"""What torch offers around the plain collectives: coalescing, batches, sparse tensors, groups that
are split off or merged, errors and options. The coalesced verbs themselves are in
test_collectives."""

from __future__ import annotations

import copy
import os
import re
import threading
from datetime import timedelta
from pathlib import Path

import devices
import harness
import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import BLOCKING_DEVICE_LAYOUT, LAYOUTS
from harness import raised, until
from mistakes import SPLITS
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

import mooncake_backend

ERRORS = Path(__file__).parents[1] / "docs/errors.md"
LARGE = 20_000  # elements beyond what travels in a slot


@pytest.fixture(params=[*LAYOUTS, BLOCKING_DEVICE_LAYOUT], scope="module")
def layout(request):
    return request.param


@pytest.fixture
def crew(layout, crews):
    return crews.get(layout, 3)


def backend_of(group=None):
    return mooncake_backend.group.backend_of(group or dist.group.WORLD)


def called():
    return backend_of()._get_sequence_number_for_group()


# ---- sequence numbers


def numbered_on_rank(me):
    """They count the collectives that were called, of each group by itself, and are Gloo's."""
    groups = {
        "world": dist.group.WORLD,
        "new": dist.new_group(),
        "mooncake-cpu": dist.new_group(backend="mooncake-cpu"),
    }
    gloo = dist.new_group(backend="gloo")
    if SPLITS:
        groups["split"] = dist.group.WORLD.split_group(
            list(range(me.size)), group_name="numbered", opts=backend_of().options
        )
    tensor = torch.ones(4)
    for name, group in groups.items():
        group._set_sequence_number_for_group()  # nothing to agree on: all begin at 0
        first = group._get_sequence_number_for_group()
        assert first == 0 or name == "world"
        theirs = gloo._get_sequence_number_for_group()
        for one in (group, gloo):
            for _ in range(3):
                one.allreduce([tensor]).wait()
            one.barrier().wait()
        now = group._get_sequence_number_for_group()
        assert now - first == gloo._get_sequence_number_for_group() - theirs == 4
        if me.rank == 1:  # a rank that has called more is ahead
            late = group.allreduce([tensor])
        else:
            assert group._get_sequence_number_for_group() == now
            late = group.allreduce([tensor])
        assert group._get_sequence_number_for_group() == now + 1
        late.wait()
    numbers = [None] * me.size
    dist.all_gather_object(numbers, dist.group.WORLD._get_sequence_number_for_group())
    assert len(set(numbers)) == 1


def test_sequence_numbers():
    harness.run_ranks(3, numbered_on_rank, env={"MOONCAKE_TRANSPORTS": "shm"})


# ---- coalescing


def manager_on_rank(me, count):
    n = me.size
    for asynchronous in (False, True):
        sums = [torch.full((count + i,), float(me.rank + i)) for i in range(5)]
        before = called()
        with _coalescing_manager(async_ops=asynchronous) as together:
            for tensor in sums:
                dist.all_reduce(tensor)
        if asynchronous:
            together.wait()
        assert called() == before + 1
        for i, tensor in enumerate(sums):
            assert (tensor == sum(range(n)) + n * i).all()

        outputs = [torch.zeros(n * (count + i)) for i in range(5)]
        inputs = [torch.full((count + i,), float(me.rank)) for i in range(5)]
        with _coalescing_manager(async_ops=asynchronous) as together:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, tensor)
        if asynchronous:
            together.wait()
        assert called() == before + 2
        for output in outputs:
            assert torch.equal(output.view(n, -1)[:, 0], torch.arange(float(n)))

        outputs = [torch.zeros(count + i) for i in range(5)]
        inputs = [torch.ones(n * (count + i)) for i in range(5)]
        with _coalescing_manager(async_ops=asynchronous) as together:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(output, tensor)
        if asynchronous:
            together.wait()
        assert called() == before + 3
        for output in outputs:
            assert (output == n).all()


@pytest.mark.parametrize("count", [10, LARGE])
def test_coalescing_is_one_operation(crew, count):
    crew.call(manager_on_rank, count)


def mixed_manager_on_rank(me):
    """With a device: whatever is called in between begins, and one work is for all of it."""
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    got, mine = torch.zeros(3), torch.full((3,), float(me.rank))
    root, tensors = torch.full((LARGE,), float(me.rank)), [torch.ones(4), torch.ones(5)]
    with _coalescing_manager(device=torch.get_default_device(), async_ops=True) as together:
        dist.broadcast(root, 1)
        assert not dist.irecv(got, source).is_completed()
        assert not dist.isend(mine, to).is_completed()
        for tensor in tensors:
            dist.all_reduce(tensor)
    together.wait()
    assert (got == source).all()
    assert (root == 1).all()
    assert all((tensor == me.size).all() for tensor in tensors)


def test_a_batch_of_everything(crew):
    crew.call(mixed_manager_on_rank)


def interrupted_batch_on_rank(me):
    """torch does not end a batch whose block raises. The first message afterwards says so."""
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    got, mine = torch.zeros(3), torch.full((3,), float(me.rank))

    def block():
        with _coalescing_manager(device=torch.device("cpu")):
            dist.isend(torch.ones(5), to)
            raise KeyError("the caller's own")

    assert raised(block)[0] == "KeyError"
    kind, message = raised(lambda: dist.recv(got, source))
    assert kind == "ValueError"
    assert f"RECV on rank {me.rank} was not posted" in message
    assert "call again" in message
    sent = dist.isend(mine, to)
    dist.recv(got, source)
    sent.wait()
    assert (got == source).all()

    torch.distributed.distributed_c10d._world.pg_coalesce_state.clear()  # torch's own half

    def waits_within():
        with _coalescing_manager(device=torch.device("cpu")):
            kept = dist.irecv(got, source)
            assert "was not posted" in raised(kept.wait)[1]

    assert "endCoalescing() without startCoalescing()" in raised(waits_within)[1]
    dist.all_reduce(mine)
    assert (mine == sum(range(me.size))).all()


def test_a_batch_that_was_left_by_an_exception(crew):
    crew.call(interrupted_batch_on_rank)


def many_on_rank(me, count, length):
    tensors = [torch.full((length,), float(i + me.rank)) for i in range(count)]
    dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    for i, tensor in enumerate(tensors):
        assert (tensor == me.size * i + sum(range(me.size))).all(), i
    given = [torch.full((length,), float(i + me.rank)) for i in range(count)]
    gathered = [torch.zeros(me.size * length) for _ in range(count)]
    dist.group.WORLD.allgather_into_tensor_coalesced(gathered, given).wait()
    for i, tensor in enumerate(gathered):
        assert tensor.view(me.size, -1)[:, 0].tolist() == [i + r for r in range(me.size)]


def test_a_thousand_tensors(crew):
    crew.call(many_on_rank, 1_000, 3)
    crew.call(many_on_rank, 1_000, 50)


def test_more_tensors_than_a_table_holds(crew):
    """all_reduce cuts them; what only gathers says how many it takes."""
    crew.call(too_many_on_rank)


def too_many_on_rank(me):
    length = 17_000  # beyond what is bundled
    tensors = [torch.full((length,), float(i)) for i in range(200)]
    dist.group.WORLD.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    assert all((tensor == me.size * i).all() for i, tensor in enumerate(tensors))
    gathered = [torch.zeros(me.size * length) for _ in tensors]
    into = dist.group.WORLD.allgather_into_tensor_coalesced
    kind, message = raised(lambda: into(gathered, tensors).wait())
    assert kind in ("NotImplementedError", "RuntimeError")
    assert "200 large tensors" in message
    oracle.exercise("all_reduce", count=10)


def lengths_disagree_on_rank(me, scale):
    lengths = [3 * scale, 5 * scale] if me.rank == 1 else [5 * scale, 3 * scale]
    tensors = [torch.ones(length) for length in lengths]
    error = raised(lambda: dist.group.WORLD.allreduce_coalesced(
        tensors, dist.AllreduceCoalescedOptions()
    ).wait())  # fmt: skip
    assert all((tensor == 1).all() for tensor in tensors)
    oracle.exercise("all_reduce", count=10)
    return error


@pytest.mark.parametrize("scale", [1, 1_000, LARGE])
def test_other_lengths_are_another_call(crew, scale):
    for kind, message in crew.call(lengths_disagree_on_rank, scale):
        assert kind == "DistBackendError"
        assert "tensors of the lengths" in message


def coalesced_sum(group, op, memory, tensors):
    """The memory after all_reduce_coalesced of tensors that lie in it."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = op
    group.allreduce_coalesced(tensors, options).wait()
    return memory


def one_after_the_other(op, memory, tensors, others):
    """What Gloo does: the inputs are copied, reduced, and copied back in the order of the list."""
    reduce = torch.add if op == dist.ReduceOp.SUM else torch.maximum
    results = [tensor.clone() for tensor in tensors]
    for _, theirs in others:
        results = [reduce(one, other) for one, other in zip(results, theirs, strict=True)]
    for tensor, result in zip(tensors, results, strict=True):
        tensor.copy_(result)
    return memory


def overlapping_on_rank(me, count, has_gloo):
    """Each tensor is reduced as it was before the call; where two overlap, the later of the list
    stays. Ranks may overlap in other ways."""

    def memory(rank, elements, dtype=torch.float32):
        return (torch.arange(elements) % 97 + 5 * rank).to(dtype)

    def same(rank):
        whole = memory(rank, count)
        return whole, [whole, whole]

    def slices(rank):
        whole = memory(rank, 2 * count)
        return whole, [whole[: count + 3], whole[count - 3 :], whole[5 : count + 5]]

    def columns(rank):
        whole = memory(rank, 4 * count, torch.int64).view(count, 4)
        return whole, [whole[:, :3], whole[:, 1:], whole.t()[2]]

    def elsewhere(rank):
        whole, begin = memory(rank, 2 * count), rank * 2
        return whole, [whole[begin : begin + count], whole[3 : 3 + count], torch.ones(4)]

    gloo = dist.new_group(backend="gloo") if has_gloo else None
    for make in (same, slices, columns, elsewhere):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            others = [make(r) for r in range(me.size) if r != me.rank]
            expected = one_after_the_other(op, *make(me.rank), others)
            ours = coalesced_sum(dist.group.WORLD, op, *make(me.rank))
            assert torch.equal(ours, expected), make.__name__
            if gloo is not None:
                assert torch.equal(coalesced_sum(gloo, op, *make(me.rank)), expected)
    if gloo is not None:
        dist.destroy_process_group(gloo)


@pytest.mark.parametrize("count", [10, LARGE])
def test_tensors_of_one_call_may_overlap(crew, layout, count):
    crew.call(overlapping_on_rank, count, layout == "shm")


# ---- batches of messages


def bad_batch_on_rank(me):
    """One wrong message: none is sent, and the group is as before."""
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    got = torch.zeros(4)
    operations = [
        dist.P2POp(dist.irecv, got, source),
        dist.P2POp(dist.isend, torch.ones(4), to, tag=-5),
    ]
    kind, message = raised(dist.batch_isend_irecv, operations)
    assert kind == "ValueError"
    assert "tag" in message
    oracle.exercise("all_reduce", count=10)
    operations[1] = dist.P2POp(dist.isend, torch.full((4,), float(me.rank)), to)
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    assert (got == source).all()


def test_a_wrong_message_in_a_batch(crew):
    crew.call(bad_batch_on_rank)


def batch_future_on_rank(me):
    """In a block with a device there is one work for all messages."""
    to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    got = torch.zeros(LARGE)
    with _coalescing_manager(device=torch.get_default_device(), async_ops=True) as together:
        dist.isend(torch.ones(LARGE), to)
        dist.irecv(got, source)
    (work,) = together.works
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    assert done.wait(harness.DEADLINE)
    assert (got == 1).all()
    assert work.is_completed()
    assert len(work.result()) == 2
    dist.barrier()


def test_the_future_of_a_batch(crew):
    crew.call(batch_future_on_rank)


# ---- parts of different sizes


def uneven_on_rank(me, dtype, sizes):
    n = me.size
    for asynchronous in (False, True):
        given = [oracle.contents(5, r, size, dtype) for r, size in enumerate(sizes)]
        outputs = [torch.ones(size).to(dtype) for size in sizes]
        work = dist.all_gather(outputs, given[me.rank].clone(), async_op=asynchronous)
        if asynchronous:
            work.wait()
        for output, expected in zip(outputs, given, strict=True):
            oracle.same(output, expected, f"all_gather of {sizes}")
        for op in ("SUM", "MAX"):
            parts = [oracle.contents(6, r, sum(sizes), dtype).split(sizes) for r in range(n)]
            output = torch.ones(sizes[me.rank]).to(dtype)
            inputs = [part.clone() for part in parts[me.rank]]
            reduce_op = getattr(dist.ReduceOp, op)
            work = dist.reduce_scatter(output, inputs, reduce_op, async_op=asynchronous)
            if asynchronous:
                work.wait()
            expected = oracle.reduced(op, [part[me.rank] for part in parts])
            oracle.same(output, expected, f"reduce_scatter of {sizes}, {op}")
    # Others have other parts in mind.
    swapped = [4, 3, *[2] * (n - 2)] if me.rank == 0 else [3, 4, *[2] * (n - 2)]
    lists = [torch.ones(size) for size in swapped]
    for call in (
        lambda: dist.all_gather(lists, torch.ones(swapped[me.rank])),
        lambda: dist.reduce_scatter(torch.ones(swapped[me.rank]), lists),
    ):
        kind, message = raised(call)
        assert kind == "DistBackendError", message
    oracle.exercise("all_reduce", count=10)


@pytest.mark.parametrize("sizes", [[5, 0, 7], [LARGE, 3, LARGE // 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
def test_parts_of_different_sizes(crew, dtype, sizes):
    crew.call(uneven_on_rank, dtype, sizes)


# ---- monitored barrier


def monitored_on_rank(me, late):
    # torch's function asks no other backend, so README and docs/errors.md name the method.
    kind, text = raised(dist.monitored_barrier)
    assert (kind, text in ERRORS.read_text()) == ("ValueError", True), text
    barrier = dist.group.WORLD.monitored_barrier
    barrier(timeout=timedelta(seconds=harness.DEADLINE), wait_all_ranks=False)
    errors = []
    for i, wait_all in enumerate((False, True)):
        if me.rank in late:
            me.board.wait_all(f"barrier-{i}", [0])
        errors.append(raised(barrier, timeout=timedelta(seconds=1), wait_all_ranks=wait_all))
        me.board.set(f"barrier-{i}-{me.rank}")
    barrier(timeout=timedelta(seconds=harness.DEADLINE), wait_all_ranks=True)
    return errors


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_monitored_barrier_names_who_did_not_come(transports):
    env = {"MOONCAKE_TRANSPORTS": transports, "MOONCAKE_HOST_IP": "127.0.0.1"}
    for rank, errors in enumerate(harness.run_ranks(4, monitored_on_rank, (1, 3), env=env)):
        assert all(kind == "DistBackendError" for kind, _ in errors), (rank, errors)
        assert "Rank 1 failed to pass monitoredBarrier in 1000 ms" in errors[0][1]
        assert "Ranks 1, 3 failed to pass monitoredBarrier in 1000 ms" in errors[1][1]
        assert re.search("Rank [02] timed out in monitoredBarrier", errors[0][1]), errors


# ---- sparse tensors


def sparse_on_rank(me, dtype, rows):
    def given(rank):
        random = torch.Generator().manual_seed(rank)
        indices = torch.randint(0, 50, (2, rows + rank), generator=random)
        values = torch.randint(-9, 9, (rows + rank, 3), generator=random).to(dtype)
        return torch.sparse_coo_tensor(indices, values, (50, 50, 3))

    expected = sum(given(r).to_dense() for r in range(me.size))
    for asynchronous in (False, True):
        mine = given(me.rank)
        work = dist.all_reduce(mine, async_op=asynchronous)
        if asynchronous:
            work.wait()
            assert work.contributors == list(range(me.size))
            assert torch.equal(work.result()[0].to_dense(), expected)
        assert mine.is_coalesced()
        assert torch.equal(mine.to_dense(), expected)
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (7,))
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0
    vector = torch.ones(7 + (me.rank == 1)).to_sparse()
    kind, message = raised(dist.all_reduce, vector)
    assert kind == "DistBackendError"
    assert "sparse tensors: rank 0 has the sizes [7], 1 of them sparse, rank 1 [8]" in message
    oracle.exercise("all_reduce", count=10)


@pytest.mark.parametrize("rows", [5, 3_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_sparse_all_reduce(crew, dtype, rows):
    crew.call(sparse_on_rank, dtype, rows)


# ---- factors


def factors_on_rank(me, dtype, count):
    same = torch.float32 if dtype.is_complex else dtype  # torch sends complex numbers as pairs
    for factor in (0.5, torch.tensor([2.0]), torch.tensor(4.0, dtype=same)):
        number = float(factor)
        op = _make_nccl_premul_sum(factor)
        mine = torch.full((count,), float(me.rank + 1), dtype=dtype)
        dist.all_reduce(mine, op=op)
        assert (mine == number * sum(range(me.size + 1))).all()
        mine = torch.full((count,), float(me.rank + 1), dtype=dtype)
        dist.reduce(mine, 0, op=op)
        total = number * sum(range(me.size + 1)) if me.rank == 0 else me.rank + 1
        assert (mine == total).all()
        given = torch.full((me.size * count,), float(me.rank + 1), dtype=dtype)
        output = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter_tensor(output, given, op=op)
        assert (output == number * sum(range(me.size + 1))).all()
        assert (given == me.rank + 1).all()
    # Everybody's own.
    mine = torch.ones(count, dtype=dtype)
    dist.all_reduce(mine, op=_make_nccl_premul_sum(float(me.rank)))
    assert (mine == sum(range(me.size))).all()


@pytest.mark.parametrize("count", [5, LARGE])
@pytest.mark.parametrize("dtype", [*oracle.FLOATS, torch.complex64], ids=str)
def test_premultiplied_sums(crew, dtype, count):
    crew.call(factors_on_rank, dtype, count)


def complex_product_on_rank(me, dtype):
    mine = torch.tensor([1 + 2j, 1j, 0.5 - 1j], dtype=dtype)
    expected = mine.clone()
    for _ in range(1, me.size):
        expected = expected * mine
    backend_of().allreduce([mine], dist.ReduceOp.PRODUCT).wait()
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", oracle.COMPLEX, ids=str)
def test_products_of_complex_numbers(crew, dtype):
    crew.call(complex_product_on_rank, dtype)


# ---- inputs and outputs in one place


def aliases_on_rank(me, count):
    n, rank = me.size, me.rank
    everything = torch.zeros(n * count)
    everything[:count] = rank  # where rank 0's goes
    dist.all_gather_into_tensor(everything, everything[:count])
    assert everything.view(n, -1)[:, 0].tolist() == [float(r) for r in range(n)]
    mixed = torch.arange(n * count).float() + 1000 * rank
    whole = mixed.clone()
    dist.all_to_all_single(mixed, mixed)
    for r in range(n):
        part = whole[rank * count : (rank + 1) * count] - 1000 * rank + 1000 * r
        assert torch.equal(mixed[r * count : (r + 1) * count], part)
    given = torch.full((n * count,), float(rank))
    dist.reduce_scatter_tensor(given[1 : count + 1], given)  # across two parts
    assert (given[1 : count + 1] == sum(range(n))).all()
    parts = list(torch.arange(float(n * count)).split(count))
    dist.scatter(parts[0], parts if rank == 1 else None, 1)
    assert torch.equal(parts[0], torch.arange(float(n * count)).split(count)[rank])
    outputs = list(torch.zeros(n * count).split(count))
    outputs[0].fill_(rank)
    dist.gather(outputs[0], outputs if rank == 1 else None, 1)
    if rank == 1:
        assert [output[0].item() for output in outputs] == [float(r) for r in range(n)]
    tensors = [torch.zeros(count), torch.zeros(count)]
    kind, message = raised(
        lambda: dist.group.WORLD.allgather_coalesced([tensors] * n, tensors).wait()
    )
    assert kind == "ValueError"
    assert "share memory" in message


def strided_outputs_on_rank(me, count):
    """Outputs that lie between each other are fine; one element in common is refused."""
    n = me.size
    given = torch.full((count,), float(me.rank))
    apart = torch.zeros(count, 2 * n)
    dist.all_gather(list(apart[:, ::2].unbind(1)), given)
    assert torch.equal(apart[:, ::2], torch.arange(float(n)).expand(count, n))
    assert not apart[:, 1::2].any()
    shared = torch.zeros(2 * count * n)
    given = torch.full((2, count), float(me.rank))
    columns = [shared.view(-1, n)[: 2 * count, r].view(2, count) for r in range(n)]
    across = shared[2 * count * n - 2 * count :].view(2, count)  # every nth place is a column's
    outputs = [*columns[:-1], across]
    kind, message = raised(dist.all_gather, outputs, given)
    assert (kind, "share memory" in message) == ("ValueError", True)
    grid = torch.zeros(3, n + 1)
    windows = [grid[:, r : r + 2] for r in range(n)]
    kind, message = raised(dist.all_gather, windows, torch.zeros(3, 2))
    assert (kind, "share memory" in message) == ("ValueError", True)
    assert not grid.any()


def one_after_the_other_on_rank(me, count):
    """Each asynchronous operation begins with what the one before it has made of the tensor, also
    where it works on a copy."""
    n, rounds = me.size, 3
    strided = torch.ones(2 * count)[::2]
    small, large = torch.ones(count), torch.ones(2 * count)[1::2]
    scaled = torch.ones(count)
    mean = _make_nccl_premul_sum(2.0)
    given, total = torch.ones(2 * count * n)[::2], torch.zeros(count)
    works = []
    for _ in range(rounds):
        works.append(dist.all_reduce(strided, async_op=True))
        works.append(dist.group.WORLD.allreduce_coalesced([small, large]))
        works.append(dist.all_reduce(scaled, mean, async_op=True))
        works.append(dist.all_reduce(given, async_op=True))
    works.append(dist.reduce_scatter_tensor(total, given, async_op=True))
    for work in works:
        work.wait()
    for name, tensor, factor in [
        ("strided", strided, n**rounds), ("small", small, n**rounds), ("large", large, n**rounds),
        ("scaled", scaled, (2 * n) ** rounds), ("total", total, n ** (rounds + 1)),
    ]:  # fmt: skip
        assert (tensor == factor).all(), (name, tensor, factor)


@pytest.mark.parametrize("count", [5, LARGE])
def test_aliases(crew, count):
    crew.call(aliases_on_rank, count)


def test_strided_outputs(crew):
    crew.call(strided_outputs_on_rank, 5)


@pytest.mark.parametrize("count", [5, LARGE])
def test_asynchronous_operations_on_one_tensor(crew, count):
    crew.call(one_after_the_other_on_rank, count)


def gradients_on_rank(me):
    """Tensors that require a gradient are data like others, strided ones too; a loss that is
    reduced: test_odd_tensors."""
    for make in (lambda: torch.ones(6), lambda: torch.ones(12)[::2]):
        leaf = make().requires_grad_()
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert leaf.tolist() == [float(me.size)] * 6
        leaf = make().requires_grad_()
        work = dist.all_reduce(leaf.detach(), async_op=True)
        work.wait()
        assert leaf.tolist() == [float(me.size)] * 6
        outputs = [make() for _ in range(me.size)]
        dist.all_gather(outputs, make().requires_grad_())
        assert all(output.tolist() == [1.0] * 6 for output in outputs)


def test_tensors_that_require_a_gradient(crew):
    crew.call(gradients_on_rank)


# ---- the group


def split_on_rank(me, name):
    world = dist.group.WORLD
    mine = [0, 2] if me.rank % 2 == 0 else [1]
    name += str(mine)  # torch's split_group() sees to that
    options = copy.deepcopy(backend_of().options)
    group = world.split_group(
        mine, timeout=timedelta(seconds=33), opts=options, group_name=name, group_desc="half"
    )
    assert (group.rank(), group.size()) == (mine.index(me.rank), len(mine))
    assert group.group_name == name
    assert group.name() == world.name() == backend_of().name()
    ours = backend_of(group)
    assert ours.options._timeout == timedelta(seconds=33)
    assert ours.on_failure == backend_of().on_failure
    for count in (10, LARGE):
        tensor = torch.full((count,), float(me.rank))
        group.allreduce([tensor]).wait()
        assert (tensor == sum(mine)).all()
    if me.rank % 2 == 0:  # and again, of what was split off
        one = group.split_group([1], group_name=name + "[1]", opts=ours.options)
        assert (one is None) == (me.rank == 0)
        if one is not None:
            assert one.name() == world.name()
            tensor = torch.ones(3)
            one.allreduce([tensor]).wait()
            assert (tensor == 1).all()
    # Nobody waits for who is not in it.
    left = world.split_group([1, 2], group_name=f"split-left-{me.folder}", opts=options)
    assert (left is None) == (me.rank == 0)
    if left is not None:
        left.barrier().wait()
    oracle.exercise("all_reduce", count=10)


@pytest.mark.skipif(not SPLITS, reason="torch splits groups since 2.9")
def test_split(crew):
    crew.call(split_on_rank, f"split-{crew.size}-{id(crew)}")


def merge_on_rank(me):
    """A job of its own, over any store; torch numbers the ranks as they come."""
    world = dist.group.WORLD
    group = world.merge_remote_group(me.store("merged"), me.size, group_name="merged")
    assert (group.size(), group.name()) == (me.size, world.name())
    tensor = torch.full((LARGE,), 2.0 ** group.rank())
    group.allreduce([tensor]).wait()
    assert (tensor == 2**me.size - 1).all()
    oracle.exercise("all_reduce", count=10)
    group.barrier().wait()
    group.shutdown()
    oracle.exercise("all_reduce", count=10)


@pytest.mark.skipif(not SPLITS, reason="torch merges groups since 2.9")
def test_merge():
    harness.run_ranks(3, merge_on_rank, env={"MOONCAKE_TRANSPORTS": "shm"})


def about_on_rank(me):
    backend = backend_of()
    options = backend.options
    assert options.backend == backend.name() == "mooncake"
    assert copy.deepcopy(options)._timeout == options._timeout
    before = called()
    for i in range(3):
        assert called() == before + i
        dist.all_reduce(torch.ones(2))
    backend._set_sequence_number_for_group()
    assert called() == before + 3
    assert backend.supports_coalescing
    assert backend.supports_splitting
    harness.set_timeout(45)
    assert backend.options._timeout == timedelta(seconds=45)
    harness.set_timeout(harness.DEADLINE)


def test_options_and_numbers(crew):
    crew.call(about_on_rank)


def name_on_rank(me):
    import torch.testing._internal.distributed.fake_pg  # registers the backend fake

    world = dist.group.WORLD
    own = dist.new_group([0, me.size - 1])
    beside = dist.new_group(backend="cpu:mooncake-cpu,meta:fake")
    # The default group is made with the name for the CPU and the test's device.
    name = devices.served_by("mooncake")
    for group in (own, world):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            assert (backend_of(group).name(), dist.get_backend(group)) == ("mooncake", name)
    # Of two backends: torch's own group, for the devices of both.
    assert backend_of(beside).name() == "mooncake-cpu"
    assert {device.type for device in beside._device_types} == {"cpu", "meta"}
    tensor = torch.ones(3, device="cpu")
    dist.all_reduce(tensor, group=beside)
    assert (tensor == me.size).all()
    dist.destroy_process_group(beside)


def test_the_name_of_a_group(crew):
    crew.call(name_on_rank)


def profiled_on_rank(me):
    n, next_one, last = me.size, (me.rank + 1) % me.size, (me.rank - 1) % me.size
    four, four_of_each = torch.ones(4), torch.ones(4 * n)
    lists = [torch.ones(4) for _ in range(n)]

    def exchange():
        receiving = dist.irecv(torch.ones(4), last)
        dist.isend(four, next_one).wait()
        receiving.wait()

    def receive_from_any():
        if me.rank == 0:
            for _ in range(n - 1):
                dist.recv(torch.ones(4))
        else:
            dist.send(four, 0)

    calls = {
        "all_reduce": lambda: dist.all_reduce(four),
        "broadcast": lambda: dist.broadcast(four, 1),
        "reduce": lambda: dist.reduce(four, 1),
        "all_gather": lambda: dist.all_gather(lists, four),
        "_all_gather_base": lambda: dist.all_gather_into_tensor(four_of_each, four),
        "gather": lambda: dist.gather(four, lists if me.rank == 1 else None, 1),
        "scatter": lambda: dist.scatter(four, lists if me.rank == 1 else None, 1),
        "reduce_scatter": lambda: dist.reduce_scatter(four, lists),
        "_reduce_scatter_base": lambda: dist.reduce_scatter_tensor(four, four_of_each),
        "all_to_all": lambda: dist.all_to_all_single(four_of_each, four_of_each),
        "barrier": dist.barrier,
        "sparse_all_reduce": lambda: dist.all_reduce(torch.eye(3).to_sparse()),
        "send": exchange,
        "recvAnySource": receive_from_any,
    }
    shapes = {
        "_reduce_scatter_base": [[4 * n]], "all_to_all": [[4 * n]], "barrier": [],
        "scatter": [[4]] * n if me.rank == 1 else [], "reduce_scatter": [[4]] * n,
        "sparse_all_reduce": [[3, 3]],
    }  # fmt: skip
    for name, call in calls.items():
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            call()
        events = {e.name: e for e in profile.function_events if e.name.startswith("mooncake:")}
        if name == "send":
            assert set(events) == {"mooncake:send", "mooncake:recv"}
        if name == "recvAnySource" and me.rank != 0:
            name = "send"
        event = events[f"mooncake:{name}"]
        assert event.is_async
        assert event.input_shapes == shapes.get(name, [[4]]), name
    # An event that began ends, though nobody waits for its work.
    with torch.autograd.profiler.profile() as profile:
        work = dist.all_reduce(four, async_op=True)
        until(work.is_completed, "the end of all_reduce")
    assert any(e.name == "mooncake:all_reduce" for e in profile.function_events)


def test_the_profiler_sees_what_is_called(crew):
    crew.call(profiled_on_rank)


def objects_on_rank(me):
    everybody = [None] * me.size
    dist.all_gather_object(everybody, {"rank": me.rank, "text": "x" * (100 * me.rank)})
    assert [one["rank"] for one in everybody] == list(range(me.size))
    gathered = [None] * me.size if me.rank == 1 else None
    dist.gather_object(("from", me.rank), gathered, 1)
    if me.rank == 1:
        assert gathered == [("from", r) for r in range(me.size)]
    given = [f"for {r}" for r in range(me.size)] if me.rank == 0 else None
    taken = [None]
    dist.scatter_object_list(taken, given, 0)
    assert taken == [f"for {me.rank}"]
    sent = ["a", 1] if me.rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    assert sent == ["a", 1]


def test_objects(crew):
    crew.call(objects_on_rank)


def forked_on_rank(me):
    """A child is told so by every call, and its parent's group goes on."""
    world = dist.group.WORLD
    tensor = torch.ones(4)
    outputs = [tensor.clone() for _ in range(me.size)] if me.rank == 0 else None
    calls = {
        "gather": lambda: dist.gather(tensor, outputs, 0),
        "scatter": lambda: dist.scatter(tensor, None if me.rank else [tensor] * me.size, 0),
        "coalesced": lambda: world.allreduce_coalesced([tensor], dist.AllreduceCoalescedOptions()),
        "start": lambda: world._start_coalescing(torch.device("cpu")),
        "monitored": lambda: world.monitored_barrier(timedelta(seconds=1), True),
        "sparse": lambda: dist.all_reduce(tensor.to_sparse()),
        "new group": dist.new_group,
    }
    if SPLITS:
        calls["split"] = lambda: world.split_group([0, 1], group_name="child")
    child = os.fork()
    if child == 0:
        wrong = list(calls)
        try:
            wrong = [name for name, call in calls.items() if "forked" not in raised(call)[1]]
        finally:
            print("not refused:", wrong, flush=True)
            os._exit(bool(wrong))
    assert os.waitpid(child, 0)[1] == 0
    oracle.exercise("gather", count=10)


def test_forked_children():
    harness.run_ranks(2, forked_on_rank, env={"MOONCAKE_TRANSPORTS": "shm"})


# ---- losses


def losses_on_rank(me, count):
    """In mode raise a coalesced call raises as one; then it is over the survivors."""
    world = dist.group.WORLD
    tensors = [torch.full((count + i,), 2.0**me.rank) for i in range(3)]

    def call():
        world.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()

    call()
    # What a rank has sent on a wire of packets is lost with it until it was acknowledged.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"first call of {me.rank}", "has ended")
    if me.rank == 2:
        store.wait([f"first call of {rank}" for rank in range(2)])
        os._exit(0)
    for tensor in tensors:
        tensor.fill_(2.0**me.rank)
    kind, _ = raised(call)
    assert kind == "PeerLostError"
    assert all((tensor == 2.0**me.rank).all() for tensor in tensors)
    call()
    assert all((tensor == 3).all() for tensor in tensors)
    sparse = torch.eye(3).to_sparse()
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
    outputs = [torch.full((count,), -1.0) for _ in range(3)]
    dist.gather(torch.ones(count), outputs if me.rank == 0 else None, 0)
    if me.rank == 0:
        assert [output[0].item() for output in outputs] == [1, 1, 0]
        assert (outputs[2] == 0).all()
    kind, message = raised(dist.scatter, torch.ones(count), None, 2)
    assert kind == "PeerLostError"
    assert "the root, rank 2" in message
    kind, _ = raised(dist.gather, torch.ones(count), None, 2)
    assert kind == "PeerLostError"
    world.monitored_barrier(timedelta(seconds=harness.DEADLINE), True)


@pytest.mark.parametrize("count", [5, LARGE])
@pytest.mark.parametrize("transports", ["shm", "tcp", "sim"])
def test_losses_in_mode_raise(transports, count):
    env = {
        "MOONCAKE_TRANSPORTS": transports,
        "MOONCAKE_HOST_IP": "127.0.0.1",
        "MOONCAKE_ON_FAILURE": "raise",
    }
    with harness.starting(3, losses_on_rank, count, env=env) as crew:
        crew.results(dead=[2])
