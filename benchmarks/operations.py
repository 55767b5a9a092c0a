"""The measured operations: the same tensors, called through torch.distributed and through MPI.

``size`` is always the size in bytes of one rank's input, a float32 tensor:

    operation           input of a rank   output of a rank
    all_reduce          size, in place    size
    all_gather          size              ranks x size                (all_gather_into_tensor)
    broadcast           size, in place    size                        (from rank 0)
    all_to_all          size              size: size/ranks per pair   (all_to_all_single)
    reduce_scatter      size              size/ranks                  (reduce_scatter_tensor)
    all_gather_list     size              a list of ranks tensors of size (all_gather)
    gather              size              ranks x size on rank 0      (torch only)
    scatter             size, on rank 0   size/ranks                  (torch only)
    all_gather_object   a dict with size bytes inside                 (torch only)
    ring                size to the next  size from the previous      (batch_isend_irecv, torch
                                                                      only)
    all_reduce_8_calls  8 tensors of size/8, one call each            (torch only)
    all_reduce_coalesced the same 8 tensors in one call               (torch only)
    all_gather_8_calls, all_gather_coalesced, reduce_scatter_8_calls, reduce_scatter_coalesced
                        likewise                                      (torch only)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ITEM_BYTES = 4  # float32
PARTS = 8  # tensors of a coalesced call
Call = Callable[[], Any]


@dataclass
class Buffers:
    """Tensors of one rank for one cell. Every backend of the cell uses the same tensors."""

    rank: int
    ranks: int
    x: torch.Tensor  # input
    y: torch.Tensor  # output; empty for an operation in place
    objects: list[Any]


@dataclass(frozen=True)
class Operation:
    """How to call an operation, and its right result. torch and mpi return a function without
    arguments."""

    output_items: Callable[[int, int], int]  # (items of the input, ranks) -> items of the output
    torch: Callable[[Buffers, Any], Call]
    mpi: Callable[[Buffers, Any, Any], Call] | None  # (buffers, communicator, the MPI module)
    expected: Callable[[Buffers, int], torch.Tensor]
    result: Callable[[Buffers], torch.Tensor] = lambda b: b.y


def pattern(rank: int, salt: int, items: int) -> torch.Tensor:
    """Small whole numbers that differ by rank, call and place: their sums are exact in float32 in
    any order."""
    return ((torch.arange(items) + 7 * rank + 13 * salt) % 31 - 15).float()


def allocate(name: str, size: int, rank: int, ranks: int, device: str = "cpu") -> Buffers:
    """Buffers of zeros for one cell. size: bytes, rounded up so that every rank (and part) has
    whole
    elements."""
    step = ranks * PARTS if name.endswith(("_8_calls", "_coalesced")) else ranks
    items = -(-max(1, size // ITEM_BYTES) // step) * step
    outputs = OPERATIONS[name].output_items(items, ranks)
    x, y = torch.zeros(items, device=device), torch.zeros(outputs, device=device)
    return Buffers(rank, ranks, x, y, [None] * ranks)


def fill(name: str, b: Buffers, salt: int) -> None:
    """Writes this rank's input of call number salt, and a wrong output."""
    b.x.copy_(pattern(b.rank, salt, b.x.numel()))
    if name == "broadcast" and b.rank != 0:
        b.x.fill_(-99)
    b.y.fill_(-99)


def reset(b: Buffers) -> None:
    """Writes zeros, so that thousands of sums in place stay finite."""
    b.x.zero_()
    b.y.zero_()


def is_right(name: str, b: Buffers, salt: int) -> bool:
    """Whether this rank holds exactly the right result of call number salt."""
    operation = OPERATIONS[name]
    return torch.equal(operation.result(b).cpu(), operation.expected(b, salt))


def _sum(b: Buffers, salt: int) -> torch.Tensor:
    return sum(pattern(r, salt, b.x.numel()) for r in range(b.ranks))


