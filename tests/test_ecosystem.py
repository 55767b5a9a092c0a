"""Libraries on top of torch.distributed, with tensors of the CPU and of a device: the
numbers are those of one process that has all of the data."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 4
ROWS = 3  # of each rank's batch
LEARNING_RATE = 0.1
DEVICE = os.environ.get(devices.VARIABLE, "fake")


def model() -> nn.Module:
    torch.manual_seed(1)
    with torch.device("cpu"):  # each device draws its own numbers
        made = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, SIZE)
        )
    return made.to(torch.get_default_device())


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    """The same on every rank: input and target of all ranks' rows."""
    generator = torch.Generator().manual_seed(2)
    return [
        on_device(
            torch.randn(SIZE * ROWS, 8, generator=generator, device="cpu"),
            torch.randn(SIZE * ROWS, SIZE, generator=generator, device="cpu"),
        )
        for _ in range(count)
    ]


def on_device(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.get_default_device()) for tensor in tensors)


def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()  # mse_loss needs a kernel of the device's own


def loss(one: nn.Module, rows: slice, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return error(one(batch[0][rows]), batch[1][rows])


def mine(rank: int) -> slice:
    return slice(rank * ROWS, (rank + 1) * ROWS)


def train(one: nn.Module, rows: slice, data: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(one.parameters(), lr=LEARNING_RATE)
    for batch in data:
        optimizer.zero_grad()
        loss(one, rows, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in one.parameters()]


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def on_ranks(function: Callable[..., None], *args: Any, **crew: Any) -> None:
    harness.run_ranks(SIZE, function, *args, **{"backend": "mooncake-cpu", **crew})


@pytest.fixture(params=["cpu", DEVICE])
def place(request) -> dict[str, Any]:
    """Options of on_ranks()."""
    if request.param == "cpu":
        return {}
    devices.prepare(DEVICE)
    return {"backend": "mooncake", "env": {devices.VARIABLE: DEVICE}}


# ---- DDP


def halves(state, bucket):
    """A hook that sends half of the bucket at a time. torch does not take annotations as text."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    works = [dist.all_reduce(half, async_op=True) for half in buffer.chunk(2)]
    futures = [work.get_future() for work in works]
    # torch makes the callback's stream wait for a value, but not for futures in a list.
    done = torch.futures.collect_all(futures)
    return done.then(lambda parts: [part.wait() for part in parts.value()] and buffer)


def ddp(me: harness.Rank, hook: Callable[..., Any] | None, tolerance: float) -> None:
    one = model()
    # So small that each layer has a bucket of its own.
    many = DistributedDataParallel(copy.deepcopy(one), bucket_cap_mb=0.0005)
    if hook is not None:
        many.register_comm_hook(None, hook)
    data = batches(5)
    assert_same(train(many, mine(me.rank), data), train(one, slice(None), data), tolerance)


@pytest.mark.parametrize("hook", ["none", "halves", "fp16"])
def test_ddp_learns_what_one_process_does(hook, place):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks = {"none": None, "halves": halves, "fp16": default_hooks.fp16_compress_hook}
    on_ranks(ddp, hooks[hook], 1e-2 if hook == "fp16" else 1e-5, **place)


def power_sgd(me: harness.Rank) -> None:
    """Compressed gradients, in one bucket. They are no one else's, but the same on all ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    one = DistributedDataParallel(model(), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    one.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(one, mine(me.rank), batches(6))
    for parameter in one.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(me.size)]
        dist.all_gather(everywhere, parameter.detach())
        for there in everywhere:
            assert_same(there, parameter)


def test_power_sgd_with_one_bucket(place):
    on_ranks(power_sgd, **place)


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


def test_ddp_joins_ranks_that_run_out_of_inputs(place):
    on_ranks(ddp_join, **place)


def zero(me: harness.Rank) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    one = model()
    many = DistributedDataParallel(copy.deepcopy(one))
    data = batches(5)
    whole = torch.optim.AdamW(one.parameters(), lr=LEARNING_RATE)
    parts = ZeroRedundancyOptimizer(many.parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
    for batch in data:
        for trained, rows, optimizer in ((one, slice(None), whole), (many, mine(me.rank), parts)):
            optimizer.zero_grad()
            loss(trained, rows, batch).backward()
            optimizer.step()
    assert_same(list(many.parameters()), list(one.parameters()), 1e-4)


def test_zero_learns_what_one_process_does(place):
    on_ranks(zero, **place)


# ---- FSDP2, DTensor, functional collectives


def fsdp(me: harness.Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    one = model()
    sharded = copy.deepcopy(one)
    mesh = init_device_mesh(devices.kind(), (SIZE,))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    data = batches(5)
    got = [shard.full_tensor() for shard in train(sharded, mine(me.rank), data)]
    assert_same(got, train(one, slice(None), data))


def test_fsdp_learns_what_one_process_does(place):
    on_ranks(fsdp, **place)


def dtensor(me: harness.Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(devices.kind(), (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(3)
    a, b = on_device(torch.randn(8, 12, device="cpu"), torch.randn(12, 6, device="cpu"))
    left = distribute_tensor(a, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
    product = left @ right
    assert product.placements == (Shard(0), Partial())
    for placements in ([Shard(1), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]):
        assert_same(product.redistribute(mesh, placements).full_tensor(), a @ b)
    assert_same(product.sum().full_tensor(), (a @ b).sum(), 1e-4)


def test_dtensor_multiplies_and_redistributes(place):
    on_ranks(dtensor, **place)


def functional(me: harness.Rank) -> None:
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    everyone = [torch.arange(8.0) + 10 * rank for rank in range(SIZE)]
    own = everyone[me.rank]
    assert_same(funcol.all_reduce(own, "avg", group), sum(everyone) / SIZE)
    assert_same(funcol.all_gather_tensor(own, 0, group), torch.cat(everyone))
    assert_same(
        funcol.reduce_scatter_tensor(own, "sum", 0, group), sum(everyone).chunk(SIZE)[me.rank]
    )
    assert_same(
        funcol.all_to_all_single(own, None, None, group),
        torch.cat([other.chunk(SIZE)[me.rank] for other in everyone]),
    )
    assert_same(funcol.broadcast(own, 2, group), everyone[2])
    assert_same(own, torch.arange(8.0) + 10 * me.rank)

    leaf = own.clone().requires_grad_()
    funcol.all_gather_tensor_autograd(leaf, 0, group).square().sum().backward()
    assert_same(leaf.grad, 2 * SIZE * own)


def test_functional_collectives(place):
    on_ranks(functional, **place)


def compiled(me: harness.Rank) -> None:
    import torch.distributed._functional_collectives as funcol

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        partial = funcol.all_reduce(x @ weight, "sum", dist.group.WORLD)
        dist.all_reduce(partial, op=dist.ReduceOp.MAX)
        return funcol.all_gather_tensor(partial.relu(), 0, dist.group.WORLD)

    torch.manual_seed(4 + me.rank)
    x, weight = torch.randn(4, 8), torch.randn(8, 4)
    expected = step(x, weight)
    assert_same(torch.compile(step, fullgraph=True)(x, weight), expected)


def test_a_compiled_function_with_collectives(tmp_path: Path):
    # Without vectors, for which the compiler would be tried out for most of a minute.
    env = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    on_ranks(compiled, env=env)


# ---- pipelines


def pipeline(me: harness.Rank, schedule: str) -> None:
    from torch.distributed import pipelining

    torch.manual_seed(5)
    with torch.device("cpu"):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(SIZE)]
    layers = [layer.to(torch.get_default_device()) for layer in layers]
    x, target = on_device(torch.randn(16, 8, device="cpu"), torch.randn(16, 8, device="cpu"))
    whole = nn.Sequential(*copy.deepcopy(layers))
    stage = pipelining.PipelineStage(layers[me.rank], me.rank, SIZE, torch.get_default_device())
    run = getattr(pipelining, schedule)(stage, n_microbatches=8, loss_fn=error)
    if me.rank == 0:
        run.step(x)
    elif me.rank == SIZE - 1:
        output = run.step(target=target)
        assert_same(output, whole(x))
    else:
        run.step()
    error(whole(x), target).backward()
    assert_same(
        [parameter.grad for parameter in layers[me.rank].parameters()],
        [parameter.grad for parameter in whole[me.rank].parameters()],
    )


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_computes_what_one_process_does(schedule, place):
    on_ranks(pipeline, schedule, **place)


# ---- checkpoints


def checkpoint(me: harness.Rank) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(48.0).reshape(8, 6)
    folder = me.folder / "checkpoint"
    saved = {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
    dcp.save(saved, checkpoint_id=folder)
    for placement in (Shard(1), Replicate()):
        loaded = {"weight": distribute_tensor(torch.zeros(8, 6), mesh, [placement]), "step": 0}
        dcp.load(loaded, checkpoint_id=folder)
        assert_same(loaded["weight"].full_tensor(), whole)
        assert loaded["step"] == 7


def test_a_checkpoint_is_read_with_other_shards():
    on_ranks(checkpoint)


# ---- TorchElastic

WORKER = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("mooncake-cpu")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
if restarts == 0 and rank == 1:
    sys.exit(3)
dist.all_reduce(total)
dist.destroy_process_group()
open(os.path.join(sys.argv[1], f"{restarts}-{rank}"), "w").write(str(total.item()))
"""


def test_torchrun_starts_all_again_after_one_failed(tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    results = tmp_path / "results"
    results.mkdir()
    run = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--max-restarts", "1", "--monitor-interval", "0.1", worker, results),
        ],
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
    )
    assert run.returncode == 0, run.stderr
    # Rank 0 may have gone on alone before it was ended, as the backend lets it.
    assert [(results / f"1-{rank}").read_text() for rank in range(2)] == ["6.0", "6.0"]
