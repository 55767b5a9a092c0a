"""Which operations take which types and reductions: found by calling them and comparing answers.

`python tests/test_supported.py` writes what was found into README.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cards
import harness
import oracle
import pytest
import torch
import torch.distributed as dist

README = Path(__file__).resolve().parents[1] / "README.md"
SIZE, ROOT, COUNT = 4, 2, 12
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
FACTOR = 2.0  # of PREMUL_SUM
TYPES = {
    "integers": oracle.INTEGERS,
    "floats": oracle.FLOATS,
    "bool": [torch.bool],
    "complex": oracle.COMPLEX,
    "float8": oracle.MOVED_ONLY,
}
REFUSALS = (NotImplementedError, RuntimeError, TypeError, ValueError)


class Case:
    """One call on one rank: what every rank gives."""

    def __init__(self, rank: int, dtype: torch.dtype, op: str = "SUM") -> None:
        self.rank, self.dtype, self.op = rank, dtype, op
        self.given = [oracle.contents(1, r, COUNT, dtype) for r in range(SIZE)]
        self.mine = self.given[rank].clone()

    def empty(self, count: int = COUNT) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8).to(self.dtype)

    def each(self) -> list[torch.Tensor]:
        return [self.empty() for _ in range(SIZE)]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(SIZE)[self.rank]

    def reduce_op(self) -> Any:
        if self.op == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(FACTOR)
        return getattr(dist.ReduceOp, self.op)

    def reduced(self) -> torch.Tensor:
        if self.op == "PREMUL_SUM":
            return oracle.reduced("SUM", [FACTOR * part for part in self.given])
        return oracle.reduced(self.op, self.given)

    def same(self, found: Any, expected: Any) -> None:
        found = found if isinstance(found, list) else [found]
        expected = expected if isinstance(expected, list) else [expected]
        for one, other in zip(found, expected, strict=True):
            oracle.same(one, other, f"{self.dtype}, {self.op}, rank {self.rank}")


# ---- the operations


def all_reduce(case: Case) -> None:
    dist.all_reduce(case.mine, case.reduce_op())
    case.same(case.mine, case.reduced())


def sparse_all_reduce(case: Case) -> None:
    if case.dtype.is_complex:
        raise TypeError("torch hands a copy to the backend, and loses its result")
    tensor = case.mine.to_sparse()
    dist.all_reduce(tensor, case.reduce_op())
    case.same(tensor.to_dense(), case.reduced())


def all_reduce_coalesced(case: Case) -> None:
    tensors = [case.mine, case.given[case.rank].clone()]
    dist.all_reduce_coalesced(tensors, case.reduce_op())
    case.same(tensors, [case.reduced()] * 2)


def reduce(case: Case) -> None:
    dist.reduce(case.mine, ROOT, case.reduce_op())
    case.same(case.mine, case.reduced() if case.rank == ROOT else case.given[case.rank])


def reduce_scatter(case: Case) -> None:
    output = case.empty(COUNT // SIZE)
    dist.reduce_scatter(output, list(case.mine.chunk(SIZE)), case.reduce_op())
    case.same(output, case.own(case.reduced()))


def reduce_scatter_tensor(case: Case) -> None:
    output = case.empty(COUNT // SIZE)
    dist.reduce_scatter_tensor(output, case.mine, case.reduce_op())
    case.same(output, case.own(case.reduced()))


def broadcast(case: Case) -> None:
    dist.broadcast(case.mine, ROOT)
    case.same(case.mine, case.given[ROOT])


def all_gather(case: Case) -> None:
    outputs = case.each()
    dist.all_gather(outputs, case.mine)
    case.same(outputs, case.given)


def all_gather_into_tensor(case: Case) -> None:
    output = case.empty(SIZE * COUNT)
    dist.all_gather_into_tensor(output, case.mine)
    case.same(list(output.chunk(SIZE)), case.given)


def all_gather_coalesced(case: Case) -> None:
    outputs = [case.each(), case.each()]
    # torch's is deprecated and takes the outputs by rank.
    dist.all_gather_coalesced([list(pair) for pair in zip(*outputs, strict=True)], [case.mine] * 2)
    case.same(outputs[0] + outputs[1], case.given * 2)


def gather(case: Case) -> None:
    outputs = case.each() if case.rank == ROOT else None
    dist.gather(case.mine, outputs, ROOT)
    case.same(outputs or [], case.given if case.rank == ROOT else [])


def scatter(case: Case) -> None:
    output = case.empty()
    dist.scatter(output, case.given if case.rank == ROOT else None, ROOT)
    case.same(output, case.given[case.rank])


def all_to_all(case: Case) -> None:
    outputs = [case.empty(COUNT // SIZE) for _ in range(SIZE)]
    dist.all_to_all(outputs, list(case.mine.chunk(SIZE)))
    case.same(outputs, [case.own(other) for other in case.given])


def all_to_all_single(case: Case) -> None:
    output = case.empty()
    dist.all_to_all_single(output, case.mine)
    case.same(list(output.chunk(SIZE)), [case.own(other) for other in case.given])


def send_recv(case: Case) -> None:
    output, neighbour = case.empty(), case.rank ^ 1
    work = dist.isend(case.mine, neighbour, tag=3)
    dist.recv(output, neighbour, tag=3)
    work.wait()
    case.same(output, case.given[neighbour])


def recv_any_source(case: Case) -> None:
    if case.rank == ROOT:
        outputs = case.each()
        for _ in range(SIZE - 1):
            output = case.empty()
            outputs[dist.recv(output)] = output
        outputs[ROOT] = case.mine
        case.same(outputs, case.given)
    else:
        dist.send(case.mine, ROOT)


def batch_isend_irecv(case: Case) -> None:
    output = case.empty()
    after, before = (case.rank + 1) % SIZE, (case.rank - 1) % SIZE
    calls = [dist.P2POp(dist.isend, case.mine, after), dist.P2POp(dist.irecv, output, before)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    case.same(output, case.given[before])


REDUCING = {
    "all_reduce": all_reduce,
    "all_reduce of sparse tensors": sparse_all_reduce,
    "all_reduce_coalesced": all_reduce_coalesced,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
}
MOVING = {
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_coalesced": all_gather_coalesced,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "send, recv": send_recv,
    "recv from any rank": recv_any_source,
    "batch_isend_irecv": batch_isend_irecv,
}


# ---- what was found


def takes(function: Callable[[Case], None], case: Case) -> bool:
    """A wrong answer is an AssertionError, and no refusal."""
    dist.barrier()  # else a message from any rank could be one of its next case
    try:
        function(case)
    except REFUSALS:
        return False
    return True


def on_rank(me: harness.Rank) -> dict[str, tuple[dict[str, str], list[str]]]:
    """By operation: which of each kind of types it takes, and which reductions."""
    found = {}
    for name, function in {**REDUCING, **MOVING}.items():
        kinds = {}
        for kind, dtypes in TYPES.items():
            taken = [takes(function, Case(me.rank, dtype)) for dtype in dtypes]
            kinds[kind] = "yes" if all(taken) else "some" if any(taken) else "no"
        ops = REDUCTIONS if name in REDUCING else ()
        integers_or_floats = (torch.int32, torch.float32)
        found[name] = (
            kinds,
            [
                op
                for op in ops
                if any(takes(function, Case(me.rank, t, op)) for t in integers_or_floats)
            ],
        )
    return found


def table(backend: str = "mooncake-cpu", **crew: Any) -> str:
    everybody = harness.run_ranks(SIZE, on_rank, backend=backend, **crew)
    assert all(found == everybody[0] for found in everybody)
    rows = [
        f"| {' | '.join(['operation', *TYPES, 'reductions'])} |",
        f"|{'---|' * (len(TYPES) + 2)}",
    ]
    for name, (kinds, ops) in everybody[0].items():
        rows.append(f"| {' | '.join([name, *kinds.values(), ', '.join(ops)])} |")
    return "\n".join(rows)


def written() -> re.Match[str]:
    page = README.read_text(encoding="utf-8")
    found = re.search(r"(<!-- supported: .*?-->\n)(.*?)(<!-- end -->)", page, re.DOTALL)
    assert found, "README.md has lost its marks"
    return found


def test_the_table_of_operations_says_what_they_take():
    assert written().group(2).strip() == table(), "run: python tests/test_supported.py"


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["device", "device-blocking"])
def test_tensors_of_devices_are_taken_alike(layout):
    assert written().group(2).strip() == table("mooncake", env=cards.over(layout))


if __name__ == "__main__":
    mark, _, end = written().groups()
    page = README.read_text(encoding="utf-8")
    README.write_text(page.replace(written().group(), f"{mark}{table()}\n{end}"), encoding="utf-8")