def _all(b: Buffers, salt: int) -> torch.Tensor:
    return torch.cat([pattern(r, salt, b.x.numel()) for r in range(b.ranks)])


def _my_part(b: Buffers, whole: torch.Tensor) -> torch.Tensor:
    return whole.view(b.ranks, -1)[b.rank]


def _floats(tensor: torch.Tensor, mpi: Any) -> list[Any]:
    return [tensor.numpy(), mpi.FLOAT]


def _call(function: Callable, *args: Any, **kwargs: Any) -> Call:
    return lambda: function(*args, **kwargs)


def _ring(b: Buffers, group: Any) -> Call:
    send = dist.P2POp(dist.isend, b.x, group=group, group_peer=(b.rank + 1) % b.ranks)
    receive = dist.P2POp(dist.irecv, b.y, group=group, group_peer=(b.rank - 1) % b.ranks)

    def call() -> None:
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return call


def _gather_objects(b: Buffers, group: Any) -> Call:
    def call() -> None:
        dist.all_gather_object(
            b.objects, {"rank": b.rank, "bytes": b.x.numpy().tobytes()}, group=group
        )

    return call


def _gather(b: Buffers, group: Any) -> Call:
    outputs = list(b.y.chunk(b.ranks)) if b.rank == 0 else None
    return _call(dist.gather, b.x, outputs, group=group, group_dst=0)


def _scatter(b: Buffers, group: Any) -> Call:
    given = list(b.x.chunk(b.ranks)) if b.rank == 0 else None
    return _call(dist.scatter, b.y, given, group=group, group_src=0)


def _each_part(b: Buffers, group: Any) -> Call:
    parts = list(b.x.chunk(PARTS))

    def call() -> None:
        for part in parts:
            dist.all_reduce(part, group=group)

    return call


def _each_pair(function: Callable, b: Buffers, group: Any) -> Call:
    pairs = list(zip(b.y.chunk(PARTS), b.x.chunk(PARTS), strict=True))

    def call() -> None:
        for output, given in pairs:
            function(output, given, group=group)

    return call


def _all_pairs(name: str, b: Buffers, group: Any) -> Call:
    coalesced = getattr(group, name)
    outputs, given = list(b.y.chunk(PARTS)), list(b.x.chunk(PARTS))
    return lambda: coalesced(outputs, given).wait()


def _all_by_part(b: Buffers, salt: int) -> torch.Tensor:
    parts = [pattern(r, salt, b.x.numel()).chunk(PARTS) for r in range(b.ranks)]
    return torch.cat([part for of_all in zip(*parts, strict=True) for part in of_all])


