"""What programs put on top of torch.distributed, on mooncake-cpu: the numbers are those of one
process that has all of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 4
ROWS = 3  # of each rank's batch
LEARNING_RATE = 0.1


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, SIZE)
    )


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same on every rank: input and target of all ranks' rows."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(SIZE * ROWS, 8, generator=generator),
            torch.randn(SIZE * ROWS, SIZE, generator=generator),
        )
        for _ in range(count)
    ]


def loss(one: nn.Module, rows: slice, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(one(batch[0][rows]), batch[1][rows])


def mine(rank: int) -> slice:
    return slice(rank * ROWS, (rank + 1) * ROWS)


def train(
    one: nn.Module, rows: slice, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(one.parameters(), lr=LEARNING_RATE)
    for batch in data:
        optimizer.zero_grad()
        loss(one, rows, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in one.parameters()]


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def on_ranks(function: Callable[..., None], *args: Any) -> None:
    harness.run_ranks(SIZE, function, *args, backend="mooncake-cpu")


# ---- DDP


def halves(state, bucket):
    """A hook that sends half of the bucket at a time. torch does not take annotations as text."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    works = [dist.all_reduce(half, async_op=True) for half in buffer.chunk(2)]
    futures = [work.get_future() for work in works]
    return torch.futures.collect_all(futures).then(lambda _: buffer)


def ddp(me: harness.Rank, hook: Callable[..., Any] | None, tolerance: float) -> None:
    one = model()
    # So small that each layer has a bucket of its own.
    many = DistributedDataParallel(copy.deepcopy(one), bucket_cap_mb=0.0005)
    if hook is not None:
        many.register_comm_hook(None, hook)
    data = batches(5)
    assert_same(train(many, mine(me.rank), data), train(one, slice(None), data), tolerance)


@pytest.mark.parametrize("hook", ["none", "halves", "fp16"])
def test_ddp_learns_what_one_process_does(hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"none": None, "halves": halves, "fp16": default_hooks.fp16_compress_hook}
    on_ranks(ddp, hooks[hook], 1e-2 if hook == "fp16" else 1e-5)


def ddp_join(me: harness.Rank) -> None:
    one = model()
    many = DistributedDataParallel(copy.deepcopy(one))
    data = batches(SIZE)
    with many.join():
        got = train(many, mine(me.rank), data[: me.rank + 1])
    optimizer = torch.optim.SGD(one.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        # Who has run out gives nothing, and the sum is divided by all ranks.
        sum(loss(one, mine(rank), batch) / SIZE for rank in range(step, SIZE)).backward()
        optimizer.step()
    assert_same(got, [parameter.detach() for parameter in one.parameters()])


def test_ddp_joins_ranks_that_run_out_of_inputs():
    on_ranks(ddp_join)


# ---- pipelines


def pipeline(me: harness.Rank, schedule: str) -> None:
    from torch.distributed import pipelining

    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(SIZE)]
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    whole = nn.Sequential(*copy.deepcopy(layers))
    stage = pipelining.PipelineStage(layers[me.rank], me.rank, SIZE, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    if me.rank == 0:
        run.step(x)
    elif me.rank == SIZE - 1:
        output = run.step(target=target)
        assert_same(output, whole(x))
    else:
        run.step()
    nn.functional.mse_loss(whole(x), target).backward()
    assert_same(
        [parameter.grad for parameter in layers[me.rank].parameters()],
        [parameter.grad for parameter in whole[me.rank].parameters()],
    )


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_computes_what_one_process_does(schedule):
    on_ranks(pipeline, schedule)
