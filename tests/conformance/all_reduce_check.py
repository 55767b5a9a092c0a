"""The suite calls all_reduce in 60 tests and looks at no result: here all of them are compared."""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

DEADLINE = 20.0  # for the others' inputs, which they write before they call

MODEL: list[tuple[Any, Callable[[Any, Any], torch.Tensor]]] = [
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
]


def model(inputs: list[torch.Tensor], op: Any) -> torch.Tensor:
    combine = next(function for known, function in MODEL if known == op)
    total = functools.reduce(combine, inputs)
    return total / len(inputs) if op == dist.ReduceOp.AVG else total


class _Call:
    """One all_reduce: what each rank gave, exchanged through files, and what it should get."""

    def __init__(self, folder: Path, ranks: list[int], me: int, tensor: torch.Tensor, op: Any):
        self.folder, self.ranks, self.tensor, self.op = folder, ranks, tensor, op
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{me}.draft"
        torch.save(tensor.detach().cpu(), draft)
        draft.rename(folder / str(me))

    def check(self) -> None:
        inputs = [self._input(rank) for rank in self.ranks]
        expected, actual = model(inputs, self.op), self.tensor.detach().cpu()
        if actual.is_sparse:
            expected, actual = expected.to_dense(), actual.to_dense()
        torch.testing.assert_close(actual, expected)

    def _input(self, rank: int) -> torch.Tensor:
        end = time.monotonic() + DEADLINE
        while not (self.folder / str(rank)).exists():
            assert time.monotonic() < end, f"all_reduce ended before rank {rank} had called it"
            time.sleep(0.001)
        return torch.load(self.folder / str(rank))


class _Work:
    """The work of a call that is compared when it has been waited for."""

    def __init__(self, work: dist.Work, call: _Call) -> None:
        self._work, self._call = work, call

    def wait(self, *timeout: Any) -> bool:
        done = self._work.wait(*timeout)
        self._call.check()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Rank:
    """Whose calls are compared; nobody's before begin()."""

    rank = -1
    folder = Path()
    numbers: ClassVar[dict[str, Iterator[int]]] = defaultdict(itertools.count)


def begin(rank: int, folder: str) -> None:
    """In the process of a rank. `folder` is the same on all ranks, and of one test."""
    _Rank.rank, _Rank.folder = rank, Path(folder) / "all_reduce"


_real = dist.all_reduce


@functools.wraps(_real)
def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    of = group or dist.group.WORLD
    # In a coalescing manager nothing is done yet when the call returns.
    if of == dist.GroupMember.NON_GROUP_MEMBER or of in _world.pg_coalesce_state:
        return _real(tensor, op, group, async_op)
    name = f"{of.group_name}-{next(_Rank.numbers[of.group_name])}"
    ranks = dist.get_process_group_ranks(of)
    call = _Call(_Rank.folder / name, ranks, _Rank.rank, tensor, op)
    work = _real(tensor, op, group, async_op)
    if work is not None:
        return _Work(work, call)
    call.check()
    return None


# Before the suite is imported, which keeps the function in default arguments.
dist.all_reduce = all_reduce
