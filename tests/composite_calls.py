"""What torch puts on top of the plain collectives, as oracle.start() has those: called on every
rank of a group, then checked against a plain model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import harness
import oracle
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from oracle import Placed, contents, reduced
from torch.distributed.distributed_c10d import _coalescing_manager

# Not complex ones: of them torch reduces a copy, view_as_real().
SPARSE_TYPES = [torch.float32, torch.float64, torch.int32, torch.int64]


@dataclass
class Call:
    """One call, seen from one rank of its group."""

    group: Any
    dtype: torch.dtype
    op: str
    count: int
    root: int
    seed: int
    layout: str
    asynchronous: bool
    tag: int  # no other call of the group has it

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def name(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def given(self, rank: int, times: int = 1, count: int | None = None) -> torch.Tensor:
        elements = (self.count if count is None else count) * times
        if self.layout == "expanded":
            return contents(self.seed, rank, min(elements, 1), self.dtype).expand(elements)
        return contents(self.seed, rank, elements, self.dtype)

    def empty(self, count: int | None = None) -> Placed:
        elements = self.count if count is None else count
        layout = "plain" if self.layout == "expanded" else self.layout
        return Placed(contents(self.seed, self.size + 1, elements, self.dtype), layout)


Steps = Generator[None, None, None]


def start(verb: str, **named: Any) -> Callable[[], None]:
    """Calls the verb. What it returns waits for the result and checks it."""
    steps = VERBS[verb](Call(**named))
    next(steps, None)
    return lambda: next(steps, None)


def _ring(call: Call) -> tuple[int, int]:
    """Where I send to, where I receive from."""
    shift = 1 + call.seed % (call.size - 1)
    return (call.rank + shift) % call.size, (call.rank - shift) % call.size


def _send_recv(call: Call, any_source: bool = False) -> Steps:
    if call.size == 1:
        return
    to, source = _ring(call)
    mine, got = Placed(call.given(call.rank), call.layout), call.empty()
    named = {"group": call.group, "tag": call.tag}
    sent = dist.isend(mine.view, call.name(to), **named)
    taken = None
    origin = None if any_source else call.name(source)
    if call.asynchronous:
        taken = dist.irecv(got.view, origin, **named)
    else:
        assert dist.recv(got.view, origin, **named) == call.name(source)
    yield
    if taken is not None:
        taken.wait()
    sent.wait()
    got.check(call.given(source), f"a message of {call}")
    mine.check(call.given(call.rank), f"what was sent of {call}")


def _recv_any(call: Call) -> Steps:
    yield from _send_recv(call, any_source=True)


def _batch(call: Call) -> Steps:
    """Two messages for everybody, the second one longer."""
    others = [r for r in range(call.size) if r != call.rank]
    if not others:
        return
    lengths = [call.count, call.count + 3_000]
    got = {(r, n): call.empty(n) for n in lengths for r in others}
    named = {"group": call.group, "tag": call.tag}
    operations = [
        dist.P2POp(dist.isend, call.given(call.rank, count=n), call.name(r), **named)
        for n in lengths
        for r in others
    ]
    operations += [
        dist.P2POp(dist.irecv, tensor.view, call.name(r), **named) for (r, _), tensor in got.items()
    ]
    works = dist.batch_isend_irecv(operations)
    yield
    for work in works:
        work.wait()
    for (r, n), tensor in got.items():
        tensor.check(call.given(r, count=n), f"{n} elements from {r} of {call}")


def _barrier(call: Call) -> Steps:
    work = dist.barrier(call.group, async_op=call.asynchronous)
    yield
    if work is not None:
        work.wait()


def _monitored_barrier(call: Call) -> Steps:
    call.group.monitored_barrier(timedelta(seconds=harness.DEADLINE), bool(call.seed % 2))
    yield


def _all_reduce_sparse(call: Call) -> Steps:
    dtype = SPARSE_TYPES[call.seed % len(SPARSE_TYPES)]

    def given(rank: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(call.seed + rank)
        elements = (call.count + 7 * rank) % 1_000
        indices = torch.randint(0, 9, (2, elements), generator=random)
        values = torch.randint(-9, 9, (elements, 2), generator=random).to(dtype)
        return torch.sparse_coo_tensor(indices, values, (9, 9, 2))

    mine = given(call.rank)
    work = dist.all_reduce(mine, group=call.group, async_op=call.asynchronous)
    yield
    if work is not None:
        work.wait()
    expected = sum(given(r).to_dense() for r in range(call.size))
    assert torch.equal(mine.to_dense(), expected), call


def _manager(call: Call) -> Steps:
    """Several calls of one kind, which torch puts together."""
    lengths, every = oracle.lengths_of(call.count), range(call.size)
    op, kind = getattr(dist.ReduceOp, call.op), call.seed % 3
    times = call.size if kind == 2 else 1
    inputs = [call.given(call.rank, times, n).clone() for n in lengths]
    outputs = [call.empty(n * call.size if kind == 1 else n).view.contiguous() for n in lengths]
    with _coalescing_manager(call.group, async_ops=call.asynchronous) as together:
        for output, given in zip(outputs, inputs, strict=True):
            if kind == 0:
                dist.all_reduce(given, op=op, group=call.group)
            elif kind == 1:
                dist.all_gather_into_tensor(output, given, group=call.group)
            else:
                dist.reduce_scatter_tensor(output, given, op=op, group=call.group)
    yield
    if call.asynchronous:
        together.wait()
    for i, n in enumerate(lengths):
        theirs = [call.given(r, times, n) for r in every]
        if kind == 1:
            oracle.same(outputs[i].view(-1), torch.cat(theirs), f"tensor {i} of {call}")
            continue
        mine = slice(call.rank * n, (call.rank + 1) * n) if kind == 2 else slice(None)
        result = reduced(call.op, [one[mine] for one in theirs])
        found = inputs[i] if kind == 0 else outputs[i].view(-1)
        oracle.same(found, result, f"tensor {i} of {call}")


def _mixed_manager(call: Call) -> Steps:
    """Whatever is called between, as one work."""
    if call.size == 1:
        return
    to, source = _ring(call)
    shared = call.given(call.rank).clone()
    got, mine = call.empty(), Placed(call.given(call.rank), call.layout)
    named = {"group": call.group, "tag": call.tag}
    with _coalescing_manager(
        call.group, device=torch.device("cpu"), async_ops=call.asynchronous
    ) as together:
        dist.broadcast(shared, call.name(call.root), group=call.group, async_op=True)
        assert not dist.irecv(got.view, call.name(source), **named).is_completed()
        assert not dist.isend(mine.view, call.name(to), **named).is_completed()
    yield
    if call.asynchronous:
        together.wait()
    oracle.same(shared, call.given(call.root), f"the broadcast of {call}")
    got.check(call.given(source), f"the message of {call}")


def _object(call: Call, rank: int) -> Any:
    return {"rank": rank, "seed": call.seed, "text": "x" * (call.count % 700 * (rank + 1))}


def _all_gather_object(call: Call) -> Steps:
    everybody = [None] * call.size
    dist.all_gather_object(everybody, _object(call, call.rank), group=call.group)
    yield
    assert everybody == [_object(call, r) for r in range(call.size)], call


def _gather_object(call: Call) -> Steps:
    is_root = call.rank == call.root
    everybody: list[Any] | None = [None] * call.size if is_root else None
    dist.gather_object(_object(call, call.rank), everybody, call.name(call.root), group=call.group)
    yield
    if is_root:
        assert everybody == [_object(call, r) for r in range(call.size)], call


def _scatter_object_list(call: Call) -> Steps:
    given = [_object(call, r) for r in range(call.size)] if call.rank == call.root else None
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, given, call.name(call.root), group=call.group)
    yield
    assert taken == [_object(call, call.rank)], call


def _broadcast_object_list(call: Call) -> Steps:
    objects = [_object(call, r) for r in range(3)] if call.rank == call.root else [None] * 3
    dist.broadcast_object_list(objects, call.name(call.root), group=call.group)
    yield
    assert objects == [_object(call, r) for r in range(3)], call


def _waited(output: torch.Tensor) -> torch.Tensor:
    is_pending = isinstance(output, functional.AsyncCollectiveTensor)
    return output.wait() if is_pending else output


def _functional_all_reduce(call: Call) -> Steps:
    mine = Placed(call.given(call.rank), call.layout)
    output = functional.all_reduce(mine.view, call.op.lower(), call.group)
    yield
    expected = reduced(call.op, [call.given(r) for r in range(call.size)])
    oracle.same(_waited(output).reshape(-1), expected, f"{call}")
    mine.check(call.given(call.rank), f"the input of {call}")


def _functional_all_gather(call: Call) -> Steps:
    output = functional.all_gather_tensor(call.given(call.rank).clone(), 0, call.group)
    yield
    expected = torch.cat([call.given(r) for r in range(call.size)])
    oracle.same(_waited(output), expected, f"{call}")


def _functional_reduce_scatter(call: Call) -> Steps:
    given = call.given(call.rank, call.size).clone()
    output = functional.reduce_scatter_tensor(given, call.op.lower(), 0, call.group)
    yield
    mine = slice(call.rank * call.count, (call.rank + 1) * call.count)
    parts = [call.given(r, call.size)[mine] for r in range(call.size)]
    oracle.same(_waited(output), reduced(call.op, parts), f"{call}")


def _functional_all_to_all(call: Call) -> Steps:
    table = oracle.splits_of(call.seed, call.size, call.count % 500)
    pieces = [call.given(r, 1, sum(row)).split(row) for r, row in enumerate(table)]
    splits = [row[call.rank] for row in table], table[call.rank]
    output = functional.all_to_all_single(torch.cat(pieces[call.rank]), *splits, call.group)
    yield
    expected = torch.cat([theirs[call.rank] for theirs in pieces])
    oracle.same(_waited(output), expected, f"{call}")


def _functional_broadcast(call: Call) -> Steps:
    mine = Placed(call.given(call.rank), call.layout)
    output = functional.broadcast(mine.view, call.root, call.group)
    yield
    oracle.same(_waited(output).reshape(-1), call.given(call.root), f"{call}")
    mine.check(call.given(call.rank), f"the input of {call}")


VERBS: dict[str, Callable[[Call], Steps]] = {
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
    "all_reduce_sparse": _all_reduce_sparse,
    "send_recv": _send_recv,
    "recv_any": _recv_any,
    "batch": _batch,
    "manager": _manager,
    "mixed_manager": _mixed_manager,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _broadcast_object_list,
    "functional_all_reduce": _functional_all_reduce,
    "functional_all_gather": _functional_all_gather,
    "functional_reduce_scatter": _functional_reduce_scatter,
    "functional_all_to_all": _functional_all_to_all,
    "functional_broadcast": _functional_broadcast,
}
REDUCING = ["manager", "functional_all_reduce", "functional_reduce_scatter"]
# The call itself waits for the others.
BLOCKING = [
    "monitored_barrier", "all_gather_object", "gather_object", "scatter_object_list",
    "broadcast_object_list",
]  # fmt: skip