def _mine_by_part(b: Buffers, salt: int) -> torch.Tensor:
    return torch.cat([_my_part(b, part) for part in _sum(b, salt).chunk(PARTS)])


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        output_items=lambda items, ranks: 0,
        torch=lambda b, group: _call(dist.all_reduce, b.x, group=group),
        mpi=lambda b, comm, mpi: _call(comm.Allreduce, mpi.IN_PLACE, _floats(b.x, mpi)),
        expected=_sum,
        result=lambda b: b.x,
    ),
    "all_gather": Operation(
        output_items=lambda items, ranks: items * ranks,
        torch=lambda b, group: _call(dist.all_gather_into_tensor, b.y, b.x, group=group),
        mpi=lambda b, comm, mpi: _call(comm.Allgather, _floats(b.x, mpi), _floats(b.y, mpi)),
        expected=_all,
    ),
    "broadcast": Operation(
        output_items=lambda items, ranks: 0,
        torch=lambda b, group: _call(dist.broadcast, b.x, group=group, group_src=0),
        mpi=lambda b, comm, mpi: _call(comm.Bcast, _floats(b.x, mpi), 0),
        expected=lambda b, salt: pattern(0, salt, b.x.numel()),
        result=lambda b: b.x,
    ),
    "all_to_all": Operation(
        output_items=lambda items, ranks: items,
        torch=lambda b, group: _call(dist.all_to_all_single, b.y, b.x, group=group),
        mpi=lambda b, comm, mpi: _call(comm.Alltoall, _floats(b.x, mpi), _floats(b.y, mpi)),
        expected=lambda b, salt: torch.cat(
            [_my_part(b, pattern(r, salt, b.x.numel())) for r in range(b.ranks)]
        ),
    ),
    "reduce_scatter": Operation(
        output_items=lambda items, ranks: items // ranks,
        torch=lambda b, group: _call(dist.reduce_scatter_tensor, b.y, b.x, group=group),
        mpi=lambda b, comm, mpi: _call(
            comm.Reduce_scatter_block, _floats(b.x, mpi), _floats(b.y, mpi)
        ),
        expected=lambda b, salt: _my_part(b, _sum(b, salt)),
    ),
    "all_gather_list": Operation(
        output_items=lambda items, ranks: items * ranks,
        torch=lambda b, group: _call(dist.all_gather, list(b.y.chunk(b.ranks)), b.x, group=group),
        mpi=lambda b, comm, mpi: _call(comm.Allgather, _floats(b.x, mpi), _floats(b.y, mpi)),
        expected=_all,
    ),
    "gather": Operation(
        output_items=lambda items, ranks: items * ranks,
        torch=_gather,
        mpi=None,
        expected=lambda b, salt: (
            _all(b, salt) if b.rank == 0 else torch.full((b.ranks * b.x.numel(),), -99.0)
        ),
    ),
    "scatter": Operation(
        output_items=lambda items, ranks: items // ranks,
        torch=_scatter,
        mpi=None,
        expected=lambda b, salt: _my_part(b, pattern(0, salt, b.x.numel())),
    ),
    "all_gather_object": Operation(
        output_items=lambda items, ranks: 0,
        torch=_gather_objects,
        mpi=None,
        expected=_all,
        result=lambda b: torch.cat(
            [torch.frombuffer(bytearray(o["bytes"]), dtype=torch.float) for o in b.objects]
        ),
    ),
    "ring": Operation(
        output_items=lambda items, ranks: items,
        torch=_ring,
        mpi=None,
        expected=lambda b, salt: pattern((b.rank - 1) % b.ranks, salt, b.x.numel()),
    ),
    "all_reduce_8_calls": Operation(
        output_items=lambda items, ranks: 0,
        torch=_each_part,
        mpi=None,
        expected=_sum,
        result=lambda b: b.x,
    ),
    "all_reduce_coalesced": Operation(
        output_items=lambda items, ranks: 0,
        torch=lambda b, group: _call(
            dist.all_reduce_coalesced, list(b.x.chunk(PARTS)), group=group
        ),
        mpi=None,
        expected=_sum,
        result=lambda b: b.x,
    ),
    "all_gather_8_calls": Operation(
        output_items=lambda items, ranks: items * ranks,
        torch=lambda b, group: _each_pair(dist.all_gather_into_tensor, b, group),
        mpi=None,
        expected=_all_by_part,
    ),
    "all_gather_coalesced": Operation(
        output_items=lambda items, ranks: items * ranks,
        torch=lambda b, group: _all_pairs("allgather_into_tensor_coalesced", b, group),
        mpi=None,
        expected=_all_by_part,
    ),
    "reduce_scatter_8_calls": Operation(
        output_items=lambda items, ranks: items // ranks,
        torch=lambda b, group: _each_pair(dist.reduce_scatter_tensor, b, group),
        mpi=None,
        expected=_mine_by_part,
    ),
    "reduce_scatter_coalesced": Operation(
        output_items=lambda items, ranks: items // ranks,
        torch=lambda b, group: _all_pairs("reduce_scatter_tensor_coalesced", b, group),
        mpi=None,
        expected=_mine_by_part,
    ),
}
CORE = ["all_reduce", "all_gather", "broadcast", "all_to_all", "reduce_scatter"]
